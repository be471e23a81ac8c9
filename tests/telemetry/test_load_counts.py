"""Load counts: fed by the event bus, shown on the metrics page, kept after the unload of a model."""

from __future__ import annotations

import threading

from edge_server.core.status_reports import EARLIER_GENERATION, IndexEntry, VersionReport
from edge_server.telemetry.event_bus import MODEL_DRAINING, MODEL_FAILED, MODEL_LOADING, MODEL_READY, EventBus
from edge_server.telemetry.metric_sources import LoadCounts
from edge_server.telemetry.metrics_page import Metrics


def page(counts: LoadCounts) -> list[str]:
    metrics = Metrics(list, list, lambda name, version: {}, None)
    metrics.add_source(counts.families)
    return [line for line in metrics.render()[0].decode().splitlines() if line.startswith("edge_model")]


def report(state: str, version: int, generation: int) -> VersionReport:
    return VersionReport("m", version, generation, state, 0.0, 0, "", 0.0)


def test_both_counters_begin_at_zero_with_the_first_attempt() -> None:
    bus, counts = EventBus(), LoadCounts(list, list)
    bus.subscribe(counts.receive)
    assert page(counts) == []
    bus.publish(MODEL_LOADING, model="m", version=1)
    assert page(counts) == ['edge_model_loads_total{model="m"} 0', 'edge_model_load_failures_total{model="m"} 0']
    bus.publish(MODEL_FAILED, model="m", version=1, reason="bad")
    bus.publish(MODEL_READY, model="m", version=2)
    bus.publish(MODEL_DRAINING, model="m", version=2)
    assert page(counts) == ['edge_model_loads_total{model="m"} 1', 'edge_model_load_failures_total{model="m"} 1']


def test_the_generation_is_that_of_the_versions_that_serve() -> None:
    living = [report("READY", 1, 4), report("FAILED", 2, 5), report("DRAINING", 1, 3)]
    assert page(LoadCounts(lambda: living, list)) == ['edge_model_generation{model="m",version="1"} 4']


def test_a_version_fails_while_its_newest_files_do_not_serve() -> None:
    index = [
        IndexEntry("good", "1", "READY"),
        IndexEntry("good", "2", "UNAVAILABLE", "unloaded"),
        IndexEntry("odd", "", "UNAVAILABLE", "config.pbtxt: no field named 'dim'"),
        IndexEntry("old", "1", "UNAVAILABLE", "no such operator"),
        IndexEntry("old", "10", "READY"),
        IndexEntry("rolled", "1", "READY"),
        IndexEntry("rolled", "2", "UNAVAILABLE", "no such operator"),
        IndexEntry("swapped", "3", "READY", f"{EARLIER_GENERATION}: no such operator"),
        IndexEntry("warming", "1", "LOADING"),
    ]
    assert page(LoadCounts(list, lambda: index)) == [
        'edge_model_failed{model="good",version="1"} 0',
        'edge_model_failed{model="old",version="10"} 0',
        'edge_model_failed{model="rolled",version="1"} 0',
        'edge_model_failed{model="swapped",version="3"} 1',
        'edge_model_failed{model="odd",version=""} 1',
        'edge_model_failed{model="rolled",version="2"} 1',
    ]


def test_counts_from_many_threads_are_exact() -> None:
    bus, counts = EventBus(), LoadCounts(list, list)
    bus.subscribe(counts.receive)
    threads = [
        threading.Thread(target=lambda kind=kind: [bus.publish(kind, model="m") for _ in range(500)])
        for kind in (MODEL_READY, MODEL_FAILED) * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page(counts) == ['edge_model_loads_total{model="m"} 1500', 'edge_model_load_failures_total{model="m"} 1500']
