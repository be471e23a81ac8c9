"""Pairing of results and depth images by their stamps: for each result the nearest depth image."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from edge_server.plugins.ros.depth.object_positions import DepthImage
from edge_server.protocol.frame_messages import FrameResult

MAX_BYTES = 128 * 1024 * 1024
MAX_IMAGES = 256
"""Limits of the depth images that are kept. They must last as long as a frame takes to its result: at 30 images per
second 128 MiB are 1 s of 1920x1080 with 16 bits."""

MAX_WAITING = 16
WAIT_S = 0.5
"""Limits of the results that wait for a depth image that comes after them."""

_CLOCK_RESTART_NS = 1_000_000_000


class PairedResult(NamedTuple):
    """A result and its depth image. `offset_ms` is the stamp of the nearest depth image minus that of the frame.

    `depth` is None if that is too much, both are None if there is no depth image."""

    result: FrameResult
    depth: DepthImage | None
    offset_ms: float | None


class DepthPairing:
    """Newest depth images, and results whose nearest depth image may still come. Not thread-safe.

    A result waits while a nearer depth image can come: none has its stamp or a later one, and the newest one is further
    away than half of the time between two. Results leave in the order in which they came.
    """

    def __init__(self, tolerance_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tolerance_ns = int(tolerance_ms * 1e6)
        self._clock = clock
        self._images: deque[DepthImage] = deque()
        self._byte_size = 0
        self._interval_ns = 0
        self._waiting: deque[tuple[FrameResult, float]] = deque()

    def add_depth(self, image: DepthImage) -> list[PairedResult]:
        """Keep a depth image; return the results that it decides."""
        if self._images:
            newest_ns = max(one.stamp_ns for one in self._images)
            if image.stamp_ns < newest_ns - _CLOCK_RESTART_NS:
                # A simulation or a recording began again.
                self._images.clear()
                self._byte_size = 0
            elif image.stamp_ns > newest_ns:
                self._interval_ns = image.stamp_ns - newest_ns
        self._images.append(image)
        self._byte_size += image.byte_size
        while self._byte_size > MAX_BYTES or len(self._images) > MAX_IMAGES:
            self._byte_size -= self._images.popleft().byte_size
        return self._take_decided()

    def add_result(self, result: FrameResult) -> list[PairedResult]:
        """Return the results that are decided, this one or earlier ones."""
        self._waiting.append((result, self._clock() + WAIT_S))
        return self._take_decided()

    def _take_decided(self) -> list[PairedResult]:
        decided = []
        while self._waiting:
            result, end_s = self._waiting[0]
            stamp_ns = result.header.sec * 1_000_000_000 + result.header.nanosec
            nearest = min(self._images, key=lambda image: abs(image.stamp_ns - stamp_ns), default=None)
            newest_ns = max((image.stamp_ns for image in self._images), default=None)
            is_decided = newest_ns is not None and stamp_ns - newest_ns <= self._interval_ns // 2
            if not is_decided and self._clock() < end_s and len(self._waiting) <= MAX_WAITING:
                break
            self._waiting.popleft()
            offset_ns = None if nearest is None else nearest.stamp_ns - stamp_ns
            if offset_ns is None or abs(offset_ns) > self._tolerance_ns:
                nearest = None
            decided.append(PairedResult(result, nearest, None if offset_ns is None else offset_ns / 1e6))
            # No later frame needs older images. The newest one stays.
            while len(self._images) > 1 and self._images[0].stamp_ns < stamp_ns - self._tolerance_ns:
                self._byte_size -= self._images.popleft().byte_size
        return decided
