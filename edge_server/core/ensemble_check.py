"""Whether the steps of an ensemble fit together and fit their models: the step graph, or a BadModelConfig that names
the step and the tensor. What is refused and what is allowed follows Triton.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_server.core.composition_spec import EnsembleStep
from edge_server.core.ensemble_graph import Origin, Step, StepGraph, StepInput, longest_origin
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.shape_tensors import batched_shape_inputs, batched_shape_outputs
from edge_server.errors import BadModelConfig


@dataclass(frozen=True, slots=True)
class _Made:
    """Where a tensor of the ensemble comes from, and what it is: the whole shape, the batch included.

    `repeats_values`: it is a shape tensor that a model which batches made, each row the same.
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
    """Return the graph of an ensemble; `members` are the models of its steps, in their order. Raises BadModelConfig."""
    assert spec.ensemble is not None
    if not spec.ensemble.steps:
        raise _bad(spec, "ensemble_scheduling: expected at least one step, given none")
    steps = [
        _checked_step(spec, index, step, member)
        for index, (step, member) in enumerate(zip(spec.ensemble.steps, members, strict=True))
    ]
    _check_made_once(spec, steps)
    return _ordered(spec, steps, members)


def _bad(spec: ModelSpec, words: str) -> BadModelConfig:
    return BadModelConfig(f"ensemble '{spec.name}': {words}")


def _checked_step(spec: ModelSpec, index: int, step: EnsembleStep, member: ModelSpec) -> Step:
    """Return the step, whose maps name what its model has."""
    optional = {item.name: item.is_optional for item in member.inputs}
    values = batched_shape_inputs(member)
    ranks = {item.name: len(_given_dims(member, item, values)) for item in member.inputs}
    shell = Step(
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
            raise _bad(spec, f"{shell}: expected an {kind}_map, given none")
        for name in names:
            if name not in known:
                raise _bad(spec, f"{shell}: {kind}_map: expected {kind}s of the model {known}, given '{name}'")
    missing = [name for name, is_optional in optional.items() if not is_optional and name not in step.input_map]
    if missing:
        raise _bad(spec, f"{shell}: input_map: expected every input that is not optional, given none for {missing}")
    limit = member.max_batch_size
    if 0 < limit < spec.max_batch_size:
        raise _bad(
            spec,
            f"{shell}: the ensemble allows a max_batch_size of {spec.max_batch_size}, its model only one of {limit}",
        )
    return shell


def _given_dims(spec: ModelSpec, item: InputSpec, values: Collection[str]) -> tuple[int, ...]:
    """Return the shape that an input is sent in: shape tensors, `values`, without a batch dimension."""
    return item.dims if item.name in values else spec.wire_dims(item.dims)


def _check_made_once(spec: ModelSpec, steps: Sequence[Step]) -> None:
    made = {item.name: "an input of the ensemble" for item in spec.inputs}
    for step in steps:
        for name, tensor in step.makes:
            if tensor in made:
                raise _bad(
                    spec, f"{step}: output '{name}' makes tensor '{tensor}', which is made by {made[tensor]} already"
                )
            made[tensor] = str(step)
    for step in steps:
        for feed in step.feeds:
            if feed.tensor not in made:
                raise _bad(
                    spec,
                    f"{step}: input '{feed.input}' takes tensor '{feed.tensor}', which no step makes and which is no "
                    "input of the ensemble",
                )
    for item in spec.outputs:
        if item.name not in made:
            raise _bad(spec, f"output '{item.name}': expected a step that makes this tensor, there is none")


def _ordered(spec: ModelSpec, steps: Sequence[Step], members: Sequence[ModelSpec]) -> StepGraph:
    """Follow the tensors from the ensemble's inputs, checking each where it is taken."""
    values = batched_shape_inputs(spec)
    made = {
        item.name: _Made(f"input '{item.name}' of the ensemble", item, _given_dims(spec, item, values), item.dims)
        for item in spec.inputs
    }
    order: list[Step] = []
    takers: dict[str, list[Step]] = {}
    for step in steps:
        for tensor in {feed.tensor for feed in step.feeds}:
            takers.setdefault(tensor, []).append(step)
    missing = {step.index: len({feed.tensor for feed in step.feeds}) for step in steps}
    there = deque(made)
    while there:
        for step in takers.get(there.popleft(), ()):
            missing[step.index] -= 1
            if missing[step.index]:
                continue
            member = members[step.index]
            for feed in step.feeds:
                _check_feed(spec, step, feed, made[feed.tensor], member)
            placed = replace(step, origin=_origin(spec, step, made))
            order.append(placed)
            for name, tensor in placed.makes:
                made[tensor] = _made_by(placed, name, member)
                there.append(tensor)
    waiting = [step for step in steps if missing[step.index]]
    if waiting:
        raise _bad(spec, f"the steps wait for each other: {_circle(waiting)}")
    _check_outputs(spec, made)
    return StepGraph(
        sorted(order, key=lambda step: step.index),
        [item.name for item in spec.outputs],
        {name: item.origin for name, item in made.items()},
    )


def _made_by(step: Step, name: str, member: ModelSpec) -> _Made:
    item = member.output(name)
    assert item is not None
    return _Made(
        f"output '{name}' of {step}",
        item,
        member.wire_dims(item.dims),
        item.dims,
        step.scope_origin,
        name in batched_shape_outputs(member),
    )


_MOST_TOLD = 16
"""How many steps of a circle an error names."""


def _circle(waiting: Sequence[Step]) -> str:
    """Return one circle of steps that wait for each other, in words."""
    maker = {tensor: step for step in waiting for _, tensor in step.makes}
    step = waiting[0]
    places = {step.index: 0}
    words: list[str] = [str(step)]
    while True:
        tensor = next(feed.tensor for feed in step.feeds if feed.tensor in maker)
        step = maker[tensor]
        words.append(f"takes '{tensor}' from {step}")
        if step.index in places:
            told = [str(step), *words[places[step.index] + 1 :]]
            return " ".join(told if len(told) <= _MOST_TOLD else [*told[:_MOST_TOLD], "..."])
        places[step.index] = len(places)


def _origin(spec: ModelSpec, step: Step, made: Mapping[str, _Made]) -> Origin:
    origins = [made[feed.tensor].origin for feed in step.feeds]
    whole = longest_origin(origins)
    if any(whole[: len(origin)] != origin for origin in origins):
        raise _bad(spec, f"{step} receives inputs originated from different decoupled models")
    return whole


def _check_feed(spec: ModelSpec, step: Step, feed: StepInput, made: _Made, member: ModelSpec) -> None:
    item = member.input(feed.input)
    assert item is not None
    where = f"{step}: input '{feed.input}' takes tensor '{feed.tensor}'"
    if item.dtype is not made.item.dtype:
        raise _bad(
            spec,
            f"{where}, a {made.item.dtype.config_name} ({made.where}), but the model expects {item.dtype.config_name}",
        )
    if feed.is_values:
        _check_values(spec, where, made, item)
        return
    shape = member.wire_dims(item.dims)
    if not _fit(made, shape, item.dims):
        raise _bad(spec, f"{where} of shape {list(made.shape)} ({made.where}), but the model expects {list(shape)}")


def _check_values(spec: ModelSpec, where: str, made: _Made, item: InputSpec) -> None:
    """Check what is to be a shape tensor of a model that batches. It has one set of values for all rows."""
    given = f"{where} of shape {list(made.shape)} ({made.where})"
    if made.has_rows and not made.repeats_values:
        raise _bad(
            spec,
            f"{given}, whose rows may differ, but it is a shape tensor of a model that batches: expected values of "
            f"{list(item.dims)} without a batch dimension, from a model that does not batch, a shape tensor of another "
            "model, or an input of the ensemble with is_shape_tensor: true",
        )
    if not _match(made.dims, item.dims):
        what = "rows of the values" if made.repeats_values else "values"
        raise _bad(spec, f"{given}, but the model expects {what} of its shape tensor, {list(item.dims)}")


def _check_outputs(spec: ModelSpec, made: Mapping[str, _Made]) -> None:
    values = batched_shape_outputs(spec)
    for item in spec.outputs:
        maker = made[item.name]
        if item.dtype is not maker.item.dtype:
            raise _bad(
                spec,
                f"output '{item.name}': expected the {maker.item.dtype.config_name} of {maker.where}, "
                f"given {item.dtype.config_name}",
            )
        if item.name in values and not maker.repeats_values:
            raise _bad(
                spec,
                f"output '{item.name}' is_shape_tensor: expected false, for {maker.where} is no shape tensor of a "
                "model that batches, given true",
            )
        shape = spec.wire_dims(item.dims)
        if not _fit(maker, shape, item.dims):
            raise _bad(
                spec,
                f"output '{item.name}': expected the shape {list(maker.shape)} of {maker.where}, given {list(shape)}",
            )
    origins = {item.name: made[item.name].origin for item in spec.outputs}
    whole = longest_origin(origins.values())
    for name, origin in origins.items():
        if whole[: len(origin)] != origin:
            raise _bad(spec, f"output '{name}' and another output originate from different decoupled models")


def _fit(made: _Made, shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Return whether a tensor may be taken as that shape; a -1 on either side leaves it to the request.

    Where one side has a batch dimension and the other has none, the same dims without it will do as well: the tensor is
    then one row.
    """
    has_batch = made.has_rows != (len(shape) != len(dims))
    return _match(made.shape, shape) or (has_batch and _match(made.dims, dims))


def _match(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))
