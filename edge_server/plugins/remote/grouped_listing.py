"""Grouping of a remote repository's files by model and version: chooses the files to download, and warns of names that
do not fit. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from edge_server.plugins.remote.object_store import ObjectListing, RemoteFile
from edge_server.repository.disk.file_fingerprint import is_ignored
from edge_server.repository.disk.scan import is_model_name, parse_version

MAX_NAME_BYTES = 255
MAX_PATH_CHARS = 1024


class UnitKey(NamedTuple):
    """One version of a model, or with `version` None the model's files outside its versions."""

    model: str
    version: int | None


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Files that the copy should hold: for each unit, by their path inside it. `warnings` are sentences."""

    units: Mapping[UnitKey, Mapping[str, RemoteFile]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def plan(listing: ObjectListing) -> FetchPlan:
    """Group a listing into units. Files with a name that does not fit a repository or this disk get a warning.

    Files beside the models, hidden files and `__pycache__` are left out without a warning.
    """
    units: dict[UnitKey, dict[str, RemoteFile]] = {}
    warnings: list[str] = []
    for folder in sorted(listing.folders):
        parts = folder.split("/")
        if len(parts) == 2 and is_model_name(parts[0]) and (number := parse_version(parts[1])) is not None:
            units.setdefault(UnitKey(parts[0], number), {})
    for file in sorted(listing.files, key=lambda item: item.path):
        parts = file.path.split("/")
        if len(parts) < 2 or any(is_ignored(part) and part not in ("..", ".") for part in parts):
            continue
        if not is_model_name(parts[0]) or not _is_fit(file.path, parts):
            warnings.append(f"{file.path[:200]!r} was skipped: its name does not fit a file of a model")
            continue
        number = parse_version(parts[1]) if len(parts) > 2 else None
        key = UnitKey(parts[0], number)
        units.setdefault(key, {})["/".join(parts[1 if number is None else 2 :])] = file
    return FetchPlan({key: _without_conflicts(key, files, warnings) for key, files in units.items()}, tuple(warnings))


def _is_fit(path: str, parts: list[str]) -> bool:
    """Return whether a path stays inside its model on any file system, and can be written on this one."""
    return (
        len(path) <= MAX_PATH_CHARS
        and path.isprintable()
        and "\\" not in path
        and all(part not in ("", ".", "..") and len(part.encode()) <= MAX_NAME_BYTES for part in parts)
        and not (len(parts) == 2 and parse_version(parts[1]) is not None)
    )


def _without_conflicts(key: UnitKey, files: dict[str, RemoteFile], warnings: list[str]) -> dict[str, RemoteFile]:
    """Return the files that are not also folders: an object store can hold both 'a' and 'a/b'."""
    folders = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
    both = folders & files.keys()
    warnings.extend(f"'{files[name].path}' was skipped: it is also a folder" for name in sorted(both))
    return {name: file for name, file in files.items() if name not in both}
