"""How fast gRPC in Python can be: `python tests/bench/grpc_floor.py [--rounds=N]`, with the test extra installed.

A server like ours, but its gRPC door answers ModelInfer with the bytes of the first answer: nothing is read of a
message, nothing computed, nothing encoded. What is left is gRPC's core and the door's own handling of its events, which
no change of anything behind the door can make cheaper. Beside it, in turns under the same perf_analyzer: the server as
it is, and NVIDIA's Triton where EDGE_BENCH_TRITON names one.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cases
import harness

CONCURRENCIES = (1, 4, 16)
FLOOR, SERVER, TRITON = "stored answer", "server", "Triton"
MODELS = {"identity": "identity_python", "identity_python": "identity_python", "frame": "frame_python"}
"""Model here -> model in Triton."""

_COUNT = "EDGE_BENCH_FLOOR_COUNT"


_ASKED_EVERY = 64
"""Of so many requests one goes to the model: perf_analyzer wants to see the model's counts grow."""


@dataclass
class FloorServer(harness.Server):
    """The server with stored answers. It counts in a file that both processes map, as its models are never asked."""

    counted: Path = Path()

    def answered(self, model: str) -> int:
        return int.from_bytes(self.counted.read_bytes(), "little")


def serve() -> None:
    """Be the server with stored answers, until told to stop."""
    from edge_server.cli.main import main
    from edge_server.frontends.grpc import direct_infer
    from edge_server.frontends.grpc.boundary import Ending

    stored: dict[int, Ending] = {}
    with open(os.environ[_COUNT], "r+b") as file:
        counted = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    class StoredInfer(direct_infer.InferCall):
        __slots__ = ("_size",)

        def on_message(self, data: bytes) -> None:
            counted[0] += 1
            # One model is asked at a time, and its messages are of one length, the text of the request's id aside.
            self._size = len(data)
            found = stored.get(self._size)
            if found is None or counted[0] % _ASKED_EVERY == 0:
                super().on_message(data)
            else:
                super().end(found)

        def end(self, done: Ending) -> None:
            if done.message is not None:
                stored[self._size] = done
            super().end(done)

    direct_infer.InferCall = StoredInfer  # type: ignore[misc]
    raise SystemExit(main(sys.argv[2:]))


@contextlib.contextmanager
def systems() -> Iterator[dict[str, harness.Server]]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        here, there, count = Path(name) / "here", Path(name) / "there", Path(name) / "count"
        cases.write_models(here)
        cases.write_python_models(there)
        count.write_bytes(bytes(8))
        program = (sys.executable, __file__, "--serve")
        floor = stack.enter_context(
            harness.server(here, "--log-info=false", program=program, variables={_COUNT: str(count)})
        )
        found: dict[str, harness.Server] = {FLOOR: FloorServer(**vars(floor), counted=count)}
        found[SERVER] = stack.enter_context(harness.server(here, "--log-info=false"))
        if harness.TRITON:
            found[TRITON] = stack.enter_context(harness.triton(there))
        yield found


def measure(rounds: int, window_s: float) -> Iterator[list[str]]:
    with systems() as servers:
        for model, there in MODELS.items():
            for concurrency in CONCURRENCIES:
                ways = {
                    way: partial(
                        harness.perf_analyzer, where, there if way == TRITON else model, "grpc", concurrency, window_s
                    )
                    for way, where in servers.items()
                }
                loads = harness.in_turns(ways, rounds)
                for way, its in loads.items():
                    load, ratio = harness.median_load(its), harness.ratios(loads[FLOOR], its)
                    figures = [f"{load.rate:.0f}", f"{load.p50_ms:.2f}", f"{load.p99_ms:.2f}", f"{load.cpu_us:.0f}"]
                    yield [model, str(concurrency), way, *figures, f"{ratio.rate:.2f}", f"{ratio.cpu_us:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=0.5, help="seconds of one of perf_analyzer's three windows")
    given = parser.parse_args()
    heads = ("model", "conc.", "system", "requests/s", "p50 ms", "p99 ms", "CPU us", "stored answer: rate", "CPU")
    print(harness.markdown(heads, list(measure(given.rounds, given.window))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve()
    main()
