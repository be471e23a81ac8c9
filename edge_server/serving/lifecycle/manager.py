"""Class `Manager`, owner of all models of a server: creates and closes the loader, the reconciler and the router of
requests, and reports the states of the models.

The `ModelTable` decides, the `Reconciler` loads and unloads, and the `Router` answers requests without a call to the
manager.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from edge_server.backends.base import ServerCalls
from edge_server.core.ensemble_graph import topological_order
from edge_server.core.status_reports import IndexEntry, VersionReport
from edge_server.core.version_lifecycle import VersionState
from edge_server.errors import Draining
from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.serving.execution.gpu_loss_and_memory import Gpus
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.execution.transient_load_errors import MACHINE_ERRORS
from edge_server.serving.lifecycle.event_queue import ModelEventQueue
from edge_server.serving.lifecycle.hang_watchdog import HangWatchdog
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.loader import Loader
from edge_server.serving.lifecycle.model_table import ModelTable
from edge_server.serving.lifecycle.reconciler import MemoryCheck, Opening, Reconciler
from edge_server.serving.lifecycle.router import Router
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import MODEL_HUNG, PublishEvent

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""How long `close` waits for running batches and closing sessions after the drain time."""

_CHECKS = 4
"""Number of checks for idle models and hung runs within a timeout."""

LONG_LOAD_S = 60.0
"""Interval at which loads that take long, and may hang, are logged."""


class Manager:
    """Thread-safe."""

    def __init__(
        self,
        timer: Timer,
        backend_settings: Mapping[str, Mapping[str, str]],
        *,
        load_threads: int = 2,
        publish: PublishEvent | None = None,
        lifecycle: LifecycleSettings | None = None,
        check_memory: MemoryCheck | None = None,
        admission_control: AdmissionControl = ADMIT_ALL,
        limiter: RateLimiter | None = None,
        cache: ResponseCache | None = None,
        gpus: Gpus | None = None,
        server: Callable[[], ServerCalls | None] = lambda: None,
        on_no_fallback: Callable[[str], None] = lambda reason: None,
        opening: Opening = lambda name, version, fingerprint: contextlib.nullcontext(),
    ) -> None:
        """`backend_settings` are those of the backends, by name. `publish` is called with each model event.

        `lifecycle` None: the defaults of LifecycleSettings. `check_memory` None: there is always enough memory.
        `admission_control` is asked before a request runs. `limiter` None: instances run whenever they are free.
        `cache` None: no response cache. `gpus` None: no GPU. `server` returns the server functions for models.
        `on_no_fallback`: see `ModelTable`. `opening`: see `Opening`.
        """
        self._timer = timer
        self._lifecycle = lifecycle = lifecycle or LifecycleSettings()
        self._admission_control = admission_control
        self._events = ModelEventQueue(publish)
        gpus = gpus or Gpus()
        self.table = table = ModelTable(timer, lifecycle, self._events, gpus, on_no_fallback)
        self.router = router = Router(table, timer, lifecycle)
        self._loader = Loader(
            timer,
            backend_settings,
            lifecycle,
            admission_control,
            limiter,
            cache,
            members=router,
            server=server,
            gpus=gpus,
            on_gpu_fault=table.handle_gpu_fault,
        )
        self._reconciler = Reconciler(
            table, self._loader, timer, lifecycle, self._events, load_threads=load_threads, check_memory=check_memory,
            opening=opening,
        )  # fmt: skip
        self.set_desired, self.set_desired_state = table.set_desired, table.set_desired_state
        self.renew, self.wait_settled = table.renew, table.wait_settled
        self.mark_gpu_lost, self.set_keep_alive = table.mark_gpu_lost, table.set_keep_alive
        self.is_member, self.loaded_versions = table.is_member, table.loaded_versions
        # Requests use the router directly.
        self.submit, self.spec, self.is_healthy = router.submit, router.spec, router.is_healthy
        self.route, self.route_request, self.routes_of = router.route, router.route_request, router.routes_of
        self.ready_versions, self.all_ready = router.ready_versions, router.all_ready
        self.end_sequence = router.end_sequence
        self.offered_versions, self.serving_names = router.offered_versions, router.serving_names
        self._hangs = HangWatchdog(lifecycle.hang_timeout_s)
        # A front end's own thread must not hang in a runtime.
        self.callers_may_run = lifecycle.hang_timeout_s <= 0
        self._repeat(LONG_LOAD_S, self._log_long_loads)
        self._each_second: list[Callable[[], None]] = []
        self._repeat(min(lifecycle.idle_unload_s / _CHECKS or 1.0, 1.0), self._check_each_second)
        if lifecycle.hang_timeout_s > 0:
            self._repeat(lifecycle.hang_timeout_s / _CHECKS, self._check_for_hangs)

    # -- status -----------------------------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        with self.table.reading() as models:
            return name in models

    def members_of(self, name: str) -> list[str]:
        """Return the member models of a desired ensemble; empty for any other model."""
        with self.table.reading() as models:
            model = models.get(name)
            return [] if model is None else list(dict.fromkeys(member for member, _ in model.stated.members))

    def wait_engine_builds(self) -> None:
        """Wait until the only models left to load are those whose load builds an engine, and ensembles of them; or
        until the manager is closed."""
        with self.table.reading() as models:
            desired = {name: model.desired for name, model in models.items()}
        members = {name: [member for member, _ in model.members] for name, model in desired.items()}
        building: set[str] = set()
        for name in topological_order(members):
            if desired[name].builds_engine or building.intersection(members[name]):
                building.add(name)
        self.wait_settled(desired.keys() - building)

    def work_share(self) -> float:
        """Return the part of its time that a model may compute now, as the governor decides."""
        return self._admission_control.allowed_fraction

    def failure(self, name: str) -> str | None:
        """Return why a model does not serve all its desired versions, in Triton's words; None if it does."""
        with self.table.reading() as models:
            model = models[name]
            if model.desired.reason:
                return model.desired.reason
            parts = [
                f"version {number} is at UNAVAILABLE state: {why.reason};" for number, why in model.failed().items()
            ]
            return " ".join(parts) or None

    def has_failures(self) -> bool:
        """Return whether any desired version is not served. A version that a request would load counts as served."""
        with self.table.reading() as models:
            return any(
                bool(model.desired.reason) or bool(model.desired.versions.keys() - set(self.offered_versions(name)))
                for name, model in models.items()
            )

    def has_unserved(self, *, ever_served: bool) -> bool:
        """Return whether a desired model has no serving version and none that a request would load.

        `ever_served`: models that have never served since they were added to the desired state do not count.
        """
        with self.table.reading() as models:
            return any(
                bool(model.desired.reason or model.desired.versions)
                and (model.has_served or not ever_served)
                and not self.offered_versions(name)
                for name, model in models.items()
            )

    def resume(self) -> None:
        """Start waiting requests, because admission control allows more than before. Returns at once."""
        for version in self.loaded_versions():
            version.resume()

    def in_flight(self) -> int:
        return sum(version.in_flight for version in self.loaded_versions())

    def index(self) -> list[IndexEntry]:
        """Return every version that lives, failed, or was unloaded, with its state and reason."""
        entries: list[IndexEntry] = []
        with self.table.reading() as models:
            for name, model in sorted(models.items()):
                rows = model.index_rows()
                faults = {number for number, one in model.failures.items() if isinstance(one.cause, MACHINE_ERRORS)}
                entries += [
                    IndexEntry(name, str(version), *rows[version], is_machines_fault=version in faults)
                    for version in sorted(rows)
                ]
                if model.desired.reason:
                    entries.append(IndexEntry(name, "", "UNAVAILABLE", model.desired.reason))
        return entries

    def versions(self, name: str | None = None) -> list[VersionReport]:
        """Return the reports of all loaded, failed and unloaded versions, of one model or of all."""
        with self.table.reading() as models:
            chosen = [(key, model) for key, model in sorted(models.items()) if name in (None, key)]
            return [report for key, model in chosen for report in model.reports(self.routes_of(key))]

    # -- close ------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """Refuse new requests, drain for at most `timeout_s`, and close everything. Return False if requests were
        failed.

        A thread that hangs in a runtime cannot be stopped; it is left behind.
        """
        deadline = time.monotonic() + timeout_s
        for item in self.table.close():
            item.fail(Draining(f"Server is stopping, model '{item.request.model}' is not loaded any more"))
        self._events.publish()
        self.table.wait_finished(deadline - time.monotonic())
        failed_count = sum(version.abandon_waiting() for version in self.loaded_versions())
        self.table.wait_finished(_GRACE_S)
        failed_count += sum(version.abandon_running() for version in self.loaded_versions())
        self._loader.pool.close()
        return failed_count == 0

    # -- periodic work, on the timer's thread -----------------------------------------------------------------------

    def call_each_second(self, work: Callable[[], None]) -> None:
        """Call `work`, which must return at once, at least once a second: with the check for idle models, so that an
        idle server does not wake more often."""
        self._each_second.append(work)

    def _check_each_second(self) -> None:
        self.table.unload_idle()
        for work in self._each_second:
            work()

    def _repeat(self, period_s: float, work: Callable[[], None]) -> None:
        def again() -> None:
            if not self.table.is_closed:
                # Scheduled first, so that an error of `work`, which the timer logs, does not end the repetition.
                self._repeat(period_s, work)
                work()

        self._timer.call_at(time.monotonic_ns() + int(period_s * 1e9), again)

    def _log_long_loads(self) -> None:
        """Log the loads that take long, and may hang. Nothing ends them."""
        with self.table.reading() as models:
            loading = [(item, item.loading, item.loading_since_ns) for item in models.values() if item.loading]
        for model, action, since_ns in loading:
            seconds = (time.monotonic_ns() - since_ns) / 1e9
            if seconds >= LONG_LOAD_S:
                log.warning("model '%s' version %d is still loading after %.0f s", model.name, action.version, seconds)

    def _check_for_hangs(self) -> None:
        versions = [item for item in self.loaded_versions() if item.state is VersionState.READY]
        for version, instance in self._hangs.find_hung(versions, time.monotonic_ns()):
            late = f"did not come back within --hang-timeout-secs={self._lifecycle.hang_timeout_s:g}"
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
                self.table.fail_hung(version, reason)
