"""Telling a service manager how it goes: readiness, status, watchdog, by datagrams as sd_notify(3) describes them.

None of systemd's libraries is needed; without $NOTIFY_SOCKET every call does nothing. `WatchdogFeeder` says when the
watchdog
is fed: never by a thread that lives on by itself, only after asking everything that has to live.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

_LONGEST_STATUS = 512
"""Characters of a status line; more does not fit any screen, and a datagram has its limits."""

MOST_LOOP_LAG_S = 1.0
"""How late the event loop may come to a turn that it was due for, and still count as well."""

FEEDS_PER_PERIOD = 3
"""How often the watchdog is fed in the time after which it bites; sd_watchdog_enabled(3) asks for at least two."""

Check = Callable[[], str]
"""Says what is not well, in words; "" when all is."""


class ServiceManager:
    """One end of the notification socket. May be used by any thread; never waits, never raises.

    `watchdog_s` is after how long without a sign of life the manager acts; 0: it does not watch.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        # "@name" is how an abstract socket is written where NUL cannot be.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._status = ""
        self._has_failed = False
        self.watchdog_s = watchdog_s if address else 0.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> ServiceManager:
        """Return the manager that $NOTIFY_SOCKET, $WATCHDOG_USEC and $WATCHDOG_PID tell of.

        A watchdog that is meant for another process (sd_watchdog_enabled(3)) is not ours to feed.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            # vsock: addresses are for virtual machines that are services as a whole.
            return cls()
        microseconds = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        watched = is_ours and microseconds.isascii() and microseconds.isdigit()
        return cls(address, int(microseconds) / 1e6 if watched else 0.0)

    @property
    def is_present(self) -> bool:
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Tell that the start, or a reload, is complete."""
        self._send("READY=1", self._status_line(status))

    def reloading(self, status: str) -> None:
        """Tell that a reload has begun; `ready` ends it."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}", self._status_line(status))

    def stopping(self, status: str, at_most_s: float) -> None:
        """Tell that the end has begun, and that it may take so long."""
        self._send("STOPPING=1", _extension(at_most_s), self._status_line(status))

    def extend(self, seconds: float) -> None:
        """Ask for so much time from now on for the start, or the stop, that is under way."""
        self._send(_extension(seconds))

    def feed(self) -> None:
        """Give the watchdog a sign of life."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Show a line in `systemctl status`, unless it is shown already."""
        before = self._status
        line = self._status_line(text)
        if self._status != before:
            self._send(line)

    def _status_line(self, text: str) -> str:
        self._status = " ".join(text.split())[:_LONGEST_STATUS]
        return f"STATUS={self._status}"

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        data = "\n".join(lines).encode("utf-8", "replace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.sendto(data, socket.MSG_DONTWAIT, self._address)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _log.warning("the service manager at $NOTIFY_SOCKET cannot be told '%s': %s", lines[0], error)
            self._has_failed = True


class WatchdogFeeder:
    """Decides, at each beat of the event loop, whether the watchdog is fed. Used by the loop's thread alone.

    A beat that finds something not well feeds nothing, and the next one asks again: what passes quickly costs no more
    than the beats in which it lasted.
    """

    def __init__(
        self, manager: ServiceManager, checks: Sequence[Check], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._manager = manager
        self._checks = checks
        self._clock = clock
        self._fed_s: float | None = None
        self._problem = ""

    @property
    def problem(self) -> str:
        """What was not well at the last beat; "" when all was."""
        return self._problem

    def beat(self, lag_s: float) -> None:
        """Take one beat that came `lag_s` late, and feed the watchdog if it is time and all is well."""
        problem = self._find(lag_s)
        if problem and not self._problem:
            _log.error("the watchdog of the service manager is not fed: %s", problem)
        elif self._problem and not problem:
            _log.info("all is well again: the watchdog is fed")
        self._problem = problem
        if problem or not self._manager.watchdog_s:
            return
        now_s = self._clock()
        if self._fed_s is None or now_s - self._fed_s >= self._manager.watchdog_s / FEEDS_PER_PERIOD:
            self._fed_s = now_s
            self._manager.feed()

    def _find(self, lag_s: float) -> str:
        if lag_s >= MOST_LOOP_LAG_S:
            return f"the event loop came {lag_s:.1f} s late to its turn"
        return next((problem for check in self._checks if (problem := check())), "")


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"
