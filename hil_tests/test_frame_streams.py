"""Cameras at their frame rate: results a second, and their age."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MODEL = "face_detection_yunet"


@pytest.mark.parametrize("cameras", [1, 4])
def test_cameras_get_fresh_results_at_an_even_rate(
    serve: Any, measure: Any, hardware: Any, bundled: Path, cameras: int
) -> None:
    from edge_server.client import FrameStream, Returns

    seconds, fps = (3.0, 10.0) if hardware.is_short else (60.0, 30.0)
    frames = np.random.default_rng(5).integers(0, 255, (8, 480, 640, 3), np.uint8)
    answered: dict[int, list[tuple[float, float]]] = {}
    with serve(bundled) as server:

        def look(number: int) -> None:
            began_s = time.monotonic()

            def film() -> Any:
                due_s = began_s
                while due_s < began_s + seconds:
                    time.sleep(max(0.0, due_s - time.monotonic()))
                    yield frames[int((due_s - began_s) * fps) % len(frames)]
                    due_s += 1 / fps

            seen = answered.setdefault(number, [])
            with FrameStream(server.grpc, MODEL, returns=Returns(has_detections=True)) as stream:
                for result in stream.results(film()):
                    seen.append((time.monotonic() - began_s, result.times.finished_us / 1000))

        threads = [threading.Thread(target=look, args=(number,)) for number in range(cameras)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rates = [len(seen) / seconds for seen in answered.values()]
    ages = sorted(age for seen in answered.values() for _, age in seen)
    for number, rate in enumerate(rates):
        measure.value(f"camera {number + 1} of {cameras}: results", rate, "1/s")
    measure.value(f"{cameras} camera(s): age of results, p50", ages[len(ages) // 2], "ms")
    measure.value(f"{cameras} camera(s): age of results, p99", ages[int(len(ages) * 0.99)], "ms")
    measure.series(f"age of camera 1's results, {cameras} camera(s)", answered[0], "ms")
    assert min(rates) > 0
    # Fair: no camera gets less than half of another's frames.
    assert min(rates) >= 0.5 * max(rates)
