"""Command line options that `edge-server perf`, `analyze` and `optimize` share."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path

from edge_server.cli.options import float_range, int_range
from edge_server.errors import InvalidRequest
from edge_server.plugins.tuning.load.input_data import InputChoice
from edge_server.plugins.tuning.load.measure_until_stable import MeasurementTimes

_MAX_LEVELS = 100


def add_input_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input-data",
        action="append",
        default=[],
        metavar="WHAT",
        help="random (default), zero, a .json file in perf_analyzer's format, an .npz file, NAME=FILE.npy. Repeatable.",
    )
    group.add_argument(
        "--shape",
        action="append",
        default=[],
        type=shape,
        metavar="NAME:N,N",
        help="shape of an input with variable dimensions, without the batch dimension. Repeatable.",
    )
    group.add_argument("--seed", type=int_range(0), default=0, metavar="N", help="seed of random values")


def input_choice(options: argparse.Namespace, batch: int) -> InputChoice:
    kinds = [word for word in options.input_data if word in ("random", "zero")]
    files = []
    for word in options.input_data:
        if word not in ("random", "zero"):
            name, separator, path = word.partition("=")
            files.append((name, Path(path)) if separator else ("", Path(word)))
    return InputChoice(kinds[-1] if kinds else "random", batch, dict(options.shape), tuple(files), options.seed)


def add_measurement_options(group: argparse._ArgumentGroup, window_ms: int) -> None:
    group.add_argument(
        "--measurement-interval",
        type=int_range(10, 600_000),
        default=window_ms,
        metavar="MS",
        help=f"length of a time window; three consecutive ones must agree; default: {window_ms}",
    )
    group.add_argument(
        "--measurement-request-count",
        type=int_range(1),
        default=20,
        metavar="N",
        help="extend a window, up to ten times its length, until it has N answers; default: 20",
    )
    group.add_argument(
        "--stability-percentage",
        type=float_range(0.1, 1000),
        default=10.0,
        metavar="P",
        help="largest deviation of windows from their mean in percent; default: 10",
    )
    group.add_argument(
        "--max-trials",
        type=int_range(1, 1000),
        default=10,
        metavar="N",
        help="largest number of windows; default: 10",
    )


def measurement_times(options: argparse.Namespace) -> MeasurementTimes:
    return MeasurementTimes(
        options.measurement_interval / 1000,
        options.measurement_request_count,
        options.stability_percentage / 100,
        options.max_trials,
    )


def levels(least: float, most: float, *, is_whole: bool) -> Callable[[str], list[float]]:
    """Return a parser of START[:END[:STEP]] and of lists a,b,c. With STEP xN each level is N times the last one."""

    def parse(text: str) -> list[float]:
        try:
            found = _levels(text)
        except ValueError:
            found = []
        if not found or not all(
            math.isfinite(value) and least <= value <= most and not (is_whole and value % 1) for value in found
        ):
            kind = "whole numbers" if is_whole else "numbers"
            raise argparse.ArgumentTypeError(
                f"expected N, N,N,N or START:END[:STEP|:xFACTOR] of {kind} from {least:g} to {most:g}, at most"
                f" {_MAX_LEVELS} of them, got '{text}'"
            )
        return found

    return parse


def _levels(text: str) -> list[float]:
    if ":" not in text:
        found = [float(word) for word in text.split(",")]
        return found if len(found) <= _MAX_LEVELS else []
    start, end, step, *rest = [*text.split(":"), *(["1"] if text.count(":") == 1 else [])]
    if rest:
        return []
    grows, by = step.startswith("x"), float(step.removeprefix("x"))
    if not (by > 1 if grows else by > 0) or not float(start) > 0:
        return []
    series = itertools.accumulate(
        itertools.repeat(by), (lambda value, factor: value * factor) if grows else (lambda a, b: a + b),
        initial=float(start),
    )  # fmt: skip
    found = list(itertools.islice(itertools.takewhile(lambda value: value <= float(end) * (1 + 1e-9), series), 101))
    return found if len(found) <= _MAX_LEVELS else []


def name_list(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("expected NAME,NAME")
    return found


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, separator, dims = text.rpartition(":")
    words = dims.split(",") if dims else []
    if not separator or not name or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise argparse.ArgumentTypeError(f"expected NAME:N,N,N, got '{text}'")
    return name, tuple(int(word) for word in words)


def read_intervals(path: Path) -> tuple[float, ...]:
    """Read a trace in perf_analyzer's format, one interval in microseconds per line. Raises InvalidRequest."""
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        intervals = tuple(float(line) / 1e6 for line in lines)
    except ValueError as error:
        raise InvalidRequest(f"{path}: expected an interval in microseconds on each line: {error}") from None
    if not intervals or not all(0 <= value < 3600 for value in intervals) or not math.fsum(intervals) > 0:
        raise InvalidRequest(f"{path}: expected intervals in microseconds, from 0 to an hour and not all of them 0")
    return intervals
