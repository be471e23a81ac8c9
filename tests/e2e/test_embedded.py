"""edge_server.Server: the server inside a Python program."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

import edge_server
from edge_server.errors import EdgeServerError, InvalidRequest, LoadError, NotReady, Unsupported
from edge_server.protocol import messages

ECHO = (
    'backend: "identity" max_batch_size: 8 '
    'input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] } '
    'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] } '
    'input { name: "INPUT1" data_type: TYPE_STRING dims: [-1] } '
    'output { name: "OUTPUT1" data_type: TYPE_STRING dims: [-1] }'
)
COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])):
                tensor = pb_utils.Tensor("NUMBER", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
INPUTS = {"INPUT0": np.array([[1.5, -0.0, np.inf]], np.float32), "INPUT1": np.array([["é", b"\xff\0", ""]], object)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "echo/1").mkdir(parents=True)
    (folder / "echo/config.pbtxt").write_text(ECHO)
    (folder / "counter/1").mkdir(parents=True)
    (folder / "counter/1/model.py").write_text(COUNTER)
    (folder / "counter/config.pbtxt").write_text(
        'backend: "python" model_transaction_policy { decoupled: true } '
        'input { name: "COUNT" data_type: TYPE_INT32 dims: [1] } '
        'output { name: "NUMBER" data_type: TYPE_INT32 dims: [1] }'
    )
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[edge_server.Server]:
    with edge_server.Server(models, grpc_port=0) as running:
        yield running


def test_the_answer_is_that_of_grpc_bit_for_bit(server: edge_server.Server) -> None:
    texts = np.array([[item.encode() if isinstance(item, str) else item for item in INPUTS["INPUT1"][0]]], object)
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        inputs = [grpc_client.InferInput("INPUT0", [1, 3], "FP32"), grpc_client.InferInput("INPUT1", [1, 3], "BYTES")]
        inputs[0].set_data_from_numpy(INPUTS["INPUT0"])
        inputs[1].set_data_from_numpy(texts)
        remote = client.infer("echo", inputs, request_id="7")
    local = server.infer("echo", INPUTS, request_id="7")
    assert (local.model, str(local.version), local.request_id) == ("echo", "1", "7")
    for name, array in local.outputs.items():
        assert array.dtype == remote.as_numpy(name).dtype
        assert array.tobytes() == remote.as_numpy(name).tobytes() or array.tolist() == remote.as_numpy(name).tolist()


def test_bytes_go_in_and_out_as_over_grpc(server: edge_server.Server) -> None:
    infer = next(item for item in messages.service_methods(messages.GRPC_SERVICE) if item.name == "ModelInfer")
    request = infer.input_class(model_name="counter_not_here")
    with pytest.raises(edge_server.RpcError, match="counter_not_here") as caught:
        server.call("ModelInfer", request.SerializeToString())
    assert caught.value.code == "NOT_FOUND"
    request = infer.input_class(model_name="echo", id="9")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 3])
    tensor.contents.fp32_contents.extend([1, 2, 3])
    request.inputs.add(name="INPUT1", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"x")
    for answer in (
        server.call("ModelInfer", request.SerializeToString()),
        asyncio.run(server.acall("ModelInfer", request.SerializeToString())),
    ):
        found = infer.output_class.FromString(answer)
        assert found.id == "9"
        assert found.raw_output_contents[0] == np.array([1, 2, 3], np.float32).tobytes()
    assert "echo" in str(server.call("RepositoryIndex", b""))


@pytest.mark.parametrize(("method", "code"), [("ModelStreamInfer", "UNIMPLEMENTED"), ("Nosuch", "UNIMPLEMENTED")])
def test_only_unary_methods_can_be_called(server: edge_server.Server, method: str, code: str) -> None:
    with pytest.raises(edge_server.RpcError, match=f"no unary method '{method}'") as caught:
        server.call(method, b"")
    assert caught.value.code == code


def test_many_tasks_of_an_event_loop_infer_at_once(server: edge_server.Server) -> None:
    async def run() -> list[float]:
        inputs = [{**INPUTS, "INPUT0": np.full((1, 3), number, np.float32)} for number in range(50)]
        answers = await asyncio.gather(*(server.ainfer("echo", item) for item in inputs))
        return [float(answer.outputs["OUTPUT0"][0, 0]) for answer in answers]

    assert asyncio.run(run()) == list(range(50))


def test_a_decoupled_model_is_read_as_a_stream(server: edge_server.Server) -> None:
    count = {"COUNT": np.array([5], np.int32)}
    assert [int(item.outputs["NUMBER"][0]) for item in server.stream("counter", count)] == [0, 1, 2, 3, 4]
    assert list(server.stream("counter", {"COUNT": np.array([0], np.int32)})) == []
    with pytest.raises(Unsupported, match=r"model 'counter' is decoupled: use stream\(\)"):
        server.infer("counter", count)


def test_a_stream_that_is_closed_early_disturbs_nothing(server: edge_server.Server) -> None:
    stream = server.stream("counter", {"COUNT": np.array([1000], np.int32)})
    assert int(next(stream).outputs["NUMBER"][0]) == 0
    stream.close()
    assert server.infer("echo", INPUTS).version == 1


@pytest.mark.parametrize(
    ("model", "inputs", "options", "said"),
    [
        ("nosuch", INPUTS, {}, "'nosuch' is not found"),
        ("echo", {**INPUTS, "INPUT0": [[1]]}, {}, "data-type is 'INT64', but model 'echo' expects 'FP32'"),
        ("echo", {"INPUT0": INPUTS["INPUT0"]}, {}, "INPUT1"),
        ("echo", {**INPUTS, "INPUT0": [[1j]]}, {}, "input 'INPUT0' for model 'echo': no tensor type for numpy type"),
        ("echo", INPUTS, {"outputs": ["NOSUCH"]}, "NOSUCH"),
        ("echo", INPUTS, {"version": 4}, "version 4"),
        ("echo", INPUTS, {"deadline_ms": -1}, "deadline"),
    ],
)
def test_a_bad_request_gets_the_error_of_a_client(
    server: edge_server.Server, model: str, inputs: dict, options: dict, said: str
) -> None:
    with pytest.raises(EdgeServerError, match=r"\S") as caught:
        server.infer(model, inputs, **options)
    assert said in caught.value.message
    with pytest.raises(EdgeServerError) as caught:
        asyncio.run(server.ainfer(model, inputs, **options))
    assert said in caught.value.message


def test_two_servers_off_the_main_thread_change_nothing_of_the_process(models: Path) -> None:
    def state() -> list[object]:
        root = logging.getLogger()
        return [
            {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)},
            sys.getswitchinterval(), root.level, list(root.handlers), logging.getLogger("edge_server").level,
            dict(os.environ),
        ]  # fmt: skip

    found: list[object] = []

    def run() -> None:
        with edge_server.Server(models, http_port=0, metrics_port=0) as one, edge_server.Server([models]) as two:
            found.append((one.ready(), two.ready(), one.http_port is not None, two.http_port, one.grpc_port))
            found.append([len(each.models()) for each in (one, two)])
            found.append(one.infer("echo", INPUTS).outputs["OUTPUT0"].tobytes())
            one.stop()
            found.append((one.live(), two.live(), two.infer("echo", INPUTS).outputs["OUTPUT0"].tobytes()))

    before, threads = state(), set(threading.enumerate())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    data = INPUTS["INPUT0"].tobytes()
    assert found == [(True, True, True, None, None), [2, 2], data, (False, True, data)]
    assert state() == before
    for left in set(threading.enumerate()) - threads:
        left.join(20)  # idle worker threads end a moment after their pool is closed
        assert not left.is_alive(), left


def test_models_are_loaded_and_unloaded_on_request(models: Path) -> None:
    with edge_server.Server(models, model_control_mode="explicit", load_model=["echo"]) as server:
        assert [entry.state for entry in server.models() if entry.name == "counter"] == [""]
        server.load("counter")
        assert len(list(server.stream("counter", {"COUNT": np.array([2], np.int32)}))) == 2
        server.unload("echo")
        with pytest.raises(EdgeServerError, match="echo"):
            server.infer("echo", INPUTS)


def test_what_prevents_a_start_is_raised(tmp_path: Path, models: Path) -> None:
    with pytest.raises(Exception, match="unknown flag --http-prt, did you mean '--http-port'"):
        edge_server.Server(models, http_prt=0)
    with pytest.raises(EdgeServerError, match="nowhere"):
        edge_server.Server(tmp_path / "nowhere").start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EdgeServerError, match=str(port)):
            edge_server.Server(models, http_port=port).start()
    (tmp_path / "broken/1").mkdir(parents=True)
    (tmp_path / "broken/1/model.onnx").write_bytes(b"no model")
    with pytest.raises(LoadError, match="1 NOT: broken"):
        edge_server.Server(tmp_path, exit_on_error=True).start()
    with edge_server.Server(tmp_path) as server:
        assert "model.onnx" in server.models()[0].reason
    with pytest.raises(NotReady, match=r"call start\(\)"):
        edge_server.Server(models).infer("echo", INPUTS)


def test_a_program_that_ends_without_stop_ends_cleanly(models: Path) -> None:
    program = (
        "import edge_server, numpy\n"
        f"server = edge_server.Server({str(models)!r}, http_port=0).start()\n"
        "print(server.infer('echo', {'INPUT0': numpy.ones((1, 1), 'f4'), 'INPUT1': [['x']]}).outputs['OUTPUT1'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[[b'x']]\n", "")


def test_importing_the_package_imports_no_library() -> None:
    package, server = {"numpy", "google.protobuf", "aiohttp", "grpc"}, {"aiohttp", "grpc", "onnxruntime", "openvino"}
    for use, libraries in (("edge_server", package), ("edge_server.Server", server)):
        program = f"import sys, edge_server; {use}; print({libraries} & set(sys.modules))"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ended.stdout, ended.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "expected text or bytes, got object"),
        ([[1.0], [2.0, 3.0]], "is no array"),
        ([["é", b"\xff"]], "is no array"),
    ],
)
def test_an_input_that_is_no_array_is_a_bad_request(server: edge_server.Server, value: object, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"input 'INPUT0' for model 'echo'.*{said}"):
        server.infer("echo", {**INPUTS, "INPUT0": value})
