"""Build progress in percent, from the nested phases that TensorRT reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Phase:
    parent: str
    step_count: int
    done_count: int = 0


@dataclass(slots=True)
class BuildProgress:
    """`percent` never falls. Phases come in any order, and names may come again."""

    percent: float = 0.0
    phase: str = ""
    _phases: dict[str, _Phase] = field(default_factory=dict)

    def begin(self, name: str, parent: str | None, step_count: int) -> None:
        self._phases[name] = _Phase(parent or "", max(step_count, 1))
        self.phase = name
        self._count()

    def step(self, name: str, number: int) -> None:
        """Note that step `number`, counted from 0, is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done_count = max(phase.done_count, min(number + 1, phase.step_count))
            self._count()

    def finish(self, name: str) -> None:
        ended = self._phases.pop(name, None)
        if ended is None:
            return
        if ended.parent in self._phases:
            self.phase = ended.parent
        elif not self._phases:
            self.percent = 100.0
        self._count()

    def _count(self) -> None:
        roots = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        if roots:
            self.percent = max(self.percent, round(100.0 * max(self._part(name, 0) for name in roots), 1))

    def _part(self, name: str, depth: int) -> float:
        """Return how much of a phase is done: its steps, and what is done of the step under way."""
        phase = self._phases[name]
        inner = [other for other, item in self._phases.items() if item.parent == name and other != name]
        under_way = max((self._part(other, depth + 1) for other in inner), default=0.0) if depth < 32 else 0.0
        return min((phase.done_count + under_way) / phase.step_count, 1.0)
