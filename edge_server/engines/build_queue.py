"""Engine build queue: returns cached TensorRT engines and queues builds for missing ones.

A version that finds no engine is served by the next runtime. Once it serves, a process apart builds the engine, one at
a time and only while the box is cool; another checks it against the serving runtime; then it goes into the cache, and
the version is loaded anew by the ordinary change of generations, which finds it there. Whatever goes wrong on the way
changes nothing about what serves. An engine that another server, or `edge-server optimize`, builds in the same cache is
waited for, and one whose GPU is lost to this process is not begun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from functools import partial

from edge_server.backends.tensorrt import cuda_driver
from edge_server.core.status_reports import EngineBuildsReport
from edge_server.core.tensorrt_engine import EngineFile, EngineOrder
from edge_server.engines.build_process import Bounds
from edge_server.engines.build_registry import UNDER_WAY, Build, BuildRegistry, BuildState
from edge_server.engines.builder import EngineBuilder, ServingCallbacks
from edge_server.engines.engine_cache import EngineCache, EngineCacheFault
from edge_server.engines.engine_key import FileHashes, GpuIdentity, key_of
from edge_server.engines.metric_families import families
from edge_server.errors import DeviceLost, EdgeServerError
from edge_server.telemetry.metrics_page import Family

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_END_PATIENCE_S = 20.0
"""How long the end of a build is waited for: twice what its process is given to end by itself."""

_CLAIM_LOOK_S = 1.0
"""How often an engine that another process builds is looked at."""


class EngineBuildQueue:
    """`find` belongs to loading threads, which may come from the start; nothing is built before `start`."""

    def __init__(self, cache: EngineCache, box: GpuIdentity, bounds: Bounds, side: ServingCallbacks) -> None:
        self.cache = cache
        self._box = box
        self._side = side
        self._hashes = FileHashes()
        self._ledger = BuildRegistry(side.announce)
        self._is_closing = threading.Event()
        self._maker = EngineBuilder(cache, bounds, side, self._ledger, self._is_closing)
        self._thread: threading.Thread | None = None
        self.lookups: Counter[str] = Counter()
        """How many times an engine was there, and how many times not: hit, miss."""

    # -- asked by the backend, on loading threads ---------------------------------------------------------------------

    def find(self, order: EngineOrder) -> EngineFile | None:
        """Return the verified engine for an order; None when it is to be built first. Raises LoadError's kin never:
        what is wrong with the cache is told in the report."""
        try:
            key = key_of(order, cuda_driver.devices()[order.device_id], self._box, self._hashes)
        except (OSError, IndexError, cuda_driver.CudaFault) as error:
            log.warning("model '%s' version %d: no engine can be looked for: %s", order.model, order.version, error)
            return None
        entry = self.cache.find(key)
        ledger = self._ledger
        with ledger.changed:
            self.lookups["miss" if entry is None else "hit"] += 1
            build = ledger.build_for(order, key, self.cache)
            if entry is not None:
                if build.state not in UNDER_WAY:
                    ledger.set_ready(build, entry.facts)
                return EngineFile(entry.plan, key.digest, partial(self._reject, build))
            if build.state is BuildState.READY:
                # It was thrown away, or damaged on disk.
                build.move(BuildState.WAITING, "the engine that was there is gone or damaged")
            ledger.changed.notify_all()
        return None

    def _reject(self, build: Build, reason: str) -> None:
        """Throw away an engine that was verified and does not open after all."""
        self.cache.drop(build.key)
        self._ledger.note_rejected(build, reason)

    # -- asked by operators -------------------------------------------------------------------------------------------

    def report(self) -> EngineBuildsReport:
        """Return the report of running, finished and waiting builds."""
        with self._ledger.changed:
            reports = tuple(build.report() for build in sorted(self._ledger.all(), key=lambda build: build.name))
        count, byte_count = self.cache.size()
        return EngineBuildsReport(reports, count, byte_count, self._side.may_build())

    def families(self) -> list[Family]:
        """Return the metric families of engines."""
        return families(self.report(), self._ledger.outcomes, self.lookups)

    def cancel(self, model: str, version: int | None = None) -> int:
        """Take back the builds for a model that wait or are under way; return how many. They are not begun again before
        an order, new files, or a restart. Raises UnknownModel when there is no engine for such a model."""
        with self._ledger.changed:
            found = self._ledger.of(model, version)
            open_ones = [build for build in found if build.state in UNDER_WAY or build.is_due(float("inf"))]
            for build in open_ones:
                build.cancel_reason = "an operator took it back"
            waiting = [build for build in open_ones if build.state not in UNDER_WAY]
        for build in waiting:
            self._ledger.note_cancelled(build)
        return len(open_ones)

    def order_again(self, model: str, version: int | None = None) -> int:
        """Build what failed or was taken back, now; return how many. Raises UnknownModel, and DeviceLost when there is
        nothing but what needs a GPU that is lost to this process."""
        with self._ledger.changed:
            stopped = [
                build
                for build in self._ledger.of(model, version)
                if build.state in (BuildState.FAILED, BuildState.CANCELLED)
            ]
            able = [build for build in stopped if not self._side.lost_gpu(build.order)]
            for build in able:
                build.cancel_reason, build.attempt_count, build.due_s = "", 0, 0.0
                build.move(BuildState.WAITING, "an operator asked for it")
            self._ledger.changed.notify_all()
        if stopped and not able:
            raise DeviceLost(f"model '{model}': no engine is built: {self._side.lost_gpu(stopped[0].order)}")
        return len(able)

    # -- working it off, on a thread of its own -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to build. Once the server has started: what serves comes first."""
        self._thread = threading.Thread(target=self._loop, name="edge-engines", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take back what is under way, and begin nothing more. Returns at once."""
        self._is_closing.set()
        with self._ledger.changed:
            self._ledger.changed.notify_all()

    def close(self) -> None:
        """As `end`, and wait for the process that builds to end. May be called again, and without `start`.

        One that hangs in a driver cannot be ended: it is left, and this process ends without it.
        """
        self.end()
        if self._thread is not None:
            self._thread.join(_END_PATIENCE_S)
            if self._thread.is_alive():
                log.error("what builds engines does not end: it is left behind")

    def _loop(self) -> None:
        while True:
            with self._ledger.changed:
                self._ledger.changed.wait(_LOOK_S)
                if self._is_closing.is_set():
                    return
                now_s = time.monotonic()
                due = [build for build in self._ledger.all() if build.is_due(now_s)]
            build = next((item for item in due if self._can_begin(item)), None)
            if build is None:
                continue
            try:
                self._make(build)
            except (EngineCacheFault, EdgeServerError, OSError) as error:
                self._ledger.note_failed(build, str(error) or type(error).__name__, is_final=False)
            except Exception as error:
                # A bug in here must cost an engine, not all that follow.
                log.exception("%s failed in a way that nobody expected", build.title)
                self._ledger.note_failed(build, f"{type(error).__name__}: {error}", is_final=True)

    def _can_begin(self, build: Build) -> bool:
        """Return whether it is time: the version has been loaded by another runtime, or none could, and the box is
        cool."""
        lost = self._side.lost_gpu(build.order)
        if lost:
            self._ledger.note_failed(build, lost, is_final=True)
            return False
        why = self._side.may_build()
        if why:
            self._ledger.note_waiting(build, why)
        if why or not self._side.is_settled(build.order.model):
            return False
        try:
            is_there = build.order.path.exists()
        except OSError as error:
            # A network file system that went away: not a word about whether the model is there.
            why = f"'{build.order.path}' cannot be read: {error.strerror}"
            self._ledger.note_waiting(build, why, time.monotonic() + _CLAIM_LOOK_S)
            return False
        if not is_there:
            self._ledger.forget(build)
        return is_there

    def _make(self, build: Build) -> None:
        """Make an engine, unless another process is at it: then it is looked for again, a little later."""
        claim = self.cache.claim(build.key)
        if claim is None:
            again_s = time.monotonic() + _CLAIM_LOOK_S
            self._ledger.note_waiting(build, f"{self.cache.holder(build.key)} builds it", again_s)
            return
        with claim:
            self._maker.make(build)
