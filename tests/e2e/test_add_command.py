"""`edge-server add`: what it says, what it writes, and that a server serves it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli.main import main
from tests.e2e.conftest import Repository, add_sub_model, clean_environment
from tests.e2e.yolo_exports import ULTRALYTICS, detect, export, names

pytest.importorskip("cv2")

HOSTILE = ULTRALYTICS | {"names": names(('quote " in it', "back\\slash", "é # } parameters"))}


@pytest.fixture(scope="module")
def server(serve: Any, module_repository: Repository) -> Iterator[Any]:
    with serve(module_repository.path) as server:
        server.repository = module_repository.path
        yield server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("EDGE_")]:
        monkeypatch.delenv(name)
    return tmp_path


def save(path: Path, model: Any) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def test_an_export_is_served_with_its_labels_by_a_server_that_watches(
    server: Any, eventually: Any, folder: Path, capsys: pytest.CaptureFixture[str], coffee: Path
) -> None:
    save(folder / "yolo11n.onnx", export(detect(), HOSTILE))
    assert main(["add", "yolo11n.onnx", f"--model-repository={server.repository}"]) == 0
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
    body = coffee.read_bytes()
    seen = json.loads(server.request("POST", "/edge/v1/models/yolo11n/perception", body)[1])
    assert [item["label"] for item in seen["detections"]] == ['quote " in it', "é # } parameters"]
    assert main(["add", "yolo11n.onnx", f"--model-repository={server.repository}"]) == 2
    assert "has version 1: choose another name with --name" in capsys.readouterr().err


def test_the_printed_request_to_a_tabular_model_works_as_printed(
    server: Any, eventually: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    save(folder / "sums.onnx", add_sub_model())
    assert main(["add", "sums.onnx", "--name=table", f"--model-repository={server.repository}"]) == 0
    command = capsys.readouterr().out.partition("Ask it:\n")[2].replace("127.0.0.1:8000", server.http)
    assert eventually(lambda: server.get("/v2/models/table/ready")[0] == 200)
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=clean_environment(), timeout=60, check=True)
    assert {output["name"] for output in json.loads(done.stdout)["outputs"]} == {"OUTPUT0", "OUTPUT1"}


def test_without_options_the_repository_is_made_in_the_current_folder(folder: Path) -> None:
    save(folder / "sums.onnx", add_sub_model())
    assert main(["add", "sums.onnx"]) == 0
    assert (folder / "model_repository/sums/1/model.onnx").is_file()


def test_a_file_that_no_runtime_opens_leaves_nothing_behind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "page.onnx").write_text("<!doctype html>")
    assert main(["add", "page.onnx", "--model-repository=models"]) == 2
    assert "is an HTML page" in capsys.readouterr().err
    assert list((folder / "models").iterdir()) == []
