"""Rate and cost with one and two reading threads, with and without the interpreter lock:
`python tests/bench/reading_threads.py --free-threaded PYTHON [--rounds N]`.

PYTHON is a free-threaded interpreter that has this server's packages; the interpreter that runs the program serves
beside it, one thread with the lock, as by default. 64 bytes through the built-in identity model with four instances,
one request at a time on each of 1, 4 and 16 connections; the client is h2load, in C, with one thread. Once the server
has one core and the client another ("apart"), once both share all cores ("shared"). The CPU time is that of the server
for a request: a thread on a core of its own gives at most a million divided by it.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import harness

from edge_server.protocol.messages import ModelInferRequest

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [16] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [16] }
instance_group { kind: KIND_CPU count: 4 }
"""
CONNECTIONS = (1, 4, 16)
JSON = (
    b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,16],"parameters":{"binary_data_size":64}}],'
    b'"parameters":{"binary_data_output":true}}'
)
SERVE = """
import sys
from edge_server.frontends import reading_threads
reading_threads.reading_thread_count = lambda: {threads}
from edge_server.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Both transports ask this function when they open. There is no setting for it."""


class Kind(NamedTuple):
    """How a server runs."""

    label: str
    python: str
    lock: str
    threads: int


def command_of(wire: str, where: harness.Server, folder: Path) -> list[str]:
    """Return h2load's arguments for one wire."""
    body = folder / wire
    if wire == "gRPC":
        request = ModelInferRequest(model_name="small", raw_input_contents=[bytes(64)])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
        message = request.SerializeToString()
        body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
        path = "/inference.GRPCInferenceService/ModelInfer"
        return [
            "--window-bits=20", "--connection-window-bits=20", f"--data={body}",
            "--header=content-type: application/grpc", "--header=te: trailers", f"http://{where.grpc}{path}",
        ]  # fmt: skip
    body.write_bytes(JSON + bytes(64))
    length = f"--header=Inference-Header-Content-Length: {len(JSON)}"
    return ["--h1", f"--data={body}", length, f"http://{where.http}/v2/models/small/infer"]


def measure(program: list[str], where: harness.Server, connections: int, seconds: int) -> tuple[float, float]:
    """Return the requests a second, and the microseconds of the server's CPU time for one."""
    size = [f"--duration={seconds}", f"--clients={connections}", "--max-concurrent-streams=1", "--threads=1"]
    count, cpu_s = where.answered("small"), where.cpu_s()
    done = subprocess.run([*program[:-1], *size, program[-1]], capture_output=True, text=True, timeout=60, check=False)
    cpu_s = where.cpu_s() - cpu_s
    count = where.answered("small") - count
    if done.returncode or not count:
        raise SystemExit(f"h2load failed:\n{done.stdout}{done.stderr}")
    return count / seconds, cpu_s / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one and two reading threads, with and without the lock.")
    parser.add_argument(
        "--free-threaded", required=True, help="a free-threaded interpreter with this server's packages"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="of each load")
    options = parser.parse_args()
    h2load = shutil.which("h2load")
    if h2load is None:
        raise SystemExit("no h2load; it is in Debian's package nghttp2-client")
    version = subprocess.check_output(
        [options.free_threaded, "-c", "import platform; print(platform.python_version())"], text=True
    ).strip()
    usual = f"{sys.version_info.major}.{sys.version_info.minor}"
    kinds = [Kind(f"{usual}, lock, 1 thread", sys.executable, "", 1)]
    for lock, word in (("1", "lock"), ("0", "no lock")):
        kinds += [
            Kind(f"{version}t, {word}, {count} thread(s)", options.free_threaded, lock, count) for count in (1, 2)
        ]
    found: dict[tuple[str, str, str, int], list[tuple[float, float]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        harness.write_model(folder / "models", "small", CONFIG)
        ways = []
        for place in ("apart", "shared"):
            pins = (["taskset", "-c", "0"], ["taskset", "-c", "1"]) if place == "apart" else ([], [])
            for kind in kinds:
                program = [*pins[0], kind.python, "-c", SERVE.format(threads=kind.threads)]
                variables = {"PYTHONPATH": str(harness.ROOT), **({"PYTHON_GIL": kind.lock} if kind.lock else {})}
                where = stack.enter_context(harness.server(folder / "models", program=program, variables=variables))
                for wire in ("gRPC", "HTTP"):
                    client = [*pins[1], h2load, *command_of(wire, where, folder)]
                    ways.append((wire, place, kind.label, where, client))
                    measure(client, where, 4, 1)
        for _ in range(options.rounds):
            for connections in CONNECTIONS:
                for wire, place, label, where, client in ways:
                    found[wire, place, label, connections].append(measure(client, where, connections, options.seconds))
    rows = []
    for wire, place, label, _, _ in sorted(ways, key=lambda way: (way[0], way[1])):
        loads = [found[wire, place, label, connections] for connections in CONNECTIONS]
        rates = [statistics.median(rate for rate, _ in load) for load in loads]
        costs = [statistics.median(cost for _, cost in load) for load in loads]
        spread = [max(rate for rate, _ in load) / min(rate for rate, _ in load) for load in loads]
        used = [rate * cost / 1e6 for rate, cost in zip(rates, costs, strict=True)]
        rows.append(
            (
                wire,
                place,
                label,
                " / ".join(f"{rate:,.0f}" for rate in rates),
                " / ".join(f"{cost:.0f}" for cost in costs),
                " / ".join(f"{cores:.2f}" for cores in used),
                f"{max(spread):.2f}",
            )
        )
    heads = ("wire", "cores", "Python", "requests/s at 1 / 4 / 16", "CPU µs", "cores used", "max/min")
    print(harness.machine())
    print(harness.markdown(heads, rows))


if __name__ == "__main__":
    main()
