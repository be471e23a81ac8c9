"""List of the ways to run a model on the GPUs and NPUs that OpenVINO or ONNX Runtime reports, for `edge-server
optimize`.

A reported device may still not work. Then the candidate fails, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from edge_server.plugins.trials.candidate import CPU, GPU, TARGET_DEVICE, RuntimeCandidate
from edge_server.repository.model_config.pbtxt import ConfigMessage

ReportedDevices: TypeAlias = Mapping[str, Sequence[str]]
"""OpenVINO: device -> its OPTIMIZATION_CAPABILITIES. ONNX Runtime: execution accelerator -> ()."""

DeviceLister: TypeAlias = Callable[[str], ReportedDevices]
"""Returns the devices of a runtime, given the backend's name. Raises CandidateFailed if they cannot be listed."""

_CAPABILITIES = {"FP32": "f32", "FP16": "f16", "BF16": "bf16"}
_FIXED_BATCH_OPTIONS = (("SKIP_OV_DYNAMIC_BATCHSIZE", "YES"), ("ENABLE_BATCH_PADDING", "YES"))
"""For a device without dynamic shapes: compile the model for the largest batch, and pad smaller batches."""


def openvino_candidates(
    reported: ReportedDevices, base: ConfigMessage, file_precision: str | None
) -> list[RuntimeCandidate]:
    """Return a candidate for each device except the CPU and each precision of the device.

    If the configuration names a device that is not reported, such as AUTO:GPU,CPU, add a candidate for it.
    `file_precision` is the precision of the model file.
    """
    found = [
        RuntimeCandidate(
            "openvino", precision, device, ((TARGET_DEVICE, device), *(_FIXED_BATCH_OPTIONS if _is_npu(device) else ()))
        )
        for device, capabilities in reported.items()
        if device != CPU
        for precision in _precisions(device, capabilities, file_precision)
    ]
    stated = base.parameters[TARGET_DEVICE].string_value.strip().upper() if TARGET_DEVICE in base.parameters else CPU
    if stated != CPU and stated not in reported:
        found.append(RuntimeCandidate("openvino", "", stated, ((TARGET_DEVICE, stated),)))
    return found


def _precisions(device: str, capabilities: Sequence[str], file_precision: str | None) -> list[str]:
    if file_precision == "int8" and "INT8" in capabilities:
        # An NPU does not report the precision of its layers, so int8 cannot be enforced.
        return ["auto" if _is_npu(device) else "int8"]
    return [precision for capability, precision in _CAPABILITIES.items() if capability in capabilities] or ["auto"]


def _is_npu(device: str) -> bool:
    return device.partition(".")[0] == "NPU"


def onnxruntime_candidates(
    reported: ReportedDevices, file_precision: str, no_gpu: str
) -> tuple[list[RuntimeCandidate], list[str]]:
    """Return a candidate for each execution accelerator and its precisions, and the reasons for omitting the GPU.

    `file_precision` is the precision of the model file: f32, f16, bf16 or int8. `no_gpu` is the reason why there is no
    GPU, or "".
    """
    others = [
        RuntimeCandidate("onnxruntime", file_precision, accelerator=name)
        for name in reported
        if name not in ("cuda", "tensorrt")
    ]
    missing = no_gpu or ("" if "cuda" in reported else "this build has no CUDA support; onnxruntime-gpu has it")
    if missing:
        return others, [f"onnxruntime on GPU: {missing}"]
    on_gpu = [RuntimeCandidate("onnxruntime", file_precision, GPU, accelerator="cuda")]
    if "tensorrt" in reported:
        precisions = {"f32": ("f32", "f16"), "f16": ("f16",), "int8": ("int8",)}.get(file_precision, ())
        modes = {"f32": "FP32", "f16": "FP16", "int8": "INT8"}
        on_gpu += [
            RuntimeCandidate(
                "onnxruntime", precision, GPU, accelerator="tensorrt", options=(("precision_mode", modes[precision]),)
            )
            for precision in precisions
        ]
    return [*others, *on_gpu], []
