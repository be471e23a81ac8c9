"""Replay of a recording through a model: sends the images of some topics, and writes the results with their time.

At rate 0 no frame is lost: a few frames are in flight at a time, and dropped frames (by the governor, or with a broken
connection) are sent again. At any other rate frames are sent at their recorded intervals, and drops are counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from edge_server.client import FrameStream, StreamError
from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.messages.message_conversion import result_messages
from edge_server.plugins.ros.recordings.frame_window import FrameWindow, OpenFrame, Results
from edge_server.plugins.ros.recordings.recording import RecordedFrame
from edge_server.plugins.ros.recordings.recording_writer import RecordingWriter
from edge_server.plugins.ros.recordings.shared_pictures import SharedPictures
from edge_server.protocol.frame_messages import Delivery, Frame, FrameDropped, FrameResult, Returns

MAX_IN_FLIGHT = 8
"""Frames of a topic in flight at rate 0: enough for a model with some instances while images are read."""

_MIN_DEPTH = 2
"""Frames in flight of one of several streams: few, so that the frames are spread over all."""

_TOPIC_NAMES = {
    "classification": "classification", "mask": "mask", "map": "map", "annotated": "annotated/compressed",
    "detections": "detections",
}  # fmt: skip
"""Kind of result -> the end of its topic's name, in the order in which the messages of a frame are written."""

_RETRY_S = 0.1
_TICK_S = 0.1
_END_S = 5.0
_MAX_ID_LENGTH = 256


@dataclass(frozen=True, slots=True)
class ReplayParameters:
    """Parameters of a replay. `rate`: 1.0 as recorded, 0 as fast as the server responds. `returns` are the requested
    results, by default those that the model declares.

    Results of a topic go to topics below `namespace` and its own name: detections, classification,
    annotated/compressed, mask, map. The replay fails when the server cannot be reached for `patience_s`. A topic has
    `stream_count` streams: a batch takes one frame of each, and tracks go over one.
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
    stream_count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1000:
            raise InvalidRequest(f"a rate is 0 to 1000, got {self.rate}")
        if self.stream_count > 1 and self.rate:
            raise InvalidRequest(f"several streams of a topic need the rate 0, got {self.rate}")

    @property
    def is_lossless(self) -> bool:
        """Whether dropped frames are sent again."""
        return self.rate == 0


@dataclass(slots=True)
class ReplaySummary:
    """Counts of a replay: sent = answered + failed + sum(dropped.values()). `repeated` frames count once in `sent`.

    `dropped` is by reason; "unanswered" are frames without a result or a report: replaced by newer ones before they
    were sent, or lost with a connection. `failed` counts messages that are no image, too.
    """

    sent: int = 0
    answered: int = 0
    failed: int = 0
    repeated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    seconds: float = 0.0

    @property
    def completed(self) -> int:
        return self.answered + self.failed + sum(self.dropped.values())

    def note_error(self, text: str) -> None:
        """Count a failed frame."""
        self.failed += 1
        self.first_error = self.first_error or text


class RecordingReplay:
    """One run over the frames of some topics, each with streams of its own. Both callbacks are called on the thread of
    `run`.

    `progress` gets the number of completed frames. `warn` gets a text when the server is lost.
    """

    def __init__(
        self,
        parameters: ReplayParameters,
        topics: Sequence[str],
        writer: RecordingWriter,
        progress: Callable[[int], None] = lambda completed: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._parameters = parameters
        self._topics = topics
        self._writer = writer
        self._progress = progress
        self._warn = warn
        self._changed = threading.Condition()
        self._warnings: deque[str] = deque()
        self._error: BaseException | None = None
        self._running = 0
        self.summary = ReplaySummary()

    def run(self, frames: Iterator[RecordedFrame]) -> ReplaySummary:
        """Send the frames and write their results; block until the last one is complete.

        Raises errors of reading and writing, and StreamError when the model is not available.
        """
        began = time.monotonic()
        window = FrameWindow(frames, self._topics, self._parameters.rate, self._write, self._note_bad_message)
        streams = [
            _TopicStream(self._parameters, topic, number, window, self.summary, self._changed, self._warnings)
            for topic in self._topics
            for number in range(self._parameters.stream_count)
        ]
        threads = [threading.Thread(target=self._run_stream, args=(one,), daemon=True) for one in streams]
        self._running = len(threads)
        try:
            for thread in threads:
                thread.start()
            self._wait()
        finally:
            # In this order: after the first line nothing is written, whatever the streams do until they end.
            window.close()
            for stream in streams:
                stream.close()
            for thread in threads:
                thread.join(_END_S)
        if self._error is not None:
            raise self._error
        self.summary.seconds = time.monotonic() - began
        return self.summary

    def _wait(self) -> None:
        """Report progress until all streams have ended, or one has failed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._running or self._error is not None, _TICK_S)
                is_over = not self._running or self._error is not None
                completed = self.summary.completed
            while self._warnings:
                self._warn(self._warnings.popleft())
            self._progress(completed)
            if is_over:
                return

    def _run_stream(self, stream: _TopicStream) -> None:
        error: BaseException | None = None
        try:
            stream.run()
        except Exception as fault:  # noqa: BLE001 - raised by `run`
            error = fault
        with self._changed:
            self._running -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def _write(self, results: Results, recorded_ns: int) -> None:
        for topic, message in results:
            self._writer.write(topic, message, recorded_ns)

    def _note_bad_message(self, text: str) -> None:
        with self._changed:
            self.summary.sent += 1
            self.summary.note_error(text)


class _TopicStream:
    """Stream of a topic: sends its frames and completes them in the window. `changed` guards `summary` as well."""

    def __init__(
        self,
        parameters: ReplayParameters,
        topic: str,
        number: int,
        window: FrameWindow,
        summary: ReplaySummary,
        changed: threading.Condition,
        warnings: deque[str],
    ) -> None:
        self._parameters = parameters
        self._topic = topic
        self._window = window
        self._summary = summary
        self._changed = changed
        self._warnings = warnings
        self._has_warned = False
        self._pending: dict[int, OpenFrame] = {}
        self._is_over = False
        self._last_message_s = time.monotonic()
        stream_id = f"{parameters.stream_id}{topic}" + (f":{number}" if parameters.stream_count > 1 else "")
        depth = max(MAX_IN_FLIGHT // parameters.stream_count, _MIN_DEPTH)
        # As many frames are in flight as wait in the stream, and one waits for its turn.
        self._shared = SharedPictures(parameters.address, 2 * depth + 1)
        self._stream = FrameStream(
            parameters.address,
            parameters.model_name,
            version=parameters.model_version,
            stream_id=stream_id[-_MAX_ID_LENGTH:] if parameters.stream_id else "",
            returns=parameters.returns,
            delivery=Delivery(depth=depth if parameters.is_lossless else 1, notifies_drops=True),
            keeps_all=parameters.is_lossless,
            client=f"ros replay of {topic}"[:_MAX_ID_LENGTH],
            on_dropped=self._note_drop,
            on_broken=self._note_break,
        )

    def run(self) -> None:
        """Send the topic's frames; block until the last one is complete or the stream is closed."""
        try:
            for result in self._stream.results(self._due_frames()):
                self._receive(result)
        finally:
            self.close()
            self._shared.close()
            with self._changed:
                if self._pending:
                    self._summary.dropped["unanswered"] += len(self._pending)

    def close(self) -> None:
        """End the stream, from any thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._stream.close()

    def _due_frames(self) -> Iterator[Frame]:
        """Yield the frames to send when they are due. Runs on the stream's sending thread, which waits for room at rate
        0."""
        while (taken := self._window.take(self._topic)) is not None:
            entry, frame = taken
            with self._changed:
                if self._is_over:
                    return
                if not self._pending:
                    self._last_message_s = time.monotonic()
                self._pending[frame.header.seq] = entry
                if entry.send_count == 1:
                    self._summary.sent += 1
                else:
                    self._summary.repeated += 1
            yield self._shared.place(frame) if self._parameters.is_lossless else frame

    def _receive(self, result: FrameResult) -> None:
        """Complete a frame. A second result of a frame that was sent twice is ignored."""
        with self._changed:
            self._last_message_s = time.monotonic()
            self._has_warned = False
            entry = self._pending.pop(result.header.seq, None)
            if entry is None:
                return
            was_shared = self._shared.free(result.header.seq)
            if not result.error_code:
                self._summary.answered += 1
            elif not was_shared:
                self._summary.note_error(f"{self._topic}: {result.error_code}: {result.error}")
        if result.error_code and was_shared:
            # Perhaps of a server that was started meanwhile, and does not know the shared memory.
            self._shared.close()
            self._window.repeat(self._topic, [entry])
            return
        self._window.complete(self._topic, entry, () if result.error_code else self._messages(result))

    def _messages(self, result: FrameResult) -> Results:
        """Return the topics and messages of a result. A result without any content becomes an empty list of
        detections."""
        given = self._parameters
        found = result_messages(
            result, _TOPIC_NAMES, has_numbers=given.class_id_is_number, has_mask=given.returns.has_mask
        )
        if not result.classes:
            del found["classification"]
        has_other = bool(found.keys() & {"classification", "mask", "map"})
        has_other |= "annotated" in found and given.returns != Returns()
        if has_other and not (result.detections or given.returns.has_detections):
            del found["detections"]
        prefix = f"{given.namespace}{self._topic}"
        return [(f"{prefix}/{_TOPIC_NAMES[name]}", message) for name, message in found.items()]

    def _note_drop(self, notice: FrameDropped) -> None:
        with self._changed:
            self._last_message_s = time.monotonic()
            entry = self._pending.get(notice.header.seq)
            if entry is None:
                return
            if self._parameters.is_lossless:
                # The governor would drop the frame again at once; wait a moment.
                self._changed.wait_for(lambda: self._is_over, _RETRY_S)
            else:
                del self._pending[notice.header.seq]
                self._summary.dropped[notice.reason.name.lower()] += 1
        if self._parameters.is_lossless:
            self._window.repeat(self._topic, [entry])
        else:
            self._window.complete(self._topic, entry, ())

    def _note_break(self, error: StreamError) -> None:
        """Repeat the frames in flight. Raises the error when the server has been lost for too long."""
        waiting = self._stream.counters().waiting
        with self._changed:
            # A camera without frames, whose stream waits, has lost nothing.
            if self._pending and time.monotonic() - self._last_message_s > self._parameters.patience_s:
                raise error
            is_new, self._has_warned = not self._has_warned, True
            # The newest frames still wait on this side, and are sent anyway. A frame too many gets two results.
            in_flight = list(self._pending.values())[: len(self._pending) - waiting]
            if is_new:
                self._warnings.append(f"{error}; trying again for {self._parameters.patience_s:g} s")
        if self._parameters.is_lossless:
            self._window.repeat(self._topic, in_flight)
