"""Check of a new TensorRT engine: compares its outputs with those of the runtime that it will replace.

The difference is that of `core.output_difference`. Verification runs in a child process, because an engine may crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_server.backends.base import SessionInfo
from edge_server.backends.cuda import cuda_driver
from edge_server.backends.isolation.npz_tensor_files import Tensors
from edge_server.core.output_difference import compare_outputs, describe_difference
from edge_server.core.tensor import DType
from edge_server.plugins.tensorrt.engine_order import EngineOrder
from edge_server.plugins.tensorrt.library_adapter import TensorRTLibrary
from edge_server.plugins.tensorrt.session import EngineUse, TensorRTSession


class Mismatch(Exception):
    """The engine's output differs. The message names the output and the difference."""


def verify_engine(
    order: EngineOrder,
    plan: Path,
    samples: Sequence[Tensors],
    expected: Sequence[Tensors],
    library: TensorRTLibrary,
    *,
    has_rows: bool,
) -> float:
    """Run every sample through the engine and return the largest difference from the `expected` outputs of each. If
    none are expected, the engine's outputs need only be finite.

    Raises Mismatch, EngineFault, CudaFault and EdgeServerError.
    """
    # The engine's outputs are converted to the types of the expected ones.
    of_numpy = {dtype.numpy: dtype for dtype in DType if dtype not in (DType.BF16, DType.BYTES)}
    dtypes = {
        name: of_numpy[array.dtype]
        for tensors in (*samples[:1], *expected[:1])
        for name, array in tensors.items()
        if array.dtype in of_numpy and array.dtype != np.uint16
    }
    context = cuda_driver.driver().retain_context(order.device_id)
    with context.current():
        core = order.options.get("trt_dla_core")
        engine = library.deserialise(plan.read_bytes(), None if core is None else int(core))
        use = EngineUse(order.model, has_rows, dtypes, is_mapped=cuda_driver.devices()[order.device_id].is_integrated)
        session = TensorRTSession(library, engine, context, use, SessionInfo("", "", ""), lambda: None)
        del engine
    worst = 0.0
    try:
        for sample, outputs in zip(samples, expected or [{} for _ in samples], strict=True):
            found = session.run(sample, list(outputs) or session.output_names)
            if not outputs:
                _require_finite(found)
            elif reason := describe_difference(outputs, found, order.tolerance, "those of the runtime that serves"):
                allowed = f"precision {order.precision} is allowed {order.tolerance:g} (parameter engine_tolerance)"
                raise Mismatch(f"{reason}; {allowed}")
            worst = max(worst, compare_outputs([outputs], [found]).relative)
    finally:
        session.close()
    return worst


def _require_finite(found: Tensors) -> None:
    for name, array in found.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Mismatch(f"output '{name}' holds NaN or infinity")
