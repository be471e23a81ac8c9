"""State of one request to an ensemble: decides, from the tensors that exist, which steps can run now.

See `ensemble_graph` for scopes and origins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Generic, TypeVar

from edge_server.core.ensemble_graph import Origin, Step, StepGraph, StepInput, StepPlan
from edge_server.core.shape_tensors import common_row_values
from edge_server.core.tensor import Tensor
from edge_server.errors import BackendError
from edge_server.record import record

Value = TypeVar("Value")


@record(slots=True, eq=False)
class Scope(Generic[Value]):
    """Tensors of the request, or of one response of a decoupled step and of the steps that use it.

    A tensor is None if it will never exist. `busy` counts steps that run in the scope and its unfinished inner scopes.
    """

    origin: Origin
    outer: Scope[Value] | None = None
    tensors: dict[str, Value | None] = field(default_factory=dict)
    use_counts: dict[str, int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    inner: dict[int, deque[Scope[Value]]] = field(default_factory=dict)
    busy: int = 0
    is_finished: bool = False
    is_answered: bool = False

    def find(self, name: str) -> Scope[Value] | None:
        """Return the scope that holds the tensor: this one or an outer one. None if it does not exist yet."""
        scope: Scope[Value] | None = self
        while scope is not None and name not in scope.tensors:
            scope = scope.outer
        return scope


@record(slots=True, eq=False)
class StepLaunch(Generic[Value]):
    """A step to run now. `inputs` are by names of its model. Responses go to `EnsembleRun.add_response`."""

    step: Step
    scope: Scope[Value]
    inputs: dict[str, Value]
    has_answered: bool = False
    is_closed: bool = False


class EnsembleRun(Generic[Value]):
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

    def start(self) -> list[StepLaunch[Value]]:
        """Return the steps that can run with the request's inputs. Call it once."""
        inputs, self._inputs = self._inputs, {}
        launches = self._add_tensors(self._root, inputs)
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
                scope.busy += 1
                launches = self._add_tensors(inner, {tensor: outputs.get(name) for name, tensor in step.outputs})
                self._finish_if_idle(inner)
        elif not launch.has_answered and (outputs or is_final):
            launch.has_answered = True
            launches = self._add_tensors(scope, {tensor: outputs.get(name) for name, tensor in step.outputs})
        if is_final and not launch.is_closed:
            launch.is_closed = True
            scope.busy -= 1
            self._finish_if_idle(scope)
        self._collect_responses(self._root)
        if self.is_done:
            self._root.tensors.clear()
        return launches

    def take_responses(self) -> list[dict[str, Value]]:
        """Return the complete responses, in the order of the step responses from which they were made."""
        responses, self._responses = self._responses, []
        return responses

    def _add_tensors(self, scope: Scope[Value], tensors: Mapping[str, Value | None]) -> list[StepLaunch[Value]]:
        """Add tensors to a scope and return the steps that can run now. Skips steps that can never run."""
        launches: list[StepLaunch[Value]] = []
        pending = deque([(scope, tensors)])
        while pending:
            target, produced = pending.popleft()
            for name, value in produced.items():
                use_counts = self._plan.use_counts.get(name, 0)
                if value is not None and not use_counts and name not in self._plan.retained:
                    continue
                target.tensors[name] = value
                target.use_counts[name] = use_counts
            for consumer_scope, step in self._find_consumers(target, produced):
                launch = self._start_step(consumer_scope, step)
                if isinstance(launch, StepLaunch):
                    launches.append(launch)
                elif launch:
                    if not step.is_decoupled:
                        pending.append((consumer_scope, dict.fromkeys((tensor for _, tensor in step.outputs), None)))
                    self._finish_if_idle(consumer_scope)
        self._finish_if_idle(scope)
        return launches

    def _find_consumers(self, scope: Scope[Value], produced: Iterable[str]) -> list[tuple[Scope[Value], Step]]:
        """Return the steps that use one of the tensors, each with the scopes in which it runs."""
        steps = sorted({index for name in produced for index in self._plan.consumers.get(name, ())})
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
            owner = scope.find(item.tensor)
            if owner is None:
                return False
            value = owner.tensors[item.tensor]
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
        if tensor not in scope.use_counts:
            return
        scope.use_counts[tensor] -= 1
        if not scope.use_counts[tensor] and tensor not in self._plan.retained:
            del scope.tensors[tensor], scope.use_counts[tensor]

    def _finish_if_idle(self, scope: Scope[Value]) -> None:
        """Finish the scope if nothing runs in it, and then its outer scopes that waited only for it."""
        ending: Scope[Value] | None = scope
        while ending is not None:
            expected = self._plan.step_count.get(ending.origin, 0)
            if ending.is_finished or ending.busy or len(ending.started) != expected:
                return
            ending.is_finished = True
            outer = ending.outer
            if outer is not None:
                outer.busy -= 1
                if ending.origin != self._plan.response_origin[: len(ending.origin)]:
                    # No response is made from it, so `_collect_responses` does not remove it.
                    outer.inner[ending.origin[-1]].remove(ending)
            ending = outer

    def _collect_responses(self, scope: Scope[Value]) -> None:
        """Collect the complete responses in order, up to the first incomplete one."""
        response_origin = self._plan.response_origin
        depth = len(scope.origin)
        if depth == len(response_origin):
            self._make_response(scope)
            return
        inner_scopes = scope.inner.get(response_origin[depth])
        while inner_scopes:
            first = inner_scopes[0]
            self._collect_responses(first)
            is_emptied = (
                first.is_answered
                if depth + 1 == len(response_origin)
                else not first.inner.get(response_origin[depth + 1])
            )
            if not (first.is_finished and is_emptied):
                return
            inner_scopes.popleft()

    def _make_response(self, scope: Scope[Value]) -> None:
        """Make the response of a scope if all wanted tensors exist, at most once."""
        if scope.is_answered:
            return
        found: dict[str, Value] = {}
        for name in self._plan.outputs:
            owner = scope.find(name)
            if owner is None:
                return
            value = owner.tensors[name]
            if value is not None:
                found[name] = value
        scope.is_answered = True
        for name in self._plan.outputs:
            self._count_use(scope, name)
        self._responses.append(found)


_MAX_SHOWN_ROWS = 8
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
    """Return the tensor as a step's input. Raises BackendError if a shape tensor's rows differ."""
    if not target.is_values or tensor.array.ndim == target.rank:
        return match_rank(tensor, target.input, target.rank)
    array = tensor.array
    values = common_row_values(array)
    if values is None:
        raise BackendError(
            f"input '{target.input}' is a shape tensor of a model that batches: expected rows of equal values in "
            f"tensor '{target.tensor}', given {array[:_MAX_SHOWN_ROWS].tolist()}"
        )
    return Tensor(target.input, tensor.dtype, values)
