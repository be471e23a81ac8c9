"""Sender of one frame stream to the server, with a thread that reads the results."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from edge_server.cli.options import describe_grpc_failure
from edge_server.client import Delivery, FrameStream, StreamError, Tls
from edge_server.plugins.cameras.commands.annotated_output import WritingThread
from edge_server.plugins.cameras.commands.foxglove_output import FoxgloveOutput
from edge_server.plugins.cameras.commands.result_lines import JsonLines, drop_as_json, result_in_words
from edge_server.plugins.cameras.commands.sent_frame_counts import FrameCounts
from edge_server.plugins.cameras.sinks.result_json import result_as_json
from edge_server.protocol.frame_messages import Frame, FrameDropped, FrameResult, Returns, StreamOpened


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of every stream of a run. With `keeps_all`, waiting frames are not replaced by newer ones."""

    address: str
    model: str
    version: int = 0
    returns: Returns = field(default_factory=Returns)
    delivery: Delivery = field(default_factory=Delivery)
    keeps_all: bool = False
    tls: Tls | None = None
    metadata: tuple[tuple[str, str], ...] = ()


class StreamSender:
    """One stream with its counts and latest result. `latest` and `opened` may be read from any thread.

    `failure` is set if the stream ended early with a permanent error. `connection_error` is set during reconnection.
    """

    def __init__(
        self,
        name: str,
        stream_id: str,
        options: StreamOptions,
        writer: WritingThread | None,
        lines: JsonLines | None,
        foxglove: FoxgloveOutput | None = None,
    ) -> None:
        self.name = name
        self.opened: StreamOpened | None = None
        self.latest: FrameResult | None = None
        self.failure: StreamError | None = None
        self.connection_error = ""
        self.last_error = ""
        self.writer = writer
        self._address = options.address
        self._lines = lines
        self._foxglove = foxglove
        self._lock = threading.Lock()
        self._counts = FrameCounts(name)
        self._is_finishing = False
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
            on_opened=self._on_opened,
            on_dropped=self._on_dropped,
            on_broken=self._on_broken,
        )
        self._thread = threading.Thread(target=self._read_results, name=f"results-{name}", daemon=True)
        self._thread.start()

    def offer(self, frame: Frame) -> None:
        """Offer a frame for sending. Its buffer must not change afterwards. Ignored after the end of the stream."""
        with self._lock:
            if self._is_finishing:
                return
            self._counts.count_offered(frame.header.seq, time.monotonic())
            self._stream.send(frame)
        if self._foxglove is not None:
            self._foxglove.show_frame(self.name, frame)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until a frame can be offered without replacing another. Return False after the timeout."""
        return self._stream.wait_for_room(timeout_s) or not self.is_alive

    def finish(self) -> None:
        """Accept no more frames. The stream ends when all frames are answered or dropped."""
        with self._lock:
            self._is_finishing = True
        self._stream.finish()

    def join(self, timeout_s: float) -> bool:
        """Wait until the stream has ended. Return False after the timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Close the stream, finalize the counts, and wait until the output is written."""
        self._close_stream()
        self._thread.join()
        with self._lock:
            self._update_client_totals()
            self._counts.end()
        if self.writer is not None:
            self.writer.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def counts(self) -> FrameCounts:
        """Return the current counts. Hold `lock` while reading them."""
        self._update_client_totals()
        return self._counts

    @property
    def lock(self) -> threading.Lock:
        return self._lock

    def _close_stream(self) -> None:
        with self._lock:
            self._is_finishing = True
        self._stream.close()

    def _update_client_totals(self) -> None:
        counters = self._stream.counters()
        self._counts.set_client_totals(counters.dropped_here, counters.lost)

    def _read_results(self) -> None:
        try:
            for result in self._stream.results():
                self._on_result(result, time.monotonic())
        except StreamError as error:
            self.failure = error.detached()
        with self._lock:
            self._is_finishing = True

    def _on_result(self, result: FrameResult, now: float) -> None:
        with self._lock:
            age_s = self._counts.count_result(result, now)
        if age_s is None:
            return
        self.connection_error = ""
        if result.error_code:
            self.last_error = result_in_words(result)
        if self._lines is not None:
            self._lines.write(result_as_json(self.name, result, age_s))
        if self._foxglove is not None and not result.error_code:
            self._foxglove.show_result(self.name, result)
        if self.writer is not None and result.annotated_jpeg:
            self.writer.put(result.header.seq, result.annotated_jpeg)
        # Without the annotated picture, which is large and not needed here.
        self.latest = replace(result, annotated_jpeg=b"")

    def _on_opened(self, opened: StreamOpened) -> None:
        if self.opened is None:
            with self._lock:
                self._counts.set_server_baseline(opened.counts)
        self.opened = opened
        self.connection_error = ""

    def _on_dropped(self, notice: FrameDropped) -> None:
        with self._lock:
            is_known = self._counts.count_server_drop(notice.header.seq, notice.reason)
        if is_known and self._lines is not None:
            self._lines.write(drop_as_json(self.name, notice))

    def _on_broken(self, error: StreamError) -> None:
        self.connection_error = error.message
        if self.opened is None:
            # The stream was never open, so this is probably not a frame server; do not retry.
            self.failure = _explain_failure(error, self._address)
            self._close_stream()


def _explain_failure(error: StreamError, address: str) -> StreamError:
    """Return the error of a stream that never opened, with a text for users if the client's is a known one."""
    text = describe_grpc_failure(error.message)
    if text == error.message:
        return error.detached()
    return StreamError(f"no answer from {address}: {text}", error.code, status=error.status, heals=error.heals)
