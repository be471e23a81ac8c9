"""Metrics that a model makes of its own, as they are handed from its runtime to the metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One number. `part` is what a histogram's sample has after the name: "_bucket", "_sum" or "_count"."""

    labels: Mapping[str, str]
    value: float
    part: str = ""


@dataclass(frozen=True, slots=True)
class MetricFamilyView:
    """A metric's name with its samples as they are now."""

    name: str
    kind: MetricKind
    help: str
    samples: tuple[MetricSample, ...]


MetricSource: TypeAlias = Callable[[], Iterable[MetricFamilyView]]
"""Called at each scrape, from any thread."""
