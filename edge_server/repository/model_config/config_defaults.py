"""Completion of a model's configuration: fills in Triton's defaults for the fields that its config.pbtxt leaves out.
Clients read the filled configuration back."""

from __future__ import annotations

from typing import NamedTuple

from edge_server.errors import BadModelConfig
from edge_server.repository.choice.model_formats import platform_of
from edge_server.repository.model_config.pbtxt import ConfigMessage
from edge_server.repository.model_config.validate_config import PLATFORM, is_ensemble

KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL = range(4)
"""Numbers of inference.ModelInstanceGroup.Kind."""

SEQUENCE_IDLE_US = 1_000_000
"""Default of max_sequence_idle_microseconds."""


class Devices(NamedTuple):
    """Devices of the machine and the backend, for instance groups.

    `gpu_count`: GPUs of the machine. `runs_on_gpu`: whether this backend uses them for KIND_AUTO. `cpu_instances`:
    instances of a CPU group without a count.
    """

    gpu_count: int = 0
    runs_on_gpu: bool = False
    cpu_instances: int = 1
    lost_gpus: frozenset[int] = frozenset()
    """GPUs that this process can no longer use. Groups without stated GPUs avoid them."""

    @property
    def healthy_gpus(self) -> list[int]:
        return [gpu for gpu in range(self.gpu_count) if gpu not in self.lost_gpus]


def normalise(config: ConfigMessage, model: str, devices: Devices) -> None:
    """Fill in the defaults, in place. Raises BadModelConfig for an instance group that this machine cannot serve."""
    config.name = model
    if not config.platform:
        config.platform = platform_of(config.backend)
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if is_ensemble(config):
        config.platform = PLATFORM
        return
    _fill_batching(config)
    for field in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(field):
            getattr(config.optimization, field).enable = True
    _fill_instance_groups(config, model, devices)


def _fill_batching(config: ConfigMessage) -> None:
    if config.HasField("dynamic_batching") and config.max_batch_size > 0:
        preferred = config.dynamic_batching.preferred_batch_size
        if not preferred:
            preferred.append(config.max_batch_size)
    if config.HasField("sequence_batching"):
        sequences = config.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or SEQUENCE_IDLE_US
        if sequences.HasField("oldest") and not sequences.oldest.preferred_batch_size and config.max_batch_size > 0:
            sequences.oldest.preferred_batch_size.append(config.max_batch_size)


def _fill_instance_groups(config: ConfigMessage, model: str, devices: Devices) -> None:
    if not config.instance_group:
        config.instance_group.add(name=model)
    for index, group in enumerate(config.instance_group):
        if not group.name:
            group.name = f"{model}_{index}"
        if group.kind == KIND_AUTO:
            wants_gpu = bool(group.gpus) or (bool(devices.healthy_gpus) and devices.runs_on_gpu)
            group.kind = KIND_GPU if wants_gpu else KIND_CPU
        if group.count < 1:
            group.count = devices.cpu_instances if group.kind == KIND_CPU else 1
        _fill_gpus(group, model, devices)
    names = [group.name for group in config.instance_group]
    if len(set(names)) != len(names):
        raise BadModelConfig(f"model '{model}': instance_group: expected a name of its own for each, given {names}")


def _fill_gpus(group: ConfigMessage, model: str, devices: Devices) -> None:
    gpu_count = devices.gpu_count
    prefix = f"model '{model}': instance_group '{group.name}'"
    if group.kind != KIND_GPU:
        if group.gpus:
            kind = "KIND_CPU" if group.kind == KIND_CPU else "KIND_MODEL"
            raise BadModelConfig(f"{prefix} has kind {kind}: expected no gpus, given {list(group.gpus)}")
        return
    if gpu_count == 0:
        raise BadModelConfig(
            f"{prefix} has kind KIND_GPU but no GPU is available; use KIND_CPU, or KIND_AUTO to take what there is"
        )
    if not group.gpus:
        group.gpus.extend(devices.healthy_gpus or range(gpu_count))
    for gpu in group.gpus:
        if not 0 <= gpu < gpu_count:
            raise BadModelConfig(f"{prefix} gpus: expected numbers of 0 to {gpu_count - 1}, given {gpu}")
