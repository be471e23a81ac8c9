"""Classes pb_utils.MetricFamily and Metric, by which a Python model defines metrics of its own."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence

from edge_server.backends.custom_metrics import REGISTRY, Labels, MetricSeries
from edge_server.core.metric_family import MetricKind
from edge_server.plugins.python_models.error_translation import TritonModelException
from edge_server.plugins.python_models.tensor import plain

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


_KINDS: dict[PbMetricKind, MetricKind] = {
    PbMetricKind.COUNTER: "counter",
    PbMetricKind.GAUGE: "gauge",
    PbMetricKind.HISTOGRAM: "histogram",
}


class Metric:
    """One series of a family. Thread-safe."""

    def __init__(self, series: MetricSeries) -> None:
        self._series = series

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. Raises TritonModelException for a negative value at a counter."""
        self._check_kind("increment", "counter", "gauge")
        family = self._series.family
        if family.kind == "counter" and value < 0:
            raise TritonModelException(f"counter '{family.name}' cannot be incremented by {value}")
        self._series.add(value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._check_kind("set", "gauge")
        self._series.set(value)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._check_kind("observe", "histogram")
        self._series.observe(value)

    def value(self) -> float:
        """Return the value of a counter or a gauge."""
        self._check_kind("value", "counter", "gauge")
        return self._series.value

    def _check_kind(self, method: str, *kinds: MetricKind) -> None:
        family = self._series.family
        if family.kind not in kinds:
            raise TritonModelException(f"metric '{family.name}' is a {family.kind}, which has no {method}()")


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
        wanted = _KINDS[PbMetricKind(kind)]
        self._family = REGISTRY.family(plain(name), plain(description), wanted)
        if self._family.kind != wanted:
            raise TritonModelException(f"metric family '{name}' is a {self._family.kind} already, not a {wanted}")

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Return the series with these labels. `buckets` are the rising upper edges of a histogram's."""
        family = self._family
        key = _label_key(family.name, labels)
        edges: tuple[float, ...] | None = None
        if family.kind == "histogram":
            edges = tuple(float(edge) for edge in buckets or ())
            if list(edges) != sorted(set(edges)):
                raise TritonModelException(
                    f"histogram '{family.name}': expected rising edges as buckets, got {buckets}"
                )
        elif buckets is not None:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        series = family.series(key, edges)
        if series.buckets != edges:
            raise TritonModelException(f"metric '{family.name}' {dict(key)} has the buckets {series.buckets} already")
        return Metric(series)


def _label_key(name: str, labels: Mapping[str, str] | None) -> Labels:
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
