"""The step graph of an ensemble, checked against its members, and one request's way through it: which steps may run
now, given which tensors exist.

A step whose model is decoupled answers any number of times. Each of its responses opens a *scope*: the steps that take
its tensors run once for each, and see the tensors of the scopes around theirs too. The `origin` of a tensor or a step
is the chain of decoupled steps that lead to it; a step may join tensors only when one's origin continues the other's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

Origin: TypeAlias = tuple[int, ...]
"""The decoupled steps, by index, whose responses a tensor or a step belongs to; empty in most ensembles."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class StepInput:
    """An input of a step's model and the tensor that it takes. `rank` counts its dimensions, the batch included.

    `is_values`: it is a shape tensor of a model that batches: `rank` has no batch, and rows stand for their values.
    """

    input: str
    tensor: str
    is_optional: bool = False
    rank: int = -1
    is_values: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as it runs. `makes` are pairs of an output of the model and the tensor that it becomes."""

    index: int
    model: str
    version: int | None
    feeds: tuple[StepInput, ...]
    makes: tuple[tuple[str, str], ...]
    is_decoupled: bool = False
    origin: Origin = ()

    @property
    def scope_origin(self) -> Origin:
        """The origin of what it makes."""
        return (*self.origin, self.index) if self.is_decoupled else self.origin

    def __str__(self) -> str:
        return f"step {self.index + 1} (model '{self.model}')"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps that a request needs. `uses` counts how often a tensor is taken by steps of its own origin, and by the
    answer; `stays` are tensors that inner scopes take as well: they are kept as long as their scope."""

    steps: tuple[int, ...]
    takers: Mapping[str, tuple[int, ...]]
    uses: Mapping[str, int]
    stays: frozenset[str]
    step_count: Mapping[Origin, int]
    wanted: tuple[str, ...]
    answer_origin: Origin


class StepGraph:
    """The steps of one ensemble, by index. Made by `ensemble_check.step_graph`."""

    def __init__(self, steps: Sequence[Step], outputs: Sequence[str], origins: Mapping[str, Origin]) -> None:
        self.steps = tuple(steps)
        self.outputs = tuple(outputs)
        self._origins = dict(origins)
        self._maker = {tensor: step.index for step in steps for _, tensor in step.makes}
        self._plans: dict[frozenset[str], StepPlan] = {}

    def plan(self, wanted: Collection[str] = ()) -> StepPlan:
        """Return what is needed for these outputs, all of them when none is named."""
        chosen = frozenset(wanted) or frozenset(self.outputs)
        plan = self._plans.get(chosen)
        if plan is None:
            plan = self._make_plan(chosen)
            if len(self._plans) < _MOST_PLANS:
                self._plans[chosen] = plan
        return plan

    def maker(self, tensor: str) -> Step | None:
        """Return the step that makes a tensor, None for one that comes with the request."""
        index = self._maker.get(tensor)
        return None if index is None else self.steps[index]

    def _make_plan(self, wanted: frozenset[str]) -> StepPlan:
        running = self._running(wanted)
        takers: dict[str, list[int]] = {}
        uses: dict[str, int] = dict.fromkeys(wanted, 1)
        stays: set[str] = set()
        counts: dict[Origin, int] = {}
        answer_origin = longest_origin(self._origins[name] for name in wanted)
        for step in running:
            counts[step.origin] = counts.get(step.origin, 0) + 1
            for tensor in {feed.tensor for feed in step.feeds}:
                takers.setdefault(tensor, []).append(step.index)
                if self._origins[tensor] == step.origin:
                    uses[tensor] = uses.get(tensor, 0) + 1
                else:
                    stays.add(tensor)
        stays.update(name for name in wanted if self._origins[name] != answer_origin)
        return StepPlan(
            tuple(step.index for step in running),
            {tensor: tuple(indices) for tensor, indices in takers.items()},
            uses,
            frozenset(stays),
            counts,
            tuple(name for name in self.outputs if name in wanted),
            answer_origin,
        )

    def _running(self, wanted: frozenset[str]) -> list[Step]:
        """Return the steps but for those that make nothing that is wanted, or taken by one that runs.

        A step that makes a tensor which leads nowhere runs always, as in Triton: it is there for what it does.
        """
        taken = {feed.tensor for step in self.steps for feed in step.feeds}
        needed = set(wanted)
        for step in self.steps:
            needed.update(tensor for _, tensor in step.makes if tensor not in taken and tensor not in self.outputs)
        running: set[int] = set()
        waiting = list(needed)
        while waiting:
            maker = self.maker(waiting.pop())
            if maker is not None and maker.index not in running:
                running.add(maker.index)
                waiting += [feed.tensor for feed in maker.feeds]
        return [step for step in self.steps if step.index in running]


_MOST_PLANS = 64


def longest_origin(origins: Iterable[Origin]) -> Origin:
    """Return the longest of origins that continue one another."""
    return max(origins, key=len, default=())


@dataclass(slots=True, eq=False)
class Scope(Generic[Value]):
    """Tensors of the request itself, or of one response of a decoupled step and what is made from it. None stands for
    a tensor that is known never to come. `busy` counts steps that run in it and inner scopes that are not finished."""

    origin: Origin
    outer: Scope[Value] | None = None
    tensors: dict[str, Value | None] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    inner: dict[int, deque[Scope[Value]]] = field(default_factory=dict)
    open_counts: dict[int, int] = field(default_factory=dict)
    busy: int = 0
    is_finished: bool = False
    is_answered: bool = False

    def find(self, name: str) -> Scope[Value] | None:
        """Return the scope, this one or one around it, that holds the tensor."""
        scope: Scope[Value] | None = self
        while scope is not None and name not in scope.tensors:
            scope = scope.outer
        return scope


@dataclass(slots=True, eq=False)
class StepLaunch(Generic[Value]):
    """A step to be run now with `inputs`, by names of its model. Answered through `GraphRun.answered`."""

    step: Step
    scope: Scope[Value]
    inputs: dict[str, Value]
    has_answered: bool = False
    is_closed: bool = False


class GraphRun(Generic[Value]):
    """One request on its way. Not thread-safe; decides only, the caller runs the steps.

    After `start` and each `answered` the launches returned are to be run, and `take_answers` may have something.
    """

    def __init__(
        self, graph: StepGraph, plan: StepPlan, inputs: Mapping[str, Value], all_inputs: Iterable[str]
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._root: Scope[Value] = Scope(())
        self._inputs = {name: inputs.get(name) for name in all_inputs}
        self._answers: list[dict[str, Value]] = []

    @property
    def is_done(self) -> bool:
        """Whether nothing runs or can be run any more."""
        return self._root.is_finished

    @property
    def held(self) -> list[str]:
        """The names of the tensors that are kept, one for each scope that keeps one of that name."""
        found: list[str] = []
        scopes = [self._root]
        while scopes:
            scope = scopes.pop()
            found += [name for name, value in scope.tensors.items() if value is not None]
            scopes += [inner for row in scope.inner.values() for inner in row]
        return found

    def start(self) -> list[StepLaunch[Value]]:
        inputs, self._inputs = self._inputs, {}
        launches = self._proceed(self._root, inputs)
        self._collect_from(self._root)
        return launches

    def answered(
        self, launch: StepLaunch[Value], outputs: Mapping[str, Value], *, is_final: bool
    ) -> list[StepLaunch[Value]]:
        """Take a response of a step's model, its outputs by their names there. Returns what may run now."""
        step, scope = launch.step, launch.scope
        launches: list[StepLaunch[Value]] = []
        if step.is_decoupled:
            if outputs:
                launches = self._open_inner(step, scope, outputs)
        elif not launch.has_answered and (outputs or is_final):
            launch.has_answered = True
            launches = self._proceed(scope, {tensor: outputs.get(name) for name, tensor in step.makes})
        if is_final and not launch.is_closed:
            launch.is_closed = True
            scope.busy -= 1
            self._finish_if_idle(scope)
        self._collect_from(self._root)
        if self.is_done:
            self._root.tensors.clear()
        return launches

    def open_inner_count(self, launch: StepLaunch[Value]) -> int:
        """Return how many responses of a decoupled step are still worked on."""
        return launch.scope.open_counts.get(launch.step.index, 0)

    def take_answers(self) -> list[dict[str, Value]]:
        """Return the answers that are complete, in the order of the responses that they were made from."""
        answers, self._answers = self._answers, []
        return answers

    def _open_inner(self, step: Step, scope: Scope[Value], outputs: Mapping[str, Value]) -> list[StepLaunch[Value]]:
        inner: Scope[Value] = Scope(step.scope_origin, scope)
        scope.inner.setdefault(step.index, deque()).append(inner)
        scope.open_counts[step.index] = scope.open_counts.get(step.index, 0) + 1
        scope.busy += 1
        launches = self._proceed(inner, {tensor: outputs.get(name) for name, tensor in step.makes})
        self._finish_if_idle(inner)
        return launches

    def _proceed(self, scope: Scope[Value], tensors: Mapping[str, Value | None]) -> list[StepLaunch[Value]]:
        """Put tensors where they belong, and return the steps that can run now; what can never run is passed over."""
        launches: list[StepLaunch[Value]] = []
        work = deque([(scope, tensors)])
        while work:
            place, made = work.popleft()
            for name, value in made.items():
                uses = self._plan.uses.get(name, 0)
                if value is not None and not uses and name not in self._plan.stays:
                    continue
                place.tensors[name] = value
                place.uses[name] = uses
            for target, step in self._takers(place, made):
                launch = self._begin(target, step)
                if isinstance(launch, StepLaunch):
                    launches.append(launch)
                elif launch:
                    if not step.is_decoupled:
                        work.append((target, dict.fromkeys((tensor for _, tensor in step.makes), None)))
                    self._finish_if_idle(target)
        self._finish_if_idle(scope)
        return launches

    def _takers(self, scope: Scope[Value], made: Iterable[str]) -> list[tuple[Scope[Value], Step]]:
        steps = sorted({index for name in made for index in self._plan.takers.get(name, ())})
        found: list[tuple[Scope[Value], Step]] = []
        for index in steps:
            step = self._graph.steps[index]
            places = [scope]
            for decoupled in step.origin[len(scope.origin) :]:
                places = [inner for place in places for inner in place.inner.get(decoupled, ())]
            found += [(place, step) for place in places]
        return found

    def _begin(self, scope: Scope[Value], step: Step) -> StepLaunch[Value] | bool:
        """Begin a step where all it takes is there. False: not yet, or begun before; True: it can never run."""
        if step.index in scope.begun:
            return False
        inputs: dict[str, Value] = {}
        can_run = True
        for feed in step.feeds:
            holder = scope.find(feed.tensor)
            if holder is None:
                return False
            value = holder.tensors[feed.tensor]
            if value is not None:
                inputs[feed.input] = value
            elif not feed.is_optional:
                can_run = False
        scope.begun.add(step.index)
        for tensor in {feed.tensor for feed in step.feeds}:
            self._use_up(scope, tensor)
        if not can_run:
            return True
        scope.busy += 1
        return StepLaunch(step, scope, inputs)

    def _use_up(self, scope: Scope[Value], tensor: str) -> None:
        """Let a tensor of the scope go after its last use."""
        if tensor not in scope.uses:
            return
        scope.uses[tensor] -= 1
        if not scope.uses[tensor] and tensor not in self._plan.stays:
            del scope.tensors[tensor], scope.uses[tensor]

    def _finish_if_idle(self, scope: Scope[Value]) -> None:
        """Finish the scope, and those around it that waited for it alone."""
        place: Scope[Value] | None = scope
        while place is not None and self._is_idle(place):
            place.is_finished = True
            outer = place.outer
            if outer is not None:
                outer.busy -= 1
                outer.open_counts[place.origin[-1]] -= 1
                if place.origin != self._plan.answer_origin[: len(place.origin)]:
                    # No answer is made from it, so that nobody comes to take it out of the row.
                    outer.inner[place.origin[-1]].remove(place)
            place = outer

    def _is_idle(self, scope: Scope[Value]) -> bool:
        expected = self._plan.step_count.get(scope.origin, 0)
        return not scope.is_finished and not scope.busy and len(scope.begun) == expected

    def _collect_from(self, scope: Scope[Value]) -> None:
        """Take the answers that are complete, up to the first one that is not."""
        goal = self._plan.answer_origin
        depth = len(scope.origin)
        if depth == len(goal):
            self._answer(scope)
            return
        row = scope.inner.get(goal[depth])
        while row:
            self._collect_from(row[0])
            head = row[0]
            is_emptied = head.is_answered if depth + 1 == len(goal) else not head.inner.get(goal[depth + 1])
            if not (head.is_finished and is_emptied):
                return
            row.popleft()

    def _answer(self, scope: Scope[Value]) -> None:
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
            self._use_up(scope, name)
        self._answers.append(found)


def find_cycle(name: str, members: Mapping[str, Collection[str]]) -> list[str]:
    """Return the way from a model over members of members back to itself, nothing when there is none."""
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
    """Return the models in an order in which members come before what is made of them; circles in any order."""
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
