"""Copy what a Python has installed for edge-server: python3 collect_dependencies.py SOURCE DEST [EXTRA ...]

Runs on the Python whose packages are taken. SOURCE is the clone: its pyproject.toml says what is needed. Everything
that follows from that, and nothing else, is copied to DEST, as `pip install --target` would lay it out.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import deque
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def main(source: Path, dest: Path, extras: list[str]) -> None:
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = deque(_first(project, extras))
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        needed = waiting.popleft()
        key = (_plain(needed.name), frozenset(needed.extras))
        if key in done:
            continue
        done.add(key)
        try:
            found = distribution(needed.name)
        except PackageNotFoundError:
            sys.exit(f"{sys.executable} has no {needed}, which edge-server needs")
        if not needed.specifier.contains(found.version, prereleases=True):
            sys.exit(f"{sys.executable} has {found.name} {found.version}, and edge-server needs {needed}")
        _copy(found, dest)
        waiting.extend(_wanted(map(Requirement, found.requires or []), needed.extras))


def _first(project: dict, extras: list[str]) -> list[Requirement]:
    """Return what the project itself needs; extras that name it again are followed."""
    optional = project["optional-dependencies"]
    lines = list(project["dependencies"])
    names = deque(extras)
    while names:
        for line in optional[names.popleft()]:
            needed = Requirement(line)
            if _plain(needed.name) == _plain(project["name"]):
                names.extend(needed.extras)
            else:
                lines.append(line)
    return _wanted(map(Requirement, lines), set())


def _wanted(needed, extras) -> list[Requirement]:
    """Return the requirements that hold on this machine."""
    return [
        item
        for item in needed
        if item.marker is None or any(item.marker.evaluate({"extra": extra}) for extra in (extras or {""}))
    ]


def _copy(found: Distribution, dest: Path) -> None:
    if found.files is None:
        sys.exit(f"{found.name} {found.version} was installed without a list of its files")
    for file in found.files:
        # Programs (../../../bin) are of no use where they would lie.
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        target = dest / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found.locate_file(file), target)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
