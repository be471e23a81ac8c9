"""The Prometheus page: Triton's nv_* families, our edge_* ones, and those of the process.

Nothing is counted here. At each scrape the families are made from the versions' own statistics, so that serving touches
no metric, counts are exact, and the series of an unloaded version are gone with it.

Rendered in the text format 0.0.4 by hand: Triton's counters have no "_total" at the end of their names, which
prometheus_client would add.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import edge_server
from edge_server.core.model_statistics import VersionStatistics
from edge_server.core.status_reports import InstanceReport
from edge_server.telemetry.host_usage import HostSampler

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; charset=utf-8"

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's reasons of failure; each has its series from the start, so that a rate over it is never undefined."""

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})

Statistics = Callable[[], Sequence[VersionStatistics]]
Reports = Callable[[], Sequence[InstanceReport]]
MetricTags = Callable[[str, int], Mapping[str, str]]


class Family:
    """A metric name with its samples. Adding the same labels again replaces the sample: a page with two is invalid."""

    __slots__ = ("_samples", "help", "kind", "name")

    def __init__(self, name: str, kind: Literal["counter", "gauge", "histogram"], help: str) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        self._samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, labels: Mapping[str, str], value: float, *, part: str = "") -> None:
        """Add a sample; `part` is what a histogram's sample has after the name: "_bucket", "_sum" or "_count"."""
        self._samples[part, tuple(labels.items())] = value

    def render(self) -> Iterator[str]:
        """Yield the lines of the family, none when it has no samples."""
        if not self._samples:
            return
        yield f"# HELP {self.name} {self.help.translate(_HELP_ESCAPES)}\n"
        yield f"# TYPE {self.name} {self.kind}\n"
        for (part, labels), value in self._samples.items():
            name = self.name + part
            pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels)
            # Python spells floats, nan and inf in ways that Go's ParseFloat, which the format refers to, reads.
            yield f"{name}{{{pairs}}} {value}\n" if pairs else f"{name} {value}\n"


Source = Callable[[], Iterable[Family]]


class Metrics:
    """The page's sources, rendered on demand. `render` may be called from any thread.

    `statistics` and `reports` give the versions that are loaded; `tags(name, version)` the version's `metric_tags`.
    `host` None leaves the machine's families out.
    """

    def __init__(self, statistics: Statistics, reports: Reports, tags: MetricTags, host: HostSampler | None) -> None:
        self._sources: list[Source] = [
            lambda: _model_families(statistics(), tags),
            lambda: _information(reports()),
        ]
        if host is not None:
            self._sources.append(lambda: _host_families(host))

    def add_source(self, source: Source) -> None:
        """Render the families that `source` returns too; it is called at every scrape."""
        self._sources.append(source)

    def render(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        lines = [line for source in self._sources for family in source() for line in family.render()]
        # A folder name that is no Unicode has surrogates in it; they are spelled out.
        page = "".join(lines).encode("utf-8", "backslashreplace")
        return page + _process_page(), CONTENT_TYPE


def _process_page() -> bytes:
    # The library comes with the first who asks for the page: it brings an HTTP server of its own.
    from prometheus_client import generate_latest

    return generate_latest(_process_registry())


@functools.cache
def _process_registry() -> CollectorRegistry:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def _model_families(versions: Sequence[VersionStatistics], tags: MetricTags) -> list[Family]:
    counts = [(Family(name, "counter", help), read) for name, help, read in _COUNTERS]
    cached = [(Family(name, "counter", help), read) for name, help, read in _CACHE_COUNTERS]
    failures = Family("nv_inference_request_failure", "counter", "Requests that failed, by reason")
    pending = Family("nv_inference_pending_request_count", "gauge", "Requests that wait for their execution now")
    load = Family("nv_model_load_duration_secs", "gauge", "How long the version took to load, in seconds")
    live = Family("edge_sequences_live", "gauge", "Sequences that hold a slot of the model now")
    waiting = Family("edge_sequences_waiting", "gauge", "Sequences that wait for a slot of the model now")
    for version in versions:
        labels = _labels(version, tags)
        for family, read in counts:
            family.add(labels, read(version))
        for reason in FAILURE_REASONS:
            failures.add({**labels, "reason": reason}, version.failures.get(reason, 0))
        if version.is_cached:
            for family, read in cached:
                family.add(labels, read(version))
        pending.add(labels, version.pending_count)
        if version.live_sequences is not None:
            live.add(labels, version.live_sequences)
            waiting.add(labels, version.waiting_sequences)
        load.add(labels, version.load_duration_s)
    return [*(family for family, _ in (*counts, *cached)), failures, pending, load, live, waiting]


_COUNTERS: tuple[tuple[str, str, Callable[[VersionStatistics], int]], ...] = (
    ("nv_inference_request_success", "Requests answered, of any batch size", lambda v: v.success.count),
    ("nv_inference_count", "Inferences made: the sum of batch sizes", lambda v: v.inference_count),
    ("nv_inference_exec_count", "Model executions: batches run", lambda v: v.execution_count),
    (
        "nv_inference_request_duration_us",
        "Time from arrival to answer, summed over answered requests, in microseconds",
        lambda v: v.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Time spent waiting, summed over requests, in microseconds",
        lambda v: v.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Time spent gathering inputs, summed over requests, in microseconds",
        lambda v: v.compute_input.ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Time spent executing the model, summed over requests, in microseconds",
        lambda v: v.compute_infer.ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Time spent handing out outputs, summed over requests, in microseconds",
        lambda v: v.compute_output.ns // 1000,
    ),
)

_CACHE_COUNTERS: tuple[tuple[str, str, Callable[[VersionStatistics], int]], ...] = (
    ("nv_cache_num_hits_per_model", "Requests answered from the response cache", lambda v: v.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Requests that were not in the response cache", lambda v: v.cache_miss.count),
    (
        "nv_cache_hit_duration_per_model",
        "Time spent on requests answered from the response cache, in microseconds",
        lambda v: v.cache_hit.ns // 1000,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Time spent looking for answers that were not in the response cache, and storing them, in microseconds",
        lambda v: v.cache_miss.ns // 1000,
    ),
)
"""Only of versions whose answers may come from the cache."""


def _labels(version: VersionStatistics, tags: MetricTags) -> dict[str, str]:
    labels = {"model": version.name, "version": str(version.version)}
    for key, value in tags(version.name, version.version).items():
        # Triton's prefix "_" keeps a tag from posing as a label of the server's.
        labels.setdefault("_" + re.sub(r"[^a-zA-Z0-9_]", "_", key), value)
    return labels


def _information(reports: Sequence[InstanceReport]) -> list[Family]:
    build = Family("edge_build_info", "gauge", "1, labelled with what is running")
    build.add({"version": edge_server.__version__, "python": platform.python_version()}, 1)
    models = Family("edge_model_info", "gauge", "1, labelled with how each loaded version is executed")
    for report in reports:
        labels = {
            "model": report.name,
            "version": str(report.version),
            "backend": report.backend,
            "runtime": report.runtime,
            "device": report.device,
            "precision": report.precision,
        }
        models.add(labels, 1)
    return [build, models]


def _host_families(host: HostSampler) -> list[Family]:
    reading = host.read()
    if reading is None:
        return []
    load = Family("nv_cpu_utilization", "gauge", "Share of all processor cores in use, 0 to 1")
    total = Family("nv_cpu_memory_total_bytes", "gauge", "Memory of the machine in bytes")
    used = Family("nv_cpu_memory_used_bytes", "gauge", "Memory of the machine in use in bytes")
    load.add({}, reading.cpu_utilization)
    total.add({}, reading.memory_total_bytes)
    used.add({}, reading.memory_used_bytes)
    return [load, total, used]
