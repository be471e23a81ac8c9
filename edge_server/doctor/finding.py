"""What the doctor says: facts, and of some of them that they are in the way."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class FindingLevel(enum.Enum):
    """How bad it is. Only a PROBLEM keeps the server from serving what it could serve elsewhere."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `advice` is what to do, "" where there is nothing to do; a WARNING or PROBLEM always has some."""

    section: str
    name: str
    text: str
    level: FindingLevel = FindingLevel.OK
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level in (FindingLevel.WARNING, FindingLevel.PROBLEM) and not self.advice:
            raise ValueError(f"{self.section} {self.name}: a {self.level.value} without advice")


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return everything, grouped by section, and whether the box can serve."""
    sections: dict[str, list[dict[str, str]]] = {}
    for item in findings:
        entry = {"name": item.name, "text": item.text, "level": item.level.value, "advice": item.advice}
        sections.setdefault(item.section, []).append(entry)
    return {"can_serve": can_serve(findings), "sections": sections}


def can_serve(findings: Sequence[Finding]) -> bool:
    return not any(item.level is FindingLevel.PROBLEM for item in findings)
