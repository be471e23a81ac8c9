"""Custom metrics of a model: families and samples that a runtime passes to the metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value. `part` is the name suffix of a histogram's sample: "_bucket", "_sum" or "_count"."""

    labels: Mapping[str, str]
    value: float
    part: str = ""


@dataclass(frozen=True, slots=True)
class MetricFamilyView:
    """A metric family and its current samples."""

    name: str
    kind: MetricKind
    help: str
    samples: tuple[MetricSample, ...]


MetricSource: TypeAlias = Callable[[], Iterable[MetricFamilyView]]
"""Called at each scrape, from any thread."""
