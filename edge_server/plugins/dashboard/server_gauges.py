"""Gauges of the server's work and of the machine's processor and memory: one sample every few seconds, which the page
draws as curves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from edge_server.core.metric_family import MetricFamilyView
from edge_server.core.model_statistics import VersionStatistics
from edge_server.plugin import ServingCore
from edge_server.plugins.dashboard.gauge_history import INTERVAL_S, GaugeHistory
from edge_server.telemetry.host_usage import HostReading, HostSampler

_TICK_S = 1.0
"""Time between two calls of `ServerGauges.sample`."""

_GENERATED_TOKENS = "vllm:generation_tokens_total"


class ServerGauges:
    """Samples the gauges, also those of other plugins, and keeps their history. Thread-safe."""

    def __init__(self, core: ServingCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._host = HostSampler(INTERVAL_S / 2, proc=Path(core.machine_root) / "proc", clock=clock)
        self._rates = CounterRates()
        self._history = GaugeHistory()
        self._lock = threading.Lock()
        self._sampled_s = clock()

    def sample(self) -> None:
        """Add a sample to the history if it is time for one."""
        now_s = self._clock()
        if now_s - self._sampled_s < INTERVAL_S - _TICK_S / 2:
            return
        passed_s, self._sampled_s = now_s - self._sampled_s, now_s
        service = self._core.service
        values = self._rates.update(service.statistics(None, None), service.model_families(), passed_s)
        host = self._host.read()
        if host is not None:
            values |= {"cpu": 100 * host.cpu_utilization, "memory": float(host.memory_used_bytes)}
        values |= self._core.gauges()
        with self._lock:
            self._history.add(now_s, values)

    def host(self) -> HostReading | None:
        return self._host.read()

    def history(self) -> dict[str, object]:
        """Return the response of GET /edge/v1/history."""
        with self._lock:
            return self._history.as_json(self._clock())


class CounterRates:
    """Growth of the server's counters from one sample to the next."""

    def __init__(self) -> None:
        self._before: dict[str, int] | None = None

    def update(
        self, versions: Iterable[VersionStatistics], families: Iterable[MetricFamilyView], passed_s: float
    ) -> dict[str, float]:
        """Return requests, failures and tokens a second, milliseconds in queues, per cent of cache hits, and the
        number of waiting requests. The first call returns only the latter."""
        counts = dict.fromkeys(("requests", "failed", "queue_ns", "hits", "misses"), 0)
        waiting = 0
        for version in versions:
            waiting += version.pending_count
            counts["requests"] += version.success.count + version.fail.count
            counts["failed"] += version.fail.count
            counts["queue_ns"] += version.queue.ns
            counts["hits"] += version.cache_hit.count
            counts["misses"] += version.cache_miss.count
        for family in families:
            if family.name == _GENERATED_TOKENS:
                for sample in family.samples:
                    name = f"tokens {sample.labels['model']}"
                    counts[name] = counts.get(name, 0) + int(sample.value)
        values = {"waiting": float(waiting)}
        before, self._before = self._before, counts
        if before is None:
            return values
        # A version that was unloaded takes its counts with it.
        grown = {name: max(0, count - before.get(name, 0)) for name, count in counts.items()}
        rates = (name for name in grown if name in ("requests", "failed") or name.startswith("tokens "))
        values |= {name: grown[name] / passed_s for name in rates}
        values["queue"] = grown["queue_ns"] / grown["requests"] / 1e6 if grown["requests"] else 0.0
        lookups = counts["hits"] + counts["misses"]
        if lookups:
            values["cache"] = 100 * counts["hits"] / lookups
        return values
