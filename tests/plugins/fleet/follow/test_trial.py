"""Comparison of a release's outputs with those that are expected, and of its time with the serving version's."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from edge_server.core.output_difference import describe_difference
from edge_server.plugins.fleet.follow.trial import Rejected, as_comparable, check_time
from edge_server.plugins.fleet.release import Release

TEXTS = np.array([b"cup", b"espresso"], object)


@pytest.mark.parametrize(
    ("expected", "found", "reason"),
    [
        (np.array([1.0, -4.0]), np.float32([1.0, -4.01]), ""),
        (np.array([1.0, -4.0]), np.float32([1.0, -4.4]), "by 0.1 of its largest value, more than 0.01"),
        (np.array([100, 200]), np.uint8([100, 201]), ""),
        (np.array([100, 200]), np.uint8([100, 210]), "by 0.05 of its largest value, more than 0.01"),
        (np.array([1, 0]), np.array([True, False]), ""),
        (np.array([True, False]), np.array([True, True]), "by 1 of its largest value"),
        (np.array([np.nan, np.inf]), np.float32([np.nan, np.inf]), ""),
        (np.array([np.inf]), np.float32([1.0]), "is not finite where"),
        (np.array([np.inf]), np.float32([-np.inf]), "is not finite where"),
        (np.zeros(2), np.zeros(3, np.float32), r"has the shape \[3\], expected \[2\]"),
        (np.array([b"cup", b"espresso"]), TEXTS, ""),
        (np.array([b"cup"] * 200), np.array([b"cup"] * 199 + [b"mug"], object), "differs from the expected ones$"),
        (np.array([1.0, 2.0]), TEXTS, "differs from the expected ones$"),
        (TEXTS, np.float32([1.0, 2.0]), "differs from the expected ones$"),
    ],
)  # fmt: skip
def test_outputs_may_differ_by_the_tolerance_and_texts_not_at_all(expected: Any, found: Any, reason: str) -> None:
    described = describe_difference(*as_comparable({"Y": expected}, {"Y": found}), 0.01, "the expected ones")
    assert re.search(reason, described) if reason else described == ""


def test_an_output_that_is_missing_is_named() -> None:
    assert (
        describe_difference(*as_comparable({"Y": np.zeros(1)}, {"Z": np.zeros(1)}), 1.0, "x") == "it has no output 'Y'"
    )


class TimedChild:
    """A version whose rounds take these times, in milliseconds."""

    def __init__(self, *rounds_ms: float) -> None:
        self._rounds_ms = list(rounds_ms)

    def execute(self, command: str, **fields: Any) -> dict[str, Any]:
        return {"times_ms": [self._rounds_ms.pop(0)] * fields["runs"]}


RELEASE = Release("m/1.json", "m", 1, max_slowdown=1.5, max_latency_ms=20.0)


def test_a_round_in_which_the_box_was_busy_does_not_count() -> None:
    times = check_time(RELEASE, [TimedChild(28.0, 11.0, 30.0, 28.0), TimedChild(10.0, 10.5, 25.0, 12.0)])
    assert times.endswith("in 11.00 ms beside 10.00 ms")


@pytest.mark.parametrize(
    ("new_ms", "reason"), [(16.0, "16.00 ms, the version that serves in 10.00 ms"), (21.0, "more than 20 ms")]
)
def test_a_version_that_is_slow_in_each_round_is_rejected(new_ms: float, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        check_time(RELEASE, [TimedChild(*[new_ms] * 4), TimedChild(*[10.0] * 4)])
