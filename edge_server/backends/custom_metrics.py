"""Custom metrics of Python models: pb_utils.MetricFamily and Metric.

All families of one name in a process are one family, and all metrics with the same labels are one series. A family or
series disappears from the metrics page with the last reference to it, at the latest when its model is unloaded.
"""

from __future__ import annotations

import bisect
import enum
import re
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence

from edge_server.backends.python.error_translation import TritonModelException
from edge_server.backends.python.tensor import plain
from edge_server.core.custom_metric import MetricFamilyView, MetricKind, MetricSample

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_PREFIXES = (
    "nv_inference_",
    "nv_model_",
    "nv_cache_",
    "nv_gpu_",
    "nv_cpu_",
    "nv_energy_",
    "edge_",
    "process_",
)
"""Prefixes of the server's own families. A metrics page with two families of one name is invalid."""


class PbMetricKind(enum.IntEnum):
    """TRITONSERVER_MetricKind."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_KIND_NAMES: dict[PbMetricKind, MetricKind] = {
    PbMetricKind.COUNTER: "counter",
    PbMetricKind.GAUGE: "gauge",
    PbMetricKind.HISTOGRAM: "histogram",
}

_Labels = tuple[tuple[str, str], ...]


class _Series:
    """Values of one series. For a histogram, `counts` has one more entry than `buckets` and is not cumulative."""

    __slots__ = ("__weakref__", "buckets", "counts", "labels", "total", "value")

    def __init__(self, labels: _Labels, buckets: tuple[float, ...] | None) -> None:
        self.labels = labels
        self.buckets = buckets
        self.value = 0.0
        self.total = 0
        self.counts = [0] * (len(buckets) + 1) if buckets is not None else []

    def samples(self) -> list[MetricSample]:
        if self.buckets is None:
            return [MetricSample(dict(self.labels), self.value)]
        found = []
        count = 0
        for edge, more in zip((*self.buckets, float("inf")), self.counts, strict=True):
            count += more
            label = "+Inf" if edge == float("inf") else repr(edge)
            found.append(MetricSample({**dict(self.labels), "le": label}, count, "_bucket"))
        found.append(MetricSample(dict(self.labels), self.value, "_sum"))
        return [*found, MetricSample(dict(self.labels), self.total, "_count")]


class _FamilyData:
    """Name, kind and series of one family, shared by all MetricFamily objects of that name."""

    def __init__(self, name: str, help: str, kind: PbMetricKind) -> None:
        self.name = name
        self.help = help
        self.kind = kind
        self.series: weakref.WeakValueDictionary[_Labels, _Series] = weakref.WeakValueDictionary()


class MetricRegistry:
    """The families of this process, and the ones that isolated models reported last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._families: weakref.WeakValueDictionary[str, _FamilyData] = weakref.WeakValueDictionary()
        self._reported: dict[object, tuple[MetricFamilyView, ...]] = {}

    def family(self, name: str, help: str, kind: PbMetricKind) -> _FamilyData:
        with self.lock:
            shared = self._families.get(name)
            if shared is None:
                shared = self._families[name] = _FamilyData(name, help, kind)
        if shared.kind is not kind:
            raise TritonModelException(
                f"metric family '{name}' is a {_KIND_NAMES[shared.kind]} already, not a {_KIND_NAMES[kind]}"
            )
        return shared

    def report(self, owner: object, views: Iterable[MetricFamilyView]) -> None:
        """Replace the metrics that `owner` reported. No views remove them."""
        with self.lock:
            self._reported.pop(owner, None)
            if found := tuple(views):
                self._reported[owner] = found

    def views(self) -> list[MetricFamilyView]:
        """Return all families that have series, each name once. Of two kinds under one name the first is kept."""
        with self.lock:
            own = [
                MetricFamilyView(
                    shared.name,
                    _KIND_NAMES[shared.kind],
                    shared.help,
                    tuple(sample for series in list(shared.series.values()) for sample in series.samples()),
                )
                for shared in list(self._families.values())
            ]
            found = [*own, *(view for views in self._reported.values() for view in views)]
        by_name: dict[str, MetricFamilyView] = {}
        for view in found:
            known = by_name.get(view.name)
            if known is None:
                by_name[view.name] = view
            elif known.kind == view.kind:
                samples = (*known.samples, *view.samples)
                by_name[view.name] = MetricFamilyView(view.name, view.kind, known.help, samples)
        return [view for view in by_name.values() if view.samples]


REGISTRY = MetricRegistry()


class Metric:
    """One series of a family. Thread-safe."""

    def __init__(self, shared: _FamilyData, series: _Series) -> None:
        self._shared = shared
        self._series = series

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. Raises TritonModelException for a negative value at a counter."""
        self._check_kind("increment", PbMetricKind.COUNTER, PbMetricKind.GAUGE)
        if self._shared.kind is PbMetricKind.COUNTER and value < 0:
            raise TritonModelException(f"counter '{self._shared.name}' cannot be incremented by {value}")
        with REGISTRY.lock:
            self._series.value += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._check_kind("set", PbMetricKind.GAUGE)
        with REGISTRY.lock:
            self._series.value = float(value)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._check_kind("observe", PbMetricKind.HISTOGRAM)
        series = self._series
        with REGISTRY.lock:
            series.counts[bisect.bisect_left(series.buckets or (), value)] += 1
            series.value += value
            series.total += 1

    def value(self) -> float:
        """Return the value of a counter or a gauge."""
        self._check_kind("value", PbMetricKind.COUNTER, PbMetricKind.GAUGE)
        return self._series.value

    def _check_kind(self, method: str, *kinds: PbMetricKind) -> None:
        if self._shared.kind not in kinds:
            kind = _KIND_NAMES[self._shared.kind]
            raise TritonModelException(f"metric '{self._shared.name}' is a {kind}, which has no {method}()")


class MetricFamily:
    """pb_utils.MetricFamily: the metrics of one name."""

    COUNTER = PbMetricKind.COUNTER
    GAUGE = PbMetricKind.GAUGE
    HISTOGRAM = PbMetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: int) -> None:
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED_PREFIXES):
            raise TritonModelException(
                f"metric family '{name}': expected letters, digits and _ and none of the server's own beginnings "
                f"{', '.join(_RESERVED_PREFIXES)}"
            )
        self._shared = REGISTRY.family(plain(name), plain(description), PbMetricKind(kind))

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Return the series with these labels. A histogram needs `buckets`, the rising upper edges of its buckets."""
        shared = self._shared
        key = _label_key(shared.name, labels)
        edges: tuple[float, ...] | None = None
        if shared.kind is PbMetricKind.HISTOGRAM:
            edges = tuple(float(edge) for edge in buckets or ())
            if not edges or list(edges) != sorted(set(edges)):
                raise TritonModelException(
                    f"histogram '{shared.name}': expected rising edges as buckets, got {buckets}"
                )
        elif buckets is not None:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        with REGISTRY.lock:
            series = shared.series.get(key)
            if series is None:
                series = shared.series[key] = _Series(key, edges)
        if series.buckets != edges:
            raise TritonModelException(f"metric '{shared.name}' {dict(key)} has the buckets {series.buckets} already")
        return Metric(shared, series)


def _label_key(name: str, labels: Mapping[str, str] | None) -> _Labels:
    if labels is None:
        return ()
    if not isinstance(labels, Mapping):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    for label, text in labels.items():
        if not isinstance(label, str) or not isinstance(text, str) or not _LABEL.fullmatch(label) or label == "le":
            raise TritonModelException(
                f"metric '{name}': expected names with a text each as labels, got {dict(labels)}"
            )
    return tuple(sorted((plain(label), plain(text)) for label, text in labels.items()))
