"""Memory and start: `python tests/bench/memory.py [ROUNDS] [FOLDER]`, with the test extra installed.

All run from compiled bytecode, as pip installs it, also out of a source tree whose bytecode is not written.

Resident (Rss) and proportional (Pss) memory at rest, and seconds from start to ready: of the server without a model; of
the server with the bundled classifier on each runtime, after a first request; of the raw runtime's own process, numpy
and one inference and nothing else; of Triton where EDGE_BENCH_TRITON names one. In turns; medians are told, and written
to FOLDER/memory.json if one is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cases
import harness
import short

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


def figures(pid: int, start_s: float) -> Figures:
    time.sleep(SETTLE_S)
    found = harness.memory_mb(pid)
    return {"rss_mb": found["Rss"], "pss_mb": found["Pss"], "start_s": start_s}


def of_server(repository: Path, model: str = "") -> Figures:
    with harness.server(repository, "--log-info=false") as where, contextlib.ExitStack() as stack:
        if model:
            data = short.message(model, "input", cases.picture())
            stack.enter_context(short.over_grpc(where, data))()
        return figures(where.pid, where.start_s)


def of_triton(repository: Path) -> Figures:
    with harness.triton(repository) as where:
        return figures(where.pid, where.start_s)


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
        found = figures(process.pid, time.monotonic() - started)
        process.stdin.close()
        return found


def imports_no_runtime() -> list[str]:
    """Return the runtimes and other heavy modules that importing the package brings in."""
    heavy = ("onnxruntime", "openvino", "torch", "cv2", "grpc", "aiohttp", "numpy")
    code = f"import sys, edge_server; print(*[name for name in {heavy!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def measure(rounds: int) -> dict[str, Figures]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty").mkdir()
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        ways: dict[str, Callable[[], Figures]] = {"server, no model": partial(of_server, folder / "empty")}
        for runtime in RUNTIMES:
            model = cases.write_classifier(folder / runtime, runtime)
            ways[f"server, classifier on {runtime}"] = partial(of_server, folder / runtime, model)
            ways[f"bare {runtime}, classifier"] = partial(of_raw, runtime)
        if harness.TRITON:
            ways["Triton, no model"] = partial(of_triton, folder / "empty")
        for measure_one in ways.values():
            measure_one()  # writes the bytecode
        found: dict[str, list[Figures]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, measure_one in ways.items():
                found[way].append(measure_one())
    return {way: {key: statistics.median(one[key] for one in rows) for key in rows[0]} for way, rows in found.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    before = harness.machine()
    found, heavy = measure(rounds), imports_no_runtime()
    rows = [
        (way, f"{row['rss_mb']:.0f}", f"{row['pss_mb']:.0f}", f"{row['start_s']:.2f}") for way, row in found.items()
    ]
    print(harness.markdown(("", "Rss MB", "Pss MB", "start to ready s"), rows))
    for runtime in RUNTIMES:
        ours, bare = found[f"server, classifier on {runtime}"], found[f"bare {runtime}, classifier"]
        print(f"on {runtime}: {ours['rss_mb'] - bare['rss_mb']:+.0f} MB Rss beside the bare runtime")
    print(f"`import edge_server` brings in: {', '.join(heavy) or 'none of the heavy modules'}")
    if len(sys.argv) > 2:
        report = {"facts": {"before": before, "after": harness.machine()}, "medians": found, "imports": heavy}
        Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
        (Path(sys.argv[2]) / "memory.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
