"""The commands of the README, as written, do what the README claims."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cv2  # noqa: F401 - the commands send pictures
import pytest

from tests.kit.eventually import eventually
from tests.kit.server import COMMAND, serve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def command(name: str, language: str = "sh", page: str = README) -> str:
    """Return the code between `<!-- name -->` and `<!-- end -->`."""
    found = re.search(rf"<!-- {name} -->\s*```{language}\n(.*?)\n```\s*<!-- end -->", page, re.DOTALL)
    assert found, f"the page has no command marked {name}"
    return found[1]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server of the serve command. `models`: the folder that is its repository without --demo."""
    flags = shlex.split(command("serve-command").split("&&")[-1])[2:]
    assert flags == ["--demo"]
    models = tmp_path_factory.mktemp("models")
    with serve(models, *flags) as server:
        server.models = models
        yield server


def test_the_serve_command_installs_the_cpu_extra_and_serves_the_bundled_repository() -> None:
    make, install, serve = (shlex.split(part) for part in command("serve-command").split("&&"))
    assert make[:3] == ["python3", "-m", "venv"]
    folder = make[3]
    assert install[0] == f"{folder}/bin/pip"
    assert install[1] == "install"
    assert install[-1] == ".[cpu]"
    assert serve[:2] == [f"{folder}/bin/edge-server", "serve"]


def test_the_python_versions_are_those_that_the_package_names() -> None:
    classifiers = importlib.metadata.metadata("edge-server").get_all("Classifier") or []
    versions = [text.rpartition(" ")[2] for text in classifiers if re.search(r"Python :: 3\.\d", text)]
    assert f"Python {versions[0]} to {versions[-1]}" in README


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_serve_and_curl_commands_classify_the_image_as_espresso(demo: Any) -> None:
    words = [word.replace("127.0.0.1:8000", demo.http) for word in shlex.split(command("curl-command"))]
    assert any(demo.http in word for word in words), "the curl command does not ask 127.0.0.1:8000"
    done = subprocess.run(
        [words[0], "-sS", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    labels = json.loads(done.stdout)["outputs"][0]["data"]
    assert len(labels) == 5
    assert labels[0].split(":")[2] == "espresso"
    shown = re.search(r"<!-- end -->\s*```json\n(.*)\n```", README)
    assert shown
    assert [label.split(":")[1:] for label in json.loads(shown[1])["outputs"][0]["data"]] == [
        label.split(":")[1:] for label in labels
    ]


def test_demo_serves_the_bundled_models_and_prints_a_request_that_finds_a_face(demo: Any) -> None:
    assert eventually(lambda: any(line.startswith("  curl ") for line in demo.banner))
    curl, flag, picture, url = shlex.split(demo.banner[-1])
    assert (curl, flag, url.startswith(demo.url("/"))) == ("curl", "--data-binary", True)
    path = url.removeprefix(demo.url(""))
    status, answer = demo.request("POST", path, Path(picture.removeprefix("@")).read_bytes())
    assert (status, [face["label"] for face in json.loads(answer)["detections"]]) == (200, ["face"])
    assert list(demo.models.iterdir()) == []
    # The usual choice is for `status`: the log has lines that ask for attention.
    assert "onnxruntime: fixed order" in demo.notes("face_detection_yunet")
    assert "fixed order" not in demo.log()


def test_the_test_command_installs_the_test_extra_and_runs_the_tests() -> None:
    make, install, run = (shlex.split(part) for part in command("test-command").split("&&"))
    assert make[:3] == ["python3", "-m", "venv"]
    assert install[-1] == ".[test]"
    assert run[1:3] == ["-m", "pytest"]


def test_the_stream_command_and_the_client_example_get_a_result_for_each_frame(demo: Any) -> None:
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    words = shlex.split(command("stream-command"))
    page = (ROOT / "docs/cameras.md").read_text()
    example = command("client-example", "python", page).replace("127.0.0.1:8001", demo.grpc)
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(run, [COMMAND, *words[1:], f"--address={demo.grpc}"])
        printed = run([sys.executable, "-c", example])
    done = streaming.result()
    assert re.search(r"offered (\d+) = answered \d+ \+ dropped \d+ \+ lost 0", done.stdout), done.stdout
    assert re.search(r"1 face 0\.9\d", done.stdout), done.stdout
    lines = printed.stdout.splitlines()
    told = [
        re.fullmatch(r"frame (\d+): face at (\d+),(\d+), \d+ ms in the server, (\d+) dropped before it", line)
        for line in lines
    ]
    assert all(told), printed.stdout
    # The portrait's face is in the same place in each frame, and each of the 30 frames is accounted for.
    ((left, top),) = {(int(found[2]), int(found[3])) for found in told if found}
    assert max(abs(left - 178), abs(top - 63)) <= 3
    assert len(told) + sum(int(found[4]) for found in told if found) == int(told[-1][1]) <= 30
