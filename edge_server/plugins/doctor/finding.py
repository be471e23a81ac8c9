"""Result type of the machine checks: a fact with its level (ok, note, warning or problem) and advice."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class FindingLevel(enum.Enum):
    """Severity of a finding. Only a PROBLEM prevents the server from serving."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `advice` says what to do, "" if nothing. A WARNING or PROBLEM always has advice."""

    section: str
    name: str
    text: str
    level: FindingLevel = FindingLevel.OK
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level in (FindingLevel.WARNING, FindingLevel.PROBLEM) and not self.advice:
            raise ValueError(f"{self.section} {self.name}: a {self.level.value} without advice")


def findings_as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return all findings, grouped by section, and whether the machine can serve."""
    sections: dict[str, list[dict[str, str]]] = {}
    for item in findings:
        entry = {"name": item.name, "text": item.text, "level": item.level.value, "advice": item.advice}
        sections.setdefault(item.section, []).append(entry)
    return {"can_serve": can_serve(findings), "sections": sections}


def can_serve(findings: Sequence[Finding]) -> bool:
    """Return whether there is no PROBLEM."""
    return not any(item.level is FindingLevel.PROBLEM for item in findings)
