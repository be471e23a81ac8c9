"""REPORTS.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_each_report_has_a_test_or_the_reason_why_not() -> None:
    lines = (FOLDER / "REPORTS.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "Report"]
    assert len(rows) >= 30
    missing = []
    for report, _, cell in rows:
        found = _TEST.findall(cell)
        assert found or cell.startswith("none: "), report
        for file, name in found:
            path = FOLDER.parent / file
            if not (path.is_file() and f"def {name}(" in path.read_text()):
                missing.append(f"{report}: {file}::{name}")
    assert not missing
