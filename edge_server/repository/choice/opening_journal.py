"""Journal on disk of the model versions that are being opened: from it the next start learns which version ended the
server.

A runtime that crashes takes the server along, and a service manager starts it again, with the same models.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from edge_server.errors import LoadError
from edge_server.repository.disk.replace_file import replace_file

log = logging.getLogger(__name__)

FILE_NAME = "openings.json"
MAX_FILE_BYTES = 1 << 20
MAX_ENDED = 100
"""The oldest are forgotten."""

_TIMES = 2
"""Ends of the server after which a version is not opened any more. The first may be of another cause, such as a signal
or a lack of memory."""

_TURN_TIMEOUT_S = 60.0
"""How long one version waits for another's opening, while it is not known which one ended the last server."""


class _Version(NamedTuple):
    """`fingerprint` is that of its files and configuration."""

    name: str
    number: int
    fingerprint: str


class _Opening(NamedTuple):
    """A version that a process opens. `boot`: number of the start of the machine."""

    version: _Version
    pid: int
    boot: str


class OpeningJournal:
    """The journal in one folder; without one it does nothing. Thread-safe.

    Servers that share a folder keep each other's entries, but for those that they write at the same moment.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._lock = threading.Lock()
        self._open: list[_Opening] = []
        self._ended: list[_Version] = []
        """A version once for each server in turn that ended when it alone was opened."""
        self._suspects: set[_Version] = set()
        """Those that were opened when an earlier server ended. Until each is opened, one is opened at a time."""
        self._turn = threading.Lock()
        self._boot = _boot()
        self._read()

    @contextlib.contextmanager
    def opening(self, name: str, number: int, fingerprint: str) -> Iterator[None]:
        """Note that the version is opened, until the end of the block. Raises LoadError for one whose opening ended two
        servers in turn."""
        version = _Version(name, number, fingerprint)
        if self._ended.count(version) >= _TIMES:
            raise LoadError(
                f"model '{name}' version {number}: the server ended {_TIMES} times without an error message when it "
                "opened it, so it is not opened again until its files or its configuration change: touch config.pbtxt "
                "or the model file to try it again"
            )
        has_turn = bool(self._suspects) and self._turn.acquire(timeout=_TURN_TIMEOUT_S)
        entry = _Opening(version, os.getpid(), self._boot)
        with self._lock:
            self._open.append(entry)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._open = [other for other in self._open if other is not entry]
                self._suspects.discard(version)
                self._ended = [other for other in self._ended if other != version]
                self._write()
            if has_turn:
                self._turn.release()

    def close(self) -> None:
        """Forget what is being opened, and write nothing more: this process is told to end, perhaps in the middle."""
        with self._lock:
            self._open = [entry for entry in self._open if entry.pid != os.getpid()]
            self._write()
            self._path = None

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            content = json.loads(self._path.read_text(encoding="utf-8"))
            found = [
                _Opening(_version(item["version"]), int(item["pid"]), str(item["boot"])) for item in content["open"]
            ]
            self._ended = [_version(item) for item in content["ended"]]
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("'%s' is not used: %s", self._path, error)
            return
        self._open = [entry for entry in found if _is_running(entry.pid)]
        # Not after a loss of power.
        left = {entry.version for entry in found if entry not in self._open and entry.boot == self._boot}
        for name, number, _ in sorted(left):
            log.error("the server ended when it opened model '%s' version %d", name, number)
        if len(left) == 1:
            self._ended += left
        self._ended = self._ended[-MAX_ENDED:]
        self._suspects = left | {version for version in self._ended if self._ended.count(version) < _TIMES}
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        opened = [entry._asdict() for entry in self._open]
        document = {"open": opened, "ended": self._ended}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(document).encode(), is_durable=False)
        except OSError as error:
            log.debug("a model that ends the server will not be known, '%s' cannot be written: %s", self._path, error)
            self._path = None


def _version(item: Any) -> _Version:
    """Return a version of the file. Raises ValueError or TypeError."""
    name, number, fingerprint = item
    return _Version(str(name), int(number), str(fingerprint))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _is_running(pid: int) -> bool:
    """Whether another process with this number runs. A server in a container has the number of the one before."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
