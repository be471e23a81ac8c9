"""Metric families that do not come from the statistics of versions: response cache, CUDA shared memory, custom metrics
of models, counts of loads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from edge_server.core.custom_metric import MetricFamilyView
from edge_server.core.model_statistics import CacheStatistics
from edge_server.core.status_reports import VersionReport
from edge_server.telemetry.event_bus import MODEL_FAILED, MODEL_LOADING, MODEL_READY, Event
from edge_server.telemetry.metrics_page import Family, Source


def cache_families(statistics: Callable[[], CacheStatistics]) -> Source:
    """Return a source with the families of the response cache: Triton's nv_cache_* names, durations in microseconds."""

    def gauge(name: str, help: str, value: float) -> Family:
        family = Family(name, "gauge", help)
        family.add({}, value)
        return family

    def families() -> list[Family]:
        counts = statistics()
        lookup_count = counts.hit_count + counts.miss_count
        losses = Family(
            "edge_cache_losses_total",
            "counter",
            "Lookups and responses that the response cache could not serve or store, by reason",
        )
        for reason, count in counts.losses.items():
            losses.add({"reason": reason}, count)
        found = [
            gauge("nv_cache_num_lookups", "Lookups in the response cache", lookup_count),
            gauge("nv_cache_num_hits", "Lookups that found a response", counts.hit_count),
            gauge("nv_cache_num_misses", "Lookups that found no response", counts.miss_count),
            gauge("nv_cache_lookup_duration", "Time of cache lookups, in microseconds", counts.lookup.ns // 1000),
            gauge(
                "nv_cache_insertion_duration", "Time of cache insertions, in microseconds", counts.insertion.ns // 1000
            ),
            losses,
        ]
        if counts.capacity_bytes:
            used = counts.size_bytes / counts.capacity_bytes
            found += [
                gauge("nv_cache_util", "Used share of the response cache, 0 to 1", used),
                gauge("nv_cache_num_entries", "Responses in the response cache", counts.entry_count),
                gauge("nv_cache_num_evictions", "Responses evicted from the response cache", counts.eviction_count),
            ]
        return found

    return families


def cuda_memory_families(copied_bytes: Callable[[], tuple[int, int]]) -> Source:
    """Return a source with the bytes copied for CUDA shared memory; `copied_bytes` returns (out of regions, into
    regions) since the start."""

    def families() -> list[Family]:
        family = Family(
            "edge_cuda_shared_memory_copied_bytes_total",
            "counter",
            "Bytes copied between the GPU memory of clients and the host, by direction",
        )
        for direction, count in zip(("input", "output"), copied_bytes(), strict=True):
            family.add({"direction": direction}, count)
        return [family]

    return families


def custom_families(views: Callable[[], Iterable[MetricFamilyView]]) -> Source:
    """Return a source with the metric families that models define."""

    def families() -> list[Family]:
        found: list[Family] = []
        for view in views():
            family = Family(view.name, view.kind, view.help)
            for sample in view.samples:
                family.add(sample.labels, sample.value, part=sample.part)
            found.append(family)
        return found

    return families


class LoadCounts:
    """Loads and failed loads of each model, counted from the event bus. The counts stay when the model is unloaded.

    A subscriber of the bus (`receive`) and a source of the metrics page (`families`). Thread-safe. `versions` returns
    the loaded versions, whose generations are shown.
    """

    def __init__(self, versions: Callable[[], Iterable[VersionReport]]) -> None:
        self._versions = versions
        self._lock = threading.Lock()
        self._loads: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def receive(self, event: Event) -> None:
        """Count the event if it is about a load."""
        if event.kind not in (MODEL_LOADING, MODEL_READY, MODEL_FAILED):
            return
        model = str(event.fields.get("model", ""))
        with self._lock:
            # Both series begin at 0 with the first attempt: a rate over either is then always defined.
            self._loads[model] = self._loads.get(model, 0) + (event.kind == MODEL_READY)
            self._failures[model] = self._failures.get(model, 0) + (event.kind == MODEL_FAILED)

    def families(self) -> list[Family]:
        """Return the counts, and the generation of each READY version."""
        loads = Family("edge_model_loads_total", "counter", "Versions that were loaded, reloads included")
        failures = Family("edge_model_load_failures_total", "counter", "Versions that failed to load or to warm up")
        generation = Family(
            "edge_model_generation", "gauge", "Number of the model's load that made the serving version"
        )
        with self._lock:
            for model in self._loads:
                loads.add({"model": model}, self._loads[model])
                failures.add({"model": model}, self._failures[model])
        for report in self._versions():
            if report.state == "READY":
                generation.add({"model": report.name, "version": str(report.version)}, report.generation)
        return [loads, failures, generation]
