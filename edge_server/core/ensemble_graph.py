"""Step graph of an ensemble, and the progress of one request through it: which steps can run now.

A step with a decoupled model sends any number of responses. Each response opens a *scope*. The steps that use its
tensors run once per scope, and can also use the tensors of the outer scopes. The `origin` of a tensor or a step is the
chain of decoupled steps that lead to it. A step can combine tensors only if one origin is a prefix of the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from edge_server.core.shape_tensors import common_row_values
from edge_server.core.tensor import Tensor
from edge_server.errors import BackendError

Origin: TypeAlias = tuple[int, ...]
"""Indices of the decoupled steps whose responses a tensor or a step belongs to; empty in most ensembles."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class StepInput:
    """An input of a step's model and its tensor. `rank` is the number of dimensions, with the batch dimension.

    `is_values`: it is a shape tensor of a model that batches. It has no batch dimension, and equal rows are reduced to
    their values.
    """

    input: str
    tensor: str
    is_optional: bool = False
    rank: int = -1
    is_values: bool = False


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps that a request needs. `uses` counts the uses of a tensor by steps of the same origin and by the
    response. Tensors in `kept` are also used by inner scopes: they are kept as long as their scope."""

    steps: tuple[int, ...]
    consumers: Mapping[str, tuple[int, ...]]
    uses: Mapping[str, int]
    kept: frozenset[str]
    step_count: Mapping[Origin, int]
    wanted: tuple[str, ...]
    response_origin: Origin


class StepGraph:
    """The steps of one ensemble, by index. Made by `ensemble_check.build_step_graph`."""

    def __init__(self, steps: Sequence[Step], outputs: Sequence[str], origins: Mapping[str, Origin]) -> None:
        self.steps = tuple(steps)
        self.outputs = tuple(outputs)
        self._origins = dict(origins)
        self._maker = {tensor: step.index for step in steps for _, tensor in step.outputs}
        self._plans: dict[frozenset[str], StepPlan] = {}

    def plan(self, wanted: Collection[str] = ()) -> StepPlan:
        """Return the plan for these outputs; for all outputs if none is named."""
        chosen = frozenset(wanted) or frozenset(self.outputs)
        plan = self._plans.get(chosen)
        if plan is None:
            plan = self._make_plan(chosen)
            if len(self._plans) < _MOST_PLANS:
                self._plans[chosen] = plan
        return plan

    def maker(self, tensor: str) -> Step | None:
        """Return the step that makes a tensor, or None for an input of the ensemble."""
        index = self._maker.get(tensor)
        return None if index is None else self.steps[index]

    def _make_plan(self, wanted: frozenset[str]) -> StepPlan:
        needed_steps = self._needed_steps(wanted)
        consumers: dict[str, list[int]] = {}
        uses: dict[str, int] = dict.fromkeys(wanted, 1)
        kept: set[str] = set()
        counts: dict[Origin, int] = {}
        response_origin = longest_origin(self._origins[name] for name in wanted)
        for step in needed_steps:
            counts[step.origin] = counts.get(step.origin, 0) + 1
            for tensor in {item.tensor for item in step.inputs}:
                consumers.setdefault(tensor, []).append(step.index)
                if self._origins[tensor] == step.origin:
                    uses[tensor] = uses.get(tensor, 0) + 1
                else:
                    kept.add(tensor)
        kept.update(name for name in wanted if self._origins[name] != response_origin)
        return StepPlan(
            tuple(step.index for step in needed_steps),
            {tensor: tuple(indices) for tensor, indices in consumers.items()},
            uses,
            frozenset(kept),
            counts,
            tuple(name for name in self.outputs if name in wanted),
            response_origin,
        )

    def _needed_steps(self, wanted: frozenset[str]) -> list[Step]:
        """Return the steps whose outputs are wanted or used by another needed step.

        As in Triton, a step that makes a tensor that nothing uses always runs: it may have side effects.
        """
        used = {item.tensor for step in self.steps for item in step.inputs}
        needed = set(wanted)
        for step in self.steps:
            needed.update(tensor for _, tensor in step.outputs if tensor not in used and tensor not in self.outputs)
        found: set[int] = set()
        waiting = list(needed)
        while waiting:
            maker = self.maker(waiting.pop())
            if maker is not None and maker.index not in found:
                found.add(maker.index)
                waiting += [item.tensor for item in maker.inputs]
        return [step for step in self.steps if step.index in found]


_MOST_PLANS = 64


def longest_origin(origins: Iterable[Origin]) -> Origin:
    """Return the longest origin; () if there is none."""
    return max(origins, key=len, default=())


@dataclass(slots=True, eq=False)
class Scope(Generic[Value]):
    """Tensors of the request, or of one response of a decoupled step and of the steps that use it.

    A tensor is None if it will never exist. `busy` counts steps that run in the scope and its unfinished inner scopes.
    """

    origin: Origin
    outer: Scope[Value] | None = None
    tensors: dict[str, Value | None] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    inner: dict[int, deque[Scope[Value]]] = field(default_factory=dict)
    open_counts: dict[int, int] = field(default_factory=dict)
    busy: int = 0
    is_finished: bool = False
    is_answered: bool = False

    def find(self, name: str) -> Scope[Value] | None:
        """Return the scope that holds the tensor: this one or an outer one. None if it does not exist yet."""
        scope: Scope[Value] | None = self
        while scope is not None and name not in scope.tensors:
            scope = scope.outer
        return scope


@dataclass(slots=True, eq=False)
class StepLaunch(Generic[Value]):
    """A step to run now. `inputs` are by names of its model. Responses go to `GraphRun.add_response`."""

    step: Step
    scope: Scope[Value]
    inputs: dict[str, Value]
    has_answered: bool = False
    is_closed: bool = False


class GraphRun(Generic[Value]):
    """State of one request in an ensemble. Not thread-safe. It only decides; the caller runs the steps.

    After `start` and each `add_response` the caller runs the returned launches and calls `take_responses`.
    """

    def __init__(
        self, graph: StepGraph, plan: StepPlan, inputs: Mapping[str, Value], all_inputs: Iterable[str]
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._root: Scope[Value] = Scope(())
        self._inputs = {name: inputs.get(name) for name in all_inputs}
        self._responses: list[dict[str, Value]] = []

    @property
    def is_done(self) -> bool:
        """Whether no step runs and no further step can run."""
        return self._root.is_finished

    @property
    def kept_tensors(self) -> list[str]:
        """The names of the tensors in memory. A name appears once per scope that keeps it."""
        found: list[str] = []
        scopes = [self._root]
        while scopes:
            scope = scopes.pop()
            found += [name for name, value in scope.tensors.items() if value is not None]
            scopes += [inner for row in scope.inner.values() for inner in row]
        return found

    def start(self) -> list[StepLaunch[Value]]:
        """Return the steps that can run with the request's inputs. Call it once."""
        inputs, self._inputs = self._inputs, {}
        launches = self._proceed(self._root, inputs)
        self._collect_responses(self._root)
        return launches

    def add_response(
        self, launch: StepLaunch[Value], outputs: Mapping[str, Value], *, is_final: bool
    ) -> list[StepLaunch[Value]]:
        """Add a response of a step's model, with its outputs by name. Return the steps that can run now."""
        step, scope = launch.step, launch.scope
        launches: list[StepLaunch[Value]] = []
        if step.is_decoupled:
            if outputs:
                inner: Scope[Value] = Scope(step.scope_origin, scope)
                scope.inner.setdefault(step.index, deque()).append(inner)
                scope.open_counts[step.index] = scope.open_counts.get(step.index, 0) + 1
                scope.busy += 1
                launches = self._proceed(inner, {tensor: outputs.get(name) for name, tensor in step.outputs})
                self._finish_if_idle(inner)
        elif not launch.has_answered and (outputs or is_final):
            launch.has_answered = True
            launches = self._proceed(scope, {tensor: outputs.get(name) for name, tensor in step.outputs})
        if is_final and not launch.is_closed:
            launch.is_closed = True
            scope.busy -= 1
            self._finish_if_idle(scope)
        self._collect_responses(self._root)
        if self.is_done:
            self._root.tensors.clear()
        return launches

    def open_scope_count(self, launch: StepLaunch[Value]) -> int:
        """Return the number of responses of a decoupled step that later steps still work on."""
        return launch.scope.open_counts.get(launch.step.index, 0)

    def take_responses(self) -> list[dict[str, Value]]:
        """Return the complete responses, in the order of the step responses from which they were made."""
        responses, self._responses = self._responses, []
        return responses

    def _proceed(self, scope: Scope[Value], tensors: Mapping[str, Value | None]) -> list[StepLaunch[Value]]:
        """Add tensors to a scope and return the steps that can run now. Skips steps that can never run."""
        launches: list[StepLaunch[Value]] = []
        work = deque([(scope, tensors)])
        while work:
            target, made = work.popleft()
            for name, value in made.items():
                uses = self._plan.uses.get(name, 0)
                if value is not None and not uses and name not in self._plan.kept:
                    continue
                target.tensors[name] = value
                target.uses[name] = uses
            for user, step in self._find_consumers(target, made):
                launch = self._start_step(user, step)
                if isinstance(launch, StepLaunch):
                    launches.append(launch)
                elif launch:
                    if not step.is_decoupled:
                        work.append((user, dict.fromkeys((tensor for _, tensor in step.outputs), None)))
                    self._finish_if_idle(user)
        self._finish_if_idle(scope)
        return launches

    def _find_consumers(self, scope: Scope[Value], made: Iterable[str]) -> list[tuple[Scope[Value], Step]]:
        """Return the steps that use one of the tensors, each with the scopes in which it runs."""
        steps = sorted({index for name in made for index in self._plan.consumers.get(name, ())})
        found: list[tuple[Scope[Value], Step]] = []
        for index in steps:
            step = self._graph.steps[index]
            scopes = [scope]
            for decoupled in step.origin[len(scope.origin) :]:
                scopes = [inner for outer in scopes for inner in outer.inner.get(decoupled, ())]
            found += [(target, step) for target in scopes]
        return found

    def _start_step(self, scope: Scope[Value], step: Step) -> StepLaunch[Value] | bool:
        """Start a step if all its inputs exist. False: not yet, or started before. True: it can never run."""
        if step.index in scope.started:
            return False
        inputs: dict[str, Value] = {}
        can_run = True
        for item in step.inputs:
            holder = scope.find(item.tensor)
            if holder is None:
                return False
            value = holder.tensors[item.tensor]
            if value is not None:
                inputs[item.input] = value
            elif not item.is_optional:
                can_run = False
        scope.started.add(step.index)
        for tensor in {item.tensor for item in step.inputs}:
            self._count_use(scope, tensor)
        if not can_run:
            return True
        scope.busy += 1
        return StepLaunch(step, scope, inputs)

    def _count_use(self, scope: Scope[Value], tensor: str) -> None:
        """Count one use of a tensor, and drop the tensor after its last use."""
        if tensor not in scope.uses:
            return
        scope.uses[tensor] -= 1
        if not scope.uses[tensor] and tensor not in self._plan.kept:
            del scope.tensors[tensor], scope.uses[tensor]

    def _finish_if_idle(self, scope: Scope[Value]) -> None:
        """Finish the scope if nothing runs in it, and then its outer scopes that waited only for it."""
        place: Scope[Value] | None = scope
        while place is not None:
            expected = self._plan.step_count.get(place.origin, 0)
            if place.is_finished or place.busy or len(place.started) != expected:
                return
            place.is_finished = True
            outer = place.outer
            if outer is not None:
                outer.busy -= 1
                outer.open_counts[place.origin[-1]] -= 1
                if place.origin != self._plan.response_origin[: len(place.origin)]:
                    # No response is made from it, so `_collect_responses` does not remove it.
                    outer.inner[place.origin[-1]].remove(place)
            place = outer

    def _collect_responses(self, scope: Scope[Value]) -> None:
        """Collect the complete responses in order, up to the first incomplete one."""
        goal = self._plan.response_origin
        depth = len(scope.origin)
        if depth == len(goal):
            self._make_response(scope)
            return
        row = scope.inner.get(goal[depth])
        while row:
            first = row[0]
            self._collect_responses(first)
            is_emptied = first.is_answered if depth + 1 == len(goal) else not first.inner.get(goal[depth + 1])
            if not (first.is_finished and is_emptied):
                return
            row.popleft()

    def _make_response(self, scope: Scope[Value]) -> None:
        """Make the response of a scope if all wanted tensors exist, at most once."""
        if scope.is_answered:
            return
        found: dict[str, Value] = {}
        for name in self._plan.wanted:
            holder = scope.find(name)
            if holder is None:
                return
            value = holder.tensors[name]
            if value is not None:
                found[name] = value
        scope.is_answered = True
        for name in self._plan.wanted:
            self._count_use(scope, name)
        self._responses.append(found)


_SHOWN_ROWS = 8
"""Most rows of values that an error message shows."""


def match_rank(tensor: Tensor, name: str, rank: int) -> Tensor:
    """Return the tensor with another name and, if needed, with or without a batch dimension of one row.

    The rank differs by one if only one of two connected models has a batch dimension.
    """
    array = tensor.array
    if array.ndim + 1 == rank:
        array = array[None]
    elif array.ndim == rank + 1 and array.shape[0] == 1:
        array = array[0]
    elif tensor.name == name:
        return tensor
    return Tensor(name, tensor.dtype, array)


def step_input_tensor(tensor: Tensor, target: StepInput) -> Tensor:
    """Return the tensor in the form of a step's input. Raises BackendError if a shape tensor's rows differ."""
    if not target.is_values or tensor.array.ndim == target.rank:
        return match_rank(tensor, target.input, target.rank)
    array = tensor.array
    values = common_row_values(array)
    if values is None:
        raise BackendError(
            f"input '{target.input}' is a shape tensor of a model that batches: expected rows of equal values in "
            f"tensor '{target.tensor}', given {array[:_SHOWN_ROWS].tolist()}"
        )
    return Tensor(target.input, tensor.dtype, values)


def find_cycle(name: str, members: Mapping[str, Collection[str]]) -> list[str]:
    """Return a path from a model through members of members back to itself; empty if there is none."""
    trails = deque([[name]])
    seen: set[str] = set()
    while trails:
        trail = trails.popleft()
        for member in members.get(trail[-1], ()):
            if member == name:
                return [*trail, name]
            if member not in seen:
                seen.add(member)
                trails.append([*trail, member])
    return []


def members_first(members: Mapping[str, Collection[str]]) -> list[str]:
    """Return the models in an order in which members come before their ensembles; cycles in any order."""
    order: dict[str, None] = {}
    seen: set[str] = set()
    for start in members:
        trail = [start]
        while trail:
            name = trail[-1]
            seen.add(name)
            below = [member for member in members[name] if member in members and member not in seen]
            if below:
                trail.append(below[0])
            else:
                order[trail.pop()] = None
    return list(order)
