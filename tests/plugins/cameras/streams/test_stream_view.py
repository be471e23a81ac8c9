"""The view of a frame stream: images on demand, at a bounded rate, without delaying the stream."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import cv2
import numpy as np
import pytest

from edge_server.errors import NotFound, Throttled
from edge_server.plugins.cameras.streams.stream_registry import MAX_VIEWERS
from edge_server.plugins.cameras.streams.stream_view import MAX_PICTURES_PER_S, MAX_SIDE, StreamView, ViewedFrame
from edge_server.plugins.vision.perception_decoder import Perception
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.resize import Color
from edge_server.protocol.frame_messages import Detection, FrameHeader, RegionSlice

PATIENCE_S = 60.0
GRAY = Picture(np.full((60, 80, 3), 128, np.uint8), Color.BGR)
SEEN = Perception(detections=(Detection(10, 10, 50, 40, 0.9, 0, "face"),))
HEADER = FrameHeader(12, 34, "door", 5)
FRAME = ViewedFrame(HEADER, GRAY, SEEN)


def ask(view: StreamView) -> threading.Event:
    told = threading.Event()
    view.notify_once(told.set)
    return told


def decoded(view: StreamView) -> Any:
    return cv2.imdecode(np.frombuffer(view.jpeg(), np.uint8), cv2.IMREAD_COLOR)


def test_images_are_drawn_only_while_a_viewer_waits() -> None:
    view = StreamView()
    assert not view.wants(1)
    told = ask(view)
    assert view.wants(1)
    view.show(FRAME, 1)
    assert told.is_set()


@pytest.mark.parametrize("fps", [1000, 60, 30, 12, 10])
def test_five_images_a_second_are_drawn_at_any_frame_rate(fps: int) -> None:
    view, shown = StreamView(), 0
    ask(view)
    for number in range(10 * fps):
        # Frames come up to a tenth of their interval early or late.
        now_ns = round((number + 10 + (-1) ** number / 10) * 1_000_000_000 / fps)
        if view.wants(now_ns):
            view.show(FRAME, now_ns)
            ask(view)
            shown += 1
    assert abs(shown - 10 * MAX_PICTURES_PER_S) <= 2


def test_results_are_drawn_once_for_all_viewers() -> None:
    view = StreamView()
    ask(view)
    view.show(FRAME, 1)
    assert np.ptp(decoded(view)) > 100
    assert view.jpeg() is view.jpeg()
    assert np.ptp(GRAY.bgr()) == 0


def test_a_frame_is_available_without_drawn_results() -> None:
    view = StreamView()
    assert view.frame() is None
    ask(view)
    view.show(FRAME, 1)
    assert view.jpeg()
    found = view.frame()
    assert found is not None
    frame, jpeg = found
    assert frame is FRAME
    assert np.ptp(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)) == 0


def test_a_large_frame_is_reduced() -> None:
    view = StreamView()
    ask(view)
    view.show(ViewedFrame(HEADER, Picture(np.zeros((1080, 1920, 3), np.uint8), Color.BGR), SEEN), 1)
    assert decoded(view).shape == (540, MAX_SIDE, 3)


def test_no_images_are_drawn_after_a_viewer_left() -> None:
    view, told = StreamView(), threading.Event()
    view.notify_once(told.set)
    view.cancel_notify(told.set)
    assert not view.wants(1)
    view.show(FRAME, 1)
    assert not view.jpeg()


def test_the_end_of_the_stream_reaches_present_and_later_viewers() -> None:
    view = StreamView()
    first = ask(view)
    view.end()
    assert first.is_set()
    assert ask(view).is_set()


def test_a_viewer_sees_frames_and_the_stream_has_no_cost_afterwards(served: Any, tools: Any) -> None:
    camera = served.camera(stream_id="door")
    with served.streams.view("door") as view:
        told = ask(view)
        camera.send(tools.frame(7))
        assert told.wait(PATIENCE_S)
        assert decoded(view).shape == (8, 8, 3)
    assert not view.wants(1 << 62)
    assert not view.jpeg()
    assert tools.values(camera.finish()) == [tools.sum_of(7)]


def test_a_reconnecting_viewer_gets_no_more_images_a_second(served: Any) -> None:
    served.camera(stream_id="door")
    with served.streams.view("door") as view:
        ask(view)
        view.show(FRAME, 1 << 62)
    with served.streams.view("door") as again:
        ask(again)
        assert not again.wants(1 << 62)


def test_two_viewers_share_the_view_until_a_new_stream_of_that_name(served: Any) -> None:
    served.camera(stream_id="door")
    with served.streams.view("door") as view, served.streams.view("door") as other:
        assert view is other
        told = ask(view)
        served.camera(stream_id="door")
        assert told.wait(PATIENCE_S)
        assert view.is_over
        with served.streams.view("door") as newer:
            assert newer is not view


def test_unknown_streams_and_too_many_viewers_are_refused(served: Any) -> None:
    served.camera(stream_id="door")
    with pytest.raises(NotFound, match="no frame stream 'gate' is open"), served.streams.view("gate"):
        pass
    with contextlib.ExitStack() as viewers:
        for _ in range(MAX_VIEWERS):
            viewers.enter_context(served.streams.view("door"))
        with pytest.raises(Throttled, match=str(MAX_VIEWERS)), served.streams.view("door"):
            pass
    with served.streams.view("door"):
        pass


def test_an_image_outlives_the_shared_memory_of_its_frame(served: Any, tools: Any) -> None:
    segment = SharedMemory(create=True, size=192)
    try:
        segment.buf[:192] = bytes([200]) * 192
        served.service.shared_memory.register("camera", segment.name, 0, 192)
        camera = served.camera(stream_id="door")
        with served.streams.view("door") as view:
            told = ask(view)
            camera.send(tools.frame(1, data=b"", region=RegionSlice("camera", 0, 192)))
            assert told.wait(PATIENCE_S)
            camera.wait(1)
            segment.buf[:192] = bytes(192)
            assert decoded(view).min() > 190
        camera.finish()
    finally:
        served.service.shared_memory.unregister("camera")
        segment.close()
        segment.unlink()
