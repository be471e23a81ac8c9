"""Replay of a recording through a model: sends each image of a topic, and writes the results with the image's time.

At rate 0 no frame is lost: a few frames are in flight at a time, and dropped frames (by the governor, or with a broken
connection) are sent again. At any other rate frames are sent at their recorded intervals, and drops are counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from edge_server.client import FrameStream, StreamError
from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.messages.message_conversion import (
    OutgoingMessage,
    annotated_message,
    classification_message,
    detections_message,
    map_message,
    mask_message,
)
from edge_server.plugins.ros.recordings.recording import RecordedFrame, RecordingWriter
from edge_server.protocol.frame_messages import Delivery, Frame, FrameDropped, FrameResult, Returns

MAX_IN_FLIGHT = 4
"""Frames in flight at rate 0: enough to keep a model busy while images are read, and little memory."""

_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class ReplayParameters:
    """Parameters of a replay. `rate`: 1.0 as recorded, 0 as fast as the server responds. `returns` are the requested
    results, by default those that the model declares.

    Results go to topics below `namespace`: detections, classification, annotated/compressed, mask, map. The
    replay fails when the server cannot be reached for `patience_s`.
    """

    model_name: str
    model_version: int = 0
    address: str = "127.0.0.1:8001"
    rate: float = 0.0
    returns: Returns = field(default_factory=Returns)
    namespace: str = "/edge_server"
    stream_id: str = ""
    class_id_is_number: bool = False
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1000:
            raise InvalidRequest(f"a rate is 0 to 1000, got {self.rate}")

    @property
    def is_lossless(self) -> bool:
        """Whether dropped frames are sent again."""
        return self.rate == 0


@dataclass(slots=True)
class ReplaySummary:
    """Counts of a replay: sent = answered + failed + sum(dropped.values()). `repeated` frames count once in `sent`.

    `dropped` is by reason; "unanswered" are frames without a result or a report: replaced by newer ones before they
    were sent, or lost with a connection.
    """

    sent: int = 0
    answered: int = 0
    failed: int = 0
    repeated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    seconds: float = 0.0


class TopicReplay:
    """One run over the frames of one topic. Both callbacks are called on the thread of `run`.

    `progress` gets the number of completed frames. `warn` gets a text each time the server is lost.
    """

    def __init__(
        self,
        parameters: ReplayParameters,
        writer: RecordingWriter,
        progress: Callable[[int], None] = lambda completed: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._parameters = parameters
        self._writer = writer
        self._progress = progress
        self._warn = warn
        self._has_warned = False
        self._changed = threading.Condition()
        self._pending: dict[int, RecordedFrame] = {}
        self._to_repeat: deque[int] = deque()
        self._is_over = False
        self._last_message_s = 0.0
        self.summary = ReplaySummary()
        self._stream = FrameStream(
            parameters.address,
            parameters.model_name,
            version=parameters.model_version,
            stream_id=parameters.stream_id,
            returns=parameters.returns,
            delivery=Delivery(depth=MAX_IN_FLIGHT if parameters.is_lossless else 1, notifies_drops=True),
            keeps_all=parameters.is_lossless,
            client="ros replay",
            on_dropped=self._note_drop,
            on_broken=self._note_break,
        )

    def run(self, frames: Iterable[RecordedFrame]) -> ReplaySummary:
        """Send the frames and write their results; block until the last one is complete.

        Raises errors of reading and writing, and StreamError when the model is not available.
        """
        began = self._last_message_s = time.monotonic()
        try:
            for result in self._stream.results(self._due_frames(frames)):
                self._receive(result)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self._stream.close()
        if self._pending:
            self.summary.dropped["unanswered"] += len(self._pending)
        self.summary.seconds = time.monotonic() - began
        return self.summary

    def _due_frames(self, frames: Iterable[RecordedFrame]) -> Iterator[Frame]:
        """Yield the frames when they are due. Runs on the stream's sending thread, which waits for room at rate 0."""
        pace = _ReplayClock(self._parameters.rate)
        for recorded in frames:
            yield from self._repeats()
            with self._changed:
                while not self._is_over and (wait_s := pace.wait_s(recorded.recorded_ns, time.monotonic())) > 0:
                    self._changed.wait(wait_s)
                if self._is_over:
                    return
                self._pending[recorded.frame.header.seq] = recorded
                self.summary.sent += 1
            yield recorded.frame
        while self._parameters.is_lossless:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or not self._pending or self._to_repeat)
                if self._is_over or not self._pending:
                    return
            yield from self._repeats()

    def _repeats(self) -> Iterator[Frame]:
        """Yield the frames to send again."""
        while True:
            with self._changed:
                if not self._to_repeat or self._is_over:
                    return
                recorded = self._pending.get(self._to_repeat.popleft())
                self.summary.repeated += recorded is not None
            if recorded is not None:
                yield recorded.frame

    def _receive(self, result: FrameResult) -> None:
        """Write one result. A second result of a frame that was sent twice is ignored."""
        with self._changed:
            self._last_message_s = time.monotonic()
            self._has_warned = False
            recorded = self._pending.pop(result.header.seq, None)
            if recorded is None:
                return
            self._changed.notify_all()
        if result.error_code:
            self.summary.failed += 1
            self.summary.first_error = self.summary.first_error or f"{result.error_code}: {result.error}"
        else:
            self.summary.answered += 1
            for topic, message in self._messages(result):
                self._writer.write(topic, message, recorded.recorded_ns)
        self._report_progress()

    def _messages(self, result: FrameResult) -> Iterator[tuple[str, OutgoingMessage]]:
        """Yield the messages of a result. A result without any content becomes an empty list of detections."""
        given, numbers = self._parameters, self._parameters.class_id_is_number
        annotated, mask = annotated_message(result), mask_message(result, is_requested=given.returns.has_mask)
        if result.classes:
            yield f"{given.namespace}/classification", classification_message(result, has_numbers=numbers)
        if mask is not None:
            yield f"{given.namespace}/mask", mask
        if (dense := map_message(result)) is not None:
            yield f"{given.namespace}/map", dense
        if annotated is not None:
            yield f"{given.namespace}/annotated/compressed", annotated
        has_other = bool(result.classes) or mask is not None or dense is not None
        has_other |= annotated is not None and given.returns != Returns()
        if result.detections or given.returns.has_detections or not has_other:
            yield f"{given.namespace}/detections", detections_message(result, has_numbers=numbers)

    def _note_drop(self, notice: FrameDropped) -> None:
        with self._changed:
            self._last_message_s = time.monotonic()
            if notice.header.seq not in self._pending:
                return
            if not self._parameters.is_lossless:
                del self._pending[notice.header.seq]
                self.summary.dropped[notice.reason.name.lower()] += 1
            else:
                # The governor would drop the frame again at once; wait a moment.
                self._changed.wait_for(lambda: self._is_over, _RETRY_S)
                self._to_repeat.append(notice.header.seq)
            self._changed.notify_all()
        self._report_progress()

    def _note_break(self, error: StreamError) -> None:
        """Repeat the frames in flight. Raises the error when the server has been lost for too long."""
        waiting = self._stream.counters().waiting
        with self._changed:
            if time.monotonic() - self._last_message_s > self._parameters.patience_s:
                raise error
            is_new, self._has_warned = not self._has_warned, True
            if self._parameters.is_lossless:
                # The newest frames still wait on this side, and are sent anyway. A frame too many gets two results.
                in_flight = list(self._pending)[: len(self._pending) - waiting]
                self._to_repeat.extend(seq for seq in in_flight if seq not in self._to_repeat)
            self._changed.notify_all()
        if is_new:
            self._warn(f"{error}; trying again for {self._parameters.patience_s:g} s")

    def _report_progress(self) -> None:
        self._progress(self.summary.answered + self.summary.failed + sum(self.summary.dropped.values()))


class _ReplayClock:
    """Schedule of the frames: the recorded intervals divided by the rate. At rate 0 each frame is due at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._origin: tuple[int, float] | None = None

    def wait_s(self, recorded_ns: int, now_s: float) -> float:
        """Return the time until a frame is due; the first frame starts the clock."""
        if self._rate == 0:
            return 0.0
        if self._origin is None:
            self._origin = recorded_ns, now_s
        first_ns, began_s = self._origin
        return began_s + (recorded_ns - first_ns) / 1e9 / self._rate - now_s
