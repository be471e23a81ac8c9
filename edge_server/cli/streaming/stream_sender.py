"""Stream sender: one frame stream to the server, with a thread for the results."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from edge_server.cli.streaming.annotated_output import WritingThread
from edge_server.cli.streaming.frame_counts import FrameCounts
from edge_server.cli.streaming.json_lines import JsonLines
from edge_server.cli.streaming.result_text import drop_as_json, result_as_json, result_in_words
from edge_server.client import Delivery, FrameStream, StreamError, Tls
from edge_server.core.frame_stream_types import Frame, FrameDropped, FrameResult, Returns, StreamOpened


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What every stream of a run asks for. `keeps_all`: frames wait for leave to be sent instead of giving way."""

    address: str
    model: str
    version: int = 0
    returns: Returns = field(default_factory=Returns)
    delivery: Delivery = field(default_factory=Delivery)
    keeps_all: bool = False
    tls: Tls | None = None
    metadata: tuple[tuple[str, str], ...] = ()


class StreamSender:
    """A stream and what is known of it. `latest` and `opened` may be read from any thread.

    `failure` is set when the stream ended for good before it was asked to, `trouble` while it is being connected anew.
    """

    def __init__(
        self, name: str, stream_id: str, options: StreamOptions, writer: WritingThread | None, lines: JsonLines | None
    ) -> None:
        self.name = name
        self.opened: StreamOpened | None = None
        self.latest: FrameResult | None = None
        self.failure: StreamError | None = None
        self.trouble = ""
        self.last_error = ""
        self.writer = writer
        self._lines = lines
        self._lock = threading.Lock()
        self._tally = FrameCounts(name)
        self._takes_no_more = False
        self._stream = FrameStream(
            options.address,
            options.model,
            version=options.version,
            stream_id=stream_id,
            returns=options.returns,
            delivery=replace(options.delivery, notifies_drops=True),
            keeps_all=options.keeps_all,
            tls=options.tls,
            metadata=options.metadata,
            client="edge-server stream",
            on_opened=self._take_opening,
            on_dropped=self._take_notice,
            on_broken=self._take_break,
        )
        self._thread = threading.Thread(target=self._read, name=f"results-{name}", daemon=True)
        self._thread.start()

    def offer(self, frame: Frame) -> None:
        """Hand over a frame, whose buffer is not changed any more. Does nothing on a stream that has ended."""
        with self._lock:
            if self._takes_no_more:
                return
            self._tally.offer(frame.header.seq, time.monotonic())
            self._stream.send(frame)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until a frame can be offered that makes no other give way; False when the time is over first."""
        return self._stream.wait_for_room(timeout_s) or not self.is_alive

    def finish(self) -> None:
        """Take no more frames: the stream ends by itself when the last one is settled."""
        with self._lock:
            self._takes_no_more = True
        self._stream.finish()

    def join(self, timeout_s: float) -> bool:
        """Wait until the stream has ended; False when the time is over first."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the stream at once, wait for what is still to be written, and settle the counts."""
        self._end()
        self._thread.join()
        with self._lock:
            self._settle()
            self._tally.end()
        if self.writer is not None:
            self.writer.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def tally(self) -> FrameCounts:
        """Return the counts as they stand. They go on; hold `lock` while reading them."""
        self._settle()
        return self._tally

    @property
    def lock(self) -> threading.Lock:
        return self._lock

    def _end(self) -> None:
        with self._lock:
            self._takes_no_more = True
        self._stream.close()

    def _settle(self) -> None:
        counters = self._stream.counters()
        self._tally.settle(counters.dropped_here, counters.lost)

    def _read(self) -> None:
        try:
            for result in self._stream.results():
                self._take_result(result, time.monotonic())
        except StreamError as error:
            self.failure = error.detached()
        with self._lock:
            self._takes_no_more = True

    def _take_result(self, result: FrameResult, now: float) -> None:
        with self._lock:
            age_s = self._tally.answer(result, now)
        if age_s is None:
            return
        self.trouble = ""
        if result.error_code:
            self.last_error = result_in_words(result)
        if self._lines is not None:
            self._lines.write(result_as_json(self.name, result, age_s))
        if self.writer is not None and result.annotated_jpeg:
            self.writer.put(result.header.seq, result.annotated_jpeg)
        # The picture is large, and nobody looks at it here.
        self.latest = replace(result, annotated_jpeg=b"")

    def _take_opening(self, opened: StreamOpened) -> None:
        if self.opened is None:
            with self._lock:
                self._tally.open(opened.counts)
        self.opened = opened
        self.trouble = ""

    def _take_notice(self, notice: FrameDropped) -> None:
        with self._lock:
            is_ours = self._tally.notice(notice.header.seq, notice.reason)
        if is_ours and self._lines is not None:
            self._lines.write(drop_as_json(self.name, notice))

    def _take_break(self, error: StreamError) -> None:
        self.trouble = error.message
        if self.opened is None:
            # There never was a server of this kind: waiting for one would look like working.
            self.failure = error.detached()
            self._end()
