"""Models in Python through the installed server: Triton's own kind of folder and what a process gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.server import serve

ADD_SUB_CONFIG = """
name: "add_sub"
backend: "python"

input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
input [ { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]

instance_group [{ kind: KIND_CPU }]
"""

ADD_SUB = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.types = [
            pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        ]

    def execute(self, requests):
        responses = []
        for request in requests:
            first, second = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            responses.append(pb_utils.InferenceResponse(output_tensors=[
                pb_utils.Tensor("OUTPUT0", (first + second).astype(self.types[0])),
                pb_utils.Tensor("OUTPUT1", (first - second).astype(self.types[1])),
            ]))
        return responses
"""


ARGUMENTS_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""

ARGUMENTS = """
import argparse
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parser = argparse.ArgumentParser()
        parser.add_argument("--threshold", default="0.5")
        self.threshold = parser.parse_args().threshold

    def execute(self, requests):
        given = np.array([self.threshold, *sys.argv], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given)]) for _ in requests]
"""


ONE_TO_ONE = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
"""

INTERVAL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        seconds = np.array([sys.getswitchinterval()], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", seconds)]) for _ in requests]
"""


STRAGGLER = """
import threading
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=time.sleep, args=(3600,)).start()

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    for name, code, config in (
        ("add_sub", ADD_SUB, ADD_SUB_CONFIG),
        ("arguments", ARGUMENTS, ARGUMENTS_CONFIG),
    ):
        module_repository.add(name, config, files={"1/model.py": code})
        apart = config.replace('name: "add_sub"', "") + parameters(isolation="process")
        module_repository.add(f"isolated_{name}", apart, files={"1/model.py": code})
    module_repository.add("interval", ONE_TO_ONE, files={"1/model.py": INTERVAL})
    module_repository.add("straggler", ONE_TO_ONE, files={"1/model.py": STRAGGLER})
    with serve(module_repository.path) as running:
        yield running
        # Also with a thread in it that a model left behind.
        assert running.get("/v2/models/straggler/ready")[0] == 200
        assert running.stop() == 0


@pytest.fixture(params=["", "isolated_"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("client", [httpclient, grpcclient])
def test_a_model_folder_of_triton_is_served_unchanged(server: Any, kind: str, client: Any) -> None:
    address = server.http if client is httpclient else server.grpc
    arrays = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], np.float32)
    inputs = [infer_input(client, f"INPUT{number}", array) for number, array in enumerate(arrays)]
    with client.InferenceServerClient(address) as connection:
        answer = connection.infer(f"{kind}add_sub", inputs, request_id="r")
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), [5, 5, 5, 5])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), [-3, -1, 1, 3])


def test_a_computing_model_lets_other_threads_run_within_5_ms(server: Any) -> None:
    given = infer_input(grpcclient, "IN", np.zeros(1, np.float32))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert 0 < client.infer("interval", [given]).as_numpy("OUT")[0] <= 0.001


def test_a_model_that_reads_the_command_line_finds_it_empty(server: Any, kind: str) -> None:
    """As under Triton: argparse would take the server's options for the model's."""
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [0]}]}
    status, answer = server.infer(f"{kind}arguments", body)
    assert (status, answer["outputs"][0]["data"]) == (200, ["0.5", ""])
