"""Check of a new TensorRT engine: compares its outputs with those of the runtime that it will replace.

The difference is that of `core.output_difference`. Verification runs in a child process, because an engine may crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_server.backends.base import Array, SessionInfo
from edge_server.backends.cuda import cuda_driver
from edge_server.core.output_difference import compare_arrays
from edge_server.core.tensor import DType
from edge_server.plugins.tensorrt.engine_order import EngineOrder
from edge_server.plugins.tensorrt.library_adapter import TensorRTLibrary
from edge_server.plugins.tensorrt.session import EngineUse, TensorRTSession

_SAMPLE = "sample"


class Mismatch(Exception):
    """The engine's output differs. The message names the output and the difference."""


@dataclass(frozen=True, slots=True)
class VerificationSample:
    """One request and its expected outputs. Without outputs, the engine's outputs need only be finite."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def save_samples(path: Path, samples: list[VerificationSample]) -> None:
    """Write samples for another process. Raises OSError."""
    arrays = {
        f"{_SAMPLE}/{number}/{side}/{name}": array
        for number, sample in enumerate(samples)
        for side, tensors in (("in", sample.inputs), ("out", sample.outputs))
        for name, array in tensors.items()
    }
    with open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # a name could be one of its options: ours have slashes


def load_samples(path: Path) -> list[VerificationSample]:
    """Read what `save_samples` wrote."""
    found: dict[int, VerificationSample] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            _, number, side, name = key.split("/", 3)
            sample = found.setdefault(int(number), VerificationSample({}, {}))
            tensors = sample.inputs if side == "in" else sample.outputs
            tensors[name] = arrays[key]  # type: ignore[index]  # a Sample made above holds dicts
    return [found[number] for number in sorted(found)]


def verify_engine(
    order: EngineOrder, plan: Path, samples: list[VerificationSample], library: TensorRTLibrary, *, has_rows: bool
) -> float:
    """Run every sample through the engine and return the largest difference.

    Raises Mismatch, EngineFault, CudaFault and EdgeServerError.
    """
    # The engine's outputs are converted to the types of the expected ones.
    of_numpy = {dtype.numpy: dtype for dtype in DType if dtype not in (DType.BF16, DType.BYTES)}
    dtypes = {
        name: of_numpy[array.dtype]
        for sample in samples[:1]
        for name, array in {**sample.inputs, **sample.outputs}.items()
        if array.dtype in of_numpy and array.dtype != np.uint16
    }
    context = cuda_driver.driver().retain_context(order.device_id)
    with context.current():
        core = order.options.get("trt_dla_core")
        engine = library.deserialise(plan.read_bytes(), None if core is None else int(core))
        use = EngineUse(order.model, has_rows, dtypes, is_mapped=cuda_driver.devices()[order.device_id].is_integrated)
        session = TensorRTSession(library, engine, context, use, SessionInfo("", "", ""), lambda: None)
        del engine
    try:
        return max((_check(order, session, sample) for sample in samples), default=0.0)
    finally:
        session.close()


def _check(order: EngineOrder, session: TensorRTSession, sample: VerificationSample) -> float:
    found = session.run(sample.inputs, list(sample.outputs) or session.output_names)
    if not sample.outputs:
        not_finite = next(
            (name for name, array in found.items() if array.dtype.kind == "f" and not np.isfinite(array).all()), ""
        )
        if not_finite:
            raise Mismatch(f"output '{not_finite}' holds NaN or infinity")
    worst = 0.0
    for name, expected in sample.outputs.items():
        apart = compare_arrays(expected, found[name]).relative
        if apart > order.tolerance:
            shapes = (
                f", its shape {list(found[name].shape)} for {list(expected.shape)}" if apart == float("inf") else ""
            )
            raise Mismatch(
                f"output '{name}' differs by {apart:.3g} of its largest magnitude{shapes}; precision "
                f"{order.precision} is allowed {order.tolerance:g} (parameter engine_tolerance)"
            )
        worst = max(worst, apart)
    return worst
