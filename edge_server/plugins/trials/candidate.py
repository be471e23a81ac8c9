"""Data class of one way to run a model (runtime, device, precision), called a candidate, and the model configuration
for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from edge_server.backends import engine_backends
from edge_server.repository.model_config.pbtxt import ConfigMessage

CPU, GPU = "CPU", "GPU"
TARGET_DEVICE = "TARGET_DEVICE"
"""The parameter that names OpenVINO's device. OpenVINO counts its GPUs separately from KIND_GPU."""


@dataclass(frozen=True, slots=True)
class RuntimeCandidate:
    """One way to run a model. `precision` is a value of the parameter `precision`; "" keeps the configured value.

    `device` is CPU, GPU (an NVIDIA GPU, as in KIND_GPU) or an OpenVINO device. `parameters` are set in addition.
    `accelerator` is an execution accelerator of ONNX Runtime, and `options` its options. `is_plain` marks candidates
    that can serve as the numeric reference.
    """

    runtime: str
    precision: str
    device: str = CPU
    parameters: tuple[tuple[str, str], ...] = ()
    is_plain: bool = False
    accelerator: str = ""
    options: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.runtime, self.precision, self.where)))

    @property
    def where(self) -> str:
        """Device and accelerator as text; "" for the default device."""
        on = "" if self.device == CPU or self.is_engine else f"on {self.device}"
        by = "" if self.accelerator in ("", "cuda") else f"by {self.accelerator}"
        return " ".join(filter(None, (on, by)))

    @property
    def is_engine(self) -> bool:
        """Whether a TensorRT engine must be built first."""
        return self.runtime in engine_backends()

    @property
    def is_natural(self) -> bool:
        """Whether it runs the file as the server does without a configuration, if it is the first of its runtime."""
        return not (self.is_engine or self.parameters or self.accelerator) and self.device == CPU


def config_of(
    base: ConfigMessage,
    candidate: RuntimeCandidate,
    file_name: str,
    shapes: Mapping[str, str] = MappingProxyType({}),
    *,
    has_gpu: bool = False,
) -> ConfigMessage:
    """Return the configuration for a candidate. `shapes` are the parameters of an engine's shapes. `has_gpu`: the
    machine has an NVIDIA GPU, on which a runtime might run a model that does not state where."""
    config = type(base)()
    config.CopyFrom(base)
    config.backend = candidate.runtime
    config.platform = ""
    config.default_model_filename = file_name
    if candidate.precision:
        # For the TensorRT accelerator, its options set the precision.
        precision = "auto" if candidate.accelerator == "tensorrt" else candidate.precision
        config.parameters["precision"].string_value = precision
    if candidate.runtime == "openvino" and TARGET_DEVICE in config.parameters:
        config.parameters[TARGET_DEVICE].string_value = CPU
    for key, value in (*candidate.parameters, *(shapes.items() if candidate.is_engine else ())):
        config.parameters[key].string_value = value
    if candidate.runtime == "onnxruntime":
        _set_accelerator(config, candidate)
    _set_instance_kind(config, candidate, has_gpu)
    return config


def _set_accelerator(config: ConfigMessage, candidate: RuntimeCandidate) -> None:
    """Make the candidate's accelerator the only one, and keep its configured parameters."""
    if not candidate.accelerator and not config.optimization.HasField("execution_accelerators"):
        return
    both = config.optimization.execution_accelerators
    listed = both.gpu_execution_accelerator if candidate.device == GPU else both.cpu_execution_accelerator
    kept: list[Any] = [item for item in listed if item.name == candidate.accelerator]
    stated = dict(kept[0].parameters) if kept else {}
    del listed[:]
    if candidate.accelerator:
        listed.add(name=candidate.accelerator, parameters={**stated, **dict(candidate.options)})


def _set_instance_kind(config: ConfigMessage, candidate: RuntimeCandidate, has_gpu: bool) -> None:
    """Set the kind of the instance groups to the candidate's device."""
    group_type = config.DESCRIPTOR.fields_by_name["instance_group"].message_type
    numbers = group_type.enum_types_by_name["Kind"].values_by_name
    is_on_gpu = candidate.device == GPU and candidate.runtime != "openvino"
    if not candidate.is_engine and not config.instance_group and (is_on_gpu or has_gpu):
        config.instance_group.add()
    for group in config.instance_group:
        if is_on_gpu:
            group.kind = numbers["KIND_GPU"].number
        elif has_gpu or group.kind == numbers["KIND_GPU"].number or group.gpus:
            group.kind = numbers["KIND_CPU"].number
            del group.gpus[:]
