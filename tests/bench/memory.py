"""Memory and start: `python tests/bench/memory.py [--rounds=N] [--output=FOLDER]`, with the test extra installed.

All run from compiled bytecode, as pip installs it, also out of a source tree whose bytecode is not written.

Resident (Rss) and proportional (Pss) memory at rest, seconds from start to the first 200 of /v2/health/ready, the CPU
time of the start, and the modules imported until then: of the server without a model, with one small network (the face
detector of model_repository), and with all of model_repository; of the server with the identity model, and with the
bundled classifier on each runtime, after a first request; of the raw runtime's own process, numpy and one inference and
nothing else; of Triton where EDGE_BENCH_TRITON names one. In turns; medians and ranges are printed, and written to
FOLDER/memory.json if one is given.

`--server LABEL=COMMAND`, once for each, compares trees: `--server old=/tree/.venv/bin/edge-server --server new=...`.
The start of the second and later ones is then printed as a ratio to the first's, round by round. `--quick` measures the
servers without a model, with the identity model, with the face detector and with model_repository, and nothing else.
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
import subprocess
import sys
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
RUNTIMES = ("onnxruntime", "openvino")
RAW = """
import sys
import numpy
{runtime}
call(numpy.zeros((1, 3, 224, 224), numpy.float32))
print("ready", flush=True)
sys.stdin.read()
"""
_LOADERS = {
    "onnxruntime": """
import onnxruntime
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
call = lambda array: session.run(None, {"input": array})
""",
    "openvino": """
import openvino
settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
request = openvino.Core().compile_model(sys.argv[1], "CPU", settings).create_infer_request()
call = lambda array: request.infer({"input": array})
""",
}
"""As `cases.raw_call`, in a process that imports nothing else."""

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


def figures(pid: int, start_s: float, start_cpu_s: float) -> Figures:
    time.sleep(SETTLE_S)
    found = harness.memory_mb(pid)
    return {"rss_mb": found["Rss"], "pss_mb": found["Pss"], "start_s": start_s, "start_cpu_s": start_cpu_s}


def of_server(program: Sequence[str], repository: Path, model: str = "") -> Figures:
    words = (*program[1:], "--log-info=false")
    with harness.server(repository, *words, program=program[:1]) as where, contextlib.ExitStack() as stack:
        start_s, start_cpu_s = first_answer_s(where), where.cpu_s()
        if model:
            name, array = ("INPUT0", SMALL) if model == "small" else ("input", cases.picture())
            data = short.message(model, name, array)
            stack.enter_context(short.over_grpc(where, data))()
        return figures(where.pid, start_s, start_cpu_s)


def of_triton(repository: Path) -> Figures:
    with harness.triton(repository) as where:
        return figures(where.pid, where.start_s, where.cpu_s())


def of_raw(runtime: str) -> Figures:
    code = RAW.format(runtime=_LOADERS[runtime])
    command = [sys.executable, "-c", code, str(cases.BUNDLED / "1/model.onnx")]
    started = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with harness.ended(process):
        assert process.stdout is not None
        assert process.stdin is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"the bare {runtime} did not start")
        found = figures(process.pid, time.monotonic() - started, harness.cpu_s(process.pid))
        process.stdin.close()
        return found


def imports_no_runtime() -> list[str]:
    """Return the runtimes and other heavy modules that importing the package brings in."""
    heavy = ("onnxruntime", "openvino", "torch", "cv2", "grpc", "aiohttp", "numpy")
    code = f"import sys, edge_server; print(*[name for name in {heavy!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def measure(rounds: int, programs: Mapping[str, Sequence[str]], *, is_quick: bool) -> dict[str, list[Figures]]:
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
        for runtime in () if is_quick else RUNTIMES:
            model = cases.write_classifier(folder / runtime, runtime)
            for label, program in programs.items():
                ways[f"{label}, classifier on {runtime}"] = partial(of_server, program, folder / runtime, model)
            ways[f"bare {runtime}, classifier"] = partial(of_raw, runtime)
        if harness.TRITON and not is_quick:
            ways["Triton, no model"] = partial(of_triton, folder / "empty")
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
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    named = [text.partition("=") for text in given.server or [f"server={harness.COMMAND}"]]
    programs = {label: shlex.split(command) for label, _, command in named}
    before = harness.machine()
    rounds, heavy = measure(given.rounds, programs, is_quick=given.quick), imports_no_runtime()
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
    for runtime in () if given.quick else RUNTIMES:
        ours, bare = found[f"{first}, classifier on {runtime}"], found[f"bare {runtime}, classifier"]
        print(f"on {runtime}: {ours['rss_mb'] - bare['rss_mb']:+.0f} MB Rss beside the bare runtime")
    print(f"`import edge_server` brings in: {', '.join(heavy) or 'none of the heavy modules'}")
    if given.output is not None:
        report = {"facts": {"before": before, "after": harness.machine()}, "medians": found, "imports": heavy}
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "memory.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
