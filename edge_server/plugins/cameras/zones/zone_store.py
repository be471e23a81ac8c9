"""Store of zones and lines that were changed over HTTP: in the sources file, or else in a change file in the state
folder, which wins over the sources file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.zones.sources_file_edit import CannotEdit, edit_zones
from edge_server.plugins.cameras.zones.zone_settings import (
    LineEntry,
    ZoneEntry,
    entries_as_plain,
    parse_lines,
    parse_zones,
)
from edge_server.repository.disk.replace_file import replace_file

_LOG = logging.getLogger(__name__)

CHANGE_FILE = "camera_zones.json"
SOURCES_FILE, STATE_FOLDER = "sources_file", "state_folder"
MAX_FILE_BYTES = 4 * 1024 * 1024


class Shapes(NamedTuple):
    """Zones and lines of a source."""

    zones: tuple[ZoneEntry, ...] = ()
    lines: tuple[LineEntry, ...] = ()


class ZoneStore:
    """Keeps changes. One thread at a time may use it. `sources_file` "" or `state_dir` "": there is none."""

    def __init__(self, sources_file: str, state_dir: str) -> None:
        self._sources_file = sources_file
        self._change_file = Path(state_dir) / CHANGE_FILE if state_dir else None
        self.changes: Mapping[str, Shapes] = _read_changes(self._change_file)
        """Source -> its zones and lines of the change file."""

    def save(self, source: str, shapes: Shapes, *, is_in_file: bool) -> str:
        """Keep the zones and lines of a source. Return SOURCES_FILE or STATE_FOLDER, where they are now.

        `is_in_file`: the source is one of the sources file. Raises InvalidRequest if they cannot be kept.
        """
        problem = "it is not in a sources file"
        if is_in_file:
            try:
                self._edit(source, shapes)
            except CannotEdit as error:
                problem = f"the sources file cannot be changed: {error}"
            except ValueError as error:
                raise InvalidRequest(f"the sources file is not TOML: {error}") from None
            except OSError as error:
                problem = f"the sources file cannot be written: {error.strerror}"
            else:
                if source in self.changes:
                    self._write_changes({name: kept for name, kept in self.changes.items() if name != source})
                return SOURCES_FILE
        if self._change_file is None:
            raise InvalidRequest(
                f"zones of '{source}' cannot be kept: {problem}, and the server has no state folder (--state-dir)"
            )
        self._write_changes({**self.changes, source: shapes})
        _LOG.info("source '%s': its zones are kept in '%s', because %s", source, self._change_file, problem)
        return STATE_FOLDER

    def _edit(self, source: str, shapes: Shapes) -> None:
        path = os.path.realpath(self._sources_file)
        found = os.stat(path)
        if not os.access(path, os.W_OK):
            raise CannotEdit("it is read-only")
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise CannotEdit("it is too large")
        _replace_file(path, edit_zones(text.decode(), source, *shapes).encode(), found)

    def _write_changes(self, changes: Mapping[str, Shapes]) -> None:
        assert self._change_file is not None
        document = {
            source: {"zones": entries_as_plain(kept.zones), "lines": entries_as_plain(kept.lines)}
            for source, kept in changes.items()
        }
        text = json.dumps(document, indent=1)
        if len(text) > MAX_FILE_BYTES:
            raise InvalidRequest(f"zones cannot be kept: '{self._change_file}' would have over {MAX_FILE_BYTES} bytes")
        try:
            self._change_file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._change_file, text.encode())
        except OSError as error:
            raise InvalidRequest(f"zones cannot be kept: '{self._change_file}': {error.strerror}") from None
        self.changes = changes


def _read_changes(path: Path | None) -> Mapping[str, Shapes]:
    if path is None or not path.exists():
        return {}
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"expected at most {MAX_FILE_BYTES} bytes, given more")
        document = json.loads(text)
        return {
            str(source): Shapes(parse_zones(kept["zones"]), parse_lines(kept["lines"]))
            for source, kept in document.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        _LOG.error("'%s' is ignored, the zones of the sources file are used: %s", path, error)
        return {}


def _replace_file(path: str, data: bytes, before: os.stat_result) -> None:
    """Replace a file in one step, with the same owner and permissions. Raises OSError, and CannotEdit if it is no
    longer the file `before`."""
    part = f"{path}.{secrets.token_hex(4)}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            made = os.fstat(descriptor)
            if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
                os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        now = os.stat(path)
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
            raise CannotEdit("somebody else changes it just now")
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
