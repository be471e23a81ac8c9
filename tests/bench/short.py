"""Cost of a request relative to its minimum, in one run, for the test suite: `python tests/bench/short.py [FOLDER]`.

- The classifier through gRPC beside the bare runtime with the same settings: requests a second, and CPU time.
- A request to the identity model beside an echo of the same bytes by a bare server of a common library (grpcio's,
  aiohttp's) in a process of its own, with the same client: CPU time, the figure that a busy machine moves least. Over
  gRPC also with eight requests at once, where less of the time goes into waking up a process.

Reference and server take turns; a ratio is the median of each round's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cases
import grpc
import harness
import numpy as np
from harness import Load
from tritonclient.grpc import service_pb2

ROUNDS = 15
TURN_S = 0.15
AT_ONCE = 8
METHOD = "/inference.GRPCInferenceService/ModelInfer"
IDENTITY = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
"""

ECHO_SERVERS = """
import asyncio, concurrent.futures, sys
import grpc
from aiohttp import web

def echo(data, context):
    return data

async def answer(request):
    return web.Response(body=await request.read())

async def main():
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(sys.argv[1], {"ModelInfer": handler})])
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(grpc_port, runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def echo_servers() -> Iterator[harness.Server]:
    """Start the servers that echo."""
    command = [sys.executable, "-c", ECHO_SERVERS, METHOD.split("/")[1]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with harness.ended(process):
        assert process.stdout is not None
        grpc_port, http_port = process.stdout.readline().split()
        yield harness.Server(f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", process.pid, 0.0)


def message(model: str, name: str, array: np.ndarray) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(name=name, datatype="FP32", shape=array.shape)
    return bytes(request.SerializeToString())


def channel(where: harness.Server) -> grpc.Channel:
    """Return a channel with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.insecure_channel(where.grpc, options=options)


@contextlib.contextmanager
def over_grpc(where: harness.Server, data: bytes) -> Iterator[harness.Call]:
    with channel(where) as opened:
        infer = opened.unary_unary(METHOD)
        yield lambda: infer(data)


@contextlib.contextmanager
def many_over_grpc(where: harness.Server, data: bytes) -> Iterator[harness.Call]:
    """Yield what sends eight requests over one connection and waits for all answers."""
    with channel(where) as opened:
        infer = opened.unary_unary(METHOD)

        def call() -> None:
            for pending in [infer.future(data) for _ in range(AT_ONCE)]:
                pending.result()

        yield call


@contextlib.contextmanager
def http_sender(where: harness.Server) -> Iterator[Callable[[str, bytes, int], None]]:
    """Yield what sends a body to a path over a connection of its own: (path, body, length of its JSON part)."""
    connection = http.client.HTTPConnection(where.http, timeout=60)

    def send(path: str, body: bytes, header_length: int) -> None:
        connection.request("POST", path, body, {"Inference-Header-Content-Length": str(header_length)})
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise SystemExit(f"refused: {text.decode()}")

    with contextlib.closing(connection):
        yield send


@contextlib.contextmanager
def over_http(where: harness.Server, path: str, body: bytes, header_length: int) -> Iterator[harness.Call]:
    with http_sender(where) as send:
        yield lambda: send(path, body, header_length)


def binary_body(array: np.ndarray) -> tuple[bytes, int]:
    """Return the body of an HTTP request and the length of its JSON part."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": array.shape}
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    return head + array.tobytes(), len(head)


def compare(rounds: int = ROUNDS) -> dict[str, dict[str, list[Load]]]:
    """Return the loads of server and reference by what was compared."""
    small, image = np.arange(16, dtype=np.float32), cases.picture()
    body, header_length = binary_body(small)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        repository = Path(name)
        harness.write_model(repository, "small", IDENTITY)
        classifier = cases.write_classifier(repository, "onnxruntime")
        server = stack.enter_context(harness.server(repository, "--log-info=false"))
        echo = stack.enter_context(echo_servers())

        def turn(where: harness.Server, opened: contextlib.AbstractContextManager[harness.Call]) -> Any:
            return partial(harness.closed_loop, stack.enter_context(opened), TURN_S, where.cpu_s)

        pairs = {
            "classifier over gRPC beside the bare runtime": (
                turn(server, over_grpc(server, message(classifier, "input", image))),
                partial(harness.closed_loop, cases.raw_call(image), TURN_S),
            ),
            "identity over gRPC beside a bare echo": tuple(
                turn(where, over_grpc(where, message("small", "INPUT0", small))) for where in (server, echo)
            ),
            "eight at once over gRPC beside a bare echo": tuple(
                turn(where, many_over_grpc(where, message("small", "INPUT0", small))) for where in (server, echo)
            ),
            "identity over HTTP beside a bare echo": tuple(
                turn(where, over_http(where, "/v2/models/small/infer", body, header_length)) for where in (server, echo)
            ),
        }
        return {
            title: harness.in_turns({"server": ours, "reference": reference}, rounds)
            for title, (ours, reference) in pairs.items()
        }


def report(found: dict[str, dict[str, list[Load]]]) -> dict[str, dict[str, float]]:
    """Return, by what was compared, the ratios of the server to its reference, and both costs in microseconds."""
    told = {}
    for title, loads in found.items():
        ratio = harness.ratios(loads["server"], loads["reference"])
        told[title] = {
            "throughput_ratio": ratio.rate,
            "cpu_ratio": ratio.cpu_us,
            **{f"{way}_cpu_us": statistics.median(load.cpu_us for load in loads[way]) for way in loads},
        }
    return told


def main(folder: Path) -> None:
    facts, told = harness.machine(), report(compare())
    (folder / "short.json").write_text(json.dumps({"facts": facts, "ratios": told}, indent=1) + "\n")
    for title, ratios in told.items():
        print(f"{title}: {', '.join(f'{name} {value:.2f}' for name, value in ratios.items())}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "."))
