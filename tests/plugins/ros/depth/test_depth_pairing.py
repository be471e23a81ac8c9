"""Pairing of results with depth images: the nearest stamp, waiting for images that come later, and bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.ros.depth import depth_pairing
from edge_server.plugins.ros.depth.depth_pairing import WAIT_S, DepthPairing, PairedResult
from edge_server.plugins.ros.depth.object_positions import DepthImage
from edge_server.protocol.frame_messages import FrameHeader, FrameResult

PIXELS = np.ones((1, 1), np.uint16)


def image(stamp_ms: int, byte_size: int = 2) -> DepthImage:
    return DepthImage(stamp_ms * 1_000_000, PIXELS, 0.001, byte_size)


def result(stamp_ms: int) -> FrameResult:
    return FrameResult(FrameHeader(stamp_ms // 1000, stamp_ms % 1000 * 1_000_000))


def stamps(decided: list[PairedResult]) -> list[tuple[int, int | None]]:
    """Return the stamps of results and of their depth images, in milliseconds."""
    return [
        (
            one.result.header.sec * 1000 + one.result.header.nanosec // 1_000_000,
            None if one.depth is None else one.depth.stamp_ns // 1_000_000,
        )
        for one in decided
    ]


def test_a_depth_image_of_the_same_stamp_decides_at_once() -> None:
    pairing = DepthPairing(50)
    assert pairing.add_depth(image(1000)) == []
    assert stamps(pairing.add_result(result(1000))) == [(1000, 1000)]


def test_a_result_waits_for_the_depth_image_that_comes_after_it() -> None:
    pairing = DepthPairing(50)
    pairing.add_depth(image(900))
    pairing.add_depth(image(933))
    assert pairing.add_result(result(970)) == []
    assert pairing.add_result(result(1000)) == []
    assert stamps(pairing.add_depth(image(966))) == [(970, 966)]
    assert stamps(pairing.add_depth(image(1001))) == [(1000, 1001)]


def test_a_result_does_not_wait_if_no_nearer_image_can_come() -> None:
    """Depth at 5 Hz: the next image is 185 ms away."""
    pairing = DepthPairing(50)
    pairing.add_depth(image(800))
    pairing.add_depth(image(1000))
    assert stamps(pairing.add_result(result(1015))) == [(1015, 1000)]


def test_an_image_that_is_too_far_away_is_not_used_and_its_distance_is_told() -> None:
    pairing = DepthPairing(50)
    pairing.add_depth(image(1200))
    (decided,) = pairing.add_result(result(1000))
    assert (decided.depth, decided.offset_ms) == (None, 200)


def test_without_depth_images_results_leave_after_a_while() -> None:
    now = 0.0
    pairing = DepthPairing(50, clock=lambda: now)
    assert pairing.add_result(result(1000)) == []
    now = WAIT_S + 0.01
    (decided,) = pairing.add_result(result(1600))
    assert (decided.result.header.sec, decided.depth, decided.offset_ms) == (1, None, None)


def test_only_so_many_results_wait() -> None:
    pairing = DepthPairing(50, clock=lambda: 0.0)
    decided = [pairing.add_result(result(1000 + number)) for number in range(depth_pairing.MAX_WAITING + 2)]
    assert [len(one) for one in decided] == [0] * depth_pairing.MAX_WAITING + [1, 1]


def test_depth_images_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_pairing, "MAX_BYTES", 1000)
    pairing = DepthPairing(50)
    for number in range(10):
        pairing.add_depth(image(1000 + 33 * number, byte_size=300))
    assert stamps(pairing.add_result(result(1165))) == [(1165, None)]
    assert stamps(pairing.add_result(result(1231))) == [(1231, 1231)]
    pairing.add_depth(image(2000, byte_size=1001))
    assert stamps(pairing.add_result(result(2000))) == []
    tiny = DepthPairing(0)
    for number in range(depth_pairing.MAX_IMAGES + 1):
        tiny.add_depth(image(1000 + number))
    assert stamps(tiny.add_result(result(1000))) == [(1000, None)]
    assert stamps(tiny.add_result(result(1001))) == [(1001, 1001)]


def test_a_recording_that_begins_again_is_followed() -> None:
    pairing = DepthPairing(50)
    for stamp in (9000, 9033):
        pairing.add_depth(image(stamp))
    pairing.add_depth(image(100))
    assert stamps(pairing.add_result(result(101))) == [(101, 100)]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1000, 1500)), max_size=60),
    st.integers(0, 200),
)
def test_each_result_leaves_once_in_order_with_an_image_within_the_tolerance(
    events: list[tuple[bool, int]], tolerance_ms: int
) -> None:
    now = 0.0
    pairing = DepthPairing(tolerance_ms, clock=lambda: now)
    sent: list[int] = []
    left: list[tuple[int, int | None]] = []
    for is_result, stamp_ms in events:
        if is_result:
            sent.append(stamp_ms)
        left += stamps(pairing.add_result(result(stamp_ms)) if is_result else pairing.add_depth(image(stamp_ms)))
    now = 2 * WAIT_S
    left += stamps(pairing.add_depth(image(1)))
    assert [stamp for stamp, _ in left] == sent
    assert all(abs(depth - stamp) <= tolerance_ms for stamp, depth in left if depth is not None)
