"""Load only what was looked at: the files that a wish was made from, or nothing.

Between the look that makes a wish and the load that carries it out lies time: loads wait for one another. A
configuration that is corrected meanwhile must not be served under the wish of the wrong one, which asked for other
versions, and would have the right ones unloaded; nor a file that is being overwritten under that of its predecessor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edge_server.core.version_lifecycle import Resolved
from edge_server.errors import ChangedWhileLoading, EdgeServerError
from edge_server.repository.file_fingerprint import children, digest, lines
from edge_server.repository.resolve import ResolveOptions, resolve
from edge_server.repository.scan import ModelDirectory, read_entries


def resolve_as_seen(
    model: ModelDirectory,
    version: int,
    options: ResolveOptions,
    config_json: str | None = None,
    passed_over: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve a version as `resolve` does, from the very files that `model` was made from.

    Raises ChangedWhileLoading when they are others by now, or become others until the version is open (`confirm`).
    Files that a model adds while it is opened change nothing.
    """
    files = _Files.as_seen(model, version)
    try:
        resolved = resolve(model, version, options, config_json, passed_over or {})
    except EdgeServerError:
        # Half a file has no error of its own.
        files.confirm()
        raise
    files.confirm()

    def confirm() -> None:
        resolved.confirm()
        files.confirm()

    return replace(resolved, confirm=confirm)


@dataclass(frozen=True, slots=True)
class _Files:
    """What a version is made from, folder by folder, as `fingerprint.lines` describes it."""

    model: ModelDirectory
    version: int
    outside: tuple[str, ...]
    inside: tuple[str, ...]

    @classmethod
    def as_seen(cls, model: ModelDirectory, version: int) -> _Files:
        """Return the files as they are, which must be those that were looked at. Raises ChangedWhileLoading."""
        outside, inside = _look(model, version)
        if f"{digest(outside)}.{digest(inside)}" != model.fingerprint_of(version):
            raise ChangedWhileLoading(
                f"model '{model.name}' version {version}: its files in '{model.path}' changed before it was loaded"
            )
        return cls(model, version, outside, inside)

    def confirm(self) -> None:
        """Raise ChangedWhileLoading when one of the files is another, or gone."""
        outside, inside = _look(self.model, self.version)
        folder = self.model.path / str(self.version)
        for place, before, now in ((self.model.path, self.outside, outside), (folder, self.inside, inside)):
            lost = set(before).difference(now)
            if lost:
                raise _changed(place, min(lost))


def _look(model: ModelDirectory, version: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    folder = model.path / str(version)
    try:
        return lines(model.path, read_entries(model.path).others), lines(folder, children(folder))
    except OSError as error:
        raise ChangedWhileLoading(
            f"model '{model.name}' version {version}: '{error.filename or folder}' changed before it was loaded: "
            f"{error.strerror}"
        ) from error


def _changed(place: Path, line: str) -> ChangedWhileLoading:
    return ChangedWhileLoading(f"'{place / line.partition(chr(0))[0]}' changed while it was loaded")
