"""NVIDIA's Triton and this server in turns: `python tests/bench/triton_rounds.py --triton=FOLDER --backends=FOLDER`.

    --triton         an unpacked nvidia-pytriton wheel (0.7.0); with '' the first --server takes Triton's place
    --triton-python  an interpreter with numpy < 2, for Triton's Python backend
    --backends       folder with `identity/libtriton_identity.so` (see triton_identity.c) and, for the cells of ONNX
                     models, `onnxruntime/libtriton_onnxruntime.so` and `openvino/libtriton_openvino.so`. The latter
                     is r26.08 plus INFERENCE_PRECISION_HINT among the parameters that it reads; without that line it
                     computes in bf16 on many processors, and this server in f32
    --perf-analyzer, --perf-analyzer-libs   as tests/e2e/fetch_perf_analyzer.sh prints them
    --server         LABEL=COMMAND, the program of a server with flags of its own: once for each to compare; without it
                     the installed one. `--server 'old=/tree/.venv/bin/edge-server --grpc-transport=grpcio'`
    --again          run a second Triton in the same rounds, and say which cells are worse than Triton by more than
                     the two Tritons differ
    --cells, --concurrency   parts of the table, with commas between

Prints a table: medians of the rounds; ratios to Triton are medians of each round's ratio, with the least and the
greatest in brackets. CPU is the CPU time of the server's processes between start and end of the load, by the kernel's
clock of the process, for each request that the server's own statistics count meanwhile.

A cell of h2load sends its requests over 1 connection, 4 connections, or as 16 streams of 1 connection.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import cases
import harness
import numpy as np
import short
from harness import Load

TRITON = "Triton"
AGAIN = "Triton again"
FIELDS = {"rate": 1, "p99_ms": -1, "cpu_us": -1}
"""Fields of a Load that are compared, and the sign of their difference that is better."""


@dataclass(frozen=True)
class Cell:
    """`model` is one of those that `cases.write_for_triton` writes."""

    name: str
    model: str
    transport: str
    concurrencies: Sequence[int]


CELLS = (
    Cell("unary", "identity", "grpc", (1, 4, 16)),
    Cell("h2load", "identity", "h2load", (1, 4, 16)),
    Cell("stream", "identity", "stream", (1, 4, 16)),
    Cell("http", "identity", "http", (1, 4, 16)),
    Cell("shm", "identity", "shm", (1, 4)),
    Cell("python", "identity_python", "grpc", (1, 4, 16)),
    Cell("add_sub", "add_sub", "grpc", (1, 4, 16)),
    Cell("add_sub_stream", "add_sub", "stream", (1, 4, 16)),
    Cell("add_sub_http", "add_sub", "http", (1, 4, 16)),
    Cell("frame", "frame", "grpc", (1, 4)),
    Cell("frame_http", "frame", "http", (1, 4)),
    Cell("frame_shm", "frame", "shm", (1, 4)),
    Cell("mobilenet", "mobilenet_v2", "grpc", (1, 4, 16)),
    Cell("mobilenet_http", "mobilenet_v2", "http", (1, 4, 16)),
    Cell("mobilenet_openvino", "mobilenet_v2_openvino", "grpc", (1, 4, 16)),
    Cell("mobilenet_openvino_http", "mobilenet_v2_openvino", "http", (1, 4, 16)),
    Cell("resnet", "resnet18", "grpc", (1, 4, 16)),
    Cell("resnet_http", "resnet18", "http", (1, 4, 16)),
    Cell("resnet_openvino", "resnet18_openvino", "grpc", (1, 4, 16)),
    Cell("resnet_openvino_http", "resnet18_openvino", "http", (1, 4, 16)),
)


@contextlib.contextmanager
def systems(
    models: Sequence[str], programs: dict[str, list[str]], *, is_again: bool
) -> Iterator[dict[str, harness.Server]]:
    """Yield Triton, twice if `is_again`, and the servers to compare with it, all running at once: idle ones use hardly
    any CPU time."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        here, there = Path(name) / "here", Path(name) / "there"
        cases.write_for_triton(here, there, models)
        found = {}
        for label in ([TRITON] if harness.TRITON else []) + ([AGAIN] if is_again else []):
            found[label] = stack.enter_context(harness.triton(there))
        for label, (program, *flags) in programs.items():
            words = ("--allow-client-shm=true", "--log-info=false", *flags)
            found[label] = stack.enter_context(harness.server(here, *words, program=[program]))
        yield found


def turn(where: harness.Server, cell: Cell, concurrency: int, window_s: float, folder: Path) -> Callable[[], Load]:
    if cell.transport == "h2load":
        data = short.message(cell.model, "INPUT0", np.arange(16, dtype=np.float32))
        connections, streams = (1, concurrency) if concurrency > 4 else (concurrency, 1)
        return partial(harness.h2load, where, cell.model, short.METHOD, data, connections, streams, 3 * window_s)
    inputs = cases.write_picture(folder) if cell.model in cases.NETWORKS else None
    return partial(harness.perf_analyzer, where, cell.model, cell.transport, concurrency, window_s, inputs)


def figures(load: Load) -> list[str]:
    return [f"{load.rate:.0f}", f"{load.p50_ms:.2f} / {load.p99_ms:.2f}", f"{load.cpu_us:.0f}"]


def round_ratios(ours: Sequence[Load], theirs: Sequence[Load], field: str) -> list[float]:
    return [getattr(one, field) / getattr(other, field) for one, other in zip(ours, theirs, strict=True)]


def spread(ours: Sequence[Load], theirs: Sequence[Load], field: str) -> str:
    """Return the median of the rounds' ratios, and the least and the greatest."""
    ratios = round_ratios(ours, theirs, field)
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def worse_fields(ours: Sequence[Load], theirs: Sequence[Load], again: Sequence[Load]) -> list[str]:
    """Return the fields in which the median ratio to Triton is worse than any round's of two Tritons, whichever of the
    two is divided by the other."""
    found = []
    for field, sign in FIELDS.items():
        itself = max(abs(math.log(ratio)) for ratio in round_ratios(again, theirs, field))
        if sign * math.log(statistics.median(round_ratios(ours, theirs, field))) < -itself:
            found.append(field)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", default=harness.TRITON)
    parser.add_argument("--triton-python", default=harness.TRITON_PYTHON)
    parser.add_argument("--backends", default=harness.TRITON_BACKENDS)
    parser.add_argument("--perf-analyzer", default=harness.PERF_ANALYZER)
    parser.add_argument("--perf-analyzer-libs", default=harness.PERF_ANALYZER_LIBS)
    parser.add_argument("--server", action="append", metavar="LABEL=COMMAND")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--cells", default=",".join(cell.name for cell in CELLS))
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=0.5, help="seconds of one of perf_analyzer's three windows")
    parser.add_argument("--json", type=Path, help="file for all loads")
    given = parser.parse_args()
    harness.TRITON, harness.TRITON_PYTHON, harness.TRITON_BACKENDS = given.triton, given.triton_python, given.backends
    harness.PERF_ANALYZER, harness.PERF_ANALYZER_LIBS = given.perf_analyzer, given.perf_analyzer_libs
    unknown = set(given.cells.split(",")) - {cell.name for cell in CELLS}
    if unknown:
        parser.error(f"no cells are called {', '.join(sorted(unknown))}")
    wanted = [cell for cell in CELLS if cell.name in given.cells.split(",")]
    concurrencies = {int(text) for text in given.concurrency.split(",")}
    named = [text.partition("=") for text in given.server or [f"edge_server={harness.COMMAND}"]]
    programs = {label: shlex.split(command) for label, _, command in named}

    if not given.triton and len(programs) < 2:
        parser.error("name --triton, or two servers with --server")
    if given.again and not given.triton:
        parser.error("--again needs --triton")
    base = TRITON if given.triton else next(iter(programs))

    before = harness.machine()
    kept = []
    heads = ["cell", "conc.", f"{base}: requests/s", "p50 / p99 ms", "CPU us", "beside"]
    heads += ["requests/s", "p50 / p99 ms", "CPU us", f"rate, to {base}'s", "p99", "CPU"]
    rows: list[list[str]] = []
    worse: list[str] = []
    models = [cell.model for cell in wanted]
    with systems(models, programs, is_again=given.again) as servers, tempfile.TemporaryDirectory() as name:
        for cell in wanted:
            for concurrency in sorted(concurrencies.intersection(cell.concurrencies)):
                ways = {
                    label: turn(where, cell, concurrency, given.window, Path(name)) for label, where in servers.items()
                }
                loads = harness.in_turns(ways, given.rounds)
                kept.append([cell.name, concurrency, {way: [asdict(one) for one in its] for way, its in loads.items()}])
                theirs = loads.pop(base)
                for label, ours in loads.items():
                    ratios = [spread(ours, theirs, field) for field in FIELDS]
                    row = [cell.name, str(concurrency), *figures(harness.median_load(theirs)), label]
                    rows.append([*row, *figures(harness.median_load(ours)), *ratios])
                    print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
                    if given.again and label != AGAIN and (fields := worse_fields(ours, theirs, loads[AGAIN])):
                        worse.append(f"{label}: {cell.name} at {concurrency}: {', '.join(fields)}")
    after = harness.machine()
    print(f"{given.rounds} rounds, {before['processor']}, {before['cores']} cores, load ", end="")
    print(f"{before['load_average'][0]} before and {after['load_average'][0]} after\n\n{harness.markdown(heads, rows)}")
    if given.again:
        print("\nWorse than Triton by more than two Tritons differ:", *(worse or ["no cell"]), sep="\n- ")
    if given.json is not None:
        given.json.write_text(json.dumps({"before": before, "after": after, "loads": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
