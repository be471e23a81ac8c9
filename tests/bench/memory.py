"""Memory and start: `python tests/bench/memory.py [--rounds=N] [--output=FOLDER]`, with the test extra installed.

All run from compiled bytecode, as pip installs it, also out of a source tree whose bytecode is not written.

Resident (Rss) and proportional (Pss) memory at rest, seconds from start to the first 200 of /v2/health/ready, the CPU
time of the start, and the modules imported until then: of the server without a model, with the identity model after a
first request, with one small network (the face detector of model_repository), and with all of model_repository. In
turns; medians and ranges are printed, and written to FOLDER/memory.json if one is given.

`--server LABEL=COMMAND`, once for each, compares trees: `--server old=/tree/.venv/bin/edge-server --server new=...`.
The start of the second and later ones is then printed as a ratio to the first's, round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import cases
import harness
import numpy as np
import short

DETECTOR = "face_detection_yunet"

Figures = dict[str, float]
SETTLE_S = 1.0
SMALL = np.zeros(16, np.float32)


def first_answer_s(where: harness.Server) -> float:
    """Ask a server that says it is ready whether it is; return the seconds from its start to the answer."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection(where.http, timeout=60)
    connection.request("GET", "/v2/health/ready")
    status = connection.getresponse().status
    answered_s = time.monotonic()
    connection.close()
    if status != 200:
        raise SystemExit(f"/v2/health/ready answered {status}")
    return where.start_s + answered_s - began_s


def module_count(program: Sequence[str], repository: Path) -> int:
    """Return how many modules a server has imported when it has answered /v2/health/ready."""
    with tempfile.NamedTemporaryFile() as log:
        logged = ("sh", "-c", f'exec "$@" 2>{log.name}', "sh", *program)
        with harness.server(repository, program=logged, variables={"PYTHONPROFILEIMPORTTIME": "1"}) as where:
            first_answer_s(where)
            lines = Path(log.name).read_text().splitlines()
    return len({line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")})


def of_server(program: Sequence[str], repository: Path, model: str = "") -> Figures:
    words = (*program[1:], "--log-info=false")
    with harness.server(repository, *words, program=program[:1]) as where, contextlib.ExitStack() as stack:
        start_s, start_cpu_s = first_answer_s(where), where.cpu_s()
        if model:
            stack.enter_context(short.over_grpc(where, short.message(model, "INPUT0", SMALL)))()
        time.sleep(SETTLE_S)
        found = where.memory_mb()
        return {"rss_mb": found["Rss"], "pss_mb": found["Pss"], "start_s": start_s, "start_cpu_s": start_cpu_s}


def measure(rounds: int, programs: Mapping[str, Sequence[str]]) -> dict[str, list[Figures]]:
    """Return what each way brought, one entry a round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty").mkdir()
        harness.write_model(folder / "small", "small", short.IDENTITY)
        shutil.copytree(cases.BUNDLED.parent / DETECTOR, folder / "detector" / DETECTOR)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        ways: dict[str, Callable[[], Figures]] = {}
        for label, program in programs.items():
            ways[f"{label}, no model"] = partial(of_server, program, folder / "empty")
            ways[f"{label}, identity"] = partial(of_server, program, folder / "small", "small")
            ways[f"{label}, {DETECTOR}"] = partial(of_server, program, folder / "detector")
            ways[f"{label}, model_repository"] = partial(of_server, program, cases.BUNDLED.parent)
        for measure_one in ways.values():
            measure_one()  # writes the bytecode
        modules = {label: module_count(program, folder / "empty") for label, program in programs.items()}
        print(", ".join(f"{label} without a model: {count} modules" for label, count in modules.items()))
        found: dict[str, list[Figures]] = {way: [] for way in ways}
        names = list(ways)
        for number in range(rounds):
            # Each goes first as often as any other.
            first = number % len(names)
            for way in names[first:] + names[:first]:
                found[way].append(ways[way]())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for memory.json")
    parser.add_argument("--server", action="append", metavar="LABEL=COMMAND")
    given = parser.parse_args()
    named = [text.partition("=") for text in given.server or [f"server={harness.COMMAND}"]]
    programs = {label: shlex.split(command) for label, _, command in named}
    before = harness.machine()
    rounds = measure(given.rounds, programs)
    found = {way: {key: statistics.median(one[key] for one in its) for key in its[0]} for way, its in rounds.items()}
    rows = []
    for way, row in found.items():
        starts_s = sorted(one["start_s"] for one in rounds[way])
        start = f"{row['start_s']:.3f} ({starts_s[0]:.3f}-{starts_s[-1]:.3f})"
        rows.append((way, f"{row['rss_mb']:.1f}", f"{row['pss_mb']:.1f}", start, f"{row['start_cpu_s']:.3f}"))
    print(harness.markdown(("", "Rss MB", "Pss MB", "start to first answer s", "its CPU s"), rows))
    first, *others = programs
    for label in others:
        for way in [way.removeprefix(label) for way in found if way.startswith(f"{label}, ")]:
            for figure, says in (("start_s", "start"), ("start_cpu_s", "its CPU time")):
                pairs = zip(rounds[label + way], rounds[first + way], strict=True)
                ratios = sorted(ours[figure] / theirs[figure] for ours, theirs in pairs)
                print(f"{label}{way}: {says} {statistics.median(ratios):.3f} of {first}'s ", end="")
                print(f"({ratios[0]:.3f}-{ratios[-1]:.3f})")
    if given.output is not None:
        report = {"facts": {"before": before, "after": harness.machine()}, "medians": found}
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "memory.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
