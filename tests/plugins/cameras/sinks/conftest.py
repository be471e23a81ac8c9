"""Results to send, and a receiver that a test controls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from edge_server.plugins.cameras.sinks.sink_interface import SinkError, SinkMessage
from edge_server.protocol.frame_messages import Detection, FrameHeader, FrameResult

PATIENCE_S = 60.0


def result_message(source: str = "door", *labels: str, seq: int = 1) -> SinkMessage:
    """Return a result with one detection per label."""
    found = tuple(Detection(1, 2, 3, 4, 0.9, 0, label) for label in labels)
    return SinkMessage(source, FrameResult(FrameHeader(5, 6, source, seq), model="m", detections=found), "camera")


@pytest.fixture(scope="session")
def message() -> Callable[..., SinkMessage]:
    return result_message


class StubSink:
    """Records the sent messages. `fails` makes every call fail; `blocks` makes `send` wait."""

    refresh_s: float | None = None

    def __init__(self) -> None:
        self.sent: list[SinkMessage] = []
        self.opened = self.closed = self.refreshed = 0
        self.fails = ""
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_sending = threading.Event()

    def open(self) -> None:
        self.opened += 1
        if self.fails:
            raise SinkError(self.fails)

    def send(self, message: SinkMessage) -> bool:
        self.is_sending.set()
        assert self.goes_on.wait(PATIENCE_S)
        if self.fails:
            raise SinkError(self.fails)
        self.sent.append(message)
        return True

    def refresh(self) -> None:
        self.refreshed += 1
        if self.fails:
            raise SinkError(self.fails)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def sink() -> StubSink:
    return StubSink()
