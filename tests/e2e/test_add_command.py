"""`edge-server add` and a server that serves what it added. tests/plugins/add has what it says and writes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends import ONNX_ORDER
from edge_server.cli.main import main
from edge_server.core.model_spec import ModelFile
from edge_server.repository.choice.runtime_times import RuntimeTimes
from tests.e2e.yolo_exports import ULTRALYTICS, detect, export, names
from tests.kit.eventually import eventually
from tests.kit.models import COFFEE, Repository, add_sub_model
from tests.kit.server import COMMAND, clean_environment, serve
from tests.plugins.add.test_add_report import brightness, save

pytest.importorskip("cv2")

pytestmark = pytest.mark.usefixtures("folder")

HOSTILE = ULTRALYTICS | {"names": names(('quote " in it', "back\\slash", "é # } parameters"))}


@pytest.fixture(scope="module")
def server(module_repository: Repository) -> Iterator[Any]:
    with serve(module_repository.path) as server:
        server.repository = module_repository.path
        yield server


def test_an_export_is_served_with_its_labels_by_a_server_that_watches(
    server: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "yolo11n.onnx", export(detect(), HOSTILE))
    flags = [f"--model-repository={server.repository}", f"--state-dir={folder}"]
    assert main(["add", "yolo11n.onnx", *flags]) == 0
    added = ModelFile(server.repository / "yolo11n/1/model.onnx", server.repository / "yolo11n", 1)
    assert RuntimeTimes(folder).choose(added, ONNX_ORDER), "the times of both runtimes are stored"
    said = capsys.readouterr().out
    for pattern in (
        r"input   images FP32\[1,3,320,320\]",
        r"output  output0 FP32\[1,7,2100\]",
        "kind    yolo detect, 3 classes",
        'labels  quote " in it, back',
        r'picture quote " in it 0.90 at 32,88 to 160,304',
        "noise   2 detections",
        r"openvino \S+ +CPU +f32",
        r"onnxruntime \S+ +CPU +f32",
    ):
        assert re.search(pattern, said), said
    assert max(map(len, said.partition("Serve it")[0].splitlines())) <= 80
    assert eventually(lambda: server.get("/v2/models/yolo11n/ready")[0] == 200)
    body = COFFEE.read_bytes()
    seen = json.loads(server.request("POST", "/edge/v1/models/yolo11n/perception", body)[1])
    assert [item["label"] for item in seen["detections"]] == ['quote " in it', "é # } parameters"]
    assert main(["add", "yolo11n.onnx", f"--model-repository={server.repository}"]) == 2
    assert "has version 1: choose another name with --name" in capsys.readouterr().err


@pytest.mark.usefixtures("tried_here")
def test_other_precisions_are_tried_on_all_pictures_of_a_folder_and_none_is_turned_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "yolo11n.onnx", export(detect(), ULTRALYTICS))
    pictures = folder / "pictures"
    pictures.mkdir()
    for name in ("a.jpg", "b.jpg"):
        shutil.copy(COFFEE, pictures / name)
    assert main(["add", "yolo11n.onnx", "--picture=pictures", "--state-dir=state"]) == 0
    said = " ".join(capsys.readouterr().out.partition("Other precisions:")[2].split("wrote ")[0].split())
    for precision in ("bf16", "f16"):
        assert f"openvino {precision}: " in said
    # A processor without the arithmetic says so.
    assert said.count("boxes in 2 pictures found again") + said.count("does not offer precision") == 2, said
    model = folder / "model_repository/yolo11n"
    assert "precision" not in (model / "config.pbtxt").read_text().replace("# ", "")
    assert RuntimeTimes(folder / "state").precision_note(model / "1/model.onnx").startswith("precision: ")
    assert main(["add", "yolo11n.onnx", "--name=other", "--picture=none"]) == 2
    assert "--picture=none: there is no such file or folder" in capsys.readouterr().err


def test_a_file_that_the_page_sends_is_added_and_its_report_comes_back(server: Any) -> None:
    body = export(detect(), ULTRALYTICS).SerializeToString()
    status, answer = server.request("POST", "/edge/v1/new-models/sent.onnx", body)
    assert status == 200, answer
    found = json.loads(answer)
    assert (found["model"], "kind    yolo detect, 3 classes" in found["report"]) == ("sent", True)
    assert eventually(lambda: server.get("/v2/models/sent/ready")[0] == 200)
    for file, code, message in (
        ("sent.onnx", 400, "has version 1: choose another name"),
        ("sent.py", 400, "expected a file that ends in .onnx"),
        ("a%2Fb.onnx", 400, "name 'a/b' cannot be used"),
        ("%2E%2E.onnx", 400, "cannot be used"),
        ("damaged.onnx", 400, "'damaged.onnx' is text, not an ONNX model"),
        ("tried.onnx?picture_bytes=99", 400, "expected a picture of 99 bytes, given a body of 20"),
        ("tried.onnx?picture_bytes=x", 400, "'picture_bytes' must be a whole number"),
    ):
        status, answer = server.request("POST", f"/edge/v1/new-models/{file}", b"x" * 20)
        assert (status, message in json.loads(answer)["error"]) == (code, True), answer
    status, answer = server.request("POST", "/edge/v1/new-models/tried.onnx?picture_bytes=9", b"no pixels" + body)
    assert (status, "image" in json.loads(answer)["error"]) == (400, True), answer
    picture = COFFEE.read_bytes()
    query = f"picture_bytes={len(picture)}"
    foreign = {"Origin": "http://evil.example"}
    assert server.request("POST", "/edge/v1/new-models/evil.onnx", b"x", foreign)[0] == 403
    bare = export(detect(), {}).SerializeToString()
    report = json.loads(server.request("POST", f"/edge/v1/new-models/bare.onnx?{query}", picture + bare)[1])["report"]
    assert (server.repository / "bare/1/model.onnx").read_bytes() == bare
    advice = "Another picture of something that it knows may tell which: delete the folder 'bare' in the repository"
    assert advice in " ".join(report.split())
    assert [path.name for path in server.repository.iterdir() if path.name.startswith(".")] == []


def test_a_layout_of_a_report_is_chosen_with_the_same_file(server: Any) -> None:
    body = brightness().SerializeToString()
    path = "/edge/v1/new-models/shades.onnx"

    def send(query: str, content: bytes = body) -> tuple[int, Any]:
        status, answer = server.request("POST", f"{path}{query}", content)
        return status, json.loads(answer)

    missing = "is not in the repository as it was added from this file"
    assert missing in send("?choose=1")[1]["error"]
    (part,) = send("")[1]["reports"]
    numbers = [row["title"] for row in part["rows"] if row["title"].isdecimal()]
    assert (part["chosen"], numbers) == (None, [str(number) for number in range(1, len(numbers) + 1)])
    assert {"openvino", "onnxruntime"} <= {item["runtime"].split()[0] for item in part["runtimes"]}
    assert missing in send("?choose=1", export(detect(), {}).SerializeToString())[1]["error"]
    status, found = send("?choose=99")
    assert (status, "expected a number of the report" in found["error"]) == (400, True)
    config = server.repository / "shades/config.pbtxt"
    assert "undecided" in config.read_text(), "the model is there as before"
    assert send("?choose=2")[1]["reports"][0]["chosen"] == 2
    assert "undecided" not in config.read_text()
    assert missing in send("?choose=1")[1]["error"], "it is decided"
    assert [item.name for item in server.repository.iterdir() if item.name.startswith(".")] == []


@pytest.mark.usefixtures("tried_here")
def test_the_printed_request_to_a_tabular_model_works_as_printed(
    server: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    save(folder / "sums.onnx", add_sub_model())
    assert main(["add", "sums.onnx", "--name=table", f"--model-repository={server.repository}"]) == 0
    said = capsys.readouterr().out
    assert "kind    tensors (tabular or other); no known vision model" in said
    assert re.search(r"^sums.onnx: 0\.\d kB, opened by ", said)
    command = said.partition("Ask it:\n")[2].replace("127.0.0.1:8000", server.http)
    assert eventually(lambda: server.get("/v2/models/table/ready")[0] == 200)
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=clean_environment(), timeout=60, check=True)
    assert {output["name"] for output in json.loads(done.stdout)["outputs"]} == {"OUTPUT0", "OUTPUT1"}
    assert "rows    up to 1024 in a request" in said
    assert json.loads(server.get("/v2/models/table/config")[1])["max_batch_size"] == 1024


@pytest.mark.full
def test_on_a_terminal_the_user_chooses(folder: Path) -> None:
    save(folder / "bare.onnx", export(detect(), {}))
    terminal, end = pty.openpty()
    with subprocess.Popen([COMMAND, "add", "bare.onnx"], stdin=end, stdout=end, stderr=end, cwd=folder) as process:
        os.close(end)
        said, answers = b"", iter((b"77\n", b"0009\n", b"1\n"))
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error.
            while chunk := os.read(terminal, 4096):
                said += chunk
                if said.endswith(b"0 for none: "):
                    os.write(terminal, next(answers))
    os.close(terminal)
    assert process.returncode == 0, said.decode()
    assert said.count(b"Which one is it? 1") == 3
    config = (folder / "model_repository/bare/config.pbtxt").read_text()
    assert '\nparameters { key: "detection_head" value { string_value: "yolov8" } }' in config
