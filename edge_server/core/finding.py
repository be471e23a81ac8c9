"""Finding of a machine check: a fact with its level (ok, note, warning or problem) and advice."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FindingLevel(enum.Enum):
    """Severity of a finding. Only a PROBLEM prevents the server from serving."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, shown under the heading `section`. `advice` says what to do, "" if nothing. A WARNING or PROBLEM
    always has advice."""

    section: str
    name: str
    text: str
    level: FindingLevel = FindingLevel.OK
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level in (FindingLevel.WARNING, FindingLevel.PROBLEM) and not self.advice:
            raise ValueError(f"{self.section} {self.name}: a {self.level.value} without advice")
