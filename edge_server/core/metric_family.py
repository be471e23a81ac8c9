"""Data classes of a model's own metrics: metric families and samples, as a backend gives them to the metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]


class MetricSample(NamedTuple):
    """One value. `part` is the name suffix of a histogram's sample: "_bucket", "_sum" or "_count"."""

    labels: Mapping[str, str]
    value: float
    part: str = ""


class MetricFamilyView(NamedTuple):
    """A metric family and its current samples."""

    name: str
    kind: MetricKind
    help: str
    samples: tuple[MetricSample, ...]


MetricSource: TypeAlias = Callable[[], Iterable[MetricFamilyView]]
"""Called at each scrape, from any thread."""
