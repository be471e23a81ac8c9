"""Registry of engine builds and their states: counts, logs and publishes every change as an event."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.errors import UnknownModel
from edge_server.plugins.tensorrt.builds.build_report import BuildState, EngineReport
from edge_server.plugins.tensorrt.builds.engine_cache import EngineCache
from edge_server.plugins.tensorrt.builds.engine_key import EngineKey
from edge_server.plugins.tensorrt.engine_order import EngineOrder
from edge_server.telemetry.event_bus import EventValue, PublishEvent

log = logging.getLogger(__name__)

ENGINE_BUILD_STARTED = "engine.build_started"
ENGINE_BUILD_PROGRESS = "engine.build_progress"
ENGINE_BUILD_PAUSED = "engine.build_paused"
ENGINE_BUILD_RESUMED = "engine.build_resumed"
ENGINE_BUILD_FAILED = "engine.build_failed"
ENGINE_BUILD_CANCELLED = "engine.build_cancelled"
ENGINE_READY = "engine.ready"

_CHANGED = "the model, or what is asked of its engine, changed"


class BuildRegistry:
    """`changed` guards all builds, and is notified when one may be due. Functions named `note_...` may be called from
    any thread, without it."""

    def __init__(self, publish: PublishEvent) -> None:
        self.changed = threading.Condition()
        self.outcomes: Counter[str] = Counter()
        """Number of builds by result: ready, failed, cancelled."""
        self._publish = publish
        self._builds: dict[tuple[str, int], Build] = {}

    # -- under `changed` ----------------------------------------------------------------------------------------------

    def all(self) -> list[Build]:
        return list(self._builds.values())

    def build_for(self, order: EngineOrder, key: EngineKey, cache: EngineCache) -> Build:
        """Return the build of an order. A build for other files or another machine is superseded."""
        known = self._builds.get((order.model, order.version))
        if known is not None and known.key.digest == key.digest:
            return known
        why = cache.why_missing(key, order.model, order.version)
        if known is not None:
            known.cancel_reason = _CHANGED
            why = why or _CHANGED
        build = Build(order, key, why or "there is none for this model yet")
        self._builds[build.name] = build
        return build

    def of(self, model: str, version: int | None) -> list[Build]:
        """Return the builds for a model's versions, or for one. Raises UnknownModel if there is none."""
        found = [item for (name, number), item in self._builds.items() if name == model and version in (None, number)]
        if not found:
            raise UnknownModel(f"no engine is, or is to be, built for model '{model}'")
        return found

    def set_ready(self, build: Build, facts: Mapping[str, object]) -> None:
        build.move(BuildState.READY, "")
        build.percent, build.phase = 100.0, ""
        difference = facts.get("difference")
        build.difference = None if difference is None else float(str(difference))
        build.took_s = float(str(facts.get("took_s", 0.0)))
        build.dla_layers = facts.get("dla_layers")  # type: ignore[assignment]  # as `facts_of` wrote it

    # -- from any thread ----------------------------------------------------------------------------------------------

    def forget(self, build: Build) -> None:
        with self.changed:
            if self._builds.get(build.name) is build:
                del self._builds[build.name]

    def note_waiting(self, build: Build, why: str, due_s: float | None = None) -> None:
        """Set what a due build waits for, and when it is checked again (time.monotonic); None: at once."""
        with self.changed:
            if build.state in UNDER_WAY or build.cancel_reason:
                return
            if due_s is not None:
                build.move(BuildState.WAITING)
                build.due_s = due_s
            if build.state is BuildState.WAITING:
                build.phase = f"waits: {why}"

    def note_started(self, build: Build) -> None:
        with self.changed:
            build.attempt_count += 1
            build.phase, build.percent = "Asking the serving runtime", 0.0
            build.move(BuildState.BUILDING)
            reason = build.reason
        log.info("%s is built (%s): %s", build.title, build.order.precision, reason)
        self._publish_event(
            ENGINE_BUILD_STARTED, build, digest=build.key.digest, precision=build.order.precision, reason=reason
        )

    def note_progress(self, build: Build, phase: str, percent: float, *, is_published: bool) -> None:
        with self.changed:
            build.phase, build.percent = phase, percent
        if is_published:
            log.debug("%s: %s, %.0f %%", build.title, phase, percent)
            self._publish_event(ENGINE_BUILD_PROGRESS, build, phase=phase, percent=percent)

    def note_built(self, build: Build, took_s: float) -> None:
        with self.changed:
            build.took_s = took_s
            build.phase, build.percent = "Comparing answers", 100.0
            build.move(BuildState.VERIFYING)

    def note_paused(self, build: Build, state: BuildState, why: str) -> None:
        """Set a build to paused for a reason; "": it continues, in `state`."""
        with self.changed:
            build.move(BuildState.PAUSED if why else state, why)
        log.info("%s %s", build.title, f"pauses: {why}" if why else "goes on")
        self._publish_event(ENGINE_BUILD_PAUSED if why else ENGINE_BUILD_RESUMED, build, reason=why)

    def note_ready(self, build: Build, facts: Mapping[str, object], compared: str) -> None:
        """Record an engine that was built here, and compared with another runtime."""
        with self.changed:
            self.set_ready(build, facts)
            build.attempt_count = 0
            self.outcomes["ready"] += 1
        log.info(
            "%s is ready: built in %.1f s; its answers differ by %.2g from those of %s (%g are allowed)",
            build.title, build.took_s, build.difference or 0.0, compared or "nothing else", build.order.tolerance,
        )  # fmt: skip
        if build.dla_layers is not None:
            level = logging.INFO if build.dla_layers[0] else logging.WARNING
            log.log(
                level,
                "%s: the DLA can run %d of its %d layers, the GPU runs the others",
                build.title,
                *build.dla_layers,
            )
        self._publish_ready(build)

    def note_found(self, build: Build, facts: Mapping[str, object]) -> None:
        """Record an engine that another process has built meanwhile."""
        with self.changed:
            self.set_ready(build, facts)
            build.attempt_count = 0
        log.info("%s is ready: another process has built it", build.title)
        self._publish_ready(build)

    def note_rejected(self, build: Build, reason: str) -> None:
        """Record that a verified engine could not be opened; it is built again a little later."""
        with self.changed:
            build.attempt_count += 1
            build.fail(f"the engine did not open: {reason}", is_final=False)
            self.outcomes["failed"] += 1
            self.changed.notify_all()
        log.warning("%s is thrown away: it did not open: %s", build.title, reason)
        self._publish_event(ENGINE_BUILD_FAILED, build, reason=reason)

    def note_failed(self, build: Build, reason: str, *, is_final: bool) -> None:
        with self.changed:
            if build.state not in UNDER_WAY and not is_final:
                # A build that could not begin counts too. Otherwise a cache that cannot be written to would be tried
                # for ever.
                build.attempt_count += 1
            build.fail(reason, is_final=is_final)
            build.phase = ""
            retry_s = build.retry_s
            self.outcomes["failed"] += 1
        log.warning(
            "%s is not built: %s; %s", build.title, reason,
            "another runtime serves the model, if one can" if retry_s is None else "it is tried again",
        )  # fmt: skip
        self._publish_event(
            ENGINE_BUILD_FAILED, build, reason=reason, attempt_count=build.attempt_count, retry_s=retry_s
        )

    def note_cancelled(self, build: Build) -> None:
        with self.changed:
            reason = build.cancel_reason or "the server stops"
            build.move(BuildState.CANCELLED, reason)
            build.phase = ""
            self.outcomes["cancelled"] += 1
        log.info("%s is not built: %s", build.title, reason)
        self._publish_event(ENGINE_BUILD_CANCELLED, build, reason=reason)

    def _publish_ready(self, build: Build) -> None:
        self._publish_event(
            ENGINE_READY, build, digest=build.key.digest, took_s=build.took_s, difference=build.difference
        )

    def _publish_event(self, kind: str, build: Build, **fields: EventValue) -> None:
        self._publish(kind, model=build.order.model, version=build.order.version, **fields)


_FIRST_RETRY_S = 30.0
_MAX_RETRY_S = 3600.0

MAX_ATTEMPTS = 5
"""Failures in a row, for a cause that may pass, after which only an order or a restart tries again."""


UNDER_WAY = frozenset({BuildState.BUILDING, BuildState.PAUSED, BuildState.VERIFYING})


@dataclass(slots=True, eq=False)
class Build:
    """`cancel_reason`, if not empty, is the order to end it. `due_s` is when it may begin (time.monotonic)."""

    order: EngineOrder
    key: EngineKey
    reason: str = ""
    state: BuildState = BuildState.WAITING
    phase: str = ""
    percent: float = 0.0
    since_s: float = field(default_factory=time.time)
    attempt_count: int = 0
    due_s: float = 0.0
    retry_s: float | None = None
    took_s: float = 0.0
    difference: float | None = None
    dla_layers: Sequence[int] | None = None
    cancel_reason: str = ""

    @property
    def name(self) -> tuple[str, int]:
        return self.order.model, self.order.version

    @property
    def title(self) -> str:
        return f"engine for model '{self.order.model}' version {self.order.version}"

    def move(self, state: BuildState, reason: str | None = None) -> None:
        if state is not self.state:
            self.since_s = time.time()
        self.state = state
        self.retry_s = None
        if reason is not None:
            self.reason = reason

    def fail(self, reason: str, *, is_final: bool) -> None:
        """Record a failure, and when to try again: after 30 s, 1 min, 2 min ... an hour."""
        self.move(BuildState.FAILED, reason)
        if is_final or self.attempt_count >= MAX_ATTEMPTS:
            return
        delay_s = min(_FIRST_RETRY_S * 2.0 ** (self.attempt_count - 1), _MAX_RETRY_S)
        self.due_s = time.monotonic() + delay_s
        self.retry_s = time.time() + delay_s

    def is_due(self, now_s: float) -> bool:
        may_be_begun = self.state is BuildState.WAITING or (
            self.state is BuildState.FAILED and self.retry_s is not None
        )
        return may_be_begun and now_s >= self.due_s and not self.cancel_reason

    def report(self) -> EngineReport:
        order = self.order
        return EngineReport(
            model=order.model,
            version=order.version,
            library=f"{order.library} {order.library_version}",
            precision=order.precision,
            digest=self.key.digest,
            state=self.state.value,
            phase=self.phase,
            percent=self.percent,
            reason=self.reason,
            since_s=self.since_s,
            attempt_count=self.attempt_count,
            retry_s=self.retry_s,
            took_s=self.took_s,
            difference=self.difference,
            dla_layers=self.dla_layers,
            tolerance=order.tolerance,
        )
