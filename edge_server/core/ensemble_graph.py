"""Graph of an ensemble: its steps, the tensors that connect them, and the steps that a request needs.

A step with a decoupled model sends any number of responses. Each response opens a *scope*. The steps that use its
tensors run once per scope, and can also use the tensors of the outer scopes. The `origin` of a tensor or a step is the
chain of decoupled steps that lead to it. A step can combine tensors only if one origin is a prefix of the other.
`ensemble_run` follows one request through the graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from edge_server.record import record

Origin: TypeAlias = tuple[int, ...]
"""Indices of the decoupled steps whose responses a tensor or a step belongs to; empty in most ensembles."""


class StepInput(NamedTuple):
    """An input of a step's model and its tensor. `rank` is the number of dimensions, with the batch dimension.

    `is_values`: it is a shape tensor of a model that batches. It has no batch dimension, and equal rows are reduced to
    their values.
    """

    input: str
    tensor: str
    is_optional: bool = False
    rank: int = -1
    is_values: bool = False


@record(frozen=True, slots=True)
class Step:
    """One step. `outputs` are pairs of an output of the model and its tensor in the ensemble."""

    index: int
    model: str
    version: int | None
    inputs: tuple[StepInput, ...]
    outputs: tuple[tuple[str, str], ...]
    is_decoupled: bool = False
    origin: Origin = ()

    @property
    def scope_origin(self) -> Origin:
        """The origin of its output tensors."""
        return (*self.origin, self.index) if self.is_decoupled else self.origin

    def __str__(self) -> str:
        return f"step {self.index + 1} (model '{self.model}')"


class StepPlan(NamedTuple):
    """The steps that a request needs, to make its `outputs`.

    `use_counts` counts the uses of a tensor by steps of the same origin and by the response; after the last one it is
    dropped. Tensors in `retained` are also used by inner scopes: they are kept as long as their scope.
    """

    steps: tuple[int, ...]
    consumers: Mapping[str, tuple[int, ...]]
    use_counts: Mapping[str, int]
    retained: frozenset[str]
    step_count: Mapping[Origin, int]
    outputs: tuple[str, ...]
    response_origin: Origin


class StepGraph:
    """The steps of one ensemble, by index. Made by `ensemble_check.build_step_graph`."""

    def __init__(self, steps: Sequence[Step], outputs: Sequence[str], origins: Mapping[str, Origin]) -> None:
        self.steps = tuple(steps)
        self.outputs = tuple(outputs)
        self._origins = dict(origins)
        self._producer_index = {tensor: step.index for step in steps for _, tensor in step.outputs}
        self._plans: dict[frozenset[str], StepPlan] = {}

    def plan(self, requested: Collection[str] = ()) -> StepPlan:
        """Return the plan for these outputs; for all outputs if none is named."""
        chosen = frozenset(requested) or frozenset(self.outputs)
        plan = self._plans.get(chosen)
        if plan is None:
            plan = self._make_plan(chosen)
            if len(self._plans) < _MAX_CACHED_PLANS:
                self._plans[chosen] = plan
        return plan

    def producer(self, tensor: str) -> Step | None:
        """Return the step that makes a tensor, or None for an input of the ensemble."""
        index = self._producer_index.get(tensor)
        return None if index is None else self.steps[index]

    def _make_plan(self, requested: frozenset[str]) -> StepPlan:
        needed_steps = self._needed_steps(requested)
        consumers: dict[str, list[int]] = {}
        use_counts: dict[str, int] = dict.fromkeys(requested, 1)
        retained: set[str] = set()
        counts: dict[Origin, int] = {}
        response_origin = longest_origin(self._origins[name] for name in requested)
        for step in needed_steps:
            counts[step.origin] = counts.get(step.origin, 0) + 1
            for tensor in {item.tensor for item in step.inputs}:
                consumers.setdefault(tensor, []).append(step.index)
                if self._origins[tensor] == step.origin:
                    use_counts[tensor] = use_counts.get(tensor, 0) + 1
                else:
                    retained.add(tensor)
        retained.update(name for name in requested if self._origins[name] != response_origin)
        return StepPlan(
            tuple(step.index for step in needed_steps),
            {tensor: tuple(indices) for tensor, indices in consumers.items()},
            use_counts,
            frozenset(retained),
            counts,
            tuple(name for name in self.outputs if name in requested),
            response_origin,
        )

    def _needed_steps(self, requested: frozenset[str]) -> list[Step]:
        """Return the steps whose outputs are requested or used by another needed step."""
        found: set[int] = set()
        unvisited = list(requested)
        while unvisited:
            producer = self.producer(unvisited.pop())
            if producer is not None and producer.index not in found:
                found.add(producer.index)
                unvisited += [item.tensor for item in producer.inputs]
        return [step for step in self.steps if step.index in found]


_MAX_CACHED_PLANS = 64


def longest_origin(origins: Iterable[Origin]) -> Origin:
    """Return the longest origin; () if there is none."""
    return max(origins, key=len, default=())


def find_cycle(name: str, members: Mapping[str, Collection[str]]) -> list[str]:
    """Return a path from a model through members of members back to itself; empty if there is none."""
    paths = deque([[name]])
    seen: set[str] = set()
    while paths:
        path = paths.popleft()
        for member in members.get(path[-1], ()):
            if member == name:
                return [*path, name]
            if member not in seen:
                seen.add(member)
                paths.append([*path, member])
    return []


def topological_order(members: Mapping[str, Collection[str]]) -> list[str]:
    """Return the models in an order in which members come before their ensembles; cycles in any order."""
    order: dict[str, None] = {}
    seen: set[str] = set()
    for start in members:
        path = [start]
        while path:
            name = path[-1]
            seen.add(name)
            below = [member for member in members[name] if member in members and member not in seen]
            if below:
                path.append(below[0])
            else:
                order[path.pop()] = None
    return list(order)
