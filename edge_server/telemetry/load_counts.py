"""Counts of loads and of failed loads for each model, fed by the bus. They outlive the model's unloading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from edge_server.core.status_reports import VersionReport
from edge_server.telemetry.event_bus import MODEL_FAILED, MODEL_LOADING, MODEL_READY, Event
from edge_server.telemetry.metrics_page import Family

Versions = Callable[[], Iterable[VersionReport]]


class LoadCounts:
    """A subscriber of the bus and a source of the metrics page. Thread-safe.

    `versions` gives those that live now, for their generations.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._lock = threading.Lock()
        self._loads: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def receive(self, event: Event) -> None:
        if event.kind not in (MODEL_LOADING, MODEL_READY, MODEL_FAILED):
            return
        model = str(event.fields.get("model", ""))
        with self._lock:
            # Both series begin at 0 with the first attempt, so that a rate over either is never undefined.
            self._loads[model] = self._loads.get(model, 0) + (event.kind == MODEL_READY)
            self._failures[model] = self._failures.get(model, 0) + (event.kind == MODEL_FAILED)

    def families(self) -> list[Family]:
        loads = Family("edge_model_loads_total", "counter", "Versions that were loaded, reloads included")
        failures = Family("edge_model_load_failures_total", "counter", "Versions that failed to load or to warm up")
        generation = Family("edge_model_generation", "gauge", "Which load of the model a serving version comes from")
        with self._lock:
            for model in self._loads:
                loads.add({"model": model}, self._loads[model])
                failures.add({"model": model}, self._failures[model])
        for report in self._versions():
            if report.state == "READY":
                generation.add({"model": report.name, "version": str(report.version)}, report.generation)
        return [loads, failures, generation]
