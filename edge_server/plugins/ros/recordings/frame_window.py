"""Window of a recording's frames between reading and writing: hands each frame to the stream of its topic, and takes
the results back, at rate 0 in the order of the recording."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from edge_server.plugins.ros.messages.message_conversion import OutgoingMessage
from edge_server.plugins.ros.recordings.recording import RecordedFrame
from edge_server.protocol.frame_messages import Frame

MAX_FRAMES = 64
"""Frames between reading and writing: one topic may be so far ahead of another one."""

MAX_BYTES = 256 << 20
"""Bytes of images from which on no further frame is read until one is answered."""

Results = Sequence[tuple[str, OutgoingMessage]]
"""Topic and message of each result of a frame."""


class OpenFrame:
    """A frame without a result yet. `frame` is None and `results` is set once it is complete."""

    __slots__ = ("frame", "is_queued", "recorded_ns", "results", "send_count", "size")

    def __init__(self, frame: Frame, recorded_ns: int) -> None:
        self.frame: Frame | None = frame
        self.recorded_ns = recorded_ns
        self.size = len(frame.data)
        self.results: Results | None = None
        self.is_queued = True
        self.send_count = 0


class FrameWindow:
    """Queues of frames for some topics. All methods may be called on any thread.

    `frames` is read on the threads that call `take`, by one at a time. At rate 0 reading waits until there is room, and
    results are written in the order of the frames. Otherwise each frame waits until it is due, and results are written
    at once. `write` is called with the results and the time of a frame. `note_error` is called with the error of a
    message that is no image.
    """

    def __init__(
        self,
        frames: Iterator[RecordedFrame],
        topics: Sequence[str],
        rate: float,
        write: Callable[[Results, int], None],
        note_error: Callable[[str], None],
    ) -> None:
        self._frames = frames
        self._queues: dict[str, deque[OpenFrame]] = {topic: deque() for topic in topics}
        self._open_counts = dict.fromkeys(topics, 0)
        self._rate = rate
        self._is_lossless = rate == 0
        self._clock_start: tuple[int, float] | None = None
        """Time of the first frame in the recording, and by this machine's clock."""
        self._write = write
        self._note_error = note_error
        self._changed = threading.Condition()
        self._order: deque[OpenFrame] = deque()
        self._bytes = 0
        self._is_reading = self._is_exhausted = self._is_over = False

    def take(self, topic: str) -> tuple[OpenFrame, Frame] | None:
        """Return the next frame of a topic to send when it is due. Return None when all are complete, or else, unless
        at rate 0, after the last one. Raises errors of reading."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_over or self._queues[topic] or self._may_read or self._is_done(topic)
                )
                if self._is_over:
                    return None
                if self._queues[topic]:
                    entry = self._queues[topic].popleft()
                    entry.is_queued = False
                    if (frame := entry.frame) is None:
                        continue  # answered while it waited to be sent again
                    if not self._is_lossless:
                        entry.frame = None
                    entry.send_count += 1
                    return entry, frame
                if self._is_done(topic):
                    return None
                self._is_reading = True
            try:
                self._read_one()
            finally:
                with self._changed:
                    self._is_reading = False
                    self._changed.notify_all()

    def repeat(self, topic: str, entries: Sequence[OpenFrame]) -> None:
        """Have frames sent again before any other."""
        with self._changed:
            for entry in reversed(entries):
                if not entry.is_queued:
                    entry.is_queued = True
                    self._queues[topic].appendleft(entry)
            self._changed.notify_all()

    def _read_one(self) -> None:
        recorded = next(self._frames, None)
        with self._changed:
            if recorded is None:
                self._is_exhausted = True
            elif recorded.frame is None:
                self._note_error(recorded.error)
            else:
                self._changed.wait_for(lambda: self._is_over, self._wait_s(recorded.recorded_ns))
                entry = OpenFrame(recorded.frame, recorded.recorded_ns)
                self._queues[recorded.topic].append(entry)
                self._open_counts[recorded.topic] += 1
                if self._is_lossless:
                    self._order.append(entry)
                    self._bytes += entry.size

    def _is_done(self, topic: str) -> bool:
        return self._is_exhausted and not (self._is_lossless and self._open_counts[topic])

    def _wait_s(self, recorded_ns: int) -> float:
        """Return the time until a frame is due: the recorded intervals divided by the rate, from the first frame on."""
        if self._is_lossless:
            return 0.0
        now_s = time.monotonic()
        first_ns, began_s = self._clock_start = self._clock_start or (recorded_ns, now_s)
        return max(began_s + (recorded_ns - first_ns) / 1e9 / self._rate - now_s, 0.0)

    @property
    def _may_read(self) -> bool:
        has_room = len(self._order) < MAX_FRAMES and self._bytes < MAX_BYTES
        return has_room and not self._is_reading and not self._is_exhausted

    def complete(self, topic: str, entry: OpenFrame, results: Results) -> None:
        """Write the results of a frame, after those of earlier frames; none for a frame that failed or was dropped.

        Raises errors of writing.
        """
        with self._changed:
            if self._is_over:
                return
            entry.results = results
            entry.frame = None
            if not self._is_lossless:
                self._write(results, entry.recorded_ns)
                return
            self._bytes -= entry.size
            self._open_counts[topic] -= 1
            while self._order and (ready := self._order[0].results) is not None:
                self._write(ready, self._order.popleft().recorded_ns)
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits. Nothing is written after that."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
