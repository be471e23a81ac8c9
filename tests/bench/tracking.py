"""Processor time of tracking a frame: `python tests/bench/tracking.py`.

Boxes of 30 to 90 pixels drift over pictures of two sizes, with noise in place and score; in the small picture most
overlap others. The time is that of `ByteTracker.update` on one thread, median and maximum of 300 frames.
"""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np

from edge_server.plugins.vision.tracking import ByteTracker


def frame_times_ms(count: int, width: int, height: int) -> list[float]:
    rng = np.random.default_rng(1)
    start, sizes = rng.random((count, 2)) * (width, height), rng.random((count, 2)) * 60 + 30
    speeds = (rng.random((count, 2)) - 0.5) * 100
    tracker = ByteTracker(itertools.count(1).__next__, 0.5)
    times = []
    for frame in range(300):
        centres = start + speeds * frame / 30
        boxes = np.concatenate((centres - sizes / 2, centres + sizes / 2), axis=1) + rng.normal(0, 1, (count, 4))
        scores = np.clip(rng.normal(0.7, 0.15, count), 0.1, 1)
        best_first = np.argsort(-scores)
        boxes, scores = boxes[best_first], scores[best_first]
        began_ns = time.thread_time_ns()
        tracker.update(boxes, scores, 1 / 30)
        times.append((time.thread_time_ns() - began_ns) / 1e6)
    return times


if __name__ == "__main__":
    for count in (10, 50, 256):
        for width, height in ((1920, 1080), (640, 480)):
            times = frame_times_ms(count, width, height)
            print(f"{count} boxes, {width}x{height}: {statistics.median(times):.2f} ms, at most {max(times):.2f} ms")
