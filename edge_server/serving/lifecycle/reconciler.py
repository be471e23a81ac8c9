"""Worker that loads and unloads versions as the model table decides, on a few short-lived threads. Holds no state of a
model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from edge_server.core.model_spec import ModelFile
from edge_server.core.version_lifecycle import ReloadPolicy, Resolved
from edge_server.errors import EdgeServerError, LoadError, OutOfMemory
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.loader import Loader, LoaderThreads, LoadSlot
from edge_server.serving.lifecycle.model_table import Action, Load, ModelTable, Unload
from edge_server.serving.timer import Timer
from edge_server.telemetry.event_bus import EventQueue

log = logging.getLogger(__name__)

_THREAD_RETRY_NS = 1_000_000_000
"""Interval at which a thread is asked for again that the system refused."""

_LOAD_SLOT_TIMEOUT_S = 60.0
"""A load that takes longer does not block other loads any more."""

_CLOSE_COUNT = 8
_CLOSE_SLOT_TIMEOUT_S = 1.0
"""Number of versions that are closed at a time, and the time after which a closing does not block others any more."""


_MEMORY_TIMEOUT_S = 5.0
"""How long a load without enough memory waits for models that are being unloaded, or for a model in use to become
idle."""

_IDLE_CHECK_INTERVAL_S = 0.05
"""Interval at which a load checks whether a model in use has become idle: the end of a request is not reported."""

MemoryCheck = Callable[[ModelFile, int], str | None]
"""Returns why there is no memory for so many instances of a model's file; None if there is."""

Opening = Callable[[str, int, str], AbstractContextManager[None]]
"""Entered for the time in which a runtime opens a version, given by name, number and fingerprint. Raises LoadError for
one that must not be opened."""


class Reconciler:
    """`load_threads` loads and a few closings run at a time; one that takes long or hangs does not count. A draining
    version has no thread. `check_memory` None: there is always enough memory."""

    def __init__(
        self,
        table: ModelTable,
        loader: Loader,
        timer: Timer,
        lifecycle: LifecycleSettings,
        events: EventQueue,
        *,
        load_threads: int,
        check_memory: MemoryCheck | None,
        opening: Opening,
    ) -> None:
        self._table = table
        self._loader = loader
        self._timer = timer
        self._lifecycle = lifecycle
        self._events = events
        self._opening = opening
        self.check_memory: MemoryCheck = check_memory or (lambda file, instance_count: None)
        timeout_s = lifecycle.hang_timeout_s or _LOAD_SLOT_TIMEOUT_S
        self._loads = LoaderThreads(load_threads, timer, timeout_s, partial(self._start_thread, "edge-load"))
        self._closings = LoaderThreads(
            _CLOSE_COUNT, timer, _CLOSE_SLOT_TIMEOUT_S, partial(self._start_thread, "edge-drain")
        )
        table.on_actions = self._start_actions

    def _start_actions(self) -> None:
        """Start all that the table has decided. Any thread; returns at once."""
        while (action := self._table.next_action()) is not None:
            self._start(action)

    def _start(self, action: Action) -> None:
        if isinstance(action, Load):
            self._loads.run(lambda slot: self._load(action, slot))
        elif not isinstance(action, Unload):
            self._closings.run(lambda slot: self._events.publish())
        elif action.has_failed:
            # A thread of its own, because it may never end.
            self._start_thread("edge-close-failed", lambda: self._close_failed(action))
        else:
            action.version.when_drained(lambda: self._closings.run(lambda slot: self._unload(action)))

    def _start_thread(self, name: str, work: Callable[[], None], refused_count: int = 0) -> None:
        """Run `work` on a daemon thread. If the system refuses a thread, try again every second."""
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as error:
            if not refused_count:
                log.error("no thread '%s' for now, it is asked for again every second: %s", name, error)
            when_ns = time.monotonic_ns() + _THREAD_RETRY_NS
            self._timer.call_at(when_ns, lambda: self._start_thread(name, work, refused_count + 1))

    # -- on a thread of its own -------------------------------------------------------------------------------------

    def _load(self, load: Load, slot: LoadSlot) -> None:
        result = self._open(load, slot)
        slot.release()
        self._table.finish(load, result)

    def _open(self, load: Load, slot: LoadSlot) -> ServedVersion | EdgeServerError | None:
        """Return the opened version, or the error; None if the version is no longer desired or must stay evicted."""
        try:
            desired = self._table.begin(load)
            if desired is None:
                return None
            self._events.publish()
            key = load.name, load.action.version, desired.fingerprint
            with self._opening(*key):
                resolved = self._loader.resolve(desired, {})
            if resolved.spec.ensemble is None and not self._free_memory(load, slot, resolved):
                return None
            must_answer = self._table.serves_generated_inputs(load.name)
            with self._opening(*key):
                version = self._loader.open(desired, resolved, load.generation, must_answer=must_answer)
        except EdgeServerError as error:
            return error.detached()
        except BaseException as error:
            # An error of a runtime while it loads affects only this version. Even sys.exit() must not end the thread:
            # the model would stay in LOADING for ever.
            log.exception("model '%s' version %d failed to load", load.name, load.action.version)
            return LoadError(f"{type(error).__name__}: {error}")
        report = version.report()
        log.info(
            "model '%s' version %d is loaded: %s, in %.0f ms",
            report.name, report.version, report.how_it_runs, report.load_s * 1000,
        )  # fmt: skip
        for warning in report.warnings:
            log.warning("model '%s': %s", report.name, warning)
        for note in version.spec.notes:
            log.info("model '%s': %s", report.name, note)
        return version

    def _free_memory(self, load: Load, slot: LoadSlot, resolved: Resolved) -> bool:
        """Unload what must be unloaded before the version is opened; wait for it without the slot. Return False if the
        version must not be opened any more.

        Raises OutOfMemory.
        """
        table, spec = self._table, resolved.spec
        if self._lifecycle.reload_policy_of(spec) is ReloadPolicy.REPLACE:
            while (is_replaced := table.replace_old(load)) is None:
                self._events.publish()
                with slot.release_while_waiting():
                    table.wait_until(lambda: table.replace_old(load) is not None)
            if not is_replaced:
                return False
        until = time.monotonic() + _MEMORY_TIMEOUT_S
        while (has_slot := table.reserve_resident_slot(load, spec)) is None:
            self._events.publish()
            if time.monotonic() > until:
                limit = self._lifecycle.max_resident_models
                raise OutOfMemory(f"all {limit} models that --max-resident-models allows are in use")
            with slot.release_while_waiting():
                table.wait_until(lambda: False, _IDLE_CHECK_INTERVAL_S)
        if not has_slot:
            return False
        count = sum(group.count * max(1, len(group.gpus)) for group in spec.instance_groups)
        refusal = self.check_memory(resolved.file, count)
        if refusal is not None and table.is_unloading():
            # What is being unloaded may leave enough.
            with slot.release_while_waiting():
                table.wait_until(lambda: not table.is_unloading(), _MEMORY_TIMEOUT_S)
            refusal = self.check_memory(resolved.file, count)
        if refusal is not None:
            raise OutOfMemory(f"model '{spec.name}' version {resolved.file.version}: {refusal}")
        return True

    def _unload(self, action: Unload) -> None:
        self._events.publish()
        version = action.version
        try:
            version.close()
            # A server that stops says it of all in one line.
            level = logging.DEBUG if self._table.is_closed else logging.INFO
            log.log(level, "model '%s' version %d is unloaded", version.name, version.version)
        finally:
            self._table.finish(action)

    def _close_failed(self, action: Unload) -> None:
        self._events.publish()
        action.version.close_after_hang()
        self._table.finish(action)
