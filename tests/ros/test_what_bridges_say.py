"""What the bridge and the replay say of topics, servers and disks that are not as they should be."""

from __future__ import annotations

import logging

import pytest

from edge_server.client import StreamError
from edge_server.core.frame import StreamOpened
from edge_server.errors import ErrorCode, InvalidRequest
from edge_server.ros.bridge import BridgeParameters
from edge_server.ros.connection_log import ConnectionLog


def test_a_bridge_that_publishes_nothing_names_the_flags() -> None:
    with pytest.raises(InvalidRequest, match="--detections-topic"):
        BridgeParameters("m", image_topic="/image")


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


def test_a_server_that_stays_away_is_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    caplog.set_level(logging.INFO)
    news = ConnectionLog("/image", clock=lambda: now)
    gone, other = (StreamError(text, ErrorCode.UNAVAILABLE) for text in ("refused", "other"))
    for now in (0.0, 0.1, 59.0):  # noqa: B007 - the clock
        news.broke(gone)
    assert caplog.text.count("trying again") == 1
    now = 60.0
    news.broke(gone)
    assert caplog.text.count("trying again") == 2
    news.broke(other)
    assert caplog.text.count("trying again") == 3
    now = 60.2
    news.opened(StreamOpened("camera", "m", 1, "openvino"))
    news.broke(other)
    assert caplog.text.count("trying again") == 4
    assert "/image goes to m version 1 on openvino" in caplog.text
