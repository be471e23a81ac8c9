"""EngineWorks: who is asked for engines, and has those built that are not there.

A version that finds no engine is served by the next runtime. Once it serves, a process apart builds the engine, one at
a time and only while the box is cool; another checks it against the serving runtime; then it goes into the cache, and
the version is loaded anew by the ordinary change of generations, which finds it there. Whatever goes wrong on the way
changes nothing about what serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from edge_server.backends.tensorrt import cuda
from edge_server.backends.tensorrt.order import order_to_json
from edge_server.backends.tensorrt.verify import save_samples
from edge_server.core.engine import EngineFile, EngineOrder
from edge_server.core.view import EngineWorksReport
from edge_server.engines.box import Box
from edge_server.engines.build import UNDER_WAY, Build, BuildState
from edge_server.engines.cache import CacheFault, EngineCache
from edge_server.engines.child import Bounds, Orders, Outcome, run_child
from edge_server.engines.families import families
from edge_server.engines.key import EngineKey, FileHashes, key_of
from edge_server.engines.samples import answers, requests_for, unanswered
from edge_server.errors import EdgeServerError, UnknownModel
from edge_server.serving.served import ServedVersion
from edge_server.telemetry.events import (
    ENGINE_BUILD_CANCELLED,
    ENGINE_BUILD_FAILED,
    ENGINE_BUILD_PAUSED,
    ENGINE_BUILD_PROGRESS,
    ENGINE_BUILD_RESUMED,
    ENGINE_BUILD_STARTED,
    ENGINE_READY,
    EventValue,
)
from edge_server.telemetry.metrics import Family

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_PROGRESS_STEP_PERCENT = 5.0
"""How far a build must have come since the last event of its progress, unless the phase changed."""

_SAMPLES = "samples.npz"


class Announce(Protocol):
    """Publishes an event; see telemetry.events."""

    def __call__(self, kind: str, /, **fields: EventValue) -> object: ...


@dataclass(frozen=True, slots=True)
class ServingSide:
    """What the works ask of the server around them. All may be called from any thread, and return at once.

    `serving` is the version that serves, None when there is none; `is_settled`: nothing of a model is being loaded;
    `renew` has a version loaded anew, under a mark for the reason, and says whether it will be. `may_build` says why
    nothing is built now, "" when something may be.
    """

    serving: Callable[[str, int], ServedVersion | None]
    is_settled: Callable[[str], bool]
    renew: Callable[[str, int, str], bool]
    may_build: Callable[[], str]
    announce: Announce


class EngineWorks:
    """`find` belongs to loading threads, which may come from the start; nothing is built before `start`."""

    def __init__(self, cache: EngineCache, box: Box, bounds: Bounds, side: ServingSide) -> None:
        self.cache = cache
        self._box = box
        self._bounds = bounds
        self._side = side
        self._hashes = FileHashes()
        self._changed = threading.Condition()
        self._builds: dict[tuple[str, int], Build] = {}
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.outcomes: Counter[str] = Counter()
        """How many builds ended in which way: ready, failed, cancelled."""
        self.lookups: Counter[str] = Counter()
        """How many times an engine was there, and how many times not: hit, miss."""

    # -- asked by the backend, on loading threads ---------------------------------------------------------------------

    def find(self, order: EngineOrder) -> EngineFile | None:
        """Return the verified engine for an order; None when it is to be built first. Raises LoadError's kin never:
        what is wrong with the cache is told in the report."""
        try:
            key = key_of(order, cuda.devices()[order.device_id], self._box, self._hashes)
        except (OSError, IndexError) as error:
            log.warning("model '%s' version %d: no engine can be looked for: %s", order.model, order.version, error)
            return None
        entry = self.cache.find(key)
        with self._changed:
            self.lookups["miss" if entry is None else "hit"] += 1
            build = self._build_for(order, key)
            if entry is not None:
                if build.state not in UNDER_WAY:
                    self._note_ready(build, entry.facts)
                return EngineFile(entry.plan, key.digest, partial(self._reject, build))
            if build.state is BuildState.READY:
                # It was thrown away, or damaged on disk.
                build.move(BuildState.WAITING, "the engine that was there is gone or damaged")
            self._changed.notify_all()
        return None

    def _build_for(self, order: EngineOrder, key: EngineKey) -> Build:
        """Return what is known of an order; one for other files, or another box, is superseded. Under the lock."""
        known = self._builds.get((order.model, order.version))
        if known is not None and known.key.digest == key.digest:
            return known
        why = self.cache.why_missing(key, order.model, order.version)
        if known is not None:
            known.cancel_reason = "the model, or what is asked of its engine, changed"
            why = why or "the model, or what is asked of its engine, changed"
        build = Build(order, key, why or "there is none for this model yet")
        self._builds[build.name] = build
        return build

    def _note_ready(self, build: Build, facts: object) -> None:
        build.move(BuildState.READY, "")
        build.percent, build.phase = 100.0, ""
        if isinstance(facts, dict):
            build.difference = facts.get("difference")
            build.took_s = float(facts.get("took_s", 0.0))

    def _reject(self, build: Build, reason: str) -> None:
        """Throw away an engine that was verified and does not open after all; it is built anew, a little later."""
        self.cache.drop(build.key)
        with self._changed:
            build.attempt_count += 1
            build.fail(f"the engine did not open: {reason}", is_final=False)
            self.outcomes["failed"] += 1
            self._changed.notify_all()
        log.warning("%s is thrown away: it did not open: %s", build.title, reason)
        self._side.announce(ENGINE_BUILD_FAILED, model=build.order.model, version=build.order.version, reason=reason)

    # -- asked by operators -------------------------------------------------------------------------------------------

    def report(self) -> EngineWorksReport:
        """Return what is built, was built, and waits."""
        with self._changed:
            reports = tuple(build.report() for _, build in sorted(self._builds.items()))
        count, byte_count = self.cache.size()
        return EngineWorksReport(reports, count, byte_count, self._side.may_build())

    def families(self) -> list[Family]:
        """Return what the metrics page tells of engines."""
        return families(self.report(), self.outcomes, self.lookups)

    def cancel(self, model: str, version: int | None = None) -> int:
        """Take back the builds for a model that wait or are under way; return how many. They are not begun again before
        an order, new files, or a restart. Raises UnknownModel when there is no engine for such a model."""
        with self._changed:
            found = self._of(model, version)
            open_ones = [build for build in found if build.state in UNDER_WAY or build.is_due(float("inf"))]
            for build in open_ones:
                build.cancel_reason = "an operator took it back"
            waiting = [build for build in open_ones if build.state not in UNDER_WAY]
        for build in waiting:
            self._end_cancelled(build)
        return len(open_ones)

    def order_again(self, model: str, version: int | None = None) -> int:
        """Build what failed or was taken back, now; return how many. Raises UnknownModel."""
        with self._changed:
            stopped = [
                build for build in self._of(model, version) if build.state in (BuildState.FAILED, BuildState.CANCELLED)
            ]
            for build in stopped:
                build.cancel_reason, build.attempt_count, build.due_s = "", 0, 0.0
                build.move(BuildState.WAITING, "an operator asked for it")
            self._changed.notify_all()
        return len(stopped)

    def _of(self, model: str, version: int | None) -> list[Build]:
        found = [item for (name, number), item in self._builds.items() if name == model and version in (None, number)]
        if not found:
            raise UnknownModel(f"no engine is, or is to be, built for model '{model}'")
        return found

    # -- working it off, on a thread of its own -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to build. Once the server has started: what serves comes first."""
        self._thread = threading.Thread(target=self._loop, name="edge-engines", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take back what is under way, and begin nothing more. Returns at once."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """As `end`, and wait for the process that builds to end. May be called again, and without `start`."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_LOOK_S)
                if self._is_closing:
                    return
                now_s = time.monotonic()
                due = [build for build in self._builds.values() if build.is_due(now_s)]
            build = next((item for item in due if self._can_begin(item)), None)
            if build is None:
                continue
            try:
                self._make(build)
            except (CacheFault, EdgeServerError, OSError) as error:
                self._note_failed(build, str(error) or type(error).__name__, is_final=False)
            except Exception as error:
                # A bug in here must cost an engine, not all that follow.
                log.exception("%s failed in a way that nobody expected", build.title)
                self._note_failed(build, f"{type(error).__name__}: {error}", is_final=True)

    def _can_begin(self, build: Build) -> bool:
        """Return whether it is time: the version has been loaded by another runtime, or none could, and the box is
        cool."""
        why = self._side.may_build()
        with self._changed:
            if why and build.state is BuildState.WAITING:
                build.phase = f"waits: {why}"
        if why or not self._side.is_settled(build.order.model):
            return False
        if not build.order.path.exists():
            self._forget(build)
            return False
        return True

    def _forget(self, build: Build) -> None:
        with self._changed:
            if self._builds.get(build.name) is build:
                del self._builds[build.name]

    def _make(self, build: Build) -> None:
        """Build, verify, keep and hand over one engine."""
        served = self._side.serving(*build.name)
        with self._changed:
            build.attempt_count += 1
            build.phase, build.percent = "Asking the serving runtime", 0.0
            build.move(BuildState.BUILDING)
            reason = build.reason
        log.info("%s is built (%s): %s", build.title, build.order.precision, reason)
        self._side.announce(
            ENGINE_BUILD_STARTED, model=build.order.model, version=build.order.version,
            digest=build.key.digest, precision=build.order.precision, reason=reason,
        )  # fmt: skip
        folder = self.cache.work_folder(build.key)
        self._write_samples(build, served, folder / _SAMPLES)
        facts = self.cache.built(build.key)
        if facts is None:
            outcome = self._run(build, served is not None, self._build_job(build, folder))
            if outcome.end != "built":
                self._end(build, outcome)
                return
            facts = {
                "model": build.order.model,
                "version": build.order.version,
                "path": str(build.order.path),
                "profiles": build.order.recipe()["profiles"],
                "plan_sha256": outcome.facts["plan_sha256"],
                "bytes": outcome.facts["bytes"],
                "took_s": outcome.facts["seconds"],
            }
            self.cache.note_built(build.key, facts)
        with self._changed:
            build.took_s = float(str(facts["took_s"]))
            build.phase, build.percent = "Comparing answers", 100.0
            build.move(BuildState.VERIFYING)
        outcome = self._run(build, served is not None, self._verify_job(build, folder))
        if outcome.end != "verified":
            # What crashed may have crashed for want of memory: the plan is kept, and tried again.
            if outcome.is_final:
                self.cache.drop(build.key)
            self._end(build, outcome)
            return
        self._hand_over(build, served, {**facts, "difference": outcome.facts["difference"]})

    def _write_samples(self, build: Build, served: ServedVersion | None, path: Path) -> None:
        """Ask the serving runtime for what is right. Raises EdgeServerError, OSError."""
        spec = served.spec if served is not None else build.order.spec
        assert spec is not None
        requests = requests_for(spec, build.order, build.order.path.parent.parent)
        if served is None:
            samples = unanswered(requests, spec)
        else:
            samples = answers(requests, spec, partial(served.submit, may_run=False))
        save_samples(path, samples)

    def _build_job(self, build: Build, folder: Path) -> dict[str, object]:
        device = cuda.devices()[build.order.device_id]
        return {
            "task": "build",
            "order": order_to_json(build.order),
            "folder": str(folder),
            "capability": list(device.capability),
            "timing_cache": str(self.cache.timing_file(build.key)),
            # On a board TensorRT would try things out in three quarters of the memory that the models live in.
            "pool_bytes": device.total_bytes // 8 if device.is_integrated else 0,
        }

    def _verify_job(self, build: Build, folder: Path) -> dict[str, object]:
        spec = build.order.spec
        return {
            "task": "verify",
            "order": order_to_json(build.order),
            "plan": str(folder / "engine.plan"),
            "samples": str(folder / _SAMPLES),
            "has_rows": spec is not None and spec.max_batch_size > 0,
        }

    def _run(self, build: Build, was_served: bool, job: dict[str, object]) -> Outcome:
        told: list[tuple[str, float]] = [("", 0.0)]

        def report(phase: str, percent: float) -> None:
            with self._changed:
                build.phase, build.percent = phase, percent
            last_phase, last_percent = told[-1]
            if phase != last_phase or percent - last_percent >= _PROGRESS_STEP_PERCENT:
                told[-1] = (phase, percent)
                log.debug("%s: %s, %.0f %%", build.title, phase, percent)
                self._side.announce(
                    ENGINE_BUILD_PROGRESS, model=build.order.model, version=build.order.version,
                    phase=phase, percent=percent,
                )  # fmt: skip

        return run_child(
            job,
            self._bounds,
            Orders(
                should_cancel=lambda: self._why_not(build, was_served),
                should_pause=self._side.may_build,
                report=report,
                paused=partial(self._note_paused, build, build.state),
            ),
        )

    def _why_not(self, build: Build, was_served: bool) -> str:
        """Return why a build is to end, "" when it is to go on."""
        if self._is_closing:
            return "the server stops"
        if build.cancel_reason:
            return build.cancel_reason
        # A load that wants another engine has said so by now, see `find`; one that wants the same need not stop this.
        if was_served and self._side.serving(*build.name) is None and self._side.is_settled(build.order.model):
            build.cancel_reason = "the model was unloaded"
        return build.cancel_reason

    def _note_paused(self, build: Build, state: BuildState, why: str) -> None:
        with self._changed:
            build.move(BuildState.PAUSED if why else state, why)
        kind = ENGINE_BUILD_PAUSED if why else ENGINE_BUILD_RESUMED
        log.info("%s %s", build.title, f"pauses: {why}" if why else "goes on")
        self._side.announce(kind, model=build.order.model, version=build.order.version, reason=why)

    def _hand_over(self, build: Build, served: ServedVersion | None, facts: dict[str, object]) -> None:
        """Keep a verified engine, and have the version loaded anew."""
        compared = f"{served.report().runtime}" if served is not None else ""
        entry = self.cache.commit(build.key, {**facts, "compared_with": compared, "tolerance": build.order.tolerance})
        with self._changed:
            self._note_ready(build, dict(entry.facts))
            build.attempt_count = 0
            self.outcomes["ready"] += 1
        log.info(
            "%s is ready: built in %.1f s; its answers differ by %.2g from those of %s (%g are allowed)",
            build.title, build.took_s, build.difference or 0.0, compared or "nothing else", build.order.tolerance,
        )  # fmt: skip
        self._side.announce(
            ENGINE_READY, model=build.order.model, version=build.order.version,
            digest=build.key.digest, took_s=build.took_s, difference=build.difference,
        )  # fmt: skip
        self._side.renew(*build.name, build.key.digest)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, build: Build, outcome: Outcome) -> None:
        if outcome.end != "cancelled":
            self._note_failed(build, outcome.reason, is_final=outcome.is_final)
            return
        self._end_cancelled(build)
        if self._side.serving(*build.name) is None:
            self._forget(build)

    def _end_cancelled(self, build: Build) -> None:
        with self._changed:
            reason = build.cancel_reason or "the server stops"
            build.move(BuildState.CANCELLED, reason)
            build.phase = ""
            self.outcomes["cancelled"] += 1
        log.info("%s is not built: %s", build.title, reason)
        self._side.announce(ENGINE_BUILD_CANCELLED, model=build.order.model, version=build.order.version, reason=reason)

    def _note_failed(self, build: Build, reason: str, *, is_final: bool) -> None:
        with self._changed:
            build.fail(reason, is_final=is_final)
            retry_s = build.retry_s
            self.outcomes["failed"] += 1
        log.warning(
            "%s is not built: %s; %s", build.title, reason,
            "the other runtime goes on serving it" if retry_s is None else "it is tried again",
        )  # fmt: skip
        self._side.announce(
            ENGINE_BUILD_FAILED, model=build.order.model, version=build.order.version,
            reason=reason, attempt_count=build.attempt_count, retry_s=retry_s,
        )  # fmt: skip
