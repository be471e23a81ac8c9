"""Conversion of a complete and checked configuration message to the frozen ModelSpec."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from edge_server.core.ensemble_and_sequence_spec import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ControlInput,
    ControlKind,
    DirectStrategy,
    Ensemble,
    EnsembleStep,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    StateTensor,
)
from edge_server.core.model_spec import (
    FIRST_RESPONSE_BUCKETS_MS,
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
from edge_server.core.version_lifecycle import Member
from edge_server.errors import BadModelConfig
from edge_server.repository.model_config.pbtxt import ConfigMessage, write_json

_DTYPES = {dtype.number: dtype for dtype in DType}
_KINDS = (InstanceKind.AUTO, InstanceKind.GPU, InstanceKind.CPU, InstanceKind.MODEL)
_FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
_FORMATS = ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW")
_TIMEOUT_ACTIONS = (TimeoutAction.REJECT, TimeoutAction.DELAY)

_IGNORED: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("runtime", lambda config: bool(config.runtime)),
    ("cc_model_filenames", lambda config: bool(config.cc_model_filenames)),
    ("model_operations", lambda config: bool(config.model_operations.op_library_filename)),
    (
        "model_metrics of other families",
        lambda config: any(
            control.metric_identifier.family != _FIRST_RESPONSE_FAMILY
            for control in config.model_metrics.metric_control
        ),
    ),
    ("model_repository_agents", lambda config: bool(config.model_repository_agents.agents)),
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
"""Fields that clients can read back but that have no effect unless the backend uses them, each with a test whether a
configuration sets it."""


def to_spec(
    config: ConfigMessage,
    labels: Mapping[str, tuple[str, ...]] | None = None,
    notes: tuple[str, ...] = (),
    used_fields: Collection[str] = (),
    warnings: tuple[str, ...] = (),
) -> ModelSpec:
    """Return the specification of a complete configuration. `labels` maps an output's name to its class names,
    `used_fields` are the backend's.

    The specification's notes are `notes`, and one note for each field that has no effect.
    """
    known_labels = labels or {}
    unused = [field for field, is_set in _IGNORED if field not in used_fields and is_set(config)]
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
        first_response_buckets_ms=_first_response_buckets(config),
        optimization=_optimization(config.optimization),
        ensemble=ensemble(config),
        sequence=sequence_batching(config),
        batch_inputs=batch_inputs(config),
        batch_outputs=batch_outputs(config),
        is_cached=config.response_cache.enable,
        cc_filenames=dict(config.cc_model_filenames),
        config_json=write_json(config),
        notes=(*notes, *(f"{field} is kept in the configuration but has no effect" for field in unused)),
        warnings=warnings,
    )


def _first_response_buckets(config: ConfigMessage) -> tuple[float, ...]:
    """Return the buckets of `model_metrics`, else Triton's. Raises BadModelConfig."""
    buckets: tuple[float, ...] = FIRST_RESPONSE_BUCKETS_MS
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family != _FIRST_RESPONSE_FAMILY:
            continue
        buckets = tuple(control.histogram_options.buckets)
        if any(not low < high for low, high in itertools.pairwise((*buckets, math.inf))):
            raise BadModelConfig(
                f"model '{config.name}': model_metrics: expected rising buckets, given {list(buckets)}"
            )
    return buckets


def version_policy(config: ConfigMessage) -> VersionPolicy:
    """Return the version policy of a configuration; the default is the latest version."""
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return VersionPolicy(latest=None)
        case "specific":
            return VersionPolicy(latest=None, specific=tuple(sorted(set(policy.specific.versions))))
        case _:
            return VersionPolicy(latest=policy.latest.num_versions or 1)


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


def ensemble(config: ConfigMessage) -> Ensemble | None:
    """Return the ensemble of a configuration, None for any other model."""
    if not config.HasField("ensemble_scheduling"):
        return None
    scheduling = config.ensemble_scheduling
    steps = tuple(
        EnsembleStep(
            step.model_name,
            # Triton writes -1 for the newest version. A missing version reads as 0, which is no valid version.
            step.model_version if step.model_version > 0 else None,
            dict(step.input_map),
            dict(step.output_map),
        )
        for step in scheduling.step
    )
    return Ensemble(steps, scheduling.max_inflight_requests)


def members(config: ConfigMessage) -> tuple[Member, ...]:
    """Return the member models of an ensemble with their versions; empty for any other model."""
    found = ensemble(config)
    return () if found is None else tuple(dict.fromkeys((step.model, step.version) for step in found.steps))


def builds_engine(config: ConfigMessage) -> bool:
    """Return whether a load builds an engine: ONNX Runtime does for its accelerator TensorRT."""
    accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
    return any(item.name == "tensorrt" for item in accelerators)


def sequence_batching(config: ConfigMessage) -> SequenceBatching | None:
    """Return the sequence batching settings, None for a model without sequences."""
    if not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    return SequenceBatching(
        strategy=_strategy(batching),
        max_idle_us=batching.max_sequence_idle_microseconds,
        controls=tuple(_control(item.name, control) for item in batching.control_input for control in item.control),
        states=tuple(_state(item) for item in batching.state),
        is_iterative=batching.iterative_sequence,
    )


def _strategy(batching: ConfigMessage) -> DirectStrategy | OldestStrategy:
    if batching.WhichOneof("strategy_choice") == "oldest":
        oldest = batching.oldest
        return OldestStrategy(
            oldest.max_candidate_sequences,
            tuple(sorted(set(oldest.preferred_batch_size))),
            oldest.max_queue_delay_microseconds,
            oldest.preserve_ordering,
        )
    return DirectStrategy(batching.direct.max_queue_delay_microseconds, batching.direct.minimum_slot_utilization)


def _control(name: str, control: ConfigMessage) -> ControlInput:
    kind = ControlKind(control.kind)
    if kind is ControlKind.CORRID:
        return ControlInput(name, kind, _DTYPES[control.data_type])
    pairs = (
        (DType.INT32, control.int32_false_true),
        (DType.FP32, control.fp32_false_true),
        (DType.BOOL, control.bool_false_true),
    )
    dtype, values = next((pair for pair in pairs if pair[1]), (DType.BOOL, (False, True)))
    return ControlInput(name, kind, dtype, (values[0], values[1]))


def _state(item: ConfigMessage) -> StateTensor:
    initial = item.initial_state[0] if item.initial_state else None
    return StateTensor(
        input_name=item.input_name,
        output_name=item.output_name,
        dtype=_DTYPES[item.data_type],
        dims=tuple(item.dims),
        initial=None
        if initial is None
        else InitialState(initial.name, _DTYPES[initial.data_type], tuple(initial.dims), initial.data_file),
        uses_same_buffer=item.use_same_buffer_for_input_output,
        is_growable=item.use_growable_memory,
    )


def batch_inputs(config: ConfigMessage) -> tuple[BatchInput, ...]:
    """Return the inputs that the server makes from a ragged batch."""
    return tuple(
        BatchInput(
            BatchInputKind(item.kind), tuple(item.target_name), _DTYPES[item.data_type], tuple(item.source_input)
        )
        for item in config.batch_input
    )


def batch_outputs(config: ConfigMessage) -> tuple[BatchOutput, ...]:
    """Return the outputs that are split by the shapes of inputs."""
    return tuple(BatchOutput(tuple(item.target_name), tuple(item.source_input)) for item in config.batch_output)
