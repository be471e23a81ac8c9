"""Triton's `--metrics-config`."""

from __future__ import annotations

import pytest

from edge_server.config import ConfigError, parse_serve
from edge_server.config.latency_metrics import DEFAULT_QUANTILES, is_on, quantiles


def parsed(*values: str) -> tuple[tuple[str, str], ...]:
    flags = [f"--metrics-config={value}" for value in values]
    return parse_serve(["--model-repository=/models", *flags], {}).config.metrics.latencies


def test_the_last_value_of_a_switch_counts() -> None:
    metrics = parsed("histogram_latencies=true", "counter_latencies=false", "histogram_latencies=false")
    assert not is_on(metrics, "histogram_latencies", default=False)
    assert not is_on(metrics, "counter_latencies", default=True)
    assert is_on(parsed(), "counter_latencies", default=True)


def test_summaries_have_tritons_quantiles_or_the_given_ones() -> None:
    assert quantiles(parsed()) == ()
    assert quantiles(parsed("summary_quantiles=0.5:0.05")) == ()
    assert quantiles(parsed("summary_latencies=true")) == DEFAULT_QUANTILES
    assert quantiles(parsed("summary_latencies=true", "summary_quantiles=0.5:0.05,0.9:0.01")) == (0.5, 0.9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("histogram_latency=true", "did you mean 'histogram_latencies'"),
        ("histogram_latencies", "expected <name>=<value>"),
        ("histogram_latencies=maybe", "expected true, false"),
        ("summary_quantiles=0.5", "expected pairs such as 0.9:0.01"),
        ("summary_quantiles=1.5:0.1", "from 0 to 1, given '1.5:0.1'"),
        ("summary_quantiles=nan:0.1", "from 0 to 1"),
        ("summary_quantiles=", "expected pairs"),
    ],
)
def test_other_values_are_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(value)
