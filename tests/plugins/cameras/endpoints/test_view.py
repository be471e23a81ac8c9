"""Live images over HTTP: Motion JPEG, access control, and viewers that do not read."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest

from edge_server.config import RestrictedGroup
from edge_server.errors import NotFound, Throttled
from edge_server.frontends.http import access_check
from edge_server.plugins.cameras.endpoints import view_endpoints
from edge_server.plugins.cameras.streams.stream_view import StreamView, ViewedFrame
from edge_server.plugins.vision.perception_decoder import Perception
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.resize import Color
from edge_server.protocol.frame_messages import Detection, FrameHeader
from tests.kit.eventually import eventually

PATIENCE_S = 60.0
HEADER = FrameHeader(12, 34, "camera", 5)
SEEN = Perception(detections=(Detection(1, 2, 3.5, 4, 0.75, 2, "cat", track_id=9),))
PATH = "/edge/v1/streams/front%20door/view"
ONE = "/edge/v1/streams/front%20door/picture"
FRAMES = "/edge/v1/streams/front%20door/frames"


class OneStream:
    """A stream named "front door" whose worker offers an image whenever one is needed, at any rate."""

    def __init__(self, side: int = 8) -> None:
        self.view = StreamView()
        self.viewer_count = 0
        self.shown = 0
        self.error: Exception | None = None
        self._pixels = np.random.default_rng(7).integers(0, 256, (side, side, 3), np.uint8)
        self._stopped = threading.Event()
        self._worker = threading.Thread(target=self._work)
        self._worker.start()

    @contextlib.contextmanager
    def __call__(self, stream_id: str) -> Iterator[StreamView]:
        if stream_id != "front door":
            raise NotFound("no such stream")
        if self.error is not None:
            raise self.error
        self.viewer_count += 1
        try:
            yield self.view
        finally:
            self.viewer_count -= 1

    def _work(self) -> None:
        while not self._stopped.wait(0.001):
            if self.view.wants(1 << 62):
                self.view.show(ViewedFrame(HEADER, Picture(self._pixels, Color.BGR), SEEN), 0)
                self.shown += 1

    def close(self) -> None:
        self._stopped.set()
        self._worker.join()


@pytest.fixture
def stream() -> Iterator[OneStream]:
    made = OneStream()
    yield made
    made.close()


@contextlib.contextmanager
def looking(site: Any, path: str = PATH, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as answer:
            yield answer
    finally:
        connection.close()


def read_part(answer: http.client.HTTPResponse) -> tuple[str, bytes]:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += answer.read(1)
    lines = dict(line.split(": ") for line in head.decode().splitlines() if ": " in line)
    return lines["Content-Type"], answer.read(int(lines["Content-Length"]) + 2)[:-2]


def read_picture(answer: http.client.HTTPResponse) -> Any:
    kind, data = read_part(answer)
    assert kind == "image/jpeg"
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)


def test_a_viewer_gets_images_until_the_stream_ends(open_site: Any, stream: OneStream) -> None:
    with looking(open_site(view=stream)) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "multipart/x-mixed-replace; boundary=picture"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert [read_picture(answer).shape for _ in range(3)] == [(8, 8, 3)] * 3
        stream.view.end()
        answer.read()
    assert eventually(lambda: stream.viewer_count == 0)


def test_results_are_sent_separately_from_their_frames(open_site: Any, stream: OneStream) -> None:
    with looking(open_site(view=stream), FRAMES) as answer:
        for _ in range(2):
            kind, data = read_part(answer)
            assert kind == "application/json"
            assert json.loads(data) == {
                "stamp": {"sec": 12, "nanosec": 34}, "frame_id": "camera", "seq": 5, "width": 8, "height": 8,
                "picture_scale": 1, "classes": [],
                "detections": [{
                    "x_min": 1, "y_min": 2, "x_max": 3.5, "y_max": 4, "score": 0.75, "class_index": 2, "label": "cat",
                    "keypoints": [], "track_id": 9,
                }],
            }  # fmt: skip
            assert read_picture(answer).shape == (8, 8, 3)


def test_a_single_image_is_a_jpeg(open_site: Any, stream: OneStream) -> None:
    reply = open_site(view=stream).get(ONE)
    assert (reply.status, reply.headers["Content-Type"]) == (200, "image/jpeg")
    assert cv2.imdecode(np.frombuffer(reply.body, np.uint8), cv2.IMREAD_COLOR).shape == (8, 8, 3)
    assert stream.viewer_count == 0


def test_a_silent_or_ended_camera_has_no_image(
    open_site: Any, stream: OneStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.close()
    monkeypatch.setattr(view_endpoints, "_PICTURE_WAIT_S", 0.02)
    site = open_site(view=stream)
    for _ in range(2):
        reply = site.get(ONE)
        assert (reply.status, reply.body, reply.headers["Content-Length"]) == (204, b"", None)
        stream.view.end()


def test_without_a_viewer_no_image_is_drawn(open_site: Any, stream: OneStream) -> None:
    with looking(open_site(view=stream)) as answer:
        read_picture(answer)
    assert eventually(lambda: stream.viewer_count == 0)
    assert not stream.view.wants(1 << 62)


def test_a_viewer_that_does_not_read_is_disconnected(open_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_endpoints, "_WRITE_LIMIT_S", 0.05)
    stream = OneStream(side=900)  # noise: half a megabyte a picture, more than sockets hold after some
    try:
        with looking(open_site(view=stream)):
            assert eventually(lambda: stream.viewer_count == 1)
            assert eventually(lambda: stream.viewer_count == 0)
            assert not stream.view.wants(1 << 62)
    finally:
        stream.close()


def test_an_unknown_stream_and_too_many_viewers_are_refused(open_site: Any, stream: OneStream) -> None:
    site = open_site(view=stream)
    assert site.get("/edge/v1/streams/other/view").status == 404
    stream.error = Throttled("10 viewers look already", retry_after_s=10.0)
    reply = site.get(PATH)
    assert (reply.status, reply.headers["Retry-After"]) == (429, "10")


def test_without_streams_there_is_nothing_to_view(site: Any) -> None:
    assert site.get(PATH).status == 404


def test_other_machines_need_a_key_or_view_open(
    open_site: Any, stream: OneStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_check, "is_this_machine", lambda address: False)
    closed, opened = open_site(view=stream), open_site(view=stream, is_view_open=True)
    refused = closed.get(PATH)
    assert refused.status == 403
    assert "--view-open" in refused.error
    assert closed.get(ONE).status == 403
    with looking(opened) as answer:
        assert answer.status == 200
    guarded = open_site(view=stream, restricted=(RestrictedGroup(("view",), "x-key", "s3cret"),))
    assert guarded.get(PATH).status == 403
    with looking(guarded, **{"x-key": "s3cret"}) as answer:
        assert answer.status == 200


def test_a_foreign_host_name_that_resolves_here_shows_nothing(open_site: Any, stream: OneStream) -> None:
    site = open_site(address="0.0.0.0", view=stream, is_view_open=True, allowed_hosts=("box.example",))
    reply = site.get(PATH, headers={"Host": "evil.example"})
    assert reply.status == 403
    assert "evil.example" in reply.error
    with looking(site, Host="box.example") as answer:
        assert answer.status == 200


def test_another_site_needs_a_key_even_if_its_origin_is_allowed(open_site: Any, stream: OneStream) -> None:
    site = open_site(view=stream, allowed_origins=("*",))
    assert site.get(PATH, headers={"Origin": "https://evil.example"}).status == 403
    with looking(site, Origin=f"http://127.0.0.1:{site.port}") as answer:
        assert answer.status == 200
    guarded = open_site(
        view=stream, allowed_origins=("*",), restricted=(RestrictedGroup(("view",), "x-key", "s3cret"),)
    )
    with looking(guarded, Origin="https://dashboard.example", **{"x-key": "s3cret"}) as answer:
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "*")
