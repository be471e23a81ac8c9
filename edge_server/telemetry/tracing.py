"""Start of request traces: holds the trace settings in effect, and begins the trace of each sampled request.

Only the settings are here. The modules that record, write and export traces are imported when the first settings turn
tracing on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from edge_server.config import TraceConfig
from edge_server.core.trace_settings import (
    OPENTELEMETRY,
    ServerTraceSettings,
    TraceChange,
    TraceSettings,
    parse_trace_level,
)
from edge_server.errors import BackendMissing
from edge_server.telemetry.trace_sampling import RemoteParent, TraceSampler, remote_parent

if TYPE_CHECKING:
    from edge_server.telemetry.trace_collector import TraceCollector
    from edge_server.telemetry.trace_record import TracedRequest, TraceExport


class Traces:
    """The trace settings of the server; starts the trace of a sampled request. Thread-safe."""

    def __init__(self, config: TraceConfig | None = None, make_export: Callable[[], TraceExport] | None = None) -> None:
        """`make_export` is for mode opentelemetry. Raises BackendMissing if it is missing there."""
        self._config = config or TraceConfig()
        self._make_export = make_export
        self._lock = threading.Lock()
        self._server_settings = ServerTraceSettings(start_settings(self._config))
        self._global_sampler = TraceSampler(self._server_settings.whole)
        self._model_samplers: dict[str, TraceSampler] = {}
        self._ids = itertools.count(1)
        self._collector: TraceCollector | None = None
        self._is_closed = False
        self.is_on = False
        """Whether any request may be traced now. Front ends check this first."""
        self._apply_settings()

    def get(self, model: str = "") -> dict[str, str | list[str]]:
        """Return the settings in effect in the form for clients: the model's own, else the global ones."""
        sampler = self._model_samplers.get(model, self._global_sampler)
        options: dict[str, str | list[str]] = {}
        if sampler.settings.mode == OPENTELEMETRY:
            options["url"] = self._config.url
        return {**sampler.settings.to_json(sampler.left), **options}

    def update(self, model: str, change: TraceChange) -> dict[str, str | list[str]]:
        """Change all the settings given, or none, and return the settings in effect. Raises InvalidRequest.

        Traces that have begun keep their settings.
        """
        with self._lock:
            self._server_settings = self._server_settings.with_change(model, change)
            is_new = bool(change.set or change.cleared)
            replaced = self._apply_settings(fresh={model} if is_new else set())
            # Read under the lock, and once: `close` may set it to None at any time.
            collector = self._collector
        if collector is not None:
            for sampler in replaced:
                collector.flush(sampler)
        return self.get(model)

    def sample(self, model: str, headers: Iterable[tuple[str, str]], began_ns: int = 0) -> TracedRequest | None:
        """Return a new trace if the request is to be traced, else None. The caller must `finish` it.

        `began_ns` is the arrival of the request by time.monotonic_ns; 0: now. In mode opentelemetry a request with a
        W3C trace context is traced regardless of the rate and the count.
        """
        sampler = self._model_samplers.get(model, self._global_sampler)
        settings, collector = sampler.settings, self._collector
        if collector is None or not settings.is_on:
            return None
        if not sampler.left and settings.mode != OPENTELEMETRY:
            return None
        parent: RemoteParent | None = None
        if settings.mode == OPENTELEMETRY:
            parent = remote_parent(headers)
        if not sampler.sample(is_forced=parent is not None):
            return None
        from edge_server.telemetry.trace_record import TracedRequest

        return TracedRequest(model, sampler, self._ids, collector.add, parent, began_ns or time.monotonic_ns())

    def problem(self) -> str:
        """Return why traces are lost and how many, "" while they are written."""
        collector = self._collector
        return "" if collector is None else collector.problem()

    def close(self, timeout_s: float) -> None:
        """Stop tracing, and write the collected traces within `timeout_s`."""
        with self._lock:
            self._is_closed = True
            self.is_on = False
            collector, self._collector = self._collector, None
        if collector is not None:
            collector.close(timeout_s)

    def _apply_settings(self, fresh: Iterable[str] = ()) -> list[TraceSampler]:
        """Put the server's settings in effect and return the samplers that were replaced.

        Samplers whose settings did not change continue to count, except those of the models in `fresh`.
        """
        fresh = set(fresh)
        replaced: list[TraceSampler] = []

        def sampler_for(name: str, before: TraceSampler | None, settings: TraceSettings) -> TraceSampler:
            if before is not None and before.settings == settings and name not in fresh:
                return before
            if before is not None:
                replaced.append(before)
            return TraceSampler(settings)

        whole, by_model = self._server_settings.whole, self._server_settings.models
        needs_collector = whole.mode == OPENTELEMETRY or any(item.is_on for item in (whole, *by_model.values()))
        if needs_collector and self._collector is None and not self._is_closed:
            from edge_server.telemetry.trace_collector import TraceCollector

            export = None
            if self._config.mode == OPENTELEMETRY:
                if self._make_export is None:
                    raise BackendMissing(f"trace mode {OPENTELEMETRY}: no plugin exports traces")
                export = self._make_export()
            self._collector = TraceCollector(export)
        models = {name: sampler_for(name, self._model_samplers.get(name), item) for name, item in by_model.items()}
        replaced += [sampler for name, sampler in self._model_samplers.items() if name not in models]
        self._global_sampler = sampler_for("", self._global_sampler, whole)
        self._model_samplers = models
        for sampler in replaced:
            sampler.mark_replaced()
        in_force = (self._global_sampler, *models.values())
        self.is_on = not self._is_closed and any(sampler.settings.is_on for sampler in in_force)
        return replaced


def start_settings(config: TraceConfig) -> TraceSettings:
    """Return the trace settings that the configuration gives."""
    return TraceSettings(
        parse_trace_level(config.level), config.rate, config.count, config.log_frequency, config.file, config.mode
    )
