"""Program that `doctor` starts for each runtime: loads it, runs a sample model and prints one line of JSON.

Usage: python -m edge_server.plugins.doctor.probe_runtime NAME.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from edge_server.backends import ONNX_ORDER, engine_backends, load_backend
from edge_server.backends.base import Backend, OpenJob, Session
from edge_server.backends.cuda import cuda_driver
from edge_server.config import ServerConfig
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelFile, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import EdgeServerError, LoadError
from edge_server.plugin import own_plugins
from edge_server.plugins.doctor.sample_model import INPUT, INPUT_SHAPE, OUTPUT, OUTPUT_SHAPE, sample_model

_LONGEST_S = 1.5
"""Time for which the sample model runs."""
_MIN_RUNS = 5
_BUILD_S = 100.0
"""Longest time to build an engine of the sample, within that of the doctor for this program."""


def main(name: str) -> dict[str, object]:
    """Return {"problem"}, {"sample_problem"}, or the known part of {"runtime", "device", "precision", "ms"}."""
    try:
        backend = load_backend(name)
    except EdgeServerError as error:
        return {"problem": error.message}
    if name not in (*ONNX_ORDER, *engine_backends()):
        return {}
    try:
        return _measure(name, backend)
    except EdgeServerError as error:
        # The runtime works, but it does not accept the sample model.
        return {"sample_problem": error.message}


def _measure(name: str, backend: Backend) -> dict[str, object]:
    """Run the sample model and return runtime, device, precision and the median time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sample", "1", "model.onnx")
        path.parent.mkdir(parents=True)
        path.write_bytes(sample_model())
        device = 0 if backend.runs_on_gpu else None
        kind = InstanceKind.CPU if device is None else InstanceKind.GPU
        spec = ModelSpec(
            "sample", name, "", 0,
            (InputSpec(INPUT, DType.FP32, INPUT_SHAPE),),
            (OutputSpec(OUTPUT, DType.FP32, OUTPUT_SHAPE),),
            (InstanceGroup("sample", kind, 1, () if device is None else (device,)),),
        )  # fmt: skip
        file, server = ModelFile(path, path.parents[1], 1), None
        if getattr(backend, "has_builder", False):
            if missing := cuda_driver.unavailable_reason():
                raise LoadError(f"it needs a GPU: {missing}")
            declared = (plugin.trial_engines(ServerConfig()) for plugin in own_plugins())
            engines = next(filter(None, declared))._replace(cache_dir=folder, build_timeout_s=_BUILD_S)
            server = engines.make(spec, file, Path(folder), lambda phase, percent: None).server(device, {})
        session = backend.open(OpenJob(spec, file, "sample_0", device, server=server))
        assert isinstance(session, Session)
        try:
            ms = _median_ms(session)
        finally:
            session.close()
        info = session.info
        return {"runtime": info.runtime, "device": info.device, "precision": info.precision, "ms": round(ms, 3)}


def _median_ms(session: Session) -> float:
    image = np.random.default_rng(5).random(INPUT_SHAPE, np.float32)
    session.run({INPUT: image}, [OUTPUT])
    took: list[float] = []
    end_s = time.perf_counter() + _LONGEST_S
    while len(took) < _MIN_RUNS or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        session.run({INPUT: image}, [OUTPUT])
        took.append((time.perf_counter() - began_s) * 1000)
    return statistics.median(took)


if __name__ == "__main__":
    # Runtimes may print anything. Only the result may be on standard output.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            found = main(sys.argv[1])
        answer.write(json.dumps(found) + "\n")
