"""Every runtime, in every precision, gives the outputs of the reference within the tolerance of the precision.

The reference is ONNX Runtime on the processor in f32, or OpenVINO where that is not installed, asked through the same
server for the same picture.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MODEL = "efficientnet_lite0"
INPUT_SHAPE = (1, 3, 224, 224)

RUNTIMES = ("onnxruntime", "openvino", "tensorrt", "tensorrt_rtx")

MIN_COSINE = {"f32": 0.99999, "f16": 0.9995, "bf16": 0.995}
"""Of the two vectors of probabilities. f16 keeps 11 bits of a number, bf16 8."""
MAX_DIFFERENCE = {"f32": 1e-3, "f16": 2e-2, "bf16": 8e-2}
"""Of any probability."""


def repository(folder: Path, bundled: Path, variants: dict[str, tuple[str, str]]) -> Path:
    """Write the bundled classifier once for each name -> (backend, precision), without pictures and labels."""
    for name, (backend, precision) in variants.items():
        (folder / name / "1").mkdir(parents=True)
        shutil.copy(bundled / MODEL / "1/model.onnx", folder / name / "1/model.onnx")
        # Without a kind, onnxruntime would take a GPU for the reference too.
        group = "instance_group { kind: KIND_CPU }\n" if name == "reference" else ""
        (folder / name / "config.pbtxt").write_text(
            f'backend: "{backend}"\nparameters {{ key: "precision" value {{ string_value: "{precision}" }} }}\n{group}'
        )
    return folder


def why_not_served(server: Any, runtime: str) -> str:
    """Return "" as soon as the runtime serves the model `tried`, or the reason why it will not.

    Another runtime serves the model while TensorRT's engine is built, or where it cannot be built.
    """
    while True:
        found = {item["name"]: item["backend"] for item in server.get("/edge/v1/models")["models"]}
        if found.get("tried") == runtime:
            return ""
        builds = [item for item in server.get("/edge/v1/engines")["engines"] if item["model"] == "tried"]
        if not builds:
            return next(line for line in server.log().splitlines() if "tried" in line)
        if builds[0]["state"] in ("failed", "cancelled"):
            return str(builds[0]["reason"])
        time.sleep(0.5)


@pytest.mark.parametrize("precision", list(MIN_COSINE))
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_outputs_of_a_runtime_equal_the_reference(
    serve: Any, measure: Any, hardware: Any, bundled: Path, tmp_path: Path, runtime: str, precision: str
) -> None:
    if importlib.util.find_spec(runtime) is None:
        pytest.skip(f"{runtime} is not installed")
    if runtime.startswith("tensorrt") and not hardware.has_cuda:
        pytest.skip("TensorRT needs a GPU")
    base = "onnxruntime" if importlib.util.find_spec("onnxruntime") else "openvino"
    variants = {"reference": (base, "f32"), "tried": (runtime, precision)}
    folder = repository(tmp_path, bundled, variants)
    with serve(folder, "--strict-readiness=false") as server:
        reason = why_not_served(server, runtime)
        if reason and precision == "f32" and "builds no engines for the compute capability" not in reason:
            pytest.fail(reason)
        if reason:
            pytest.skip(f"{runtime} does not offer {precision} here: {reason[-300:]}")
        images = [np.random.default_rng(seed).standard_normal(INPUT_SHAPE).astype(np.float32) for seed in range(4)]
        name = server.get("/v2/models/tried")["inputs"][0]["name"]
        took = []
        for image in images:
            (wanted,) = server.infer("reference", {name: image}).values()
            began_s = time.perf_counter()
            (given,) = server.infer("tried", {name: image}).values()
            took.append((time.perf_counter() - began_s) * 1000)
            cosine = float((wanted * given).sum() / np.linalg.norm(wanted) / np.linalg.norm(given))
            assert np.isfinite(given).all()
            assert cosine >= MIN_COSINE[precision]
            assert float(np.abs(wanted - given).max()) <= MAX_DIFFERENCE[precision]
        measure.value(f"{runtime} {precision}: cosine to the reference", cosine, "")
        measure.value(f"{runtime} {precision}: largest difference", float(np.abs(wanted - given).max()), "")
        measure.value(f"{runtime} {precision}: an answer took", min(took), "ms")
