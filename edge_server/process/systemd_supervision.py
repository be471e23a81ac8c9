"""Control of the process by systemd and signals: readiness and watchdog messages, reload at SIGHUP, drain at the end.

SIGHUP reloads the log settings, the certificates and keys of HTTPS and gRPC, the bearer tokens, the public key for
signed models, and, in mode poll, the repositories. The log names every other changed setting, which needs a restart. A
configuration that cannot be read changes nothing. No reload turns off what callers or files must prove.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from edge_server.config import ConfigError, ServerConfig
from edge_server.core.exit_code import ExitCode
from edge_server.core.status_reports import IndexEntry
from edge_server.errors import EdgeServerError
from edge_server.record import record
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.lifecycle.periodic_checks import HangWatchdog
from edge_server.telemetry.systemd_notify import Check, ServiceManager, WatchdogFeeder

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Longest period of the event loop's heartbeat; shorter if the watchdog's timeout is short."""

_START_EXTENSION_S = 30.0
"""Extension of the start timeout, requested again and again while models load without a problem."""

_EXTEND_EVERY_S = 10.0

_MAX_START_S = 3600.0
"""Longest start in all, extensions included: engine builds take minutes, not hours."""

_PROOFS = ("auth.tokens_file", "http.client_ca", "repository.public_key", "repository.requires_checksums")
"""Settings that a reload may change, but not turn off: a configuration file that a full disk has emptied would open the
server. The transports of gRPC keep theirs themselves."""

Reread = Callable[[], ServerConfig]
"""Reads command line, environment and file again. Raises ConfigError."""

Reload = Callable[[ServerConfig], None]
"""Applies its part of a new configuration. On EdgeServerError or ConfigError nothing has changed."""


@record(frozen=True, slots=True)
class ProcessEnvironment:
    """Environment of the process: the service manager, and a function that reads the configuration again, or None."""

    manager: ServiceManager = dataclasses.field(default_factory=ServiceManager)
    reread: Reread | None = None


class Supervision:
    """Sends the state of the server to systemd from `begin` to `end`, and reloads settings. Runs on the event loop.

    Each heartbeat calls `checks`, which must return at once. `describe` returns one line about the served models.
    """

    def __init__(
        self,
        config: ServerConfig,
        environment: ProcessEnvironment,
        checks: Sequence[Check],
        describe: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._manager = environment.manager
        self._reread = environment.reread
        self._describe = describe
        self._clock = clock
        self._feeder = WatchdogFeeder(self._manager, checks, clock=clock)
        self._reloads: list[tuple[tuple[str, ...], Reload]] = []
        self._heartbeat: asyncio.Task[None] | None = None
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
            self._heartbeat = asyncio.get_running_loop().create_task(self._beat_forever())

    def add_reload(self, names: Sequence[str], reload: Reload) -> None:
        """Make SIGHUP call `reload`, which applies the settings of these names, e.g. "log.format"."""
        self._reloads.append((tuple(names), reload))

    def started(self) -> None:
        """Report that the first desired state is reached."""
        self._is_started = True
        self._manager.ready(self._describe())

    def stopping(self, at_most_s: float) -> None:
        """Report that the server drains, for at most `at_most_s`."""
        self._is_stopping = True
        self._manager.stopping("finishing the requests in flight", at_most_s)

    async def end(self) -> None:
        """Stop the heartbeat and a reload. May be called without `begin`, and more than once."""
        tasks = [task for task in (self._heartbeat, self._reloading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._heartbeat = self._reloading = None

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
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
        if is_due and not problem and now_s - self._began_s < _MAX_START_S:
            self._extended_s = now_s
            self._manager.extend(_START_EXTENSION_S)

    # -- reload -------------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Start a reload. A reload in progress reads the configuration again after its end."""
        self._is_reload_due = True
        if self._reloading is None and not self._is_stopping:
            self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        try:
            while self._is_reload_due:
                self._is_reload_due = False
                if self._is_started:
                    self._manager.reloading("reloading")
                await asyncio.to_thread(self._apply_new_config)
        finally:
            self._reloading = None
            if self._is_started:
                self._manager.ready(self._describe())

    def _apply_new_config(self) -> None:
        if self._reread is None:
            log.warning("SIGHUP: the configuration of this server cannot be read again")
            return
        try:
            config = self._reread()
        except ConfigError as error:
            log.error("SIGHUP: nothing was reloaded: %s", error)
            return
        known = {name for names, _ in self._reloads for name in names}
        before, after = _flat(self._config), _flat(config)
        changed = {name for name, value in after.items() if value != before[name]}
        for names, reload in self._reloads:
            try:
                for name in names:
                    if name in _PROOFS and before[name] and not after[name]:
                        raise ConfigError(f"less would be checked without {name}; to turn it off, restart the server")
                reload(config)
            except (EdgeServerError, ConfigError) as error:
                log.error("SIGHUP: %s is unchanged: %s", ", ".join(names) or "the repository", error)
        needs_restart = sorted(changed - known)
        if needs_restart:
            log.warning("SIGHUP: changed, but needs a restart: %s", ", ".join(needs_restart))
        log.info("SIGHUP: the configuration was read again")


def summary(entries: Sequence[IndexEntry]) -> str:
    """Return one line about served and failed models, for `systemctl status`."""
    ready = {entry.name for entry in entries if entry.state == "READY"}
    failed = [entry for entry in entries if entry.state == "UNAVAILABLE" and not entry.reason.startswith("unloaded")]
    text = f"{len(ready)} model{'' if len(ready) == 1 else 's'} served"
    if failed:
        first = failed[0]
        text += f", {len(failed)} NOT: {first.name} {first.version} ({first.reason})"
    return text


def _flat(config: ServerConfig) -> Mapping[str, object]:
    values: dict[str, object] = {}
    tables = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    for name, table in (tables | tables.pop("plugin_tables")).items():
        if dataclasses.is_dataclass(table):
            values |= {f"{name}.{item.name}": getattr(table, item.name) for item in dataclasses.fields(table)}
        else:
            values[name] = table
    return values


class HungRunCheck:
    """Health check: no run of an instance takes longer than `limit_s`; 0: no limit."""

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
    """Request to drain and end the process with an exit code. Submitted once, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None
        self.code: ExitCode | None = None

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the request is submitted, or now if it was submitted before."""
        with self._lock:
            self._wake = wake
            is_submitted = self.code is not None
        if is_submitted:
            wake()

    def submit(self, code: ExitCode, reason: str) -> None:
        """End the server; `reason` goes to the log. A second call has no effect."""
        with self._lock:
            if self.code is not None:
                return
            self.code, wake = code, self._wake
        log.error("ending with exit code %d (%s): %s", code, code.name, reason)
        if wake is not None:
            wake()
