"""Encoder of the Prometheus metrics page: Triton's nv_* families, the edge_* families, and those of the process.

Nothing is counted here. Each scrape makes the families from the statistics of the versions. Serving therefore updates
no metric, counts are exact, and an unloaded version has no series.

The text format 0.0.4 is written here because prometheus_client would add "_total" to the names of Triton's counters.
"""

from __future__ import annotations

import functools
import gc
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from edge_server.core.model_statistics import LatencyStatistics, VersionStatistics
from edge_server.core.status_reports import InstanceReport
from edge_server.telemetry.host_usage import HostSampler
from edge_server.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; charset=utf-8"

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's reasons of failure. Each has a series from the start: a rate over it is then always defined."""

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})

Statistics = Callable[[], Sequence[VersionStatistics]]
Reports = Callable[[], Sequence[InstanceReport]]
MetricTags = Callable[[str, int], Mapping[str, str]]


class Family:
    """A metric family: name, kind, help and samples. A second sample with the same labels replaces the first."""

    __slots__ = ("_samples", "help", "kind", "name")

    def __init__(self, name: str, kind: Literal["counter", "gauge", "histogram", "summary"], help: str) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        self._samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, labels: Mapping[str, str], value: float, *, part: str = "") -> None:
        """Add a sample. `part` is the suffix of a histogram's sample: "_bucket", "_sum" or "_count", the last
        two also of a summary's."""
        self._samples[part, tuple(labels.items())] = value

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield the part, the labels and the value of each sample."""
        for (part, labels), value in self._samples.items():
            yield part, dict(labels), value

    def render(self) -> Iterator[str]:
        """Yield the lines of the family; a family without samples has none."""
        if not self._samples:
            return
        yield f"# HELP {self.name} {self.help.translate(_HELP_ESCAPES)}\n"
        yield f"# TYPE {self.name} {self.kind}\n"
        for (part, labels), value in self._samples.items():
            name = self.name + part
            pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels)
            # Go's ParseFloat, which defines the format's numbers, reads Python's spelling of floats, nan and inf.
            yield f"{name}{{{pairs}}} {value}\n" if pairs else f"{name} {value}\n"


Source = Callable[[], Iterable[Family]]


class Metrics:
    """The metrics page: a list of sources, rendered on demand. `render` may be called from any thread.

    `statistics` and `reports` return the loaded versions; `tags(name, version)` returns the version's `metric_tags`.
    With `host` None the page has no families of the machine, without `has_latency_counters` no counters of time.
    """

    def __init__(
        self,
        statistics: Statistics,
        reports: Reports,
        tags: MetricTags,
        host: HostSampler | None,
        *,
        has_latency_counters: bool = True,
    ) -> None:
        self._sources: list[Source] = [
            lambda: _model_families(statistics(), tags, has_latency_counters),
            lambda: _info_families(reports()),
        ]
        if host is not None:
            self._sources.append(lambda: _host_families(host))

    def add_source(self, source: Source) -> None:
        """Add the families of `source` to the page. It is called at each scrape."""
        self._sources.append(source)

    def families(self) -> Iterator[Family]:
        """Yield the families of all sources as they are now, without those of the process."""
        for source in self._sources:
            yield from source()

    def render(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        # So many samples at once make the garbage collector walk through all objects of the server. With a thousand
        # models that takes longer than the page, and nothing else runs meanwhile.
        collects = gc.isenabled()
        gc.disable()
        try:
            lines = [line for family in self.families() for line in family.render()]
        finally:
            if collects:
                gc.enable()
        # A folder name that is not valid Unicode has surrogates: they are escaped.
        page = "".join(lines).encode("utf-8", "backslashreplace")
        # Imported at the first scrape: the library imports an HTTP server of its own.
        from prometheus_client import generate_latest

        return page + generate_latest(_process_registry()), CONTENT_TYPE


@functools.cache
def _process_registry() -> CollectorRegistry:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def _model_families(
    versions: Sequence[VersionStatistics], tags: MetricTags, has_latency_counters: bool
) -> list[Family]:
    counts = [
        (Family(name, "counter", help), read)
        for name, help, read in (*_COUNTERS, *(_LATENCY_COUNTERS if has_latency_counters else ()))
    ]
    cached = [(Family(name, "counter", help), read) for name, help, read in _CACHE_COUNTERS if has_latency_counters]
    first = Family(
        "nv_inference_first_response_histogram_ms", "histogram", "Time from request to first response, in milliseconds"
    )
    summaries = {part: Family(*family) for part, family in _SUMMARIES.items()}
    failures = Family("nv_inference_request_failure", "counter", "Requests that failed, by reason")
    pending = Family("nv_inference_pending_request_count", "gauge", "Requests that wait for execution now")
    load = Family("nv_model_load_duration_secs", "gauge", "Load time of the version, in seconds")
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
        if version.latencies is not None:
            _add_latencies(first, summaries, labels, version.latencies)
    return [*(family for family, _ in (*counts, *cached)), failures, pending, load, live, waiting, first,
            *summaries.values()]  # fmt: skip


def _add_latencies(
    first: Family, summaries: Mapping[str, Family], labels: Mapping[str, str], latencies: LatencyStatistics
) -> None:
    count = 0
    for bound, number in latencies.first_response_buckets.items():
        count += number
        first.add({**labels, "le": "+Inf" if bound == math.inf else f"{bound:g}"}, count, part="_bucket")
    if latencies.first_response_buckets:
        first.add(labels, latencies.first_response_sum_ms, part="_sum")
        first.add(labels, count, part="_count")
    for part, summary in latencies.summaries.items():
        for quantile, value in summary.quantiles_us.items():
            summaries[part].add({**labels, "quantile": f"{quantile:g}"}, value)
        summaries[part].add(labels, summary.sum_us, part="_sum")
        summaries[part].add(labels, summary.request_count, part="_count")


_SUMMARIES: Mapping[str, tuple[str, Literal["summary"], str]] = {
    "request": ("nv_inference_request_summary_us", "summary", "Time from arrival to response, in microseconds"),
    "queue": ("nv_inference_queue_summary_us", "summary", "Time in the queue, in microseconds"),
    "compute_input": ("nv_inference_compute_input_summary_us", "summary", "Time to gather inputs, in microseconds"),
    "compute_infer": (
        "nv_inference_compute_infer_summary_us", "summary", "Execution time of the model, in microseconds",
    ),
    "compute_output": (
        "nv_inference_compute_output_summary_us", "summary", "Time to distribute outputs, in microseconds",
    ),
}  # fmt: skip
"""By LATENCY_PARTS. Quantiles are of the last minute; answers from the response cache count in the first two."""


_COUNTERS: tuple[tuple[str, str, Callable[[VersionStatistics], int]], ...] = (
    ("nv_inference_request_success", "Successful requests, of any batch size", lambda v: v.success.count),
    ("nv_inference_count", "Inferences: the sum of batch sizes", lambda v: v.inference_count),
    ("nv_inference_exec_count", "Model executions: batches run", lambda v: v.execution_count),
    (
        "edge_batch_reruns_total",
        "Failed batches whose requests were run again singly, because one of them may be at fault",
        lambda v: v.batch_rerun_count,
    ),
)

_LATENCY_COUNTERS: tuple[tuple[str, str, Callable[[VersionStatistics], int]], ...] = (
    (
        "nv_inference_request_duration_us",
        "Time from arrival to response, summed over successful requests, in microseconds",
        lambda v: v.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Time in the queue, summed over requests, in microseconds",
        lambda v: v.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Time to gather inputs, summed over requests, in microseconds",
        lambda v: v.compute_input.ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Execution time of the model, summed over requests, in microseconds",
        lambda v: v.compute_infer.ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Time to distribute outputs, summed over requests, in microseconds",
        lambda v: v.compute_output.ns // 1000,
    ),
)

_CACHE_COUNTERS: tuple[tuple[str, str, Callable[[VersionStatistics], int]], ...] = (
    ("nv_cache_num_hits_per_model", "Requests answered from the response cache", lambda v: v.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Requests that were not in the response cache", lambda v: v.cache_miss.count),
    (
        "nv_cache_hit_duration_per_model",
        "Time of requests answered from the response cache, in microseconds",
        lambda v: v.cache_hit.ns // 1000,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Time of lookups without a hit in the response cache, and of insertions, in microseconds",
        lambda v: v.cache_miss.ns // 1000,
    ),
)
"""Only for versions that use the response cache."""


def _labels(version: VersionStatistics, tags: MetricTags) -> dict[str, str]:
    labels = {"model": version.name, "version": str(version.version)}
    for key, value in tags(version.name, version.version).items():
        # Triton's prefix "_": a tag cannot replace a label of the server.
        labels.setdefault("_" + re.sub(r"[^a-zA-Z0-9_]", "_", key), value)
    return labels


def _info_families(reports: Sequence[InstanceReport]) -> list[Family]:
    build = Family("edge_build_info", "gauge", "1, labelled with the versions of the server and of Python")
    build.add({"version": __version__, "python": sys.version.split()[0]}, 1)
    models = Family(
        "edge_model_info",
        "gauge",
        "1, labelled with backend, runtime, device, precision and SHA-256 of each loaded version",
    )
    for report in reports:
        labels = {
            "model": report.name,
            "version": str(report.version),
            "backend": report.backend,
            "runtime": report.runtime,
            "device": report.device,
            "precision": report.precision,
            "digest": report.digest,
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
