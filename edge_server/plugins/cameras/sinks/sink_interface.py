"""Base class of sinks, the receivers of results, and the message, error types and reasons that they share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.questions.question import QUESTION_ANSWERED, QuestionAnswer, QuestionEntry
from edge_server.plugins.cameras.sinks.result_json import result_as_json, zone_event_fields
from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry
from edge_server.protocol.frame_messages import FrameHeader, FrameResult, ZoneEvent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

REMOVED = "REMOVED"
"""State of a source that is no longer configured."""


class SinkError(EdgeServerError):
    """A receiver does not answer, refuses, or is full. The message holds no part of a URL besides host and port."""


@dataclass(frozen=True, slots=True)
class SinkMessage:
    """A result of a source, an event in one of its zones, an answer to a question about a picture, or a change of its
    state: RUNNING, WAITING, FAILED, REMOVED.

    `clock` tells whose time the stamp is: "camera" or "server". An event has the `header` of its frame. A change of the
    state also has, as far as known, the `labels` that the source's model counts, in `has_classes` whether it names the
    class of a picture, in `is_tracked` whether it numbers objects, and the zones, lines and questions of the source.
    `picture`
    returns the frame's pixels, 8-bit BGR (height, width, 3); results have it for sinks that take pictures, unless the
    results are more than a few frames behind.
    """

    source: str
    result: FrameResult | None = None
    clock: str = ""
    state: str = ""
    reason: str = ""
    labels: tuple[str, ...] = ()
    has_classes: bool = False
    is_tracked: bool = False
    picture: Callable[[], npt.NDArray[np.uint8]] | None = None
    zones: tuple[ZoneEntry, ...] = ()
    lines: tuple[LineEntry, ...] = ()
    questions: tuple[QuestionEntry, ...] = ()
    event: ZoneEvent | None = None
    header: FrameHeader = field(default_factory=FrameHeader)
    answer: QuestionAnswer | None = None
    encoded: list[str] = field(default_factory=list, repr=False, compare=False)
    """The message as JSON, once a sink needed it. Copies of the message share it: one with another result needs its
    own."""

    @property
    def is_state(self) -> bool:
        return self.result is None and self.event is None and self.answer is None

    @property
    def event_zones(self) -> tuple[str, ...] | None:
        """The zone or line of an event, or the zones of an answer; None for other messages."""
        if self.answer is not None:
            return self.answer.zones
        return None if self.event is None else (self.event.name,)

    def json_text(self) -> str:
        """Return the message as JSON, encoded once for all sinks that get it, unless two need it at the same time."""
        if not self.encoded:
            self.encoded.append(json.dumps(self.as_json(), allow_nan=False))
        return self.encoded[0]

    def as_json(self) -> dict[str, Any]:
        if self.event is not None:
            return self._of_frame(self.event.kind, zone_event_fields(self.event), self.header, self.clock)
        if self.answer is not None:
            return self._of_frame(QUESTION_ANSWERED, self.answer.fields(), self.answer.header, self.answer.clock)
        if self.result is None:
            document = {"kind": "source", "source": self.source, "state": self.state}
            return {**document, "reason": self.reason} if self.reason else document
        return {**result_as_json(self.source, self.result, self.result.times.finished_us / 1e6), "clock": self.clock}

    def _of_frame(
        self, kind: str, values: dict[str, str | int | float], header: FrameHeader, clock: str
    ) -> dict[str, Any]:
        stamp = {"sec": header.sec, "nanosec": header.nanosec}
        return {"kind": kind, "source": self.source, **values, "seq": header.seq, "stamp": stamp, "clock": clock}


def write_failure_reason(path: Path, error: OSError) -> str:
    """Return why a file or a folder cannot be written. A sink makes no folder above its own."""
    parent = path.absolute().parent
    if isinstance(error, FileNotFoundError) and not parent.is_dir():
        return f"the folder {parent} must exist"
    return error.strerror or type(error).__name__


class Sink:
    """A receiver of messages, by default one without a connection. One thread uses it. All methods may block, for at
    most a few seconds."""

    refresh_s: float | None = None
    """Longest time between two calls of `refresh`, or None for a receiver without a connection."""

    def open(self) -> None:
        """Connect. Called before the first `send`, and again after an error. Raises EdgeServerError."""

    def send(self, message: SinkMessage) -> bool:
        """Send a message, and return once the receiver has it. Return False if it held nothing for the receiver. Raises
        EdgeServerError."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Check the connection, and repeat what the receiver may have forgotten. Called only while open. Raises
        EdgeServerError."""

    def close(self) -> None:
        """Disconnect. Does nothing if not open."""
