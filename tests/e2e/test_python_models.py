"""Models in Python through the installed server: Triton's own kind of folder, Triton's clients, streams, crashes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

import edge_server
from edge_server.frontends.grpc import http2_transport
from edge_server.frontends.http import inference_route
from edge_server.serving.execution.inline_execution import UNLIMITED_US
from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder
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

IN_TURN = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor(given.name().replace("INPUT", "OUTPUT"), given.as_numpy()) for given in request.inputs()
            ])
            for request in requests
        ]
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

CRASHER = """
import os
import ctypes
import threading
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=time.sleep, args=(3600,)).start()

    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0] < 0:
            ctypes.string_at(0)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""

SPEAKER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    mood = 1.0

    def is_ready(self):
        return self.mood > 0

    def execute(self, requests):
        answers = []
        for request in requests:
            self.mood = float(request.inputs()[0].as_numpy()[0])
            said = {"text": "gr\u00fc\u00df", "whole": -(2**63), "part": 0.5, "yes": True}
            said["asked"] = request.parameters()
            if self.mood == 2:
                said["huge"] = 2**64
            if self.mood == 3:
                for order in (pb_utils.load_model, pb_utils.unload_model):
                    try:
                        order("speaker")
                    except pb_utils.TritonModelException as error:
                        said[order.__name__] = str(error)
            output = pb_utils.Tensor("OUT", np.array([self.mood], np.float32))
            answers.append(pb_utils.InferenceResponse([output], parameters=said))
        return answers
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

PLACE = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.mine = threading.current_thread()

    def execute(self, requests):
        is_mine = np.array([threading.current_thread() is self.mine], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", is_mine)]) for request in requests]
"""


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    isolated = 'parameters { key: "isolation" value { string_value: "process" } }'
    for name, code, config in (
        ("add_sub", ADD_SUB, ADD_SUB_CONFIG),
        ("isolated_add_sub", ADD_SUB, ADD_SUB_CONFIG.replace('name: "add_sub"', "") + isolated),
        ("in_turn", IN_TURN, ADD_SUB_CONFIG.replace('name: "add_sub"', "")),
        ("isolated_in_turn", IN_TURN, ADD_SUB_CONFIG.replace('name: "add_sub"', "") + isolated),
        ("speaker", SPEAKER, ONE_TO_ONE),
        ("isolated_speaker", SPEAKER, ONE_TO_ONE + isolated),
        ("arguments", ARGUMENTS, ARGUMENTS_CONFIG),
        ("isolated_arguments", ARGUMENTS, ARGUMENTS_CONFIG + isolated),
        ("crasher", CRASHER, ONE_TO_ONE + isolated),
        ("straggler", CRASHER, ONE_TO_ONE),
        ("interval", INTERVAL, ONE_TO_ONE),
    ):
        module_repository.add(name, config, files={"1/model.py": code})
    with serve(module_repository.path) as running:
        yield running
        # Also with a thread in it that a model left behind.
        assert running.stop() == 0


@pytest.fixture(params=["", "isolated_"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def arrays() -> list[np.ndarray]:
    return [np.array([1, 2, 3, 4], dtype=np.float32), np.array([4, 3, 2, 1], dtype=np.float32)]


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("client", [httpclient, grpcclient])
def test_a_model_gets_inputs_and_returns_outputs_in_request_order(
    server: Any, kind: str, client: Any, is_binary: bool
) -> None:
    flags = {} if client is grpcclient else {"binary_data": is_binary}
    inputs = [client.InferInput(f"INPUT{number}", [4], "FP32") for number in (1, 0)]
    for given, array in zip(inputs, arrays(), strict=True):
        given.set_data_from_numpy(array, **flags)
    wanted = [client.InferRequestedOutput(f"OUTPUT{number}", **flags) for number in (0, 1)]
    with client.InferenceServerClient(server.http if client is httpclient else server.grpc) as connection:
        # The second time the server knows the request's head.
        for _ in range(2):
            for outputs in (wanted, None):
                answer = connection.infer(f"{kind}in_turn", inputs, outputs=outputs)
                message = answer.get_response()
                named = message["outputs"] if client is httpclient else message.outputs
                names = [output["name"] if client is httpclient else output.name for output in named]
                assert names == ["OUTPUT1", "OUTPUT0"]
                np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), arrays()[0])
                np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), arrays()[1])


@pytest.mark.parametrize("client", [httpclient, grpcclient])
def test_a_model_folder_of_triton_is_served_unchanged(server: Any, kind: str, client: Any) -> None:
    address = server.http if client is httpclient else server.grpc
    inputs = [client.InferInput(f"INPUT{number}", [4], "FP32") for number in (0, 1)]
    for given, array in zip(inputs, arrays(), strict=True):
        given.set_data_from_numpy(array)
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


def test_a_crash_is_reported_with_its_signal_and_the_model_serves_again(server: Any) -> None:
    def body(value: float) -> dict[str, Any]:
        return {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [value]}]}

    assert server.infer("crasher", body(1.0))[0] == 200
    status, answer = server.infer("crasher", body(-1.0))
    assert status == 500
    assert "signal SIGSEGV" in answer["error"]
    assert server.infer("crasher", body(2.0))[1]["outputs"][0]["data"] == [2.0]
    assert server.process.poll() is None
    assert server.infer("straggler", body(3.0))[0] == 200


def value_of(client: Any, value: float) -> list[Any]:
    given = infer_input(client, "IN", np.array([value], dtype=np.float32))
    return [given]


def test_request_and_response_parameters_pass_over_http_and_grpc(server: Any, kind: str) -> None:
    parameters = {"name": "caf\u00e9", "count": 7}
    with httpclient.InferenceServerClient(server.http) as client:
        said = client.infer(f"{kind}speaker", value_of(httpclient, 1.0), parameters=parameters).get_response()
    over_http = said["parameters"]
    with grpcclient.InferenceServerClient(server.grpc) as client:
        answer = client.infer(f"{kind}speaker", value_of(grpcclient, 1.0), parameters=parameters).get_response()
    over_grpc = {key: getattr(item, item.WhichOneof("parameter_choice")) for key, item in answer.parameters.items()}
    for said in (over_http, over_grpc):
        # A map of protobuf's has no order.
        assert json.loads(said.pop("asked")) == parameters
    assert over_http == over_grpc == {"text": "gr\u00fc\u00df", "whole": -(2**63), "part": 0.5, "yes": True}


def test_a_model_whose_health_check_fails_is_not_ready_over_http_and_grpc(server: Any, kind: str) -> None:
    name = f"{kind}speaker"
    with (
        httpclient.InferenceServerClient(server.http) as over_http,
        grpcclient.InferenceServerClient(server.grpc) as over_grpc,
    ):
        for mood, is_well in ((-1.0, False), (1.0, True)):
            over_http.infer(name, value_of(httpclient, mood))
            assert (over_http.is_model_ready(name), over_grpc.is_model_ready(name)) == (is_well, is_well)


def test_without_explicit_model_control_a_model_that_loads_others_gets_an_error(server: Any, kind: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        said = client.infer(f"{kind}speaker", value_of(httpclient, 3.0)).get_response()["parameters"]
    words = (
        "explicit model load / unload is not allowed if polling is enabled; to allow it, start the server with "
        "--model-control-mode=explicit"
    )
    assert (said["load_model"], said["unload_model"]) == (words, words)


@pytest.fixture(scope="module")
def server_of_short_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edge_server.Server]:
    """In this process, with reading threads that may be held for any finite time: on a busy machine the smallest model
    needs longer than READING_THREAD_HOLD_US for each request, in processor time too, as others empty the caches."""
    on_callers = 'parameters { key: "execution_thread" value { string_value: "caller" } }'
    repository = tmp_path_factory.mktemp("brief")
    for name, config in (("place", ONE_TO_ONE), ("place_of_callers", ONE_TO_ONE + on_callers)):
        model_folder(repository / name, config, {"1/model.py": PLACE})
    with pytest.MonkeyPatch.context() as patch:
        for module in (inference_route, http2_transport):
            patch.setattr(module, "READING_THREAD_HOLD_US", UNLIMITED_US / 2)
        with edge_server.Server(repository, http_port=0, grpc_port=0) as running:
            yield running


@pytest.mark.parametrize("client", [httpclient, grpcclient])
def test_a_short_model_is_executed_inline_by_the_thread_that_reads_its_requests(
    server_of_short_models: edge_server.Server, client: Any
) -> None:
    server = server_of_short_models
    given = infer_input(client, "IN", np.zeros(1, np.float32))
    port = server.http_port if client is httpclient else server.grpc_port
    with client.InferenceServerClient(f"127.0.0.1:{port}") as connection:

        def is_on_its_own_thread(model: str) -> bool:
            return bool(connection.infer(model, [given]).as_numpy("OUT")[0])

        assert eventually(lambda: not is_on_its_own_thread("place_of_callers"))
        assert all(is_on_its_own_thread("place") for _ in range(20))
