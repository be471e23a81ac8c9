"""edge_server.Server: the server inside a Python program."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

import edge_server
from edge_server.core.tensor import BY_NAME
from edge_server.errors import EdgeServerError, InvalidRequest, LoadError, NotReady, Unsupported
from edge_server.protocol import messages
from tests.kit.model_folder import model_folder

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
    model_folder(folder / "echo", ECHO)
    model_folder(
        folder / "counter",
        'backend: "python" model_transaction_policy { decoupled: true } '
        'input { name: "COUNT" data_type: TYPE_INT32 dims: [1] } '
        'output { name: "NUMBER" data_type: TYPE_INT32 dims: [1] }',
        {"1/model.py": COUNTER},
    )
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[edge_server.Server]:
    with edge_server.Server(models, grpc_port=0) as running:
        yield running


def test_outputs_equal_those_over_grpc_bit_for_bit(server: edge_server.Server) -> None:
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


def test_bytes_are_passed_as_over_grpc(server: edge_server.Server) -> None:
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


def test_many_tasks_of_an_event_loop_infer_concurrently(server: edge_server.Server) -> None:
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


def test_closing_a_stream_early_disturbs_nothing(server: edge_server.Server) -> None:
    stream = server.stream("counter", {"COUNT": np.array([1000], np.int32)})
    assert int(next(stream).outputs["NUMBER"][0]) == 0
    stream.close()
    assert server.infer("echo", INPUTS).version == 1


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        ("nosuch", INPUTS, {}, "'nosuch' is not found"),
        ("echo", {**INPUTS, "INPUT0": np.array([[1]])}, {}, "data-type is 'INT64', but model 'echo' expects 'FP32'"),
        ("echo", {"INPUT0": INPUTS["INPUT0"]}, {}, "INPUT1"),
        ("echo", {**INPUTS, "INPUT0": [[1j]]}, {}, "input 'INPUT0' for model 'echo': no tensor type for numpy type"),
        ("echo", INPUTS, {"outputs": ["NOSUCH"]}, "NOSUCH"),
        ("echo", INPUTS, {"version": 4}, "version 4"),
        ("echo", INPUTS, {"version": "4"}, "version 4"),
        ("echo", INPUTS, {"version": "newest"}, "version string 'newest' (details: not a whole number of 0 or above)"),
        ("echo", INPUTS, {"deadline_ms": -1}, "deadline"),
    ],
)
def test_an_invalid_request_raises_a_client_error(
    server: edge_server.Server, model: str, inputs: dict, options: dict, message: str
) -> None:
    with pytest.raises(EdgeServerError, match=r"\S") as caught:
        server.infer(model, inputs, **options)
    assert message in caught.value.message
    assert "id_unknown" not in caught.value.message  # such as Triton's "[request id: <id_unknown>]"
    with pytest.raises(EdgeServerError) as caught:
        asyncio.run(server.ainfer(model, inputs, **options))
    assert message in caught.value.message
    assert "id_unknown" not in caught.value.message


def test_two_servers_off_the_main_thread_do_not_change_process_state(models: Path) -> None:
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


def test_a_failed_start_raises_its_reason(tmp_path: Path, models: Path) -> None:
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
    model_folder(tmp_path / "broken", files={"1/model.onnx": b"no model"})
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


def test_importing_the_package_imports_no_third_party_library() -> None:
    package, server = {"numpy", "google.protobuf", "aiohttp", "grpc"}, {"aiohttp", "grpc", "onnxruntime", "openvino"}
    for use, libraries in (("edge_server", package), ("edge_server.Server", server)):
        program = f"import sys, edge_server; {use}; print({libraries} & set(sys.modules))"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ended.stdout, ended.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "expected text or bytes, got object"),
        ([[1.0], [2.0, 3.0]], "is no array"),
        ([["é", b"\xff"]], "is no array"),
    ],
)
def test_an_input_that_is_no_array_is_an_invalid_request(
    server: edge_server.Server, value: object, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"input 'INPUT0' for model 'echo'.*{message}"):
        server.infer("echo", {**INPUTS, "INPUT0": value})


def test_error_messages_contain_the_request_id(server: edge_server.Server) -> None:
    with pytest.raises(InvalidRequest, match=r"^\[request id: 7\] expected 2 inputs but got 0 inputs"):
        server.infer("echo", {}, request_id="7")


@pytest.mark.parametrize("version", [None, "", 1, "1"])
def test_a_version_is_given_as_a_number_or_a_string(server: edge_server.Server, version: int | str | None) -> None:
    assert server.infer("echo", INPUTS, version=version).version == 1
    assert server.metadata("echo", version)["versions"] == ["1"]
    assert server.statistics("echo", version)["model_stats"][0]["version"] == "1"


@pytest.mark.parametrize("datatype", ["UINT8", "INT8", "INT32", "INT64", "UINT64", "FP16", "BF16", "FP32", "FP64"])
def test_python_integers_are_converted_to_the_models_type(typed: edge_server.Server, datatype: str) -> None:
    answer = typed.infer(datatype.lower(), {"X": [[1, 2], (3, 100)]}).outputs["X"]
    assert answer.dtype == BY_NAME[datatype].numpy
    expected = [[0x3F80, 0x4000], [0x4040, 0x42C8]] if datatype == "BF16" else [[1, 2], [3, 100]]
    assert answer.tolist() == expected


def test_python_floats_bools_and_empty_lists_are_converted_to_the_models_type(typed: edge_server.Server) -> None:
    half = typed.infer("fp16", {"X": [[0.1, float("inf"), -2]]}).outputs["X"]
    assert (half.dtype, half.tolist()) == (np.float16, [[np.float16(0.1), np.inf, -2]])
    near = typed.infer("bf16", {"X": [[1.00390625, 1.01171875, float("-inf")]]}).outputs["X"]  # halfway: to even
    assert near.tolist() == [[0x3F80, 0x3F82, 0xFF80]]
    assert typed.infer("bool", {"X": [[True, False]]}).outputs["X"].tolist() == [[True, False]]
    assert typed.infer("uint64", {"X": [[2**64 - 1]]}).outputs["X"].tolist() == [[2**64 - 1]]
    assert typed.infer("int32", {"X": [[]]}).outputs["X"].shape == (1, 0)
    assert next(typed.stream("int32", {"X": [[5]]})).outputs["X"].dtype == np.int32


@pytest.mark.parametrize(
    ("model", "value", "message"),
    [
        ("uint8", [[1, 256]], "input 'X' for model 'uint8': 256 is out of range for UINT8, 0 to 255"),
        ("uint64", [[-1]], "input 'X' for model 'uint64': -1 is out of range for UINT64, 0 to 18446744073709551615"),
        ("int64", [[2**70]], "input 'X' for model 'int64': a number is out of range for INT64"),
        ("fp16", [[70000]], "input 'X' for model 'fp16': a number is out of range for FP16"),
        ("bf16", [[3.4e38]], "input 'X' for model 'bf16': a number is out of range for BF16"),
        ("fp32", [[1e39]], "input 'X' for model 'fp32': a number is out of range for FP32"),
        ("int32", [[1.0]], "data-type is 'FP64', but model 'int32' expects 'INT32'"),
        ("int32", [[True]], "data-type is 'BOOL', but model 'int32' expects 'INT32'"),
        ("bool", [[1]], "data-type is 'INT64', but model 'bool' expects 'BOOL'"),
        ("fp32", [["1"]], "data-type is 'BYTES', but model 'fp32' expects 'FP32'"),
        ("fp32", np.array([[1.0]]), "data-type is 'FP64', but model 'fp32' expects 'FP32'"),
    ],
)
def test_out_of_range_numbers_and_arrays_of_another_type_are_refused(
    typed: edge_server.Server, model: str, value: object, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        typed.infer(model, {"X": value})
    assert message in caught.value.message


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edge_server.Server]:
    """A server with a model for each type, that answers its input."""
    folder = tmp_path_factory.mktemp("typed")
    for name in ("BOOL", "UINT8", "INT8", "INT32", "INT64", "UINT64", "FP16", "BF16", "FP32", "FP64"):
        (folder / name.lower() / "1").mkdir(parents=True)
        tensor = f'{{ name: "X" data_type: TYPE_{name} dims: [-1, -1] }}'
        (folder / name.lower() / "config.pbtxt").write_text(f'backend: "identity" input {tensor} output {tensor}')
    with edge_server.Server(folder) as running:
        yield running


def test_metadata_and_statistics_equal_those_over_http(models: Path) -> None:
    with edge_server.Server(models, http_port=0) as server:
        server.infer("echo", INPUTS)

        def get(path: str) -> object:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}") as answer:
                return json.load(answer)

        assert server.metadata() == get("/v2")
        assert server.metadata("echo") == get("/v2/models/echo")
        assert server.statistics("echo") == get("/v2/models/echo/stats")
        assert server.statistics() == get("/v2/models/stats")
        with pytest.raises(EdgeServerError, match="nosuch"):
            server.metadata("nosuch")


def test_the_metrics_page_needs_no_port(server: edge_server.Server) -> None:
    assert server.metrics_port is None
    server.infer("echo", INPUTS)
    page = server.metrics()
    assert re.search(r'^nv_inference_request_success\{model="echo",version="1"\} [1-9]', page, re.MULTILINE)
    assert "process_resident_memory_bytes" in page


def test_a_stopped_server_cannot_be_started_again(models: Path) -> None:
    server = edge_server.Server(models)
    with server:
        assert server.start() is server
    said = "the server was stopped and cannot be started again: make a new edge_server.Server"
    for use in (server.start, server.__enter__, lambda: asyncio.run(server.__aenter__())):
        with pytest.raises(NotReady, match=said):
            use()
    server.stop()
    assert not server.live()
    never_started = edge_server.Server(models)
    never_started.stop()
    for use in (never_started.start, never_started.models):
        with pytest.raises(NotReady, match=said):
            use()


def test_a_start_that_another_thread_stops_fails(models: Path, tmp_path: Path) -> None:
    began = write_slow_model(tmp_path)
    server = edge_server.Server(tmp_path, exit_timeout_secs=1)

    def stop() -> None:
        while not began.exists():
            time.sleep(0.01)
        server.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(NotReady, match="the server was stopped"):
        server.start()
    stopper.join(60)
    assert not server.live()


def write_slow_model(repository: Path) -> Path:
    """Write a model whose load takes a second. Return the path of the file that it creates when its load starts."""
    (repository / "slow/1").mkdir(parents=True)
    began = repository / "began"
    (repository / "slow/1/model.py").write_text(
        "import pathlib, time\n\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        f"        pathlib.Path({str(began)!r}).touch()\n"
        "        time.sleep(1)\n\n"
        "    def execute(self, requests):\n"
        "        return [None for _ in requests]\n"
    )
    (repository / "slow/config.pbtxt").write_text(
        'backend: "python" input { name: "X" data_type: TYPE_INT32 dims: [1] } '
        'output { name: "Y" data_type: TYPE_INT32 dims: [1] }'
    )
    return began


def test_async_with_does_not_block_the_event_loop(models: Path) -> None:
    async def run() -> tuple[edge_server.Server, int, list[int]]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        counting = asyncio.create_task(count())
        async with edge_server.Server(models) as server:
            turns_of_start = turns
            numbers = [
                int(item.outputs["NUMBER"][0]) async for item in server.astream("counter", {"COUNT": [5]}, version="1")
            ]
        counting.cancel()
        return server, turns_of_start, numbers

    server, turns_of_start, numbers = asyncio.run(run())
    assert not server.live()
    assert turns_of_start > 1
    assert numbers == [0, 1, 2, 3, 4]


def test_a_cancelled_start_of_async_with_leaves_no_server(tmp_path: Path) -> None:
    began = write_slow_model(tmp_path)
    server = edge_server.Server(tmp_path, exit_timeout_secs=1)

    async def use() -> None:
        async with server:
            raise AssertionError("it must not be entered")

    async def run() -> None:
        using = asyncio.create_task(use())
        while not began.exists():
            await asyncio.sleep(0.01)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using

    threads = set(threading.enumerate())
    asyncio.run(run())
    assert not server.live()
    for left in set(threading.enumerate()) - threads:
        left.join(20)
        assert not left.is_alive(), left


def test_an_async_stream_can_be_closed_early_and_raises_the_errors_of_infer(server: edge_server.Server) -> None:
    async def run() -> None:
        async with contextlib.aclosing(server.astream("counter", {"COUNT": [1000]})) as responses:
            async for response in responses:
                assert int(response.outputs["NUMBER"][0]) == 0
                break
        with pytest.raises(InvalidRequest, match=r"^expected 1 inputs but got 0 inputs for model 'counter'"):
            await anext(server.astream("counter", {}))
        assert [item.version async for item in server.astream("echo", INPUTS)] == [1]

    asyncio.run(run())


def test_dir_lists_the_public_names() -> None:
    assert dir(edge_server) == ["InferOptions", "InferResult", "RpcError", "Server", "__version__"]
    assert all(getattr(edge_server, name) is not None for name in dir(edge_server))


ROOT = Path(__file__).parents[2]


def blocks_of(page: str, title: str) -> list[str]:
    section = (ROOT / "docs" / page).read_text().partition(f"# {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```(?:python|pbtxt)\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize(
    ("block", "printed"),
    [
        pytest.param(block, printed, marks=marks)
        for block, printed, marks in zip(
            blocks_of("embedding.md", "The server inside a Python program"),
            (r"\d+\n", r"(efficientnet_lite0 1\n){3}3\n"),
            # Each loads the bundled models in a process of its own, the first does less than the second.
            ([pytest.mark.full], []),
            strict=True,
        )
    ],
)
def test_programs_of_the_documentation_run_as_written(block: str, printed: str) -> None:
    ended = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(printed, ended.stdout), ended.stdout


@pytest.mark.full
def test_the_fastapi_program_of_the_documentation_answers_and_refuses(tmp_path: Path) -> None:
    pytest.importorskip("fastapi.testclient", reason="needs fastapi, of the extra test-all")
    program, client = blocks_of("embedding.md", "FastAPI")
    model, config = blocks_of("python-models.md", "A whole model")
    folder = tmp_path / "model_repository/mean"
    model_folder(folder, config, {"1/model.py": model})
    (tmp_path / "program.py").write_text(program)
    ended = subprocess.run([sys.executable, "-c", client], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "{'mean': 3.0}\n422\n"), ended.stderr


TYPED_PROGRAM = """
import asyncio
import contextlib

import numpy as np

import edge_server


def infer(server: edge_server.Server, **options: int) -> None:
    result = server.infer("echo", {"X": [1, 2], "Y": np.zeros(2), "Z": "text"}, version="1", deadline_ms=50)
    reveal_type(result)
    reveal_type(result.outputs["X"])
    with contextlib.closing(server.stream("counter", {"COUNT": [5]}, outputs=["NUMBER"])) as responses:
        for response in responses:
            print(response.version + 1)
    chosen: edge_server.InferOptions = {"version": 1, "priority": 2}
    server.infer("echo", {}, **chosen)
    print(server.metadata("echo")["inputs"][0]["name"], server.statistics()["model_stats"], server.metrics().split())
    server.infer("echo", {}, verson=1)
    server.infer("echo", {}, version=1.5)
    server.infer("echo", {}, deadline_ms="50")


async def main() -> None:
    async with edge_server.Server("models", grpc_port=0) as server:
        reveal_type(server)
        reveal_type(await server.ainfer("echo", {"X": [1]}, priority=1))
        async with contextlib.aclosing(server.astream("counter", {"COUNT": [5]}, sequence_id="a")) as responses:
            async for response in responses:
                print(response.model.upper())
        await server.ainfer("echo", {}, outputs=1)
        server.astream("echo", {}, sequence_strt=True)


asyncio.run(main())
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy, of the extra test-all")
@pytest.mark.timeout(400)
def test_a_type_checker_knows_the_options_and_results(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TYPED_PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-version=3.10", str(program)]
    # Type checkers do not follow the import hook of an editable installation.
    environment = {**os.environ, "MYPYPATH": str(Path(edge_server.__file__).parents[1])}
    checked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    notes = re.findall(r'program.py:\d+: note: Revealed type is "(.*)"', checked.stdout)
    assert [note.partition("[")[0].rpartition(".")[2] for note in notes] == [
        "InferResult", "ndarray", "Server", "InferResult",
    ]  # fmt: skip
    lines = TYPED_PROGRAM.splitlines()
    found = {lines[int(number) - 1].strip() for number in re.findall(r"program.py:(\d+): error:", checked.stdout)}
    assert found == {
        'server.infer("echo", {}, verson=1)',
        'server.infer("echo", {}, version=1.5)',
        'server.infer("echo", {}, deadline_ms="50")',
        'await server.ainfer("echo", {}, outputs=1)',
        'server.astream("echo", {}, sequence_strt=True)',
    }, checked.stdout
