"""Accelerators to try with a runtime, from the devices that the runtime reports.

That a runtime lists something does not mean that it works: what fails to open fails as a candidate, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from edge_server.repository.pbtxt import ConfigMessage
from edge_server.tuning.trial.candidate import CPU, GPU, TARGET_DEVICE, RuntimeCandidate

Reported: TypeAlias = Mapping[str, Sequence[str]]
"""OpenVINO: device -> what it computes in (OPTIMIZATION_CAPABILITIES). ONNX Runtime: execution accelerator -> ()."""

Survey: TypeAlias = Callable[[str], Reported]
"""Asks a runtime, by its backend's name. Raises CandidateFailed with the reason why it did not tell."""

_CAPABILITIES = {"FP32": "f32", "FP16": "f16", "BF16": "bf16"}
_RUNS_FIXED_SHAPES = (("SKIP_OV_DYNAMIC_BATCHSIZE", "YES"), ("ENABLE_BATCH_PADDING", "YES"))
"""How a batching model comes to a device that takes no shape of any size: compiled for the largest batch, and filled
up to it."""


def of_openvino(reported: Reported, base: ConfigMessage, written: str | None) -> list[RuntimeCandidate]:
    """Return a candidate for each device but the CPU and each precision that the device has, and one for the device
    that the configuration states where that is none of those listed (AUTO:GPU,CPU). `written`: the file's arithmetic.
    """
    found = [
        RuntimeCandidate("openvino", word, device, ((TARGET_DEVICE, device), *_shape_rules(device)))
        for device, able in reported.items()
        if device != CPU
        for word in _words(device, able, written)
    ]
    stated = base.parameters[TARGET_DEVICE].string_value.strip().upper() if TARGET_DEVICE in base.parameters else CPU
    if stated != CPU and stated not in reported:
        found.append(RuntimeCandidate("openvino", "", stated, ((TARGET_DEVICE, stated),)))
    return found


def _words(device: str, able: Sequence[str], written: str | None) -> list[str]:
    if written == "int8" and "INT8" in able:
        # An NPU does not tell what its layers compute in, so that int8 cannot be insisted on.
        return ["auto" if _is_npu(device) else "int8"]
    return [word for capability, word in _CAPABILITIES.items() if capability in able] or ["auto"]


def _shape_rules(device: str) -> tuple[tuple[str, str], ...]:
    return _RUNS_FIXED_SHAPES if _is_npu(device) else ()


def _is_npu(device: str) -> bool:
    return device.partition(".")[0] == "NPU"


def of_onnxruntime(reported: Reported, as_written: str, no_gpu: str) -> tuple[list[RuntimeCandidate], list[str]]:
    """Return a candidate for each execution accelerator and precision of it, and why the GPU is left out, if so.

    `as_written` is the file's arithmetic, f32, f16, bf16 or int8; `no_gpu` says why there is no GPU.
    """
    others = [
        RuntimeCandidate("onnxruntime", as_written, accelerator=name)
        for name in reported
        if name not in ("cuda", "tensorrt")
    ]
    missing = no_gpu or ("" if "cuda" in reported else "this build of it has no CUDA: onnxruntime-gpu has")
    if missing:
        return others, [f"onnxruntime on GPU: {missing}"]
    on_gpu = [RuntimeCandidate("onnxruntime", as_written, GPU, accelerator="cuda")]
    if "tensorrt" in reported:
        words = {"f32": ("f32", "f16"), "f16": ("f16",), "int8": ("int8",)}.get(as_written, ())
        modes = {"f32": "FP32", "f16": "FP16", "int8": "INT8"}
        on_gpu += [
            RuntimeCandidate(
                "onnxruntime", word, GPU, accelerator="tensorrt", options=(("precision_mode", modes[word]),)
            )
            for word in words
        ]
    return [*others, *on_gpu], []
