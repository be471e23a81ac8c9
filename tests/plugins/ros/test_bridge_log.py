"""Log lines of the bridge and the replay about missing topics, servers and disk space."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from edge_server.client import StreamError
from edge_server.errors import ErrorCode, InvalidRequest
from edge_server.plugins.ros.bridge import Bridge
from edge_server.plugins.ros.bridge_counts import BridgeCounts
from edge_server.plugins.ros.bridge_log import ConnectionLog, report_line
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.protocol.frame_messages import FrameHeader, FrameResult, StreamOpened


def test_a_bridge_that_publishes_nothing_names_the_flags() -> None:
    with pytest.raises(InvalidRequest, match="--detections-topic"):
        BridgeParameters("m", image_topic="/image")


def test_a_late_result_is_not_published_and_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    published, end = [], threading.Event()

    def results() -> Iterator[FrameResult]:
        for seq in (1, 2, 3):
            yield FrameResult(FrameHeader(seq=seq), is_late=seq == 2)
        end.set()

    transport = SimpleNamespace(
        advertise=lambda *_: None, subscribe=lambda *_: None, close=lambda: None, spin=lambda _: not end.wait(20),
        publish=lambda topic, message: published.append((topic, message.header.seq)),
    )  # fmt: skip
    stream = SimpleNamespace(results=results, close=lambda: None)
    monkeypatch.setattr(BridgeParameters, "open_stream", lambda *_, **__: stream)
    Bridge([BridgeParameters("m", image_topic="/image", detections_topic="/found")], transport, "box:8001").run()
    assert published == [("/found", 1), ("/found", 3)]
    counts = BridgeCounts(seconds=1.0, received=3, answered=2, late=1)
    assert report_line("/image", counts) == "/image: in 3.0/s, out 2.0/s; 1 too late to publish"


@pytest.mark.parametrize(
    "topics",
    [
        {"detections_topic": "/image"},
        {"detections_topic": "image"},
        {"detections_topic": "/found", "mask_topic": "found"},
    ],
)
def test_a_topic_that_is_named_twice_is_refused(topics: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="is named twice"):
        BridgeParameters("m", image_topic="/image", **topics)


def test_an_unreachable_server_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    caplog.set_level(logging.INFO)
    connection_log = ConnectionLog("/image", clock=lambda: now)
    gone, other = (StreamError(text, ErrorCode.UNAVAILABLE) for text in ("refused", "other"))
    for now in (0.0, 0.1, 59.0):  # noqa: B007 - the clock
        connection_log.log_broken(gone)
    assert caplog.text.count("trying again") == 1
    now = 60.0
    connection_log.log_broken(gone)
    assert caplog.text.count("trying again") == 2
    connection_log.log_broken(other)
    assert caplog.text.count("trying again") == 3
    now = 60.2
    connection_log.log_opened(StreamOpened("camera", "m", 1, "openvino"))
    connection_log.log_broken(other)
    assert caplog.text.count("trying again") == 4
    assert "/image goes to m version 1 on openvino" in caplog.text
