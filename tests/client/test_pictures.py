"""Conversion of images to frames without unnecessary copies, and refusal of invalid images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_server.client.pictures import make_frame, make_header
from edge_server.errors import InvalidRequest
from edge_server.protocol.frame_messages import FrameHeader, RegionSlice

HEADER = FrameHeader(1, 2, "front", 3)


@pytest.mark.parametrize(
    ("stamp", "expected"), [(12.5, (12, 500_000_000)), ((7, 9), (7, 9)), (0, (0, 0)), (-0.25, (-1, 750_000_000))]
)
def test_a_stamp_is_seconds_or_seconds_and_nanoseconds(stamp: Any, expected: tuple[int, int]) -> None:
    header = make_header(stamp, "front", 4)
    assert (header.sec, header.nanosec, header.frame_id, header.seq) == (*expected, "front", 4)


@pytest.mark.sample
@pytest.mark.parametrize(
    "cut", [np.s_[:, :, :], np.s_[1:4, 2:5, :], np.s_[::-1, ::-1, :], np.s_[:, :, ::-1], np.s_[::2, ::2, :]]
)
@pytest.mark.parametrize("copies", [True, False])
def test_any_view_of_an_array_is_sent_packed(cut: Any, copies: bool) -> None:
    whole = np.random.default_rng(5).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    picture = whole[cut]
    frame = make_frame(picture, HEADER, copies=copies)
    assert (frame.height, frame.width, frame.step) == (picture.shape[0], picture.shape[1], 3 * picture.shape[1])
    assert bytes(frame.data) == picture.tobytes()


def test_a_copied_frame_does_not_change_with_its_array() -> None:
    picture = np.zeros((2, 2), np.uint8)
    copied, seen = make_frame(picture, HEADER), make_frame(picture, HEADER, copies=False)
    picture[:] = 9
    assert (bytes(copied.data), bytes(seen.data)) == (bytes(4), b"\x09" * 4)


def test_bytes_that_cannot_change_are_never_copied() -> None:
    data = bytes(12)
    assert make_frame(data, HEADER, encoding="rgb8", height=2, width=2).data is data


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_the_byte_order_of_an_array_is_sent(dtype: str) -> None:
    frame = make_frame(np.array([[258]], dtype), HEADER, encoding="mono16")
    assert frame.is_bigendian == (dtype == ">u2")
    assert bytes(frame.data) == (b"\x01\x02" if frame.is_bigendian else b"\x02\x01")


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one dimension": (np.zeros(4, np.uint8), {}, "must have the shape"),
    "no pixels": (np.zeros((0, 4, 3), np.uint8), {}, "must have the shape"),
    "two channels": (np.zeros((4, 4, 2), np.uint8), {}, "of uint8 with 2 channels needs its encoding"),
    "doubles": (np.zeros((4, 4), np.float64), {}, "of float64 with 1 channels needs its encoding"),
    "bytes of no kind": (b"what is this", {}, "needs its encoding, height and width"),
    "raw without a width": (bytes(9), {"encoding": "mono8", "height": 3}, "width 0"),
    "a region of no kind": (RegionSlice("r", 0, 9), {}, "needs its encoding"),
    "a list": ([1, 2, 3], {}, "got list"),
    "nothing": (None, {}, "got NoneType"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", WRONG)
def test_an_invalid_image_is_refused(what: str) -> None:
    picture, options, message = WRONG[what]
    with pytest.raises(InvalidRequest, match=message):
        make_frame(picture, HEADER, **options)
