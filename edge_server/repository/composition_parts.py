"""The parts of a checked configuration message that compose models and requests -> nouns of core.composition."""

from __future__ import annotations

from edge_server.core.composition_spec import (
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
from edge_server.core.tensor import DType
from edge_server.core.version_lifecycle import Member
from edge_server.repository.pbtxt import ConfigMessage

_DTYPES = {dtype.number: dtype for dtype in DType}


def ensemble(config: ConfigMessage) -> Ensemble | None:
    """Return the ensemble that a configuration describes, None where it describes none."""
    if not config.HasField("ensemble_scheduling"):
        return None
    scheduling = config.ensemble_scheduling
    steps = tuple(
        EnsembleStep(
            step.model_name,
            # Triton writes -1 for the newest; a version left out reads as 0, which no version is called.
            step.model_version if step.model_version > 0 else None,
            dict(step.input_map),
            dict(step.output_map),
        )
        for step in scheduling.step
    )
    return Ensemble(steps, scheduling.max_inflight_requests)


def members(config: ConfigMessage) -> tuple[Member, ...]:
    """Return the models, with versions, that an ensemble is made of; none of any other model."""
    made_of = ensemble(config)
    return () if made_of is None else tuple(dict.fromkeys((step.model, step.version) for step in made_of.steps))


def sequence_batching(config: ConfigMessage) -> SequenceBatching | None:
    """Return how sequences are scheduled, None where the model knows none."""
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
    """Return the inputs that are made from a ragged batch."""
    return tuple(
        BatchInput(
            BatchInputKind(item.kind), tuple(item.target_name), _DTYPES[item.data_type], tuple(item.source_input)
        )
        for item in config.batch_input
    )


def batch_outputs(config: ConfigMessage) -> tuple[BatchOutput, ...]:
    """Return the outputs that are cut apart by the shapes of inputs."""
    return tuple(BatchOutput(tuple(item.target_name), tuple(item.source_input)) for item in config.batch_output)
