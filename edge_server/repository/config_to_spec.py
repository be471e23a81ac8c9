"""A complete, normalised and checked configuration message -> the frozen ModelSpec that the server serves by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edge_server.core.model_spec import (
    Accelerator,
    DynamicBatching,
    InputSpec,
    InstanceGroup,
    InstanceKind,
    ModelSpec,
    Optimization,
    OutputSpec,
    QueuePolicy,
    RateResource,
    TimeoutAction,
    VersionPolicy,
    WarmupInput,
    WarmupSample,
)
from edge_server.core.tensor import DType
from edge_server.repository import composition_parts
from edge_server.repository.pbtxt import ConfigMessage, write_json

_DTYPES = {dtype.number: dtype for dtype in DType}
_KINDS = (InstanceKind.AUTO, InstanceKind.GPU, InstanceKind.CPU, InstanceKind.MODEL)
_FORMATS = ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW")
_TIMEOUT_ACTIONS = (TimeoutAction.REJECT, TimeoutAction.DELAY)

_IGNORED: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("runtime", lambda config: bool(config.runtime)),
    (
        "cc_model_filenames",
        lambda config: bool(config.cc_model_filenames) and config.backend not in ("tensorrt", "tensorrt_rtx"),
    ),
    ("model_operations", lambda config: bool(config.model_operations.op_library_filename)),
    ("model_repository_agents", lambda config: bool(config.model_repository_agents.agents)),
    ("model_metrics", lambda config: bool(config.model_metrics.metric_control)),
    ("optimization.priority", lambda config: config.optimization.priority != 0),
    ("optimization.cuda", lambda config: config.optimization.HasField("cuda")),
    ("optimization.eager_batching", lambda config: config.optimization.eager_batching),
    (
        "optimization.gather_kernel_buffer_threshold",
        lambda config: config.optimization.gather_kernel_buffer_threshold != 0,
    ),
    ("instance_group.passive", lambda config: any(g.passive for g in config.instance_group)),
    ("instance_group.host_policy", lambda config: any(g.host_policy for g in config.instance_group)),
    ("instance_group.secondary_devices", lambda config: any(g.secondary_devices for g in config.instance_group)),
    ("is_non_linear_format_io", lambda config: any(i.is_non_linear_format_io for i in (*config.input, *config.output))),
)
"""Fields that are kept for clients but not acted on, and the test whether a configuration sets them."""


def to_spec(
    config: ConfigMessage, labels: Mapping[str, tuple[str, ...]] | None = None, notes: tuple[str, ...] = ()
) -> ModelSpec:
    """Return the specification. `labels` maps an output's name to its class names.

    `notes` come first in the specification's own; one more is added for every field that is not acted on.
    """
    known_labels = labels or {}
    return ModelSpec(
        name=config.name,
        backend=config.backend,
        platform=config.platform,
        max_batch_size=config.max_batch_size,
        inputs=tuple(_input(item) for item in config.input),
        outputs=tuple(_output(item, known_labels.get(item.name, ())) for item in config.output),
        instance_groups=tuple(_instance_group(group) for group in config.instance_group),
        version_policy=version_policy(config),
        dynamic_batching=_dynamic_batching(config),
        warmup=tuple(_warmup(sample) for sample in config.model_warmup),
        is_decoupled=config.model_transaction_policy.decoupled,
        default_model_filename=config.default_model_filename,
        parameters={key: value.string_value for key, value in config.parameters.items()},
        metric_tags=dict(config.metric_tags),
        optimization=_optimization(config.optimization),
        ensemble=composition_parts.ensemble(config),
        sequence=composition_parts.sequence_batching(config),
        batch_inputs=composition_parts.batch_inputs(config),
        batch_outputs=composition_parts.batch_outputs(config),
        is_cached=config.response_cache.enable,
        cc_filenames=dict(config.cc_model_filenames),
        config_json=write_json(config),
        notes=(*notes, *_ignored(config)),
    )


def version_policy(config: ConfigMessage) -> VersionPolicy:
    """Return which versions a configuration wishes for; the latest one when it does not say."""
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return VersionPolicy(latest=None)
        case "specific":
            return VersionPolicy(latest=None, specific=tuple(sorted(set(policy.specific.versions))))
        case _:
            return VersionPolicy(latest=policy.latest.num_versions or 1)


def _ignored(config: ConfigMessage) -> list[str]:
    return [f"{field} is kept in the configuration but not acted on" for field, is_set in _IGNORED if is_set(config)]


def _reshape(item: ConfigMessage) -> tuple[int, ...] | None:
    return tuple(item.reshape.shape) if item.HasField("reshape") else None


def _input(item: ConfigMessage) -> InputSpec:
    return InputSpec(
        name=item.name,
        dtype=_DTYPES[item.data_type],
        dims=tuple(item.dims),
        reshape=_reshape(item),
        format=_FORMATS[item.format],
        is_optional=item.optional,
        is_shape_tensor=item.is_shape_tensor,
        allow_ragged_batch=item.allow_ragged_batch,
    )


def _output(item: ConfigMessage, labels: tuple[str, ...]) -> OutputSpec:
    return OutputSpec(
        name=item.name,
        dtype=_DTYPES[item.data_type],
        dims=tuple(item.dims),
        reshape=_reshape(item),
        is_shape_tensor=item.is_shape_tensor,
        labels=labels,
    )


def _instance_group(group: ConfigMessage) -> InstanceGroup:
    return InstanceGroup(
        name=group.name,
        kind=_KINDS[group.kind],
        count=group.count,
        gpus=tuple(group.gpus),
        profiles=tuple(group.profile),
        resources=tuple(
            RateResource(item.name, item.count, getattr(item, "global")) for item in group.rate_limiter.resources
        ),
        rate_priority=group.rate_limiter.priority or 1,
    )


def _queue_policy(policy: ConfigMessage) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=_TIMEOUT_ACTIONS[policy.timeout_action],
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _dynamic_batching(config: ConfigMessage) -> DynamicBatching | None:
    if not config.HasField("dynamic_batching"):
        return None
    batching = config.dynamic_batching
    preferred = sorted(set(batching.preferred_batch_size)) or [max(1, config.max_batch_size)]
    return DynamicBatching(
        preferred_batch_sizes=tuple(preferred),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        queue_policies={level: _queue_policy(policy) for level, policy in batching.priority_queue_policy.items()},
    )


_SOURCES = {"zero_data": "zero", "random_data": "random", "input_data_file": "file"}


def _warmup(sample: ConfigMessage) -> WarmupSample:
    inputs = tuple(
        WarmupInput(
            name=name,
            dtype=_DTYPES[source.data_type],
            dims=tuple(source.dims),
            source=_SOURCES[source.WhichOneof("input_data_type")],
            file_name=source.input_data_file,
        )
        for name, source in sorted(sample.inputs.items())
    )
    return WarmupSample(name=sample.name, batch_size=sample.batch_size, inputs=inputs, count=max(1, sample.count))


def _optimization(policy: ConfigMessage) -> Optimization:
    accelerators = policy.execution_accelerators
    return Optimization(
        graph_level=policy.graph.level if policy.HasField("graph") else None,
        cpu_accelerators=tuple(_accelerator(item) for item in accelerators.cpu_execution_accelerator),
        gpu_accelerators=tuple(_accelerator(item) for item in accelerators.gpu_execution_accelerator),
    )


def _accelerator(item: ConfigMessage) -> Accelerator:
    return Accelerator(name=item.name, parameters=dict(item.parameters))
