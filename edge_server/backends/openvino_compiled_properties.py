"""Properties of a model compiled by OpenVINO, such as its precision, for status and logs."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

_HINT = "INFERENCE_PRECISION_HINT"
_REPORTED = ("NUM_STREAMS", "INFERENCE_NUM_THREADS", "PERFORMANCE_HINT", _HINT, "EXECUTION_DEVICES")
_COMPUTING_LAYERS = frozenset(("Convolution", "Deconvolution", "FullyConnected", "GroupConvolution", "MatMul"))


def precision_in_force(compiled: Any) -> str:
    """Return the arithmetic of most layers that compute; "int8" when any of them does, the rest being its frame."""
    found: Counter[str] = Counter()
    for layer in compiled.get_runtime_model().get_ops():
        info = layer.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) in _COMPUTING_LAYERS:
            # The kernel's name ends in the type it computes in ("brgconv_avx512_f32"); runtimePrecision is that of
            # the weights' storage, f16 for instance, widened on the fly.
            key = "primitiveType" if "primitiveType" in info else "runtimePrecision"
            found[info[key].astype(str).rpartition("_")[2].lower()] += 1
    if found.keys() & {"i8", "u8"}:
        return "int8"
    known = [precision for precision, _ in found.most_common() if precision in ("bf16", "f16", "f32")]
    if known:
        return known[0]
    hint = str(compiled.get_property(_HINT).get_type_name())
    return "as the model says" if hint == "dynamic" else hint


def in_force(compiled: Any) -> dict[str, str]:
    """Return the runtime's answers to what people ask about first, of those that the device has."""
    found = {}
    for name in _REPORTED:
        with contextlib.suppress(RuntimeError):
            found[name] = _text(compiled.get_property(name))
    return found


def _text(value: Any) -> str:
    if hasattr(value, "get_type_name"):
        return str(value.get_type_name())
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(getattr(value, "name", value))
