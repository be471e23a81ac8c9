"""Limit on the open client connections of HTTP and gRPC together: when file descriptors run out, closes the one silent
longest.

Models, shared memory and logs need descriptors too, and so does the next client. When few are left, the connection that
has been silent for longest is closed for a new one, whichever listener it belongs to. A listener's own limit of
connections works the same way, among its own connections. A connection is silent while no request is under way on it:
before the first one, between two, during a TLS handshake, and until the head of a request is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from struct import unpack
from termios import FIONREAD
from typing import Any, NamedTuple, Protocol

from edge_server.errors import Refusal

_LOG = logging.getLogger(__name__)

_MIN_SILENCE_S = 0.05
"""A connection that has been silent for less is not closed: its request may be on the way. The connections are also
searched at most once in this time, so that a storm of new ones costs little."""

_MAX_WAIT_S = 0.5
"""Longest time that a new connection waits for room."""

_MAX_CLOSING = 8
_CLOSING_WAIT_S = 0.001
"""Connections are closed on other threads, or in the next turn of a loop. While so many still have their descriptors,
no new one is admitted."""

_EXHAUSTED_WAIT_S = 0.5
"""Wait when there is no descriptor and no silent connection. An immediate retry would waste processor time."""

_COUNT_EVERY_S = 1.0
"""Time after which the server's own descriptors are counted again. The reserve covers what it opens meanwhile."""

_MIN_RESERVE, _MAX_RESERVE = 16, 256
_RESERVE_FRACTION = 4
"""A quarter of the descriptors that the process may have, within bounds, is kept from connections."""

_MIN_CONNECTIONS = 8
"""Number of connections that may use the reserve: a server that uses most of its descriptors itself still serves."""

_ORDER = attrgetter("has_served", "since_s")
"""Connections that have never sent a request are closed first."""

_RETRY_AFTER_S = 5.0
_LOG_EVERY_S = 60.0


class SilentConnection(NamedTuple):
    """Connection without a request under way. `since_s`: time.monotonic at which the last request ended, or at which
    the connection was accepted."""

    has_served: bool
    since_s: float
    listener: LimitedListener
    connection: Any


class LimitedListener(Protocol):
    """A listener and its connections. It accepts on one thread; `connection_count`, `silent_connections` and `run_soon`
    are for any thread. Where it has connections on other threads, it closes a silent one there, and does not wait."""

    @property
    def name(self) -> str:
        """ "HTTP", "gRPC" or "metrics"."""

    @property
    def max_connections(self) -> int: ...

    @property
    def connection_count(self) -> int:
        """Number of connections that have a descriptor, apart from one that waits to be admitted."""

    def silent_connections(self) -> list[SilentConnection]:
        """Return the silent connections. A connection that changes meanwhile may be missing."""

    def run_soon(self, call: Callable[[], None]) -> None:
        """Make a call on the listener's thread. It is dropped if the listener is closed."""

    def close_silent(self, silent: SilentConnection, on_closed: Callable[[], None]) -> bool:
        """Close a connection if it has been silent since, and call `on_closed` when its descriptor is free.

        Return False, without the call, if it has not, or has received bytes. For the listener's thread.
        """


class ConnectionLimit:
    """Decides for all listeners of a server whether a new connection is served, and which silent one ends for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[LimitedListener] = []
        self._silent: dict[LimitedListener, list[SilentConnection]] = {}
        """Silent connections at the last search. The next one to be closed comes last."""
        self._searched_s = -_MIN_SILENCE_S
        self._have_silent: frozenset[LimitedListener] = frozenset()
        """Listeners that had a silent connection at the last search."""
        self._have_strangers: frozenset[LimitedListener] = frozenset()
        """Listeners of which one had never sent a request. There may be more by now."""
        self._closing: Counter[LimitedListener] = Counter()
        """Connections that were chosen to be closed, and still have their descriptors."""
        self._other_file_count = 0
        self._counted_s = -_COUNT_EVERY_S
        self._logged_s: dict[str, float] = {}

    def add(self, listener: LimitedListener) -> None:
        """Add a listener, before it accepts its first connection."""
        with self._lock:
            self._listeners.append(listener)

    def remove(self, listener: LimitedListener) -> None:
        """Remove a listener that accepts no more connections. It may be unknown."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            self._silent.pop(listener, None)

    def admit(self, listener: LimitedListener, accepted_s: float) -> float:
        """Decide about a connection that was accepted at `accepted_s` (time.monotonic): return 0.0 if it is to be
        served now, else the seconds after which to ask again; until then the listener must accept no other.

        Raises Refusal if there is no room, and no silent connection. For the listener's thread.
        """
        with self._lock:
            closing = self._closing.copy()
        if closing.total() >= _MAX_CLOSING:
            return _CLOSING_WAIT_S
        if listener.connection_count - closing[listener] >= listener.max_connections:
            text = f"{listener.max_connections} {listener.name} connections are open already"
            closed_count, wait_s = self._close_silent(listener, [listener], 1)
        else:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if files == resource.RLIM_INFINITY:
                return 0.0
            listeners = list(self._listeners)
            self._count_other_files(listeners)
            connection_count = sum(item.connection_count for item in listeners)
            reserve = max(_MIN_RESERVE, min(_MAX_RESERVE, files // _RESERVE_FRACTION))
            excess = self._other_file_count + connection_count + 1 - (files - reserve)
            excess -= closing.total()
            if excess <= 0 or connection_count < _MIN_CONNECTIONS:
                return 0.0
            text = f"all but {reserve} of {files} file descriptors are in use"
            closed_count, wait_s = self._close_silent(listener, listeners, excess)
        if closed_count:
            self._log(f"{text}: the longest idle connections are closed for new ones")
            return 0.0
        left_s = accepted_s + _MAX_WAIT_S - time.monotonic()
        if wait_s and left_s > 0:
            return min(wait_s, left_s)
        self._log(f"{text}, and none is idle: new ones are refused")
        raise Refusal(text, retry_after_s=_RETRY_AFTER_S)

    def _count_other_files(self, listeners: list[LimitedListener]) -> None:
        """Count the descriptors that are no connections, if the last count is old."""
        now_s = time.monotonic()
        if now_s - self._counted_s < _COUNT_EVERY_S:
            return
        connection_count = sum(item.connection_count for item in listeners)
        # Without a free descriptor, the old count has to do.
        with contextlib.suppress(OSError):
            file_count = len(os.listdir("/proc/self/fd"))
            # Other threads open and close connections meanwhile. The lower count of connections makes the server's own
            # files too many for a while, which closes idle connections; too few would use up the descriptors.
            connection_count = min(connection_count, sum(item.connection_count for item in listeners))
            # Without the folder itself, and the connection that is to be admitted.
            self._other_file_count = file_count - 2 - connection_count
            self._counted_s = now_s

    def accept_failed(self, listener: LimitedListener, error: OSError) -> float:
        """Close a silent connection, because there was no descriptor for a new one. Return the seconds after which to
        accept again. For the listener's thread."""
        closed_count, wait_s = self._close_silent(listener, list(self._listeners), 1)
        reaction = "the longest idle connection is closed" if closed_count or wait_s else "new connections wait"
        self._log(f"no {listener.name} connection can be accepted: {error.strerror}; {reaction}")
        return _CLOSING_WAIT_S if closed_count else wait_s or _EXHAUSTED_WAIT_S

    def _close_silent(self, own: LimitedListener, candidates: list[LimitedListener], wanted: int) -> tuple[int, float]:
        """Close up to `wanted` silent connections of the candidates, of which `own` lives on this thread.

        Return the number of closed ones, and if that is 0, the seconds after which there may be one; 0.0 if there is
        none.
        """
        closed_count = 0
        while closed_count < wanted:
            now_s = time.monotonic()
            with self._lock:
                silent = self._longest_silent(candidates, now_s)
                if silent is None:
                    next_search_s = self._searched_s + _MIN_SILENCE_S
                    return closed_count, next_search_s - now_s if self._have_silent.intersection(candidates) else 0.0
                wait_s = silent.since_s + _MIN_SILENCE_S - now_s
                if wait_s > 0:
                    return closed_count, wait_s
                self._silent[silent.listener].pop()
                self._closing[silent.listener] += 1
            if silent.listener is not own:
                silent.listener.run_soon(partial(self._close_later, silent))
                closed_count += 1
            elif self._close(silent):
                closed_count += 1
        return closed_count, 0.0

    def _longest_silent(self, candidates: list[LimitedListener], now_s: float) -> SilentConnection | None:
        if now_s - self._searched_s >= _MIN_SILENCE_S:
            self._searched_s = now_s
            self._silent = {
                item: sorted(item.silent_connections(), key=_ORDER, reverse=True) for item in self._listeners
            }
            self._have_silent = frozenset(item for item, found in self._silent.items() if found)
            self._have_strangers = frozenset(
                item for item in self._have_silent if not self._silent[item][-1].has_served
            )
        next_ones = [found[-1] for item in candidates if (found := self._silent.get(item))]
        longest = min(next_ones, key=_ORDER, default=None)
        if longest is not None and longest.has_served and self._have_strangers.intersection(candidates):
            return None
        return longest

    def _close(self, silent: SilentConnection) -> bool:
        def on_closed() -> None:
            with self._lock:
                self._closing[silent.listener] -= 1

        is_closed = silent.listener.close_silent(silent, on_closed)
        if not is_closed:
            on_closed()
        return is_closed

    def _close_later(self, silent: SilentConnection) -> None:
        self._close(silent)

    def _log(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(text, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_s[text] = now_s
            _LOG.warning("%s", text)


def raise_file_limit() -> None:
    """Raise the number of files that this process may open to the limit that the system sets for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a hard limit above the kernel's fs.nr_open
        _LOG.warning("the limit of open files stays at %d: %s", soft, error)


def has_unread_bytes(fd: int) -> bool:
    """Return whether bytes of the client wait in a socket."""
    return bool(unpack("i", fcntl.ioctl(fd, FIONREAD, bytes(4)))[0])
