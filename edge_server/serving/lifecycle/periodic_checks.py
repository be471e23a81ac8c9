"""Periodic checks of the models, on the timer's thread: unload idle models, log long loads, and fail versions whose run
hangs. A thread inside a runtime cannot be stopped."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable

from edge_server.core.version_lifecycle import VersionState
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.model_table import ModelTable
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import MODEL_HUNG, EventQueue

log = logging.getLogger(__name__)

_CHECKS = 4
"""Number of checks for idle models and hung runs within a timeout."""

LONG_LOAD_S = 60.0
"""Interval at which loads that take long, and may hang, are logged."""


class HangWatchdog:
    """Finds instances that are in the same run for `timeout_s`. One thread calls it repeatedly.

    Between two calls it keeps (version, instance) -> (run, time first seen) of running instances only, and no reference
    to a version: the number of a version that is gone may be used again.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._seen: dict[tuple[int, str], tuple[weakref.ref[ServedVersion], int, int]] = {}

    def find_hung(self, versions: Iterable[ServedVersion], now_ns: int) -> list[tuple[ServedVersion, str]]:
        """Return the versions with a hanging instance, each with the name of one."""
        seen: dict[tuple[int, str], tuple[weakref.ref[ServedVersion], int, int]] = {}
        hung: dict[int, tuple[ServedVersion, str]] = {}
        for version in versions:
            for name, number in version.run_numbers.items():
                if number % 2 == 0:
                    continue
                key = (id(version), name)
                before = self._seen.get(key)
                is_same = before is not None and before[0]() is version and before[1] == number
                since_ns = before[2] if before is not None and is_same else now_ns
                seen[key] = (weakref.ref(version), number, since_ns)
                if now_ns - since_ns >= self._timeout_ns:
                    hung[id(version)] = (version, name)
        self._seen = seen
        return list(hung.values())


class PeriodicChecks:
    """Begin when they are made, and end when the table is closed."""

    def __init__(self, table: ModelTable, timer: Timer, settings: LifecycleSettings, events: EventQueue) -> None:
        self._table = table
        self._timer = timer
        self._hang_timeout_s = settings.hang_timeout_s
        self._events = events
        self._hangs = HangWatchdog(settings.hang_timeout_s)
        self._each_second: list[Callable[[], None]] = []
        self._repeat(LONG_LOAD_S, self._log_long_loads)
        self._repeat(min(settings.idle_unload_s / _CHECKS or 1.0, 1.0), self._check_each_second)
        if settings.hang_timeout_s > 0:
            self._repeat(settings.hang_timeout_s / _CHECKS, self._check_for_hangs)

    def call_each_second(self, work: Callable[[], None]) -> None:
        """Call `work`, which must return at once, at least once a second: with the check for idle models, so that an
        idle server does not wake more often."""
        self._each_second.append(work)

    def _check_each_second(self) -> None:
        self._table.unload_idle()
        for work in self._each_second:
            work()

    def _repeat(self, period_s: float, work: Callable[[], None]) -> None:
        def again() -> None:
            if not self._table.is_closed:
                # Scheduled first, so that an error of `work`, which the timer logs, does not end the repetition.
                self._repeat(period_s, work)
                work()

        self._timer.call_at(time.monotonic_ns() + int(period_s * 1e9), again)

    def _log_long_loads(self) -> None:
        """Log the loads that take long, and may hang. Nothing ends them."""
        with self._table.reading() as models:
            loading = [(item, item.loading, item.loading_since_ns) for item in models.values() if item.loading]
        for model, action, since_ns in loading:
            seconds = (time.monotonic_ns() - since_ns) / 1e9
            if seconds >= LONG_LOAD_S:
                log.warning("model '%s' version %d is still loading after %.0f s", model.name, action.version, seconds)

    def _check_for_hangs(self) -> None:
        versions = [item for item in self._table.loaded_versions() if item.state is VersionState.READY]
        for version, instance in self._hangs.find_hung(versions, time.monotonic_ns()):
            late = f"did not come back within --hang-timeout-secs={self._hang_timeout_s:g}"
            reason = (
                f"instance {instance} of model '{version.name}' version {version.version} hangs: its runtime {late}"
            )
            if version.end_hung_run(instance, f"{late} and was killed"):
                log.error("%s; its process was killed", reason)
                self._events.add(
                    MODEL_HUNG,
                    model=version.name,
                    version=version.version,
                    generation=version.generation,
                    reason=reason,
                )
                self._events.publish()
            else:
                self._table.fail_hung(version, reason)
