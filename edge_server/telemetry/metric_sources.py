"""Sources of metrics other than those of models' requests: response cache, CUDA shared memory, custom metrics, loads,
disk space, certificates."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping

from edge_server.core.metric_family import MetricFamilyView
from edge_server.core.model_statistics import CacheStatistics
from edge_server.core.status_reports import IndexEntry, VersionReport, find_failed
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


def disk_families(folder: str) -> Source:
    """Return a source with the size and the free space of the file system that holds `folder`; none while it cannot be
    read."""

    def families() -> list[Family]:
        size = Family("edge_disk_size_bytes", "gauge", "Size of the file system that holds the folder")
        free = Family("edge_disk_free_bytes", "gauge", "Space that the server may still use there")
        try:
            found = os.statvfs(folder)
        except OSError:
            return []
        size.add({"folder": folder}, found.f_blocks * found.f_frsize)
        free.add({"folder": folder}, found.f_bavail * found.f_frsize)
        return [size, free]

    return families


def certificate_families(expiries: Mapping[str, float]) -> Source:
    """Return a source with the end of the certificates in use: unix time by "http" and "grpc"."""

    def families() -> list[Family]:
        family = Family(
            "edge_certificate_expiry_timestamp_seconds", "gauge", "Unix time at which the certificate in use expires"
        )
        for wire, end_s in expiries.items():
            family.add({"wire": wire}, end_s)
        return [family]

    return families


class LoadCounts:
    """Loads and failed loads of each model, counted from the event bus. The counts stay when the model is unloaded.

    A subscriber of the bus (`receive`) and a source of the metrics page (`families`). Thread-safe. `versions` returns
    the loaded versions, whose generations are shown, and `index` all versions with their states.
    """

    def __init__(
        self, versions: Callable[[], Iterable[VersionReport]], index: Callable[[], Iterable[IndexEntry]]
    ) -> None:
        self._versions = versions
        self._index = index
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
        """Return the counts, the generation of each READY version, and which versions fail now."""
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
        failed = Family(
            "edge_model_failed", "gauge", "1 while the version's newest files do not serve, 0 while they do"
        )
        entries = list(self._index())
        for entry in entries:
            if entry.state == "READY":
                failed.add({"model": entry.name, "version": entry.version}, 0)
        for entry in find_failed(entries):
            failed.add({"model": entry.name, "version": entry.version}, 1)
        return [loads, failures, generation, failed]
