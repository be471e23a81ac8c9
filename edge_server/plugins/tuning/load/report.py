"""Report of the results of a load test: a table, JSON or SVG charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edge_server.plugins.tuning.load.measurement_results import (
    PERCENTILES,
    MeasuredPoint,
    ServerTimeSplit,
    TextFigures,
    doubts,
)
from edge_server.plugins.tuning.svg_charts import COLORS, ChartCurve, CurvePanel, draw_panels

COLUMN_TITLES = (
    "RATE/S", "P50 MS", "P90", "P95", "P99", "QUEUE US", "INPUT", "INFER", "OUTPUT", "SERVER CPU", "MB", "CLIENT CPU",
    "FAILED",
)  # fmt: skip
"""Column titles after the first one, which depends on the mode."""

TEXT_COLUMN_TITLES = (
    "RATE/S", "TOKENS/S", "FIRST MS P50", "P90", "P99", "NEXT MS P50", "P90", "P99", "SERVER CPU", "MB", "CLIENT CPU",
    "FAILED",
)  # fmt: skip
"""The same for streamed text: time to the first token, and between two tokens."""

OPTIONAL_COLUMNS = ("OUTPUT", "INPUT", "CLIENT CPU", "MB", "P95", "P90", "QUEUE US")
"""Columns that are omitted on a narrow terminal, the first one first."""

MODES = {"concurrency": "CONCURRENCY", "request_rate": "REQUEST RATE", "frames": "FPS", "intervals": "TRACE"}

Json = dict[str, object]


def table_row(point: MeasuredPoint) -> tuple[str, ...]:
    """Return a row of the table, with the columns mode and COLUMN_TITLES, or TEXT_COLUMN_TITLES for streamed text."""
    split, text = point.split, point.text
    parts = ["-"] * 4
    if split is not None:
        parts = [f"{part:.0f}" for part in (split.queue_us, split.input_us, split.infer_us, split.output_us)]
    times = [*(_ms(point.percentiles_ms[percent]) for percent in PERCENTILES), *parts]
    if text is not None:
        times = [f"{text.tokens_per_s:.1f}"]
        times += [_ms(part[percent]) for part in (text.first_ms, text.between_ms) for percent in (50, 90, 99)]
    return (
        f"{point.level:g}" + ("" if point.is_steady else " ~"),
        f"{point.throughput:.1f}",
        *times,
        "-" if point.server_cpu is None else f"{point.server_cpu:.2f}",
        "-" if point.server_bytes is None else f"{point.server_bytes / 1e6:.0f}",
        f"{point.client_cpu:.2f}",
        _counts(point.failures),
    )


def _ms(value: float) -> str:
    return (
        "-" if math.isnan(value) else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "0"


def point_notes(point: MeasuredPoint, cores: int) -> list[str]:
    """Return the notes on a point, to be printed below the table."""
    level = f"{MODES[point.mode].lower()} {point.level:g}"
    lines = [f"{level}: {text}" for text in doubts(point, cores)]
    if point.dropped:
        lines.insert(0, f"{level}: frames without a result: {_counts(point.dropped)}")
    return lines


def to_json(point: MeasuredPoint, cores: int) -> Json:
    """Return the results as JSON values; null stands for a missing value. Names end in their unit."""
    return {
        point.mode: point.level,
        "batch_size": point.batch,
        "stable": point.is_steady,
        "seconds": _round(point.seconds),
        "requests": point.requests,
        "throughput": _round(point.throughput),
        "latency_ms": {
            "mean": _round(point.mean_ms),
            "standard_deviation": _round(point.deviation_ms),
            **{f"p{percent}": _round(point.percentiles_ms[percent]) for percent in PERCENTILES},
        },
        "failures": dict(point.failures),
        "dropped": dict(point.dropped),
        "late_requests": point.late,
        "send_lag_p99_ms": _round(point.lag_p99_ms),
        "server": None if point.split is None else _split_json(point.split),
        "server_cpu_cores": None if point.server_cpu is None else _round(point.server_cpu),
        "server_resident_bytes": None if point.server_bytes is None else int(point.server_bytes),
        "client_cpu_cores": _round(point.client_cpu),
        "power_w": None if point.power_w is None else _round(point.power_w),
        "text": None if point.text is None else _text_json(point.text),
        "doubts": doubts(point, cores),
    }


def _text_json(text: TextFigures) -> Json:
    return {
        "tokens": text.tokens,
        "tokens_per_second": _round(text.tokens_per_s),
        "time_to_first_token_ms": {f"p{percent}": _round(value) for percent, value in text.first_ms.items()},
        "inter_token_latency_ms": {f"p{percent}": _round(value) for percent, value in text.between_ms.items()},
    }


def _split_json(split: ServerTimeSplit) -> Json:
    return {
        "requests": split.requests,
        "inferences": split.inferences,
        "executions": split.executions,
        "request_us": _round(split.request_us),
        "queue_us": _round(split.queue_us),
        "compute_input_us": _round(split.input_us),
        "compute_infer_us": _round(split.infer_us),
        "compute_output_us": _round(split.output_us),
    }


def _round(value: float) -> float | None:
    """Return the value with six significant digits; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def draw_charts(title: str, points: Sequence[MeasuredPoint]) -> str:
    """Return an SVG of throughput, latency, time per server stage and processor use, by concurrency or rate."""
    name = MODES[points[0].mode].lower()

    def curve(curve_name: str, values: Sequence[float], color: str) -> ChartCurve:
        return ChartCurve(
            curve_name, [(point.level, value) for point, value in zip(points, values, strict=True)], color
        )

    panels = [
        CurvePanel(
            "inferences a second", [curve("throughput", [point.throughput for point in points], COLORS[0])], name
        ),
        CurvePanel(
            "latency, ms",
            [
                curve(f"p{percent}", [point.percentiles_ms[percent] for point in points], color)
                for percent, color in zip(PERCENTILES, COLORS, strict=False)
            ],
            name,
        ),
    ]
    splits = [point.split for point in points]
    if None not in splits:
        known = [split for split in splits if split is not None]
        parts = ("queue_us", "input_us", "infer_us", "output_us")
        panels.append(
            CurvePanel(
                "of that in the server, mean ms",
                [
                    curve(part.removesuffix("_us"), [getattr(split, part) / 1000 for split in known], color)
                    for part, color in zip(parts, COLORS, strict=False)
                ],
                name,
            )
        )
    busy = [point.server_cpu for point in points]
    if None not in busy:
        panels.append(
            CurvePanel(
                "processor, cores",
                [
                    curve("server", [cores or 0.0 for cores in busy], COLORS[0]),
                    curve("client", [point.client_cpu for point in points], COLORS[3]),
                ],
                name,
            )
        )
    return draw_panels(title, panels)
