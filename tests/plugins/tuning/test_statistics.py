"""Statistics of a measurement: windows, percentiles, warnings; ranges and traces on the command line."""

from __future__ import annotations

import argparse
import json
import math
import random
import xml.etree.ElementTree as ET
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.plugins.tuning.clients.client_interface import ServerCounts
from edge_server.plugins.tuning.load.load_generator import constant, poisson
from edge_server.plugins.tuning.load.measurement_results import (
    Answer,
    MeasuredPoint,
    MeasurementWindow,
    ServerTimeSplit,
    are_steady,
    doubts,
    joined,
    percentile,
)
from edge_server.plugins.tuning.load.report import draw_charts, to_json
from edge_server.plugins.tuning.perf_options import levels, read_intervals, shape
from edge_server.plugins.tuning.svg_charts import Bar, draw_bars


def window(rate: int, latency_s: float, **more: object) -> MeasurementWindow:
    answers = [Answer(0.0, latency_s) for _ in range(rate)]
    return MeasurementWindow(1.0, answers, **more)  # type: ignore[arg-type]


def test_three_windows_within_a_tenth_are_steady() -> None:
    assert are_steady([window(100, 0.01), window(105, 0.0102), window(98, 0.0099)], 0.1)
    assert not are_steady([window(100, 0.01), window(105, 0.01)], 0.1)
    assert not are_steady([window(100, 0.01), window(150, 0.01), window(100, 0.01)], 0.1)
    assert not are_steady([window(100, 0.01), window(100, 0.02), window(100, 0.01)], 0.1)


def test_only_the_last_windows_count() -> None:
    assert are_steady([window(5, 1.0), window(100, 0.01), window(100, 0.01), window(100, 0.01)], 0.1)


def test_windows_without_a_successful_response_are_not_steady() -> None:
    failed = MeasurementWindow(1.0, [Answer(0.0, 0.1, "UNAVAILABLE")])
    assert not are_steady([failed, failed, failed], 0.1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([50, 90, 95, 99]))
def test_a_percentile_is_one_of_the_measured_values(values: list[float], percent: int) -> None:
    found = percentile(sorted(values), percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values)
    assert sum(value < found for value in values) < max(percent / 100 * len(values), 1)


def test_server_times_are_differences_of_sums_per_request() -> None:
    before = ServerCounts(10, 1, 40, 5, 1000, 100, 10, 500, 20)
    after = ServerCounts(30, 1, 120, 15, 201_000, 40_100, 2_010, 100_500, 1_020)
    split = ServerTimeSplit.of(after - before)
    assert split is not None
    assert (split.requests, split.inferences, split.executions) == (20, 80, 10)
    assert (split.request_us, split.queue_us, split.input_us, split.infer_us, split.output_us) == (10, 2, 0.1, 5, 0.05)
    assert ServerTimeSplit.of(ServerCounts()) is None


def test_windows_are_joined_with_all_their_responses() -> None:
    one = window(10, 0.1, server=ServerCounts(successes=10), server_cpu=1.0, server_bytes=5.0, dropped={"newer": 2})
    two = window(30, 0.1, server=ServerCounts(successes=30), server_cpu=0.5, server_bytes=9.0, dropped={"newer": 1})
    whole = joined([one, two])
    assert (whole.seconds, whole.rate, whole.server_cpu, whole.server_bytes) == (2.0, 20.0, 0.75, 9.0)
    assert whole.server == ServerCounts(successes=40)
    assert whole.dropped == {"newer": 3}
    assert joined([one, window(1, 1.0)]).server is None


def test_failures_are_reported_by_reason_and_do_not_count_as_throughput() -> None:
    answers = [Answer(0.0, 0.01), Answer(0.0, 0.0, "HTTP 429"), Answer(0.0, 0.0, "HTTP 429")]
    point = MeasuredPoint.of("concurrency", 1, 2, MeasurementWindow(1.0, answers), is_steady=True)
    assert point.failures == {"HTTP 429": 2}
    assert point.throughput == 2.0


def test_a_busy_client_is_reported_as_the_limit() -> None:
    busy = MeasuredPoint.of("concurrency", 1, 1, window(10, 0.1, client_cpu=0.95), is_steady=True)
    assert any("it is the limit" in text for text in doubts(busy, 8))
    idle = MeasuredPoint.of("concurrency", 1, 1, window(10, 0.1, client_cpu=0.05, server_cpu=0.5), is_steady=True)
    assert doubts(idle, 8) == []
    shared = MeasuredPoint.of("concurrency", 1, 1, window(10, 0.1, client_cpu=0.6, server_cpu=1.4), is_steady=True)
    assert any("share 2 busy cores" in text for text in doubts(shared, 2))


def test_missing_values_are_null_in_the_report_and_omitted_from_the_chart() -> None:
    nothing = MeasuredPoint.of("concurrency", 1, 1, MeasurementWindow(1.0, [Answer(0.0, 0.1, "X")]), is_steady=False)
    document = to_json(nothing, 2)
    assert json.loads(json.dumps(document, allow_nan=False))["latency_ms"]["p50"] is None
    assert "nan" not in draw_charts("<&>", [nothing])


def assert_nothing_is_clipped(picture: str) -> None:
    """Check that each text is inside the view box: a letter is about half as wide as it is high."""
    root = ET.fromstring(picture)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        size = float(text.get("font-size", "11"))
        length = len(text.text or "") * size * 0.55
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        left = {"end": x - length, "middle": x - length / 2}.get(text.get("text-anchor", ""), x)
        assert 0 <= left <= left + length <= width, text.text
        assert size <= y <= height - size / 3, text.text


@pytest.mark.parametrize("count", [1, 3])
def test_the_chart_of_a_measurement_is_not_clipped(count: int) -> None:
    counts = ServerCounts(10, 0, 10, 10, 1000, 100, 10, 500, 20)
    measured = window(100, 0.01, server=counts, server_cpu=0.5)
    points = [MeasuredPoint.of("concurrency", at, 1, measured, is_steady=True) for at in range(1, count + 1)]
    picture = draw_charts("a_model_with_a_name_that_is_wider_than_the_picture" * 2, points)
    assert picture.count("<polyline") == 1 + 4 + 4 + 2
    assert_nothing_is_clipped(picture)


@pytest.mark.parametrize("says", ["1/s", "123.4/s, p99 79.1 ms; p99 79.1 ms > 60 ms; difference 0.02 > 0.01"])
def test_bars_are_not_clipped_for_any_number_and_label_length(says: str) -> None:
    keys = [("recommended", "red"), ("within the limits", "blue"), ("beyond the limits", "green")]
    bars = [Bar("as configured", 1.0, says, "red")]
    assert_nothing_is_clipped(draw_bars("Configurations of " + "m" * 90, bars, "facts " * 20, keys))


def test_ranges_are_parsed_to_levels() -> None:
    table = [
        ("4", [4]),
        ("1,2,8", [1, 2, 8]),
        ("1:4", [1, 2, 3, 4]),
        ("1:9:4", [1, 5, 9]),
        ("1:16:x2", [1, 2, 4, 8, 16]),
        ("3:20:x2", [3, 6, 12]),
    ]
    assert [(text, levels(1, 100, is_whole=True)(text)) for text, _ in table] == table


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "text", ["", "0", "-1", "a", "1:", ":4", "4:1", "1:8:0", "1:8:x1", "1:8:x0.5", "1:2:3:4", "1.5", "1e9",
     "nan", "1:100:0.001", "1:inf"]
)  # fmt: skip
def test_invalid_ranges_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected N"):
        levels(1, 100, is_whole=True)(text)


def test_shapes_are_parsed() -> None:
    assert shape("a:b:1,2") == ("a:b", (1, 2))
    for text in ("a", ":1", "a:-1", "a:x", "a:1,", "a:9999999999"):
        with pytest.raises(argparse.ArgumentTypeError):
            shape(text)


def test_valid_traces_are_read_and_invalid_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("1000\n0\n2000\n")
    assert read_intervals(path) == pytest.approx((0.001, 0.0, 0.002))
    for text in ("", "x\n", "-1\n", "0\n0\n", "nan\n", "inf\n"):
        path.write_text(text)
        with pytest.raises(InvalidRequest):
            read_intervals(path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_intervals(tmp_path / "none")


def test_schedules_have_the_rate_on_average() -> None:
    assert math.fsum(islice(constant(50), 100)) == pytest.approx(2.0)
    drawn = list(islice(poisson(50, 1), 4000))
    # The mean of 4000 exponential intervals lies within five standard errors of its expectation.
    assert math.fsum(drawn) / 4000 == pytest.approx(0.02, rel=5 / math.sqrt(4000))
    assert drawn == list(islice(poisson(50, 1), 4000))
    assert drawn != [random.Random(2).expovariate(50)] * 4000
