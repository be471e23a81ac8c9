"""Bridge of one camera: sends the frames of its topic as a stream to the server, and publishes their results.

The transport's thread sends frames directly to the stream, which drops the oldest one when the server is busy; another
thread publishes the results. Both continue when the topic is silent, its publisher comes and goes, or the server
restarts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from edge_server.client import Counters, FrameStream, StreamError
from edge_server.errors import ErrorCode, InvalidRequest
from edge_server.plugins.ros.bridge_counts import FrameCounter, drops_between
from edge_server.plugins.ros.bridge_log import ConnectionLog, report_line
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.plugins.ros.diagnostics import Diagnostics
from edge_server.plugins.ros.messages.message_conversion import DiagnosticStatus, MessageKind, make_frame
from edge_server.plugins.ros.result_publishers import ResultTopics
from edge_server.plugins.ros.transports.transport import Qos, ServiceTransport, Transport
from edge_server.protocol.frame_messages import Frame, FrameResult, StreamOpened

_DRAIN_S = 5.0
_RETRY_S = 2.0
_MAX_AGE_US = 2**32 - 1

log = logging.getLogger(__name__)


class CameraBridge:
    """Connects the topics of `parameters` to the frame stream of a server at `address`.

    All methods are for the thread of the transport's `spin`. `failure` is the error by which the server ended the
    stream for good, None while there is none: the stream is then opened again from time to time, unless another client
    took its id. `on_failed` is called on another thread, with a new `failure` or with an error of this program, which
    has ended the camera. With `keeps_frame`, `last_frame` is the newest frame, for trials of other models.
    """

    def __init__(
        self, parameters: BridgeParameters, transport: Transport, address: str, on_failed: Callable[[Exception], None]
    ) -> None:
        self.parameters = parameters
        self.failure: StreamError | None = None
        self.keeps_frame = False
        self.last_frame: Frame | None = None
        self._transport = transport
        self._address = address
        self._on_failed = on_failed
        self._connection_log = ConnectionLog(parameters.image_topic)
        self._results = ResultTopics(parameters, transport)
        self._stream = self._open_stream(parameters)
        # The stream whose results are read, and its counters at the last count. After a switch it is read to its end.
        self._read_stream, self._read_counters = self._stream, Counters()
        self._reader = threading.Thread(target=self._publish_results, name="ros-results", daemon=True)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._counter = FrameCounter()
        self._silence = ""
        self._seq = 0
        self._missing_model = ""
        self._opened: StreamOpened | None = None
        self._connection_error = ""

    @property
    def largest_frame(self) -> int:
        """Bytes of the largest image that came, 0 if none."""
        return self._counter.largest_frame

    def open(self) -> None:
        """Open the topics and the stream."""
        self._results.open()
        self._subscribe(self.parameters)
        self._reader.start()

    def close(self) -> None:
        """Close the stream, and end the thread that publishes."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        self._stream.close()
        self._read_stream.close()
        if self._reader.ident is not None:
            self._reader.join()

    def switch(self, parameters: BridgeParameters) -> None:
        """Send later frames to the model of `parameters`, from their image topic; the other topics stay.

        Frames in flight are still answered, for up to _DRAIN_S; the rest of them is counted as lost. Raises
        EdgeServerError, and nothing has changed then.
        """
        before = self.parameters
        if parameters.image_topic != before.image_topic:
            self._subscribe(parameters)
        self._connection_log = ConnectionLog(parameters.image_topic)
        stream = self._open_stream(parameters)
        with self._changed:
            old, self._stream, self.parameters = self._stream, stream, parameters
            self.last_frame = self.failure = None
            self._changed.notify_all()
        if parameters.image_topic != before.image_topic:
            assert isinstance(self._transport, ServiceTransport), "only a service switches"
            self._transport.unsubscribe(before.image_topic)
        old.finish()
        closing = threading.Timer(_DRAIN_S, old.close)
        closing.daemon = True
        closing.start()

    def count(self, seconds: float) -> None:
        """End the counts of the last `seconds`."""
        with self._lock:
            counters, before = self._read_stream.counters(), self._read_counters
            self._read_counters = counters
        self._counter.end_interval(seconds, drops_between(before, counters))

    def report(self) -> None:
        """Log a line about the frames of the last intervals, and what is wrong with them."""
        topic, counts = self.parameters.image_topic, self._counter.recent()
        line = report_line(topic, counts)
        self._silence = "" if counts.received or counts.answered else self._transport.explain_silence(topic)
        reason = self._silence or self._connection_error
        log.info("%s", f"{line}: {reason}" if reason else line)
        if counts.last_error:
            failed = counts.failed + counts.refused
            log.warning("%s: %d frame(s) failed, the last: %s", topic, failed, counts.last_error)
        self._results.report()

    def statuses(self, diagnostics: Diagnostics) -> tuple[DiagnosticStatus, ...]:
        """Return the status of the frames in the last intervals, and that of the connection."""
        topic = self.parameters.image_topic
        return (
            diagnostics.frames_status(topic, self._counter.recent(), self._silence),
            diagnostics.server_status(topic, self._opened, self._connection_error),
        )

    def _open_stream(self, parameters: BridgeParameters) -> FrameStream:
        return parameters.open_stream(self._address, on_opened=self._note_opened, on_broken=self._note_broken)

    def _subscribe(self, given: BridgeParameters) -> None:
        kind = MessageKind.COMPRESSED_IMAGE if given.image_is_compressed else MessageKind.IMAGE
        topic = given.image_topic
        qos = Qos(given.input_qos, given.input_queue_size)
        self._transport.subscribe(topic, kind, qos, lambda message: self._receive(topic, message))

    def _receive(self, topic: str, message: Any) -> None:
        """Send one message to the stream. A message that is not an image is counted; the bridge continues."""
        with self._lock:
            if topic != self.parameters.image_topic:
                return
            self._seq += 1
            seq = self._seq
        try:
            frame = make_frame(message, seq=seq)
        except InvalidRequest as error:
            self._counter.add_refused(error.message)
            return
        if self.parameters.stamp_tells_age:
            frame.age_us = frame_age_us(frame)
        self._counter.add_frame(seq, len(frame.data))
        with self._lock:
            if self.keeps_frame:
                self.last_frame = frame
            stream = self._stream
        try:
            stream.send(frame)
        except ValueError:
            # Some transports call back on threads of their own: while the bridge closes, after the stream is closed.
            if not self._stopping.is_set():
                raise

    def _publish_results(self) -> None:
        try:
            while not self._stopping.is_set():
                stream = self._read_stream
                try:
                    for result in stream.results():
                        self._publish_result(result)
                except StreamError as error:
                    if stream is self._stream:
                        self._wait_after(error, stream)
                else:
                    if stream is self._stream:
                        return
                with self._lock:
                    if stream is not self._stream:
                        self._counter.add_drops(drops_between(self._read_counters, stream.counters()))
                        self._read_stream, self._read_counters = self._stream, Counters()
        except Exception as error:  # noqa: BLE001 - raised by the bridge on its thread
            if not self._stopping.is_set():
                self._on_failed(error)

    def _publish_result(self, result: FrameResult) -> None:
        self._counter.add_result(result)
        if not result.error_code:
            self._missing_model = ""
            # Messages of ROS cannot say that a result is late.
            if not result.is_late:
                self._results.publish(result)

    def _wait_after(self, error: StreamError, stream: FrameStream) -> None:
        """Wait until the stream is to be opened again. A model may be missing at the start of a robot, or between two
        deployments; any other error is a failure."""
        self._connection_error = error.message
        if error.code is ErrorCode.NOT_FOUND:
            if error.message != self._missing_model:
                self._missing_model = error.message
                log.warning("%s: %s; asking again every %g s", self.parameters.image_topic, error, _RETRY_S)
        else:
            before, self.failure = self.failure, error
            if before is None or before.message != error.message:
                self._on_failed(error)
        # Two clients that take an id from each other would do so for ever.
        wait_s = None if error.code is ErrorCode.ABORTED else _RETRY_S
        with self._changed:
            self._changed.wait_for(lambda: self._stopping.is_set() or stream is not self._stream, wait_s)

    def _note_opened(self, opened: StreamOpened) -> None:
        self._connection_log.log_opened(opened)
        self._connection_error, self.failure = "", None
        before, self._opened = self._opened, opened
        if before is None or _model_of(before) != _model_of(opened):
            self._results.publish_model(opened)

    def _note_broken(self, error: StreamError) -> None:
        self._connection_log.log_broken(error)
        self._connection_error = error.message


def _model_of(opened: StreamOpened) -> tuple[str, int, tuple[str, ...]]:
    return opened.model, opened.version, opened.labels


def frame_age_us(frame: Frame) -> int:
    """Return the age of a frame's stamp by the clock of this machine; 0 for a stamp in the future."""
    elapsed_ns = time.time_ns() - (frame.header.sec * 1_000_000_000 + frame.header.nanosec)
    return max(0, min(elapsed_ns // 1000, _MAX_AGE_US))
