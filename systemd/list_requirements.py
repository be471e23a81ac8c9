"""Print what a folder of packages lacks to run edge-server on another machine, one requirement a line, for pip:

    python3 list_requirements.py SOURCE LIB PYTHON MACHINE [EXTRA ...]

SOURCE is the clone, LIB the folder (which may be empty), PYTHON the version ("3.10") and MACHINE the processor
("aarch64") that it is for. pip chooses wheels for another machine, but follows conditions such as `python_version <
"3.11"` as they hold on the machine that it runs on; what is missed for that is found here.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def main(source: Path, library: Path, python: str, machine: str, extras: list[str]) -> None:
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = {
        "python_version": python, "python_full_version": f"{python}.0", "implementation_version": f"{python}.0",
        "platform_machine": machine, "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
        "implementation_name": "cpython", "platform_python_implementation": "CPython",
    }  # fmt: skip
    there = {_plain(item.metadata["Name"]): item for item in distributions(path=[str(library)])}
    needed = _of_project(project, extras, target)
    for item in there.values():
        # Extras of dependencies are asked for by those that need them, which pip has followed.
        needed += _holding(item.requires or [], target, "")
    missing = {
        _without_marker(item)
        for item in needed
        if (found := there.get(_plain(item.name))) is None
        or not item.specifier.contains(found.version, prereleases=True)
    }
    print("\n".join(sorted(missing)))


def _of_project(project: dict, extras: list[str], target: dict[str, str]) -> list[Requirement]:
    lines = list(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[([\w,-]+)\]", line)
            if own:
                waiting += own[1].split(",")
            else:
                lines.append(line)
    return _holding(lines, target, "")


def _holding(lines: list[str], target: dict[str, str], extra: str) -> list[Requirement]:
    """Return the requirements that hold on the target."""
    needed = map(Requirement, lines)
    return [item for item in needed if item.marker is None or item.marker.evaluate({**target, "extra": extra})]


def _without_marker(item: Requirement) -> str:
    extras = f"[{','.join(sorted(item.extras))}]" if item.extras else ""
    return f"{item.name}{extras}{item.specifier}"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
