"""Sender of messages to systemd by sd_notify(3): readiness, status and watchdog.

No library of systemd is needed. Without $NOTIFY_SOCKET each call does nothing. `WatchdogFeeder` feeds the watchdog only
after all health checks have passed, never from a thread of its own.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

_MAX_STATUS_LENGTH = 512
"""Most characters of a status line: a datagram and a screen have limits."""

MAX_LOOP_LAG_S = 1.0
"""Delay of the event loop, in seconds, from which it counts as blocked."""

FEEDS_PER_PERIOD = 3
"""Feeds per watchdog timeout; sd_watchdog_enabled(3) asks for at least two."""

Check = Callable[[], str]
"""Health check: returns a description of the problem, "" when there is none."""


class ServiceManager:
    """Sends messages to systemd's notification socket. For any thread; never waits, never raises.

    `watchdog_s` is the timeout of systemd's watchdog, 0 for none.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        # "@name" means an abstract socket, whose address begins with NUL.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._status = ""
        self._has_failed = False
        self.watchdog_s = watchdog_s if address else 0.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> ServiceManager:
        """Return the manager described by $NOTIFY_SOCKET, $WATCHDOG_USEC and $WATCHDOG_PID.

        The watchdog of another process (sd_watchdog_enabled(3)) is not used.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            # An address "vsock:..." is for a whole virtual machine.
            return cls()
        microseconds = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        watched = is_ours and microseconds.isascii() and microseconds.isdigit()
        return cls(address, int(microseconds) / 1e6 if watched else 0.0)

    @property
    def is_present(self) -> bool:
        """Whether a service manager listens for messages."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Report that the start, or a reload, is complete."""
        self._send("READY=1", self._status_line(status))

    def reloading(self, status: str) -> None:
        """Report that a reload has begun; `ready` ends it."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}", self._status_line(status))

    def stopping(self, status: str, at_most_s: float) -> None:
        """Report that the shutdown has begun and takes at most `at_most_s`."""
        self._send("STOPPING=1", _extension(at_most_s), self._status_line(status))

    def extend(self, seconds: float) -> None:
        """Ask for `seconds` more for the current start or stop."""
        self._send(_extension(seconds))

    def feed(self) -> None:
        """Reset the watchdog's timeout."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Show a line in `systemctl status`; send it only when it changes."""
        before = self._status
        line = self._status_line(text)
        if self._status != before:
            self._send(line)

    def _status_line(self, text: str) -> str:
        self._status = " ".join(text.split())[:_MAX_STATUS_LENGTH]
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
                _log.warning("cannot send '%s' to the service manager at $NOTIFY_SOCKET: %s", lines[0], error)
            self._has_failed = True


class WatchdogFeeder:
    """Feeds the watchdog at the beats of the event loop while all checks pass. Used by the loop's thread alone.

    A beat that finds a problem does not feed; the next beat checks again. A short problem therefore has no consequence.
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
        """The problem found at the last beat, "" for none."""
        return self._problem

    def beat(self, lag_s: float) -> None:
        """Run the checks after a beat that was `lag_s` late, and feed the watchdog if it is due and all checks pass."""
        if lag_s >= MAX_LOOP_LAG_S:
            problem = f"the event loop was {lag_s:.1f} s late"
        else:
            problem = next((problem for check in self._checks if (problem := check())), "")
        if problem and not self._problem:
            _log.error("the watchdog of the service manager is not fed: %s", problem)
        elif self._problem and not problem:
            _log.info("the problem is over: the watchdog is fed again")
        self._problem = problem
        if problem or not self._manager.watchdog_s:
            return
        now_s = self._clock()
        if self._fed_s is None or now_s - self._fed_s >= self._manager.watchdog_s / FEEDS_PER_PERIOD:
            self._fed_s = now_s
            self._manager.feed()


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"
