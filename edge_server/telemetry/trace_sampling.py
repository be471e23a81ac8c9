"""Which requests are traced. The settings are here and cost nothing; what takes notes, writes and exports is imported
when the first settings come that trace something."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from edge_server.config import TraceConfig
from edge_server.core.trace_settings import OPENTELEMETRY, ServerTraceSettings, TraceChange, TraceSettings, trace_level
from edge_server.telemetry.trace_context import RemoteParent, remote_parent

if TYPE_CHECKING:
    from edge_server.telemetry.trace_collector import TraceCollector
    from edge_server.telemetry.trace_record import TracedRequest


class TraceSampler:
    """Settings in force, with the count of what they let through. Replaced as a whole when they change."""

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.left = settings.count
        """How many more requests may be traced, -1 for any number."""
        self.open = 0
        """Traces that were begun and are not collected yet."""
        self.is_replaced = False
        self._seen = 0
        self._lock = threading.Lock()

    def take(self, *, is_forced: bool = False) -> bool:
        """Return whether this request is traced. One that is forced counts neither for the rate nor for the count."""
        if not self.settings.is_on:
            return False
        with self._lock:
            if is_forced:
                self.open += 1
                return True
            self._seen += 1
            if not self.left or not self.settings.rate or self._seen % self.settings.rate:
                return False
            if self.left > 0:
                self.left -= 1
            self.open += 1
            return True

    def replace(self) -> None:
        """Say that other settings are in force from now on."""
        with self._lock:
            self.is_replaced = True

    def collected(self) -> bool:
        """Count one trace as collected. Return whether it was the last that these settings will ever see."""
        with self._lock:
            self.open -= 1
            return not self.open and (self.is_replaced or not self.left)


class Traces:
    """The trace settings of the server, and the choice of requests. Thread-safe."""

    def __init__(self, config: TraceConfig | None = None) -> None:
        self._config = config or TraceConfig()
        self._lock = threading.Lock()
        self._book = ServerTraceSettings(start_settings(self._config))
        self._whole = TraceSampler(self._book.whole)
        self._models: dict[str, TraceSampler] = {}
        self._ids = itertools.count(1)
        self._collector: TraceCollector | None = None
        self._is_closed = False
        self.is_on = False
        """Whether any request may be traced now: what front ends ask before anything else."""
        self._settle()

    def get(self, model: str = "") -> dict[str, str | list[str]]:
        """Return the settings in force, of a model or else those of all without their own, as clients see them."""
        sampler = self._models.get(model, self._whole)
        options: dict[str, str | list[str]] = {}
        if sampler.settings.mode == OPENTELEMETRY:
            options["url"] = self._config.url
        return {**sampler.settings.view(sampler.left), **options}

    def update(self, model: str, change: TraceChange) -> dict[str, str | list[str]]:
        """Change the settings, all that is asked or nothing, and return them. Raises InvalidRequest.

        Traces that are under way keep to the settings that they began with.
        """
        with self._lock:
            self._book = self._book.with_change(model, change)
            is_new = bool(change.set or change.cleared)
            replaced = self._settle(fresh={model} if is_new else set())
            # Looked at once: `close` may take it away at any moment after this.
            collector = self._collector
        if collector is not None:
            for sampler in replaced:
                collector.flush(sampler)
        return self.get(model)

    def sample(self, model: str, headers: Iterable[tuple[str, str]], began_ns: int = 0) -> TracedRequest | None:
        """Return a new trace for a request that came at `began_ns` (time.monotonic_ns; 0: just now), or None. The
        caller must `finish` it.

        In mode opentelemetry a request that brings a W3C trace context is traced whatever the rate and the count.
        """
        sampler = self._models.get(model, self._whole)
        settings, collector = sampler.settings, self._collector
        if collector is None or not settings.is_on:
            return None
        if not sampler.left and settings.mode != OPENTELEMETRY:
            return None
        parent: RemoteParent | None = None
        if settings.mode == OPENTELEMETRY:
            parent = remote_parent(headers)
        if not sampler.take(is_forced=parent is not None):
            return None
        from edge_server.telemetry.trace_record import TracedRequest

        return TracedRequest(model, sampler, self._ids, collector.take, parent, began_ns or time.monotonic_ns())

    def close(self, timeout_s: float) -> None:
        """Trace nothing more, and write what was collected, waiting at most `timeout_s`."""
        with self._lock:
            self._is_closed = True
            self.is_on = False
            collector, self._collector = self._collector, None
        if collector is not None:
            collector.close(timeout_s)

    def _settle(self, fresh: Iterable[str] = ()) -> list[TraceSampler]:
        """Put the book's settings in force; those that did not change go on counting. Return what was replaced."""
        fresh = set(fresh)
        replaced: list[TraceSampler] = []

        def settled(name: str, before: TraceSampler | None, settings: TraceSettings) -> TraceSampler:
            if before is not None and before.settings == settings and name not in fresh:
                return before
            if before is not None:
                replaced.append(before)
            return TraceSampler(settings)

        if self._book.whole.mode == OPENTELEMETRY or any(
            settings.is_on for settings in (self._book.whole, *self._book.models.values())
        ):
            self._open()
        models = {name: settled(name, self._models.get(name), item) for name, item in self._book.models.items()}
        replaced += [sampler for name, sampler in self._models.items() if name not in models]
        self._whole = settled("", self._whole, self._book.whole)
        self._models = models
        for sampler in replaced:
            sampler.replace()
        in_force = (self._whole, *models.values())
        self.is_on = not self._is_closed and any(sampler.settings.is_on for sampler in in_force)
        return replaced

    def _open(self) -> None:
        if self._collector is None and not self._is_closed:
            from edge_server.telemetry.trace_collector import TraceCollector

            self._collector = TraceCollector(self._config)


def start_settings(config: TraceConfig) -> TraceSettings:
    """Return the settings that the operator started the server with."""
    return TraceSettings(
        trace_level(config.level), config.rate, config.count, config.log_frequency, config.file, config.mode
    )
