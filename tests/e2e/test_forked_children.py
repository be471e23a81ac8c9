"""Processes that a Python model forks get their own signals, and the server none of them."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.server import serve

CONFIG = """
backend: "python"
input { name: "SECONDS" data_type: TYPE_FP32 dims: [1] }
output { name: "NUMBER" data_type: TYPE_INT64 dims: [1] }
"""
IN_PROCESS = parameters(isolation="process")
MODEL = """
import multiprocessing, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        # multiprocessing ends it at the end of the process, as its documentation says.
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
        self.child.start()

    def execute(self, requests):
        (request,) = requests
        seconds = float(pb_utils.get_input_tensor_by_name(request, "SECONDS").as_numpy()[0])
        number = self.child.pid
        if seconds < 0:
            self.child.terminate()
            self.child.join(60)
            number = self.child.exitcode
        else:
            time.sleep(seconds)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([number], np.int64))])]
"""


def ask(server: Any, seconds: float) -> int:
    """Return the child's process id after the seconds; below 0, end the child and return its exit code."""
    inputs = [{"name": "SECONDS", "datatype": "FP32", "shape": [1], "data": [seconds]}]
    status, answer = server.infer("m", {"inputs": inputs})
    assert status == 200, answer
    return int(answer["outputs"][0]["data"][0])


@pytest.fixture(params=["", IN_PROCESS], ids=["inside", "process"])
def models(request: pytest.FixtureRequest, repository: Any) -> Any:
    (repository.add("m", CONFIG + request.param) / "1/model.py").write_text(MODEL)
    return repository.path


def test_a_model_ends_its_child_and_the_server_serves_on(models: Any) -> None:
    with serve(models) as server:
        assert ask(server, -1.0) == -signal.SIGTERM
        assert ask(server, 0.0) > 0
        assert server.stop() == 0
        assert server.log().count("stopping") == 1


def test_a_signal_to_the_child_ends_the_child_alone_and_running_requests_are_answered(models: Any) -> None:
    with serve(models) as server, ThreadPoolExecutor() as pool:
        child = ask(server, 0.0)
        answer = pool.submit(ask, server, 1.0)
        while server.statistics("m")["inference_count"] + answer.done() == 0:
            pass
        os.kill(child, signal.SIGTERM)
        assert server.stop() == 0
        assert answer.result() == child


def test_a_model_in_a_process_and_its_child_end_with_a_server_that_is_killed(repository: Any) -> None:
    (repository.add("m", CONFIG + IN_PROCESS) / "1/model.py").write_text(MODEL)
    with serve(repository.path) as server:
        child = Path(f"/proc/{ask(server, 0.0)}/cmdline")
        server.process.kill()
        # Empty once it has ended, also while its parent has not asked for its exit code.
        assert eventually(lambda: not child.exists() or not child.read_bytes())
