"""Status of an update of this program by its Debian package, for `edge-server status`: the package puts a new version
on trial, and takes it back if it fails (`systemd/deb/program-update`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_server.config import process_environment
from edge_server.plugin import RunningPlugin, StatusPart, StatusRow
from edge_server.plugins.fleet.settings import UPDATE_HOME_VARIABLE

_MAX_RECORD_LENGTH = 4096


class ProgramUpdatePlugin(RunningPlugin):
    """Rows about updates, for a server that follows no signed repository."""

    def status(self) -> Sequence[StatusPart]:
        return read_update_status()


def read_update_status() -> list[StatusRow]:
    """Return a row if a version is on trial, or was taken back and not replaced since. *Blocking* for small files."""
    variable = process_environment().get(UPDATE_HOME_VARIABLE)
    if not variable:
        return []
    home = Path(variable)
    try:
        current = (home / "current").readlink().name
    except OSError:
        return []
    failed, _, reason = _read_record(home / "failed").partition(" ")
    if failed and failed != current:
        return [StatusRow("program", "failed", f"version {failed} was taken back, {current} starts instead: {reason}")]
    on_trial, _, more = _read_record(home / "trial").partition(" ")
    if on_trial == current:
        previous = more.partition(" ")[0]
        return [StatusRow("program", "ok", f"version {current} is on trial; {previous} starts again if it fails")]
    return []


def _read_record(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_RECORD_LENGTH).strip()
    except FileNotFoundError:
        return ""
