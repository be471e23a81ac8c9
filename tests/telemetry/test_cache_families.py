"""Metric families of the response cache."""

from __future__ import annotations

from edge_server.core.model_statistics import CacheStatistics, Duration, VersionStatistics
from edge_server.telemetry.metric_sources import cache_families
from edge_server.telemetry.metrics_page import Metrics


def page(*versions: VersionStatistics, cache: CacheStatistics | None = None) -> str:
    metrics = Metrics(lambda: versions, lambda: (), lambda name, version: {}, None)
    if cache is not None:
        metrics.add_source(cache_families(lambda: cache))
    return metrics.render()[0].decode()


def test_only_versions_that_use_the_cache_have_its_counters() -> None:
    cached = VersionStatistics("m", 1, cache_hit=Duration(3, 4_500), cache_miss=Duration(2, 9_999), is_cached=True)
    text = page(cached, VersionStatistics("n", 1))
    assert 'nv_cache_num_hits_per_model{model="m",version="1"} 3\n' in text
    assert 'nv_cache_num_misses_per_model{model="m",version="1"} 2\n' in text
    assert 'nv_cache_hit_duration_per_model{model="m",version="1"} 4\n' in text
    assert 'nv_cache_miss_duration_per_model{model="m",version="1"} 9\n' in text
    assert "# TYPE nv_cache_num_hits_per_model counter" in text
    assert 'nv_cache_num_hits_per_model{model="n"' not in text
    assert "nv_cache" not in page(VersionStatistics("n", 1))


def test_the_cache_as_a_whole_is_shown_under_the_names_of_tritons_local_cache() -> None:
    counts = CacheStatistics(
        1000, 250, 2, 7, hit_count=3, miss_count=4, lookup=Duration(7, 70_000), insertion=Duration(4, 8_000)
    )
    counts.losses["too_big"] = 5
    text = page(cache=counts)
    for line in (
        "nv_cache_util 0.25", "nv_cache_num_entries 2", "nv_cache_num_evictions 7", "nv_cache_num_lookups 7",
        "nv_cache_num_hits 3", "nv_cache_num_misses 4", "nv_cache_lookup_duration 70", "nv_cache_insertion_duration 8",
        'edge_cache_losses_total{reason="too_big"} 5', 'edge_cache_losses_total{reason="busy"} 0',
    ):  # fmt: skip
        assert f"\n{line}\n" in text, line


def test_a_cache_in_another_process_does_not_pretend_to_know_its_size() -> None:
    text = page(cache=CacheStatistics(hit_count=1))
    assert "nv_cache_num_hits 1\n" in text
    assert "nv_cache_util" not in text
    assert "nv_cache_num_entries" not in text
