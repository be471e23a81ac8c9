"""`edge-server perf` and NVIDIA's perf_analyzer in turns, against the same server: which rate each client drives with
tiny requests, and what CPU time a request costs the client.

    eval "$(tests/e2e/fetch_perf_analyzer.sh FOLDER)"
    python tests/bench/perf_clients.py [--rounds 3] [--seconds 0.5] [--perf LABEL=COMMAND ...]

`--perf` names the programs to compare, without it the installed one: `--perf 'old=/tree/.venv/bin/edge-server'`. Prints
medians of the rounds, and ratios to perf_analyzer as medians of each round's ratio, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import cases
import harness
from harness import Load

MODEL = "identity"
WIRES = ("grpc", "stream", "http")
CONCURRENCIES = (1, 4, 16)
BASE = "perf_analyzer"


def measure(where: harness.Server, client: Callable[[], Load]) -> Load:
    """Run a client. Return its rate and times, and as `cpu_us` the CPU time of the client for each request."""
    count, before = where.answered(MODEL), resource.getrusage(resource.RUSAGE_CHILDREN)
    load = client()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Load(load.rate, load.p50_ms, load.p99_ms, cpu_s / (where.answered(MODEL) - count) * 1e6)


def perf(where: harness.Server, program: Sequence[str], wire: str, concurrency: int, window_s: float) -> Load:
    command = [
        *program, "perf", "-m", MODEL, "-i", wire, "-u", f"http://{where.http}" if wire == "http" else where.grpc,
        f"--concurrency={concurrency}", f"--measurement-interval={int(window_s * 1000)}",
        "--stability-percentage=1000", "--max-trials=3", "-q", "--json=-",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode not in (0, 1):  # 1: not stable
        raise SystemExit(f"perf failed: {shlex.join(command)}\n{done.stdout}{done.stderr}")
    point = json.loads(done.stdout)["points"][0]
    return Load(point["throughput"], point["latency_ms"]["p50"], point["latency_ms"]["p99"], 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one of a client's three windows")
    parser.add_argument("--perf", action="append", metavar="LABEL=COMMAND")
    given = parser.parse_args()
    named = [text.partition("=") for text in given.perf or [f"perf={harness.COMMAND}"]]
    programs = {label: shlex.split(command) for label, _, command in named}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        cases.write_models(Path(name))
        with harness.server(Path(name), "--log-info=false") as where:
            for wire in WIRES:
                for concurrency in CONCURRENCIES:
                    clients = {
                        BASE: partial(harness.perf_analyzer, where, MODEL, wire, concurrency, given.seconds),
                        **{
                            label: partial(perf, where, program, wire, concurrency, given.seconds)
                            for label, program in programs.items()
                        },
                    }
                    loads = harness.in_turns(
                        {label: partial(measure, where, client) for label, client in clients.items()}, given.rounds
                    )
                    theirs = loads[BASE]
                    for label, ours in loads.items():
                        ratios = sorted(one.rate / other.rate for one, other in zip(ours, theirs, strict=True))
                        load, ratio = harness.median_load(ours), harness.ratios(ours, theirs).rate
                        rows.append(
                            [
                                f"{wire} {concurrency}", label, f"{load.rate:.0f}",
                                f"{ratio:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                                f"{load.p50_ms:.3f} / {load.p99_ms:.3f}", f"{load.cpu_us:.0f}",
                            ]
                        )  # fmt: skip
                        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    heads = ["load", "client", "requests/s", f"to {BASE}'s", "p50 / p99 ms", "client's CPU us"]
    print(harness.markdown(heads, rows))


if __name__ == "__main__":
    main()
