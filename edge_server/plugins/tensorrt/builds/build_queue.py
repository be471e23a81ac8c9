"""Queue of engine builds: returns the stored TensorRT engine for a model, or queues its build.

A version without an engine is served by the next runtime. Once it serves, a separate process builds the engine, one at
a time and only while the machine is cool. Another process compares it with the serving runtime. Then it is stored in
the cache, and the version is reloaded and finds it there. A failure on the way changes nothing about what serves. If
another server, or `edge-server optimize`, builds the engine in the same cache, this one waits for it. An engine for a
GPU that this process has lost is not built.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from functools import partial

from edge_server.backends.cuda import cuda_driver
from edge_server.errors import DeviceLost, EdgeServerError
from edge_server.plugins.tensorrt.builds.build_process import Bounds
from edge_server.plugins.tensorrt.builds.build_registry import UNDER_WAY, Build, BuildRegistry
from edge_server.plugins.tensorrt.builds.build_report import BuildState, EngineBuildsReport, families
from edge_server.plugins.tensorrt.builds.builder import EngineBuilder, ServingCallbacks
from edge_server.plugins.tensorrt.builds.engine_cache import EngineCache, EngineCacheFault
from edge_server.plugins.tensorrt.builds.engine_key import FileHashes, GpuIdentity, key_of
from edge_server.plugins.tensorrt.engine_order import EngineFile, EngineOrder
from edge_server.telemetry.metrics_page import Family

log = logging.getLogger(__name__)

_POLL_S = 0.2
_END_TIMEOUT_S = 20.0
"""How long the end of a build is waited for: twice the time that its process has to end by itself."""

_CLAIM_POLL_S = 1.0
"""Interval at which an engine that another process builds is checked."""


class EngineBuildQueue:
    """Loading threads may call `find` at any time; nothing is built before `start`."""

    def __init__(self, cache: EngineCache, gpu: GpuIdentity, bounds: Bounds, server: ServingCallbacks) -> None:
        self.cache = cache
        self._gpu = gpu
        self._server = server
        self._hashes = FileHashes()
        self._registry = BuildRegistry(server.publish)
        self._is_closing = threading.Event()
        self._builder = EngineBuilder(cache, bounds, server, self._registry, self._is_closing)
        self._thread: threading.Thread | None = None
        self.lookups: Counter[str] = Counter()
        """Numbers of lookups that found an engine, and that did not: hit, miss."""

    # -- asked by the backend, on loading threads ---------------------------------------------------------------------

    def find(self, order: EngineOrder) -> EngineFile | None:
        """Return the verified engine for an order; None if it must be built first. Never raises LoadError: problems of
        the cache are in the report."""
        try:
            key = key_of(order, cuda_driver.devices()[order.device_id], self._gpu, self._hashes)
        except (OSError, IndexError, cuda_driver.CudaFault) as error:
            log.warning("model '%s' version %d: no engine can be looked for: %s", order.model, order.version, error)
            return None
        entry = self.cache.find(key)
        registry = self._registry
        with registry.changed:
            self.lookups["miss" if entry is None else "hit"] += 1
            build = registry.build_for(order, key, self.cache)
            if entry is not None:
                if build.state not in UNDER_WAY:
                    registry.set_ready(build, entry.facts)
                return EngineFile(entry.plan, key.digest, partial(self._reject, build))
            if build.state is BuildState.READY:
                # It was deleted, or damaged on disk.
                build.move(BuildState.WAITING, "the engine that was there is gone or damaged")
            registry.changed.notify_all()
        return None

    def _reject(self, build: Build, reason: str) -> None:
        """Delete an engine that was verified but cannot be opened."""
        self.cache.drop(build.key)
        self._registry.note_rejected(build, reason)

    # -- asked by operators -------------------------------------------------------------------------------------------

    def report(self) -> EngineBuildsReport:
        """Return the report of running, finished and waiting builds."""
        with self._registry.changed:
            reports = tuple(build.report() for build in sorted(self._registry.all(), key=lambda build: build.name))
        count, byte_count = self.cache.size()
        return EngineBuildsReport(reports, count, byte_count, self._server.may_build())

    def families(self) -> list[Family]:
        """Return the metric families of engines."""
        return families(self.report(), self._registry.outcomes, self.lookups)

    def cancel(self, model: str, version: int | None = None) -> int:
        """Cancel the waiting and running builds for a model; return their number. They begin again only after an order,
        new files, or a restart. Raises UnknownModel if there is no engine for such a model."""
        with self._registry.changed:
            found = self._registry.of(model, version)
            open_ones = [build for build in found if build.state in UNDER_WAY or build.is_due(float("inf"))]
            for build in open_ones:
                build.cancel_reason = "an operator took it back"
            waiting = [build for build in open_ones if build.state not in UNDER_WAY]
        for build in waiting:
            self._registry.note_cancelled(build)
        return len(open_ones)

    def order_again(self, model: str, version: int | None = None) -> int:
        """Build now what failed or was cancelled; return the number. Raises UnknownModel, and DeviceLost if all of it
        needs a GPU that this process has lost."""
        with self._registry.changed:
            stopped = [
                build
                for build in self._registry.of(model, version)
                if build.state in (BuildState.FAILED, BuildState.CANCELLED)
            ]
            able = [build for build in stopped if not self._server.lost_gpu(build.order)]
            for build in able:
                build.cancel_reason, build.attempt_count, build.due_s = "", 0, 0.0
                build.move(BuildState.WAITING, "an operator asked for it")
            self._registry.changed.notify_all()
        if stopped and not able:
            raise DeviceLost(f"model '{model}': no engine is built: {self._server.lost_gpu(stopped[0].order)}")
        return len(able)

    # -- working it off, on a thread of its own -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to build. Called once the server has started: serving comes first."""
        self._thread = threading.Thread(target=self._loop, name="edge-engines", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Cancel the running build, and begin no more. Returns at once."""
        self._is_closing.set()
        with self._registry.changed:
            self._registry.changed.notify_all()

    def close(self) -> None:
        """As `end`, and wait for the building process to end. May be called again, and without `start`.

        A process that hangs in a driver cannot be ended: it is left behind.
        """
        self.end()
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)
            if self._thread.is_alive():
                log.error("what builds engines does not end: it is left behind")

    def _loop(self) -> None:
        while True:
            with self._registry.changed:
                self._registry.changed.wait(_POLL_S)
                if self._is_closing.is_set():
                    return
                now_s = time.monotonic()
                due = [build for build in self._registry.all() if build.is_due(now_s)]
            build = next((item for item in due if self._can_begin(item)), None)
            if build is None:
                continue
            try:
                self._make(build)
            except (EngineCacheFault, EdgeServerError, OSError) as error:
                self._registry.note_failed(build, str(error) or type(error).__name__, is_final=False)
            except Exception as error:
                # A bug here must fail one engine, not all later ones.
                log.exception("%s failed in a way that nobody expected", build.title)
                self._registry.note_failed(build, f"{type(error).__name__}: {error}", is_final=True)

    def _can_begin(self, build: Build) -> bool:
        """Return whether the build may begin: another runtime has loaded the version, or none could, and the machine is
        cool."""
        lost = self._server.lost_gpu(build.order)
        if lost:
            self._registry.note_failed(build, lost, is_final=True)
            return False
        why = self._server.may_build()
        if why:
            self._registry.note_waiting(build, why)
        if why or not self._server.is_settled(build.order.model):
            return False
        try:
            is_there = build.order.path.exists()
        except OSError as error:
            # A network file system that is away says nothing about whether the model exists.
            why = f"'{build.order.path}' cannot be read: {error.strerror}"
            self._registry.note_waiting(build, why, time.monotonic() + _CLAIM_POLL_S)
            return False
        if not is_there:
            self._registry.forget(build)
        return is_there

    def _make(self, build: Build) -> None:
        """Make an engine. If another process is building it, check for it again a little later."""
        claim = self.cache.claim(build.key)
        if claim is None:
            again_s = time.monotonic() + _CLAIM_POLL_S
            self._registry.note_waiting(build, f"{self.cache.holder(build.key)} builds it", again_s)
            return
        with claim:
            self._builder.make(build)
