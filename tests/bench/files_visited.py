"""Files and calls of one warm request: `python tests/bench/files_visited.py [--transport=grpcio] [WIRE ...]`.

Starts the server of this tree with a profile function in each of its threads, sends requests one at a time, and prints
for each wire the files of the package that a warm request visits, with the number of Python calls in each; then the
calls in files of other packages and the calls of functions written in C. `--json` prints the same for programs.

A file counts if it is visited by more than half of the requests, so that a timer that fires by chance does not count.
Other flags go to the server.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = str(ROOT / "edge_server") + os.sep
WARM, REQUESTS = 200, 41
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
QUIET_S = 0.01
"""A request is over for the server when no thread of it has called anything for so long."""


# -- in the server


class Recorder:
    """Counts events of all threads between the orders "begin" and "end" of one pipe; reports into another."""

    def __init__(self, orders: int, reports: int) -> None:
        self._orders, self._reports = os.fdopen(orders), os.fdopen(reports, "w")
        self._calls: collections.Counter[str] = collections.Counter()
        self._c_calls = self._events = 0
        self._files: set[str] = set()
        self._is_on = False

    def start(self) -> None:
        threading.Thread(target=self._follow_orders, daemon=True).start()
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def _record(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self._is_on:
            return
        file = frame.f_code.co_filename
        self._events += 1
        # Also of a loop that was entered before the request came.
        self._files.add(file)
        if event == "call":
            self._calls[file] += 1
        elif event == "c_call":
            self._c_calls += 1

    def _follow_orders(self) -> None:
        for order in self._orders:
            if order == "begin\n":
                self._calls.clear()
                self._files.clear()
                self._c_calls = 0
                self._is_on = True
                found: dict[str, Any] = {}
            else:
                seen = -1
                while seen != self._events:
                    seen = self._events
                    time.sleep(QUIET_S)
                self._is_on = False
                found = {"calls": dict(self._calls), "c_calls": self._c_calls, "files": list(self._files)}
            print(json.dumps(found), file=self._reports, flush=True)


def serve(orders: str, reports: str, arguments: list[str]) -> None:
    """Run the server with a profile function, until it is stopped."""
    sys.path.insert(0, str(ROOT))
    from edge_server.cli.main import main

    Recorder(int(orders), int(reports)).start()
    raise SystemExit(main(["serve", *arguments]))


# -- in the client


@contextlib.contextmanager
def recorded_server(repository: Path, *flags: str) -> Iterator[tuple[Any, Callable[[str], dict[str, Any]]]]:
    """Start the server, and yield its addresses and what sends an order and returns the report."""
    import harness

    orders_read, orders_write = os.pipe()
    reports_read, reports_write = os.pipe()
    command = [sys.executable, __file__, "--serve", str(orders_read), str(reports_write)]
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    command += [f"--model-repository={repository}", "--log-info=false", *ports, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=(orders_read, reports_write))
    os.close(orders_read)
    os.close(reports_write)
    with os.fdopen(orders_write, "w") as orders, os.fdopen(reports_read) as reports, harness.ended(process):
        assert process.stdout is not None
        found = harness.READY.search(process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        threading.Thread(target=process.stdout.read, daemon=True).start()

        def order(word: str) -> dict[str, Any]:
            print(word, file=orders, flush=True)
            return dict(json.loads(reports.readline()))

        yield harness.Server(found[1], found[2], process.pid, 0.0), order


def calls_of_wires(where: Any, stack: contextlib.ExitStack) -> dict[str, Callable[[], object]]:
    """Return, by wire, what sends one request to the identity model and waits for its answer."""
    import numpy as np
    import short
    from tritonclient.grpc import service_pb2

    small = np.arange(16, dtype=np.float32)
    message = service_pb2.ModelInferRequest.FromString(short.message("small", "INPUT0", small))
    message.outputs.add(name="OUTPUT0")
    data = message.SerializeToString()
    body, header_length = short.binary_body(small)
    text = json.dumps(
        {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [16], "data": small.tolist()}]}
    ).encode()
    path = "/v2/models/small/infer"
    sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    responses = stack.enter_context(short.channel(where)).stream_stream(STREAM_METHOD)(iter(sent.get, None))
    stack.callback(responses.cancel)

    def stream() -> None:
        sent.put(data)
        next(responses)

    return {
        "grpc": stack.enter_context(short.over_grpc(where, data)),
        "http": stack.enter_context(short.over_http(where, path, body, header_length)),
        "stream": stream,
        "json": stack.enter_context(short.over_http(where, path, text, len(text))),
    }


def visits(call: Callable[[], object], order: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the files that one warm call visits, and how many calls it makes there and elsewhere."""
    for _ in range(WARM):
        call()
    found = []
    for _ in range(REQUESTS):
        order("begin")
        call()
        found.append(order("end"))
    # Of the requests that visit the fewest: others meet a run that is measured, or a timer.
    fewest = min(found, key=lambda one: sum(file.startswith(PACKAGE) for file in one["files"]))
    files = {
        file.removeprefix(PACKAGE): statistics.median(one["calls"].get(file, 0) for one in found)
        for file in fewest["files"]
        if file.startswith(PACKAGE)
    }
    elsewhere = (
        sum(count for file, count in one["calls"].items() if not file.startswith(PACKAGE)) for one in found
    )  # fmt: skip
    return {
        "files": dict(sorted(files.items())),
        "calls": statistics.median(
            sum(count for file, count in one["calls"].items() if file.startswith(PACKAGE)) for one in found
        ),
        "calls_elsewhere": statistics.median(elsewhere),
        "c_calls": statistics.median(one["c_calls"] for one in found),
    }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import harness
    import short

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wires", nargs="*", help="grpc, http, stream, json; all if none is named")
    parser.add_argument("--json", action="store_true")
    given, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        harness.write_model(Path(name), "small", short.IDENTITY)
        where, order = stack.enter_context(recorded_server(Path(name), *flags))
        calls = calls_of_wires(where, stack.enter_context(contextlib.ExitStack()))
        found = {wire: visits(calls[wire], order) for wire in given.wires or calls}
    if given.json:
        print(json.dumps(found))
        return
    for wire, its in found.items():
        print(f"{wire}: {len(its['files'])} files, {its['calls']} calls in them, ", end="")
        print(f"{its['calls_elsewhere']} in other packages, {its['c_calls']} of C functions")
        for file, count in its["files"].items():
            print(f"    {count:5} {file}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
    main()
