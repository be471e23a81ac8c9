"""A load that ends the server: the next start serves the other models, and says which one it was."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder
from tests.kit.server import ServerProcess, serve

pytestmark = pytest.mark.full

BUNDLED = Path(__file__).parents[2] / "model_repository"

SLOW = """
import time
class TritonPythonModel:
    def initialize(self, args):
        time.sleep(float(open("SECONDS").read()))
    def execute(self, requests):
        return []
"""


def test_a_model_whose_load_ended_two_servers_is_not_loaded_again_until_its_files_change(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(BUNDLED / "face_detection_yunet/1", models / "good/1")
    model_folder(models / "bad", files={"1/model.py": SLOW.replace("SECONDS", str(tmp_path / "seconds"))})
    (tmp_path / "seconds").write_text("1000")
    (models / "bad/config.pbtxt").write_text('backend: "python"')
    flags = ("--model-control-mode=explicit", f"--state-dir={tmp_path}")
    journal = tmp_path / "openings.json"
    for count in range(1, 3):
        with serve(models, *flags) as server:

            def load(server: ServerProcess = server) -> None:
                with suppress(OSError):
                    server.request("POST", "/v2/repository/models/bad/load")

            asking = threading.Thread(target=load)
            asking.start()
            assert eventually(lambda count=count: journal.exists() and journal.read_text().count('"bad"') == count)
            # As a runtime that crashes does.
            os.kill(server.process.pid, signal.SIGSEGV)
            server.process.wait(60)
            asking.join(60)
    (tmp_path / "seconds").write_text("0")
    watching = ("--model-control-mode=poll", "--repository-poll-secs=1", f"--state-dir={tmp_path}")
    with serve(models, *watching) as server:
        assert "the server ended when it opened model 'bad' version 1" in server.log()
        assert "'bad' version 1: the server ended 2 times without an error message when it opened it" in server.log()
        assert server.get("/v2/models/good/ready")[0] == 200, server.log()
        assert server.get("/v2/models/bad/ready")[0] != 200
        os.utime(models / "bad/config.pbtxt", (time.time(), time.time()))
        assert eventually(lambda: server.get("/v2/models/bad/ready")[0] == 200), server.log()
