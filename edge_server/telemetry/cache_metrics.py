"""The response cache's families, under the names of Triton's local cache."""

from __future__ import annotations

from collections.abc import Callable

from edge_server.core.model_statistics import CacheStatistics
from edge_server.telemetry.metrics_page import Family, Source


def cache_families(read: Callable[[], CacheStatistics]) -> Source:
    """Return a source of the page that shows what `read` gives at the time. Durations are microseconds, as Triton's."""

    def families() -> list[Family]:
        counts = read()
        shown = [
            _gauge("nv_cache_num_lookups", "Lookups in the response cache", counts.hit_count + counts.miss_count),
            _gauge("nv_cache_num_hits", "Lookups that found an answer", counts.hit_count),
            _gauge("nv_cache_num_misses", "Lookups that found none", counts.miss_count),
            _gauge("nv_cache_lookup_duration", "Time spent looking, in microseconds", counts.lookup.ns // 1000),
            _gauge("nv_cache_insertion_duration", "Time spent storing, in microseconds", counts.insertion.ns // 1000),
            _losses(counts),
        ]
        if counts.capacity_bytes:
            shown += [
                _gauge("nv_cache_util", "Share of the cache's bytes in use", counts.size_bytes / counts.capacity_bytes),
                _gauge("nv_cache_num_entries", "Answers in the response cache", counts.entry_count),
                _gauge("nv_cache_num_evictions", "Answers that left to make room", counts.eviction_count),
            ]
        return shown

    return families


def _gauge(name: str, help: str, value: float) -> Family:
    family = Family(name, "gauge", help)
    family.add({}, value)
    return family


def _losses(counts: CacheStatistics) -> Family:
    family = Family(
        "edge_cache_losses_total", "counter", "Lookups and answers that the response cache could not serve, by reason"
    )
    for reason, count in counts.losses.items():
        family.add({"reason": reason}, count)
    return family
