"""The matrix: `python tests/bench/matrix.py [--rounds=N] [--output=FOLDER]`, with the test extra installed.

Models small, big and slow, over each transport, at each concurrency: this server, NVIDIA's Triton where
EDGE_BENCH_TRITON names one, the bare runtime in a loop, and another source tree of this server where `--other` names
one, in turns under the same perf_analyzer. Prints a table of ratios and writes it as matrix.md, with matrix.json and
matrix.svg. `--only` takes parts out of it: `--only identity,grpc,1`.

`--short` needs neither perf_analyzer nor Triton, takes seconds, and measures what the test suite watches: see short.py.

Client and server share the cores, so the client's own cost is part of a throughput. Quote ratios and CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cases
import harness
import short
from harness import Load

from edge_server.plugins.tuning.svg_charts import COLORS, Bar, draw_bars

CONCURRENCIES = (1, 4, 16)
SERVER, OTHER, TRITON, RAW = "server", "other tree", "Triton", "bare runtime"
RAW_TURN_S = 1.5


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix. `loads` has one entry per round for each interface."""

    case: str
    transport: str
    concurrency: int
    loads: dict[str, list[Load]]

    def as_json(self) -> dict[str, Any]:
        ours = self.loads[SERVER]
        return {
            "model": self.case,
            "transport": self.transport,
            "concurrency": self.concurrency,
            "medians": {way: asdict(harness.median_load(loads)) for way, loads in self.loads.items()},
            "ratios": {way: asdict(harness.ratios(ours, loads)) for way, loads in self.loads.items() if way != SERVER},
        }


@contextlib.contextmanager
def systems(other: Path | None) -> Iterator[dict[str, harness.Server]]:
    """Yield the servers that were found, all running at once: idle ones use hardly any CPU time."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        here, there = Path(name) / "here", Path(name) / "there"
        cases.write_models(here)
        cases.write_python_models(there)
        flags = ("--allow-client-shm=true", "--log-info=false")
        found = {SERVER: stack.enter_context(harness.server(here, *flags))}
        if other is not None:
            found[OTHER] = stack.enter_context(harness.server(here, *flags, tree=other))
        if harness.TRITON:
            found[TRITON] = stack.enter_context(harness.triton(there))
        yield found


def ways_of(
    case: cases.Case,
    transport: str,
    concurrency: int,
    servers: dict[str, harness.Server],
    window_s: float,
    picture: Path,
) -> dict[str, Callable[[], Load]]:
    ways: dict[str, Callable[[], Load]] = {}
    for way, where in servers.items():
        model = case.there if way == TRITON else case.name
        if model:
            inputs = picture if case.runtime else None
            ways[way] = partial(harness.perf_analyzer, where, model, transport, concurrency, window_s, inputs)
    if case.runtime:
        ways[RAW] = partial(
            harness.closed_loop, cases.raw_call(case.runtime, cases.picture(), case.network), RAW_TURN_S
        )
    return ways


def measure(only: Sequence[str], rounds: int, window_s: float, other: Path | None) -> Iterator[Cell]:
    with systems(other) as servers, tempfile.TemporaryDirectory() as folder:
        picture = cases.write_picture(Path(folder))
        for case in cases.CASES:
            for transport in case.transports:
                for concurrency in CONCURRENCIES:
                    if not is_wanted(only, case.name, transport, str(concurrency)):
                        continue
                    ways = ways_of(case, transport, concurrency, servers, window_s, picture)
                    yield Cell(case.name, transport, concurrency, harness.in_turns(ways, rounds))
                    print(f"{case.name} {transport} {concurrency} done", file=sys.stderr, flush=True)


def is_wanted(only: Sequence[str], *place: str) -> bool:
    """Return whether each coordinate is selected, or none of its axis is."""
    kinds = ({case.name for case in cases.CASES}, set(harness.TRANSPORTS), {str(number) for number in CONCURRENCIES})
    return all(
        own in only or not kind.intersection(only)
        for own, kind in zip(place, kinds, strict=True)
    )  # fmt: skip


def table(cells: Sequence[Cell]) -> str:
    heads = (
        "model", "transport", "conc.", "requests/s", "p50 ms", "p99 ms", "CPU us",
        "beside", "its requests/s", "its p99 ms", "its CPU us", "throughput ratio", "p99 ratio", "CPU ratio",
    )  # fmt: skip
    rows = []
    for cell in cells:
        ours = harness.median_load(cell.loads[SERVER])
        place = [cell.case, cell.transport, str(cell.concurrency), f"{ours.rate:.0f}", f"{ours.p50_ms:.2f}"]
        place += [f"{ours.p99_ms:.2f}", f"{ours.cpu_us:.0f}"]
        others = [way for way in cell.loads if way != SERVER]
        if not others:
            rows.append([*place, *[""] * 7])
        for way in others:
            its, ratio = harness.median_load(cell.loads[way]), harness.ratios(cell.loads[SERVER], cell.loads[way])
            figures = [f"{its.rate:.0f}", f"{its.p99_ms:.2f}", f"{its.cpu_us:.0f}"]
            rows.append([*place, way, *figures, f"{ratio.rate:.2f}", f"{ratio.p99_ms:.2f}", f"{ratio.cpu_us:.2f}"])
    return harness.markdown(heads, rows)


def picture(cells: Sequence[Cell], facts: str) -> str:
    """Draw the CPU time of a request in each system, cell by cell."""
    ways = [way for way in (SERVER, OTHER, TRITON, RAW) if any(way in cell.loads for cell in cells)]
    colors = dict(zip(ways, COLORS, strict=False))
    bars = []
    for cell in cells:
        for way in cell.loads:
            load = harness.median_load(cell.loads[way])
            place = f"{cell.case}, {cell.transport}, {cell.concurrency}" if way == SERVER else way
            bars.append(Bar(place, load.cpu_us, f"{load.cpu_us:.0f} us, {load.rate:.0f} requests/s", colors[way]))
    return draw_bars("CPU time of a request", bars, facts, [(way, colors[way]) for way in ways])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=0.5, help="seconds of one of perf_analyzer's three windows")
    parser.add_argument("--only", default="", help="models, transports and concurrencies, with commas between")
    parser.add_argument("--other", type=Path, help="another source tree of this package, measured beside")
    parser.add_argument("--output", type=Path, default=Path("."), help="folder for the report")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.short:
        short.main(given.output)
        return
    before, began = harness.machine(), time.monotonic()
    only = [word for word in given.only.split(",") if word]
    cells = list(measure(only, given.rounds, given.window, given.other))
    if not cells:
        raise SystemExit(f"nothing in the matrix is called {given.only}")
    facts = {"before": before, "after": harness.machine(), "rounds": given.rounds, "took_s": time.monotonic() - began}
    words = f"{before['cores']} cores, load {before['load_average'][0]:.1f} before, medians of {given.rounds} rounds"
    report = {"facts": facts, "cells": [cell.as_json() for cell in cells]}
    (given.output / "matrix.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.output / "matrix.svg").write_text(picture(cells, words))
    (given.output / "matrix.md").write_text(f"{words}\n\n{table(cells)}\n")
    print(f"{words}\n\n{table(cells)}")


if __name__ == "__main__":
    main()
