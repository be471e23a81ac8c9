"""Checks of the default ports: free, used by a running edge-server, or used by another process."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_server.core.finding import Finding, FindingLevel
from edge_server.telemetry.sysfs import SysfsFiles

DEFAULT_PORTS = {"HTTP": 8000, "gRPC": 8001, "metrics": 8002}

_LISTEN = "0A"
"""TCP_LISTEN in the column `st` of /proc/net/tcp."""


@dataclass(frozen=True, slots=True)
class _Listener:
    """A listening socket. `uid` is its owner; `process` is "edge-server (process 12)", or "" if unknown."""

    uid: int
    process: str
    is_edge_server: bool


def check_ports(defaults: Mapping[str, int] = DEFAULT_PORTS) -> Iterator[Finding]:
    """Report for each port of 127.0.0.1 whether it is free, and if not, which process listens there."""
    for what, port in defaults.items():
        if not _is_taken(port):
            yield Finding("ports", str(port), f"{what}: free")
            continue
        listener = _find_listener(port)
        if listener is not None and listener.is_edge_server:
            yield Finding("ports", str(port), f"{what}: in use by {listener.process}")
        else:
            advice = f"a server started here needs another: --{what.lower()}-port"
            user = ""
            if listener is not None and listener.process:
                user = f" by {listener.process}"
            elif listener is not None:
                user = f" by a process of user {_user_name(listener.uid)}"
                user += "" if os.geteuid() == 0 else "; sudo names it"
            yield Finding("ports", str(port), f"{what}: in use{user}", FindingLevel.NOTE, advice)


def _is_taken(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _find_listener(port: int) -> _Listener | None:
    """Find the process that listens on a port, as far as this user may see it.

    The owner of a socket is visible only for the user's own processes (for root: for all). For a socket of another
    user, an edge-server process of that user is assumed to be the owner.
    """
    files = SysfsFiles("/")
    sockets = {
        columns[9]: int(columns[7])
        for path in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in files.lines(path)
        if len(columns := line.split()) > 9 and columns[3] == _LISTEN and columns[1].endswith(f":{port:04X}")
    }
    if not sockets:
        return None
    uid = next(iter(sockets.values()))
    likely = ""
    for pid in files.names("/proc", r"\d+"):
        words = (files.maybe_text(f"/proc/{pid}/cmdline") or "").split("\0")
        held = _open_files(Path(f"/proc/{pid}"))
        if held is None:
            if _is_edge_server(words) and _owner(Path(f"/proc/{pid}")) == uid:
                likely = f"edge-server (process {pid})"
            continue
        if any(f"socket:[{inode}]" in held for inode in sockets):
            name = "edge-server" if _is_edge_server(words) else " ".join(words)[:60]
            return _Listener(uid, f"{name} (process {pid})", _is_edge_server(words))
    return _Listener(uid, likely, bool(likely))


def _open_files(process: Path) -> set[str] | None:
    """Return the targets of a process's open files, such as "socket:[12]"; None without permission."""
    found = set()
    try:
        for name in os.listdir(process / "fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(process / "fd" / name))
    except PermissionError:
        return None
    except FileNotFoundError:
        return set()
    return found


def _owner(process: Path) -> int | None:
    try:
        return process.stat().st_uid
    except FileNotFoundError:
        return None


def _is_edge_server(words: list[str]) -> bool:
    """Return whether a command line contains `edge-server serve` or `python -m edge_server serve`."""
    return any(
        (Path(first).name == "edge-server" or first == "edge_server") and second == "serve"
        for first, second in itertools.pairwise(words)
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
