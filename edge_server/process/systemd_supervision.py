"""Supervision by systemd: readiness and watchdog messages, reload at SIGHUP, and the end of the process.

What SIGHUP reloads: the log settings, the certificates and keys of HTTPS and gRPC, the bearer tokens, the key that
models must be signed with, and, in mode poll, what is in the repositories. Everything else that changed in the
configuration is named in the log as what takes a restart; a configuration that cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_server.config import ConfigError, ServerConfig
from edge_server.core.exit_code import ExitCode
from edge_server.core.status_reports import IndexEntry
from edge_server.errors import EdgeServerError
from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.hang_watchdog import HangWatchdog
from edge_server.telemetry.service_manager import Check, ServiceManager, WatchdogFeeder

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""How often the event loop shows that it turns; more often where the watchdog is impatient."""

_START_EXTENSION_S = 30.0
"""For how much time is asked, again and again, while models load: a start that is well may take its time."""

_EXTEND_EVERY_S = 10.0

_LONGEST_START_S = 3600.0
"""How long a start may be extended in all: engines are built for minutes, not for hours."""

Reread = Callable[[], ServerConfig]
"""Reads flags, environment and file anew. Raises ConfigError."""

Reload = Callable[[ServerConfig], None]
"""Takes over its part of a configuration. Raises EdgeServerError or ConfigError, and changes nothing then."""


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """Environment of the process: the service manager, and a function that reads the configuration again (None:
    none)."""

    manager: ServiceManager = dataclasses.field(default_factory=ServiceManager)
    reread: Reread | None = None


class Supervision:
    """Lives on the event loop of the server, from `begin` to `end`.

    `checks` are asked at each beat, on the loop: they must return at once. `describe` tells what is served, in a line.
    """

    def __init__(
        self,
        config: ServerConfig,
        surroundings: ProcessEnvironment,
        checks: Sequence[Check],
        describe: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._manager = surroundings.manager
        self._reread = surroundings.reread
        self._describe = describe
        self._clock = clock
        self._feeder = WatchdogFeeder(self._manager, checks, clock=clock)
        self._reloads: list[tuple[tuple[str, ...], Reload]] = []
        self._beating: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._is_reload_due = False
        self._began_s = clock()
        self._extended_s: float | None = None
        self._is_started = False
        self._is_stopping = False

    def begin(self) -> None:
        """Start the watchdog messages if a service manager listens."""
        self._began_s = self._clock()
        if self._manager.is_present:
            self._beating = asyncio.get_running_loop().create_task(self._beat_on())

    def add_reload(self, names: Sequence[str], reload: Reload) -> None:
        """Have SIGHUP call `reload`, which takes over the settings of these names ("log.format")."""
        self._reloads.append((tuple(names), reload))

    def started(self) -> None:
        """Report that the first desired state is reached."""
        self._is_started = True
        self._manager.ready(self._describe())

    def stopping(self, at_most_s: float) -> None:
        """The server drains, for so long at most."""
        self._is_stopping = True
        self._manager.stopping("finishing what is in flight", at_most_s)

    async def end(self) -> None:
        """Stop beating. May be called without `begin`, and again."""
        tasks = [task for task in (self._beating, self._reloading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._beating = self._reloading = None

    # -- the beat -----------------------------------------------------------------------------------------------------

    async def _beat_on(self) -> None:
        period_s = min(BEAT_S, self._manager.watchdog_s / 8) if self._manager.watchdog_s else BEAT_S
        due_s = self._clock()
        while True:
            self._beat(self._clock() - due_s)
            due_s = self._clock() + period_s
            await asyncio.sleep(period_s)

    def _beat(self, lag_s: float) -> None:
        self._feeder.beat(lag_s)
        problem = self._feeder.problem
        if self._is_stopping or self._reloading is not None:
            return
        if self._is_started:
            self._manager.status(f"NOT WELL: {problem}" if problem else self._describe())
            return
        self._manager.status(f"starting: {self._describe()}")
        now_s = self._clock()
        is_due = self._extended_s is None or now_s - self._extended_s >= _EXTEND_EVERY_S
        if is_due and not problem and now_s - self._began_s < _LONGEST_START_S:
            self._extended_s = now_s
            self._manager.extend(_START_EXTENSION_S)

    # -- reload -------------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Begin to reload. One that is under way may have read already: it reads once more."""
        self._is_reload_due = True
        if self._reloading is None and not self._is_stopping:
            self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        try:
            while self._is_reload_due:
                self._is_reload_due = False
                if self._is_started:
                    self._manager.reloading("reloading")
                await asyncio.to_thread(self._take_over)
        finally:
            self._reloading = None
            if self._is_started:
                self._manager.ready(self._describe())

    def _take_over(self) -> None:
        if self._reread is None:
            log.warning("SIGHUP: this server was started in a way that its configuration cannot be read anew")
            return
        try:
            config = self._reread()
        except ConfigError as error:
            log.error("SIGHUP: nothing was reloaded: %s", error)
            return
        known = {name for names, _ in self._reloads for name in names}
        changed = _changed(self._config, config)
        for names, reload in self._reloads:
            try:
                reload(config)
            except (EdgeServerError, ConfigError) as error:
                log.error("SIGHUP: %s stays as it was: %s", ", ".join(names) or "the repository", error)
        late = sorted(changed - known)
        if late:
            log.warning("SIGHUP: changed, and takes a restart: %s", ", ".join(late))
        log.info("SIGHUP: the configuration was read anew")


def summary(entries: Sequence[IndexEntry]) -> str:
    """Return one line about served and failed models, for `systemctl status`."""
    ready = {entry.name for entry in entries if entry.state == "READY"}
    failed = [entry for entry in entries if entry.state == "UNAVAILABLE" and not entry.reason.startswith("unloaded")]
    words = f"{len(ready)} model{'' if len(ready) == 1 else 's'} served"
    if failed:
        first = failed[0]
        words += f", {len(failed)} NOT: {first.name} {first.version} ({first.reason})"
    return words


def _changed(before: ServerConfig, after: ServerConfig) -> set[str]:
    """Return the names of settings whose values differ."""
    return {name for name, value in _flat(after).items() if value != _flat(before)[name]}


def _flat(config: ServerConfig) -> Mapping[str, object]:
    values: dict[str, object] = {}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        if dataclasses.is_dataclass(part):
            values |= {f"{section.name}.{item.name}": getattr(part, item.name) for item in dataclasses.fields(part)}
        else:
            values[section.name] = part
    return values


class HungRunCheck:
    """The check that no run of an instance takes longer than `limit_s`; 0: any run may take any time."""

    def __init__(
        self, loaded: Callable[[], Sequence[ServedVersion]], limit_s: float, clock_ns: Callable[[], int]
    ) -> None:
        self._loaded = loaded
        self._limit_s = limit_s
        self._clock_ns = clock_ns
        self._watch = HangWatchdog(limit_s)

    def __call__(self) -> str:
        if self._limit_s <= 0:
            return ""
        hung = self._watch.find_hung(self._loaded(), self._clock_ns())
        if not hung:
            return ""
        version, instance = hung[0]
        return (
            f"instance {instance} of model '{version.name}' version {version.version} has been in one run for more "
            f"than {self._limit_s:g} s"
        )


class EndRequest:
    """Request to drain and end the process with an exit code. Given once, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None
        self.code: ExitCode | None = None

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the request is given, or now if it was given before."""
        with self._lock:
            self._wake = wake
            is_given = self.code is not None
        if is_given:
            wake()

    def give(self, code: ExitCode, reason: str) -> None:
        """End the server; `reason` goes to the log. A second order changes nothing."""
        with self._lock:
            if self.code is not None:
                return
            self.code, wake = code, self._wake
        log.error("ending with exit code %d (%s): %s", code, code.name, reason)
        if wake is not None:
            wake()
