"""Cost of the governor in the request path: `python tests/bench/governor_cost.py [ROUNDS]`, with the test extra.

Requests a second to the smallest model there is (identity, one number), one at a time: in this process, and through
HTTP and gRPC of the installed server. Three ways, measured in turns, round after round: `--governor=false`; the
governor on and the machine cool; the governor on with a small limit, so that every request passes admission control
and none is refused. Then the CPU time of an idle server, which is the cost of reading the sensors twice a second.

Printed are medians, and the median of each round's ratio to the server without a governor. Quote the ratios: absolute
numbers belong to the machine. Sensors are those of an Orin Nano made of files, so reading them costs what it costs.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from edge_server.config import LogConfig, RepositoryConfig, ServerConfig
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.plugin import own_plugins
from edge_server.plugins.governor.control_policy import PolicyDecision
from edge_server.plugins.governor.governor_admission import GovernorAdmission
from edge_server.plugins.governor.settings import GovernorConfig
from edge_server.process.composition_root import ServerParts, build, first_desired_state
from edge_server.telemetry.log import LogSettings

COMMAND = Path(sys.executable).parent / "edge-server"
BOARDS = Path(__file__).parents[1] / "plugins" / "governor" / "boards.py"
TURN_S = 0.5
REST_S = 20.0
OFF, COOL, HELD = "off", "on, cool", "on, holding back"
WAYS = (OFF, COOL, HELD)
SET_POINT_C = 95.0

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_INT32 dims: [1] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [1] }
instance_group { kind: KIND_CPU count: 1 }
"""

Call = Callable[[], object]


# -- boxes


def board(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("boards", BOARDS)
    assert spec is not None
    assert spec.loader is not None
    boards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(boards)
    return boards.Board("orin_nano_jp6", folder)


def hold_back(machine: Any, address: str) -> None:
    """Warm the machine until the allowed fraction falls a little, then keep it at the set point."""
    machine.set_temperature("tj-thermal", SET_POINT_C + 0.5)
    end_s = time.monotonic() + 60
    while share_of(address) >= 0.99:
        if time.monotonic() > end_s:
            raise SystemExit("the governor does not hold back at the set-point")
        time.sleep(0.1)
    machine.set_temperature("tj-thermal", SET_POINT_C)
    time.sleep(3.0)


# -- the same request in process, over HTTP and over gRPC


def in_process(core: ServerParts) -> Call:
    """Return one request to the serving core, run on this thread as the gRPC front end's are."""
    tensor = Tensor("INPUT0", DType.INT32, np.array([[7]], np.int32))

    def call() -> None:
        answers: list[Response] = []
        core.service.submit(Request("small", {"INPUT0": tensor}), answers.append, hold_us=math.inf)
        if answers[0].error is not None:
            raise SystemExit(f"refused: {answers[0].error}")

    return call


def over_http(address: str) -> Call:
    connection = http.client.HTTPConnection(address)
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}
    body = json.dumps({"inputs": [tensor]})

    def call() -> None:
        connection.request("POST", "/v2/models/small/infer", body)
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise SystemExit(f"refused: {text.decode()}")

    return call


def over_grpc(address: str) -> Call:
    request = service_pb2.ModelInferRequest(model_name="small", raw_input_contents=[np.int32(7).tobytes()])
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
    message = request.SerializeToString()
    channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    return lambda: infer(message)


# -- servers


@contextlib.contextmanager
def core(repository: Path, way: str) -> Iterator[ServerParts]:
    """Yield a serving core in this process. No sensor is read: only admission control costs time here."""
    config = ServerConfig(
        repository=RepositoryConfig(paths=(str(repository),), control_mode="explicit", load_models=("*",)),
        plugin_tables={"governor": GovernorConfig(is_enabled=way != OFF)},
    )
    made = build(config, LogSettings(LogConfig(shows_info=False, shows_warning=False)), own_plugins())
    made.service.set_desired_state(first_desired_state(config.repository, made.source))
    made.service.table.wait_settled(timeout_s=60)
    if way == HELD:
        admission = made.plugins.admission()
        assert isinstance(admission, GovernorAdmission)
        admission.apply(PolicyDecision(share=0.98), capacity=1.0)
    try:
        yield made
    finally:
        made.close(10.0)


@contextlib.contextmanager
def server(repository: Path, way: str, folder: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the addresses of HTTP and gRPC, and the process's id."""
    machine = board(folder)
    if way == HELD:
        machine.set_temperature("tj-thermal", SET_POINT_C - 0.1)
    flags = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    flags += [f"--sysfs-root={machine.root}", "--log-info=false", "--log-warning=false"]
    flags.append(f"--governor={'false' if way == OFF else 'true'}")
    process = subprocess.Popen(
        [str(COMMAND), "serve", f"--model-repository={repository}", *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"HTTP http://([^;\s]+); gRPC ([^;\s]+)", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        if way == HELD:
            hold_back(machine, found[1])
        yield found[1], found[2], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()
        machine.close()


def share_of(address: str) -> float:
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
        connection.request("GET", "/edge/v1/governor")
        return float(json.loads(connection.getresponse().read())["share"])


# -- measuring


def rate(call: Call) -> float:
    """Return calls a second over one turn."""
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + TURN_S:
        call()
        count += 1
    return count / (now - began)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def at_rest(pids: dict[str, int]) -> None:
    before = {way: cpu_s(pid) for way, pid in pids.items()}
    time.sleep(REST_S)
    for way, pid in pids.items():
        print(f"at rest, {way}: {(cpu_s(pid) - before[way]) / REST_S:.2%} of a core")


def compare(title: str, calls: dict[str, Call], rounds: int) -> None:
    rates: dict[str, list[float]] = {way: [] for way in calls}
    for call in calls.values():
        rate(call)
    for number in range(rounds):
        # Each way goes first as often as any other.
        order = [*calls][number % len(calls) :] + [*calls][: number % len(calls)]
        for way in order:
            rates[way].append(rate(calls[way]))
    for way, found in rates.items():
        ratio = statistics.median(one / other for one, other in zip(found, rates[OFF], strict=True))
        each_us = 1e6 / statistics.median(found)
        print(f"{title}, {way}: {statistics.median(found):.0f} a second ({each_us:.1f} us), {ratio:.3f} of off")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        folder = Path(name)
        repository = folder / "models"
        (repository / "small" / "1").mkdir(parents=True)
        (repository / "small" / "config.pbtxt").write_text(CONFIG)
        with contextlib.ExitStack() as cores:
            made = {way: cores.enter_context(core(repository, way)) for way in WAYS}
            compare("in process", {way: in_process(item) for way, item in made.items()}, rounds)
        addresses = {way: servers.enter_context(server(repository, way, folder / way)) for way in WAYS}
        for title, door, at in (("HTTP", over_http, 0), ("gRPC", over_grpc, 1)):
            compare(title, {way: door(found[at]) for way, found in addresses.items()}, rounds)
            print(f"{title}: holding back, the share was {share_of(addresses[HELD][0]):.3f}")
        at_rest({way: found[2] for way, found in addresses.items()})


if __name__ == "__main__":
    main()
