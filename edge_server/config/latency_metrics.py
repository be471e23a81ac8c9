"""Parser of Triton's `--metrics-config`: which families of metrics show the latencies of models."""

from __future__ import annotations

from collections.abc import Iterable

from edge_server.config.setting import nearest, parse_boolean

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
"""Triton's (metric_model_reporter.h)."""

_SWITCHES = ("counter_latencies", "histogram_latencies", "summary_latencies")
_QUANTILES = "summary_quantiles"

LatencyMetric = tuple[str, str]
"""A name of `--metrics-config` and its checked value."""


def parse_latency_metric(text: str) -> LatencyMetric:
    """Parse `NAME=VALUE`. Raises ValueError."""
    name, equals, value = text.partition("=")
    known = (*_SWITCHES, _QUANTILES)
    if name not in known or not equals:
        raise ValueError(f"expected <name>=<value> with one of {', '.join(known)}{nearest(name, known)}")
    if name in _SWITCHES:
        return name, "true" if parse_boolean(value) else "false"
    _parse_quantiles(value)
    return name, value


def _parse_quantiles(text: str) -> tuple[float, ...]:
    """Parse Triton's pairs `QUANTILE:ERROR,...`. The error is not used: quantiles of the window are exact."""
    found = []
    for pair in text.split(","):
        quantile, colon, error = pair.strip().partition(":")
        try:
            float(error)
            number = float(quantile)
        except ValueError:
            number = -1.0
        if not colon or not 0 <= number <= 1:
            raise ValueError(f"{_QUANTILES}: expected pairs such as 0.9:0.01, from 0 to 1, given '{pair[:80]}'")
        found.append(number)
    return tuple(found)


def is_on(metrics: Iterable[LatencyMetric], name: str, default: bool) -> bool:
    """Return whether a switch is on. The last value counts."""
    return dict(metrics).get(name, "true" if default else "false") == "true"


def quantiles(metrics: Iterable[LatencyMetric]) -> tuple[float, ...]:
    """Return the quantiles of the summaries, empty if there are none."""
    values = dict(metrics)
    if values.get("summary_latencies") != "true":
        return ()
    return _parse_quantiles(values[_QUANTILES]) if _QUANTILES in values else DEFAULT_QUANTILES
