"""A recording through a model: every picture of a topic is sent, and what comes back is written beside its time.

At rate 0 nothing is lost: a few frames are under way at a time, and what was dropped after all (by the governor, with
a connection that broke) is sent again. At any other rate frames come as they did when recorded, and drops are counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from edge_server.client import FrameStream, StreamError
from edge_server.core.frame import Delivery, Frame, FrameDropped, FrameResult, Returns
from edge_server.errors import InvalidRequest
from edge_server.ros.message_conversion import (
    OutgoingMessage,
    annotated_message,
    classification_message,
    detections_message,
    mask_message,
)
from edge_server.ros.recording import RecordedFrame, RecordingWriter

AT_ONCE = 4
"""Frames under way at rate 0: enough to keep a model busy while pictures are read, few enough to cost no memory."""

_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class ReplayParameters:
    """`rate`: 1.0 as recorded, 0 as fast as answered. `returns`: what to ask for, by default what the model declares.

    Results go to topics below `namespace`: detections, classification, annotated/compressed, mask. A server that cannot
    be reached for `patience_s` ends the replay.
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
        return self.rate == 0


@dataclass(slots=True)
class ReplaySummary:
    """What a replay came to: sent = answered + failed + sum(dropped.values()). `repeated` frames count as sent once.

    `dropped` is by reason; "unanswered" are frames of which nothing was heard: newer ones overtook them on this side,
    or their connection broke.
    """

    sent: int = 0
    answered: int = 0
    failed: int = 0
    repeated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    seconds: float = 0.0


class TopicReplay:
    """One run over the frames of one topic. `progress` hears how many frames are settled, from the thread of `run`.

    `tell` hears once each time the server is lost that it is tried again, and why; on that thread as well.
    """

    def __init__(
        self,
        parameters: ReplayParameters,
        writer: RecordingWriter,
        progress: Callable[[int], None] = lambda settled: None,
        tell: Callable[[str], None] = lambda trouble: None,
    ) -> None:
        self._parameters = parameters
        self._writer = writer
        self._progress = progress
        self._tell = tell
        self._is_told = False
        self._changed = threading.Condition()
        self._pending: dict[int, RecordedFrame] = {}
        self._to_repeat: deque[int] = deque()
        self._is_over = False
        self._heard_at = 0.0
        self._stream = self._open()
        self.summary = ReplaySummary()

    def _open(self) -> FrameStream:
        given = self._parameters
        return FrameStream(
            given.address,
            given.model_name,
            version=given.model_version,
            stream_id=given.stream_id,
            returns=given.returns,
            delivery=Delivery(depth=AT_ONCE if given.is_lossless else 1, notifies_drops=True),
            keeps_all=given.is_lossless,
            client="ros replay",
            on_dropped=self._note_drop,
            on_broken=self._note_break,
        )

    def run(self, frames: Iterable[RecordedFrame]) -> ReplaySummary:
        """Send the frames and write their results; block until the last is settled.

        Raises what reading or writing raises, and StreamError when the model cannot be had.
        """
        began = self._heard_at = time.monotonic()
        try:
            for result in self._stream.results(self._feed(frames)):
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

    def _feed(self, frames: Iterable[RecordedFrame]) -> Iterator[Frame]:
        """Yield the frames when they are due; runs on the stream's own thread, which waits for room at rate 0."""
        pace = _Pace(self._parameters.rate)
        for recorded in frames:
            yield from self._repeats()
            if not self._wait_until_due(pace, recorded):
                return
            with self._changed:
                self._pending[recorded.frame.header.seq] = recorded
                self.summary.sent += 1
            yield recorded.frame
        while self._parameters.is_lossless and self._wait_for_news():
            yield from self._repeats()

    def _repeats(self) -> Iterator[Frame]:
        while True:
            with self._changed:
                if not self._to_repeat or self._is_over:
                    return
                recorded = self._pending.get(self._to_repeat.popleft())
                self.summary.repeated += recorded is not None
            if recorded is not None:
                yield recorded.frame

    def _wait_until_due(self, pace: _Pace, recorded: RecordedFrame) -> bool:
        """Return whether the replay still goes on when it is the frame's turn."""
        with self._changed:
            while not self._is_over and (wait_s := pace.wait_s(recorded.recorded_ns, time.monotonic())) > 0:
                self._changed.wait(wait_s)
            return not self._is_over

    def _wait_for_news(self) -> bool:
        """Wait until there is something to repeat; False when every frame is settled."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not self._pending or self._to_repeat)
            return not self._is_over and bool(self._pending)

    def _receive(self, result: FrameResult) -> None:
        """Write one result. A second answer to a frame that was sent twice is left out."""
        with self._changed:
            self._heard_at = time.monotonic()
            self._is_told = False
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
        self._tell_progress()

    def _messages(self, result: FrameResult) -> Iterator[tuple[str, OutgoingMessage]]:
        """Yield what a result holds. Of a model that finds nothing else, finding nothing is an empty list of boxes."""
        given, numbers = self._parameters, self._parameters.class_id_is_number
        annotated, mask = annotated_message(result), mask_message(result)
        if result.classes:
            yield f"{given.namespace}/classification", classification_message(result, has_numbers=numbers)
        if mask is not None:
            yield f"{given.namespace}/mask", mask
        if annotated is not None:
            yield f"{given.namespace}/annotated/compressed", annotated
        has_other = bool(result.classes) or mask is not None or (annotated is not None and given.returns != Returns())
        if result.detections or given.returns.has_detections or not has_other:
            yield f"{given.namespace}/detections", detections_message(result, has_numbers=numbers)

    def _note_drop(self, notice: FrameDropped) -> None:
        with self._changed:
            self._heard_at = time.monotonic()
            if notice.header.seq not in self._pending:
                return
            if not self._parameters.is_lossless:
                del self._pending[notice.header.seq]
                self.summary.dropped[notice.reason.name.lower()] += 1
            else:
                # A governor that says no says it again at once; a moment later it may not.
                self._changed.wait_for(lambda: self._is_over, _RETRY_S)
                self._to_repeat.append(notice.header.seq)
            self._changed.notify_all()
        self._tell_progress()

    def _note_break(self, error: StreamError) -> None:
        """Send again what was under way. Raises the error once the server was away for too long."""
        waiting = self._stream.counters().waiting
        with self._changed:
            if time.monotonic() - self._heard_at > self._parameters.patience_s:
                raise error
            is_news, self._is_told = not self._is_told, True
            if self._parameters.is_lossless:
                # What waits on this side is the newest and goes by itself. One frame too many is answered twice.
                under_way = list(self._pending)[: len(self._pending) - waiting]
                self._to_repeat.extend(seq for seq in under_way if seq not in self._to_repeat)
            self._changed.notify_all()
        if is_news:
            self._tell(f"{error}; trying again for {self._parameters.patience_s:g} s")

    def _tell_progress(self) -> None:
        self._progress(self.summary.answered + self.summary.failed + sum(self.summary.dropped.values()))


class _Pace:
    """When frames are due: as far apart as they were recorded, divided by the rate. Rate 0 is always now."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._origin: tuple[int, float] | None = None

    def wait_s(self, recorded_ns: int, now_s: float) -> float:
        """Return how long a frame must still wait; the first begins the count."""
        if self._rate == 0:
            return 0.0
        if self._origin is None:
            self._origin = recorded_ns, now_s
        first_ns, began_s = self._origin
        return began_s + (recorded_ns - first_ns) / 1e9 / self._rate - now_s
