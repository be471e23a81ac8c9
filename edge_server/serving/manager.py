"""The manager moves reality toward the latest wish, one action at a time for each model, and owns the routing table."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from edge_server.core.lifecycle import INDEX_STATES, Load, ModelWish, VersionState, VersionWish, next_action
from edge_server.core.view import IndexEntry
from edge_server.errors import Draining, EdgeServerError, LoadError, NotReady, UnknownModel
from edge_server.serving.timer import Timer
from edge_server.serving.version import ModelVersion
from edge_server.telemetry.events import (
    MODEL_DRAINING,
    MODEL_FAILED,
    MODEL_LOADING,
    MODEL_READY,
    MODEL_UNLOADED,
    EventValue,
)

log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""How long batches that run, and sessions that close, are still waited for when the time to drain is over."""


class Announce(Protocol):
    """Told of every step in a version's life: `kind` is one of the `MODEL_...` names of telemetry.events."""

    def __call__(self, kind: str, /, **fields: EventValue) -> object: ...


@dataclass(slots=True)
class _Model:
    """What the manager knows of one model. Guarded by the manager's lock."""

    wish: ModelWish
    living: list[ModelVersion] = field(default_factory=list)
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Version -> (fingerprint, reason) of loads that failed before a ModelVersion existed, or after one was closed."""
    retired: set[int] = field(default_factory=set)
    generation: int = 0
    loading: Load | None = None

    def failed(self) -> dict[int, str]:
        """Return, with reasons, the versions that are wished for but whose files, as they are now, did not load."""
        wished = self.wish.versions
        return {
            number: reason
            for number, (fingerprint, reason) in sorted(self.failures.items())
            if number in wished and wished[number].fingerprint == fingerprint
        }


class Manager:
    """Thread-safe. Each load and each drain has a thread of its own, for either may take long, or hang; of the loads
    `load_threads` run at a time."""

    def __init__(
        self,
        timer: Timer,
        settings: Mapping[str, Mapping[str, str]],
        *,
        load_threads: int = 2,
        announce: Announce | None = None,
    ) -> None:
        self._timer = timer
        self._settings = settings
        self._changed = threading.Condition()
        self._models: dict[str, _Model] = {}
        self._routes: dict[str, dict[int, ModelVersion]] = {}
        self._load_slots = threading.BoundedSemaphore(load_threads)
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self._announce = announce or (lambda kind, /, **fields: None)
        self._announcing = threading.RLock()
        self._news: deque[tuple[str, dict[str, str | int]]] = deque()

    # -- the wish ---------------------------------------------------------------------------------------------------

    def wish_for(self, wish: ModelWish, *, retry: bool = False) -> None:
        """Replace the wish for one model. `retry` forgets earlier failures, so that they are tried again.

        Raises Draining once `close` was called.
        """
        with self._changed:
            if self._is_closed:
                raise Draining(f"Server is stopping, model '{wish.name}' can be neither loaded nor unloaded")
            self._replace_wish(wish, retry=retry)
        self._tell_news()

    def wish_for_all(self, wishes: Iterable[ModelWish]) -> None:
        """Replace the whole wish: models that it leaves out are unloaded. Does nothing once `close` was called."""
        by_name = {wish.name: wish for wish in wishes}
        with self._changed:
            if self._is_closed:
                return
            for name in self._models:
                if name not in by_name:
                    self._replace_wish(ModelWish(name))
            for wish in by_name.values():
                self._replace_wish(wish)
        self._tell_news()

    def wait_settled(self, names: Iterable[str] | None = None, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to load for these models (None: all) and what is not wished for takes nothing new.

        False on time-out, or when the manager is closed before that.
        """
        chosen = None if names is None else list(names)
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(chosen) or self._is_closed, timeout_s)
            is_settled = self._is_settled(chosen)
        self._tell_news()
        return is_settled

    def failure(self, name: str) -> str | None:
        """Return why not all of the wish for a model is served, in Triton's words, or None when all of it is."""
        with self._changed:
            model = self._models[name]
            if model.wish.reason:
                return model.wish.reason
            parts = [f"version {version} is at UNAVAILABLE state: {why};" for version, why in model.failed().items()]
            return " ".join(parts) or None

    # -- routing ----------------------------------------------------------------------------------------------------

    def route(self, name: str, version: int | None) -> ModelVersion:
        """Return the version that a request would meet now. Takes no lock: the table is replaced, never changed.

        Raises UnknownModel or NotReady with Triton's words.
        """
        versions = self._routes.get(name)
        if versions:
            if version is None:
                return versions[next(iter(versions))]
            found = versions.get(version)
            if found is not None:
                return found
        raise self._no_route(name, version)

    def ready_versions(self, name: str) -> list[ModelVersion]:
        """Return the serving versions of a model, highest first; empty when there is none."""
        return list(self._routes.get(name, {}).values())

    def all_ready(self) -> list[ModelVersion]:
        return [version for _, versions in sorted(self._routes.items()) for version in reversed(versions.values())]

    def is_known(self, name: str) -> bool:
        return name in self._models

    def has_failures(self) -> bool:
        """Return whether anything that is wished for is not served."""
        with self._changed:
            return any(
                bool(model.wish.reason)
                or any(number not in self._routes.get(name, {}) for number in model.wish.versions)
                for name, model in self._models.items()
            )

    def in_flight(self) -> int:
        return sum(version.in_flight for version in self._living())

    def index(self) -> list[IndexEntry]:
        """Return every version that lives, failed, or was unloaded, with its state and reason."""
        entries: list[IndexEntry] = []
        with self._changed:
            for name, model in sorted(self._models.items()):
                rows = self._index_rows(model)
                entries += [IndexEntry(name, str(version), *rows[version]) for version in sorted(rows)]
                if model.wish.reason:
                    entries.append(IndexEntry(name, "", "UNAVAILABLE", model.wish.reason))
        return entries

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """Refuse new requests, drain for at most `timeout_s`, and close everything. False when requests were failed.

        What hangs in its runtime cannot be ended: its thread is left, and the process ends around it.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            for model in self._models.values():
                for version in [item for item in model.living if item.state is VersionState.READY]:
                    self._start_retire(model, version)
            self._changed.notify_all()
        self._tell_news()
        self._join(deadline)
        failed_count = sum(version.abandon_waiting() for version in self._living())
        self._join(time.monotonic() + _GRACE_S)
        failed_count += sum(version.abandon_running() for version in self._living())
        return failed_count == 0

    def _living(self) -> list[ModelVersion]:
        with self._changed:
            return [item for model in self._models.values() for item in model.living]

    def _join(self, deadline: float) -> None:
        """Wait for loads and drains to end, those included that begin meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads, max(deadline - time.monotonic(), 0.0))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _is_settled(self, names: list[str] | None) -> bool:
        return not any(model.loading for name, model in self._models.items() if names is None or name in names)

    def _replace_wish(self, wish: ModelWish, *, retry: bool = False) -> None:
        model = self._models.setdefault(wish.name, _Model(wish))
        model.wish = wish
        if retry:
            model.failures.clear()
        self._proceed(model)

    def _proceed(self, model: _Model) -> None:
        """Start the model's next actions, unless a load is under way."""
        while model.loading is None and not self._is_closed:
            failed = model.failed()
            attempt = {number: wish.fingerprint for number, wish in model.wish.versions.items() if number not in failed}
            if model.wish.reason and not attempt:
                break
            action = next_action(attempt, [item.snapshot() for item in model.living], failed)
            if action is None:
                break
            if isinstance(action, Load):
                self._start_load(model, action)
            else:
                self._start_retire(model, next(item for item in model.living if item.generation == action.generation))
        self._changed.notify_all()

    def _start_load(self, model: _Model, action: Load) -> None:
        model.generation += 1
        self._start_thread("edge-load", self._load, model, action, model.generation)
        model.loading = action

    def _start_retire(self, model: _Model, version: ModelVersion) -> None:
        # First out of the table, so that whoever is refused finds the successor there.
        self._publish_routes(model, without=version)
        version.stop_taking()
        self._news.append((MODEL_DRAINING, {"model": version.name, "version": version.version}))
        self._start_thread("edge-drain", self._retire, model, version)

    def _start_thread(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        """Run `work` on a daemon thread, which cannot get at the lock, and thus not end, before this caller let go."""

        def live() -> None:
            try:
                work(*arguments)
            finally:
                with self._changed:
                    self._threads.discard(thread)
                    self._changed.notify_all()

        thread = threading.Thread(target=live, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def _publish_routes(self, model: _Model, without: ModelVersion | None = None) -> None:
        ready = {
            item.version: item
            for item in sorted(model.living, key=lambda item: (item.version, item.generation))
            if item.state is VersionState.READY and item is not without
        }
        routes = dict(self._routes)
        # Highest version first: the first of the table is what a request without a version meets.
        routes[model.wish.name] = dict(sorted(ready.items(), reverse=True))
        self._routes = routes

    def _index_rows(self, model: _Model) -> dict[int, tuple[str, str]]:
        failed = model.failed()
        rows: dict[int, tuple[str, str]] = dict.fromkeys(model.retired, ("UNAVAILABLE", "unloaded"))
        rows.update({number: ("UNAVAILABLE", reason) for number, (_, reason) in model.failures.items()})
        rows.update({item.version: (INDEX_STATES[item.state], item.reason) for item in model.living})
        if model.loading is not None:
            rows.update({number: ("LOADING", "") for number in model.wish.versions if number not in failed})
        for item in model.living:
            if item.state is VersionState.READY:
                reason = failed.get(item.version)
                note = f"an earlier generation serves; the newest failed: {reason}" if reason else ""
                rows[item.version] = ("READY", note)
        return rows

    def _no_route(self, name: str, version: int | None) -> EdgeServerError:
        with self._changed:
            model = self._models.get(name)
            if model is None or not (model.wish.versions or model.living or model.failures or model.retired):
                return UnknownModel(f"Request for unknown model: '{name}' is not found")
            rows = self._index_rows(model)
        if version is None:
            return UnknownModel(f"Request for unknown model: '{name}' has no available versions")
        if version not in rows:
            return UnknownModel(f"Request for unknown model: '{name}' version {version} is not found")
        state, reason = rows[version]
        tail = f": {reason}" if reason else f", it is {state}"
        return NotReady(f"Request for model '{name}' version {version} is not at ready state{tail}")

    # -- on the manager's own threads ---------------------------------------------------------------------------------

    def _load(self, model: _Model, action: Load, generation: int) -> None:
        with self._load_slots:
            version, reason = self._try_load(model, action, generation)
        with self._changed:
            model.loading = None
            fields: dict[str, str | int] = {"model": model.wish.name, "version": action.version}
            if version is None and reason:
                model.failures[action.version] = (action.fingerprint, reason)
                self._news.append((MODEL_FAILED, {**fields, "reason": reason}))
            elif version is not None:
                model.failures.pop(action.version, None)
                model.retired.discard(action.version)
                model.living.append(version)
                if self._is_closed:
                    self._start_retire(model, version)
                else:
                    self._publish_routes(model)
                    self._news.append((MODEL_READY, fields))
            self._proceed(model)
        self._tell_news()

    def _try_load(self, model: _Model, action: Load, generation: int) -> tuple[ModelVersion | None, str]:
        """Return the open version, or why there is none: "" when it is not wished for any more."""
        name = model.wish.name
        wish = model.wish.versions.get(action.version)
        if self._is_closed or wish is None or wish.fingerprint != action.fingerprint:
            return None, ""
        self._news.append((MODEL_LOADING, {"model": name, "version": action.version}))
        try:
            self._tell_news()
            version = self._open(wish, generation)
        except EdgeServerError as error:
            reason = error.message or type(error).__name__
        except Exception as error:
            log.exception("model '%s' version %d failed to load", name, action.version)
            reason = f"{type(error).__name__}: {error}"
        else:
            _log_ready(version)
            return version, ""
        log.error("model '%s' version %d failed to load: %s", name, action.version, reason)
        return None, reason

    def _open(self, wish: VersionWish, generation: int) -> ModelVersion:
        """Return the version opened by the first of the runtimes to choose from that can. Raises LoadError."""
        passed_over: dict[str, str] = {}
        while True:
            resolved = wish.resolve(passed_over)
            version = ModelVersion(resolved, generation, wish.fingerprint, self._timer, self._settings)
            try:
                version.open()
            except LoadError as error:
                if not resolved.has_alternatives or resolved.spec.backend in passed_over:
                    raise
                passed_over[resolved.spec.backend] = error.message
            else:
                return version

    def _retire(self, model: _Model, version: ModelVersion) -> None:
        version.drain()
        version.close()
        log.info("model '%s' version %d is unloaded", version.name, version.version)
        with self._changed:
            model.living.remove(version)
            if not any(item.version == version.version for item in model.living):
                model.retired.add(version.version)
            self._news.append((MODEL_UNLOADED, {"model": version.name, "version": version.version}))
            self._proceed(model)
        self._tell_news()

    def _tell_news(self) -> None:
        """Announce what happened, in order and outside the manager's lock. Returns when all of it was announced."""
        with self._announcing:
            while self._news:
                kind, fields = self._news.popleft()
                self._announce(kind, **fields)


def _log_ready(version: ModelVersion) -> None:
    report = version.report()
    log.info(
        "model '%s' version %d is loaded: %s on %s, %s, %d instance(s), in %.0f ms",
        report.name, report.version, report.runtime, report.device, report.precision, report.instance_count,
        report.load_s * 1000,
    )  # fmt: skip
    for note in report.notes:
        log.info("model '%s': %s", report.name, note)
