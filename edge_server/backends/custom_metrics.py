"""Registry of the metrics that models define themselves: names, labels and values, also those that models in child
processes report.

All families of one name in a process are one family, and all series with the same labels are one series. A family or
series disappears from the metrics page with the last reference to it, at the latest when its model is unloaded.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Iterable
from typing import TypeAlias

from edge_server.core.metric_family import MetricFamilyView, MetricKind, MetricSample

Labels: TypeAlias = tuple[tuple[str, str], ...]


class MetricSeries:
    """Values of one series. Thread-safe. Make it with `CustomMetricFamily.series`.

    Of a histogram, `_counts` has one more entry than `buckets` and is not cumulative.
    """

    __slots__ = ("__weakref__", "_counts", "_lock", "_total", "buckets", "family", "labels", "value")

    def __init__(
        self, family: CustomMetricFamily, labels: Labels, buckets: tuple[float, ...] | None, lock: threading.Lock
    ) -> None:
        self.family = family
        self.labels = labels
        self.buckets = buckets
        self.value = 0.0
        """Of a histogram, the sum of the observed values."""
        self._lock = lock
        self._total = 0
        self._counts = [0] * (len(buckets) + 1) if buckets is not None else []

    def add(self, value: float) -> None:
        """Add to a counter or a gauge."""
        with self._lock:
            self.value += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self.value = float(value)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._counts[bisect.bisect_left(self.buckets or (), value)] += 1
            self.value += value
            self._total += 1

    def samples(self) -> list[MetricSample]:
        if self.buckets is None:
            return [MetricSample(dict(self.labels), self.value)]
        found = []
        count = 0
        for edge, more in zip((*self.buckets, float("inf")), self._counts, strict=True):
            count += more
            label = "+Inf" if edge == float("inf") else repr(edge)
            found.append(MetricSample({**dict(self.labels), "le": label}, count, "_bucket"))
        found.append(MetricSample(dict(self.labels), self.value, "_sum"))
        return [*found, MetricSample(dict(self.labels), self._total, "_count")]


class CustomMetricFamily:
    """Name, kind and series of one family. Make it with `MetricRegistry.family`."""

    def __init__(self, name: str, help: str, kind: MetricKind, lock: threading.Lock) -> None:
        self.name = name
        self.help = help
        self.kind = kind
        self._lock = lock
        self._series: weakref.WeakValueDictionary[Labels, MetricSeries] = weakref.WeakValueDictionary()

    def series(self, labels: Labels, buckets: tuple[float, ...] | None = None) -> MetricSeries:
        """Return the series with these sorted labels. `buckets` are the rising upper edges of a new histogram's."""
        with self._lock:
            found = self._series.get(labels)
            if found is None:
                found = self._series[labels] = MetricSeries(self, labels, buckets, self._lock)
        return found

    def samples(self) -> list[MetricSample]:
        return [sample for series in list(self._series.values()) for sample in series.samples()]


class MetricRegistry:
    """The families of this process, and the ones that isolated models reported last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: weakref.WeakValueDictionary[str, CustomMetricFamily] = weakref.WeakValueDictionary()
        self._reported: dict[object, tuple[MetricFamilyView, ...]] = {}

    def family(self, name: str, help: str, kind: MetricKind) -> CustomMetricFamily:
        """Return the family of that name. One that another model made may be of another kind."""
        with self._lock:
            found = self._families.get(name)
            if found is None:
                found = self._families[name] = CustomMetricFamily(name, help, kind, self._lock)
        return found

    def report(self, owner: object, views: Iterable[MetricFamilyView]) -> None:
        """Replace the metrics that `owner` reported. No views remove them."""
        with self._lock:
            self._reported.pop(owner, None)
            if found := tuple(views):
                self._reported[owner] = found

    def views(self) -> list[MetricFamilyView]:
        """Return all families that have series, each name once. Of two kinds under one name the first is kept."""
        with self._lock:
            own = [
                MetricFamilyView(family.name, family.kind, family.help, tuple(family.samples()))
                for family in list(self._families.values())
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
