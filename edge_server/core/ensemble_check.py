"""Check that the steps of an ensemble fit together and fit their models; makes the graph of the steps.

The rules follow Triton.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_server.core.ensemble_and_sequence_spec import EnsembleStep
from edge_server.core.ensemble_graph import Origin, Step, StepGraph, StepInput, longest_origin
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.shape_tensors import batched_shape_inputs, batched_shape_outputs
from edge_server.errors import BadModelConfig


class _TensorSource(NamedTuple):
    """Source and type of a tensor of the ensemble. `shape` includes the batch dimension, `dims` does not.

    `repeats_values`: it is a shape tensor from a model that batches; all its rows are equal.
    """

    where: str
    item: InputSpec | OutputSpec
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    origin: Origin = ()
    repeats_values: bool = False

    @property
    def has_rows(self) -> bool:
        return len(self.shape) != len(self.dims)


def build_step_graph(spec: ModelSpec, members: Sequence[ModelSpec]) -> StepGraph:
    """Return the graph of an ensemble. `members` are the models of its steps, in order. Raises BadModelConfig."""
    assert spec.ensemble is not None
    if not spec.ensemble.steps:
        raise _bad(spec, "ensemble_scheduling: expected at least one step, given none")
    steps = [
        _make_step(spec, index, step, member)
        for index, (step, member) in enumerate(zip(spec.ensemble.steps, members, strict=True))
    ]
    _check_one_source_each(spec, steps)
    return _connect_steps(spec, steps, members)


def _bad(spec: ModelSpec, text: str) -> BadModelConfig:
    return BadModelConfig(f"ensemble '{spec.name}': {text}")


def _make_step(spec: ModelSpec, index: int, step: EnsembleStep, member: ModelSpec) -> Step:
    """Return the step. Raises BadModelConfig if its maps do not match its model's inputs and outputs."""
    optional = {item.name: item.is_optional for item in member.inputs}
    values = batched_shape_inputs(member)
    ranks = {item.name: len(_given_dims(member, item, values)) for item in member.inputs}
    made = Step(
        index,
        step.model,
        step.version,
        tuple(
            StepInput(name, tensor, optional.get(name, False), ranks.get(name, -1), name in values)
            for name, tensor in step.input_map.items()
        ),
        tuple(step.output_map.items()),
        member.is_decoupled,
    )
    outputs = [item.name for item in member.outputs]
    for kind, names, known in (("input", step.input_map, list(optional)), ("output", step.output_map, outputs)):
        if not names:
            raise _bad(spec, f"{made}: expected an {kind}_map, given none")
        for name in names:
            if name not in known:
                raise _bad(spec, f"{made}: {kind}_map: expected {kind}s of the model {known}, given '{name}'")
    missing = [name for name, is_optional in optional.items() if not is_optional and name not in step.input_map]
    if missing:
        raise _bad(spec, f"{made}: input_map: expected every input that is not optional, given none for {missing}")
    limit = member.max_batch_size
    if 0 < limit < spec.max_batch_size:
        raise _bad(
            spec,
            f"{made}: the ensemble allows a max_batch_size of {spec.max_batch_size}, its model only one of {limit}",
        )
    return made


def _given_dims(spec: ModelSpec, item: InputSpec, values: Collection[str]) -> tuple[int, ...]:
    """Return the shape in which clients send an input. Shape tensors (`values`) have no batch dimension."""
    return item.dims if item.name in values else spec.wire_dims(item.dims)


def _check_one_source_each(spec: ModelSpec, steps: Sequence[Step]) -> None:
    made = {item.name: "an input of the ensemble" for item in spec.inputs}
    for step in steps:
        for name, tensor in step.outputs:
            if tensor in made:
                raise _bad(
                    spec, f"{step}: output '{name}' makes tensor '{tensor}', which is made by {made[tensor]} already"
                )
            made[tensor] = str(step)
    for step in steps:
        for feed in step.inputs:
            if feed.tensor not in made:
                raise _bad(
                    spec,
                    f"{step}: input '{feed.input}' takes tensor '{feed.tensor}', which no step makes and which is no "
                    "input of the ensemble",
                )
    for item in spec.outputs:
        if item.name not in made:
            raise _bad(spec, f"output '{item.name}': expected a step that makes this tensor, there is none")
    _check_all_used(spec, steps, made)


def _check_all_used(spec: ModelSpec, steps: Sequence[Step], made: Mapping[str, str]) -> None:
    """Check that something takes each tensor. `made` maps it to what makes it."""
    used = {feed.tensor for step in steps for feed in step.inputs} | {item.name for item in spec.outputs}
    for tensor, source in made.items():
        if tensor not in used:
            raise _bad(
                spec,
                f"tensor '{tensor}' of {source} is unused: expected a step that takes it, or an output of the ensemble",
            )


def _connect_steps(spec: ModelSpec, steps: Sequence[Step], members: Sequence[ModelSpec]) -> StepGraph:
    """Follow the tensors from the ensemble's inputs through the steps, and check each input of each step."""
    values = batched_shape_inputs(spec)
    sources = {
        item.name: _TensorSource(
            f"input '{item.name}' of the ensemble", item, _given_dims(spec, item, values), item.dims
        )
        for item in spec.inputs
    }
    order: list[Step] = []
    consumers: dict[str, list[Step]] = {}
    for step in steps:
        for tensor in {item.tensor for item in step.inputs}:
            consumers.setdefault(tensor, []).append(step)
    missing = {step.index: len({item.tensor for item in step.inputs}) for step in steps}
    available = deque(sources)
    while available:
        for step in consumers.get(available.popleft(), ()):
            missing[step.index] -= 1
            if missing[step.index]:
                continue
            member = members[step.index]
            for step_input in step.inputs:
                _check_step_input(spec, step, step_input, sources[step_input.tensor], member)
            origins = [sources[item.tensor].origin for item in step.inputs]
            origin = longest_origin(origins)
            if any(origin[: len(other)] != other for other in origins):
                raise _bad(spec, f"{step} receives inputs originated from different decoupled models")
            complete = replace(step, origin=origin)
            order.append(complete)
            value_outputs = batched_shape_outputs(member)
            for name, tensor in complete.outputs:
                output = member.output(name)
                assert output is not None
                sources[tensor] = _TensorSource(
                    f"output '{name}' of {complete}",
                    output,
                    member.wire_dims(output.dims),
                    output.dims,
                    complete.scope_origin,
                    name in value_outputs,
                )
                available.append(tensor)
    waiting = [step for step in steps if missing[step.index]]
    if waiting:
        raise _bad(spec, f"the steps wait for each other: {_describe_cycle(waiting)}")
    _check_outputs(spec, sources)
    return StepGraph(
        sorted(order, key=lambda step: step.index),
        [item.name for item in spec.outputs],
        {name: item.origin for name, item in sources.items()},
    )


_MAX_SHOWN_STEPS = 16
"""Most steps of a cycle that an error message names."""


def _describe_cycle(waiting: Sequence[Step]) -> str:
    """Return a sentence about one cycle of steps that wait for each other."""
    producer = {tensor: step for step in waiting for _, tensor in step.outputs}
    step = waiting[0]
    positions = {step.index: 0}
    message_parts: list[str] = [str(step)]
    while True:
        tensor = next(item.tensor for item in step.inputs if item.tensor in producer)
        step = producer[tensor]
        message_parts.append(f"takes '{tensor}' from {step}")
        if step.index in positions:
            cycle = [str(step), *message_parts[positions[step.index] + 1 :]]
            return " ".join(cycle if len(cycle) <= _MAX_SHOWN_STEPS else [*cycle[:_MAX_SHOWN_STEPS], "..."])
        positions[step.index] = len(positions)


def _check_step_input(
    spec: ModelSpec, step: Step, step_input: StepInput, made: _TensorSource, member: ModelSpec
) -> None:
    item = member.input(step_input.input)
    assert item is not None
    where = f"{step}: input '{step_input.input}' takes tensor '{step_input.tensor}'"
    if item.dtype is not made.item.dtype:
        raise _bad(
            spec,
            f"{where}, a {made.item.dtype.config_name} ({made.where}), but the model expects {item.dtype.config_name}",
        )
    if step_input.is_values:
        _check_values(spec, where, made, item)
        return
    shape = member.wire_dims(item.dims)
    if not _fits(made, shape, item.dims):
        raise _bad(spec, f"{where} of shape {list(made.shape)} ({made.where}), but the model expects {list(shape)}")


def _check_values(spec: ModelSpec, where: str, made: _TensorSource, item: InputSpec) -> None:
    """Check the source of a shape tensor of a model that batches: it must have one set of values for all rows."""
    given = f"{where} of shape {list(made.shape)} ({made.where})"
    if made.has_rows and not made.repeats_values:
        raise _bad(
            spec,
            f"{given}, whose rows may differ, but it is a shape tensor of a model that batches: expected values of "
            f"{list(item.dims)} without a batch dimension, from a model that does not batch, a shape tensor of another "
            "model, or an input of the ensemble with is_shape_tensor: true",
        )
    if not _match(made.dims, item.dims):
        expected = "rows of the values" if made.repeats_values else "values"
        raise _bad(spec, f"{given}, but the model expects {expected} of its shape tensor, {list(item.dims)}")


def _check_outputs(spec: ModelSpec, sources: Mapping[str, _TensorSource]) -> None:
    values = batched_shape_outputs(spec)
    for item in spec.outputs:
        producer = sources[item.name]
        if item.dtype is not producer.item.dtype:
            raise _bad(
                spec,
                f"output '{item.name}': expected the {producer.item.dtype.config_name} of {producer.where}, "
                f"given {item.dtype.config_name}",
            )
        if item.name in values and not producer.repeats_values:
            raise _bad(
                spec,
                f"output '{item.name}' is_shape_tensor: expected false, for {producer.where} is no shape tensor of a "
                "model that batches, given true",
            )
        shape = spec.wire_dims(item.dims)
        if not _fits(producer, shape, item.dims):
            raise _bad(
                spec,
                f"output '{item.name}': expected the shape {list(producer.shape)} of {producer.where}, "
                f"given {list(shape)}",
            )
    _check_common_origin(spec, {item.name: sources[item.name].origin for item in spec.outputs})


def _check_common_origin(spec: ModelSpec, origins: Mapping[str, Origin]) -> None:
    """Check that one decoupled model, if any, decides how many responses all outputs have."""
    whole = longest_origin(origins.values())
    for name, origin in origins.items():
        if whole[: len(origin)] != origin:
            raise _bad(spec, f"output '{name}' and another output originate from different decoupled models")


def _fits(made: _TensorSource, shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Return whether a tensor fits an expected shape. A -1 on either side is checked per request.

    If only one side has a batch dimension, equal dims without it also fit: the tensor is then one row.
    """
    only_one_has_rows = made.has_rows != (len(shape) != len(dims))
    return _match(made.shape, shape) or (only_one_has_rows and _match(made.dims, dims))


def _match(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))
