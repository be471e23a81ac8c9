"""`edge-server pull` into the repository of a running server."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.server import serve
from tests.kit.site import Handler, Site

CONFIG = (
    'backend: "identity" input { name: "I" data_type: TYPE_FP32 dims: [1] } '
    'output { name: "O" data_type: TYPE_FP32 dims: [1] }'
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The URL of a web server for the folder `site`."""

    class Files(Handler, http.server.SimpleHTTPRequestHandler):
        """Answers with files, and prints nothing."""

    (tmp_path / "site").mkdir()
    with Site(functools.partial(Files, directory=str(tmp_path / "site"))) as server:
        yield server.url


def publish(folder: Path, version: int) -> str:
    """Write echo.tar.gz with one version into the folder; return its SHA-256."""
    model = folder.parent / f"release-{version}"
    (model / str(version)).mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    with tarfile.open(folder / "echo.tar.gz", "w:gz") as archive:
        archive.add(model, arcname="echo")
    return hashlib.sha256((folder / "echo.tar.gz").read_bytes()).hexdigest()


def test_a_polling_server_serves_a_pulled_model_and_the_old_one_until_its_replacement_is_loaded(
    run_command: Any, site: str, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()

    def pull(version: int, *more: str) -> None:
        sha256 = publish(tmp_path / "site", version)
        done = run_command("pull", f"{site}/echo.tar.gz", f"--sha256={sha256}", f"--model-repository={models}", *more)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{models / 'echo'}: version {version}\n"

    def answer() -> str:
        tensor = {"name": "I", "datatype": "FP32", "shape": [1], "data": [1.0]}
        status, body = server.infer("echo", {"inputs": [tensor]})
        return str(body["model_version"]) if status == 200 else f"{status} {body}"

    with serve(models, "--model-control-mode=poll", "--repository-poll-secs=0.2") as server:
        pull(1)
        assert eventually(lambda: answer() == "1"), server.log()
        pull(2, "--replace")
        answers: list[str] = []

        def is_replaced() -> bool:
            answers.append(answer())
            return answers[-1] == "2"

        assert eventually(is_replaced), server.log()
        assert set(answers) <= {"1", "2"}
        assert os.listdir(models) == ["echo"]
        assert "Traceback" not in server.log()
