"""One frame stream in the server: queues its frames, passes them to the worker threads, and sends the results back in
order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import Draining, EdgeServerError
from edge_server.plugins.cameras.reports import FrameStreamReport
from edge_server.plugins.cameras.streams.frame_counters import ModelTotals, Rate, RecentQuantiles
from edge_server.plugins.cameras.streams.frame_mailbox import FrameLimits, FrameTally, Mailbox, RunEstimate
from edge_server.plugins.cameras.streams.stream_settings import StreamSettings
from edge_server.plugins.cameras.streams.stream_view import StreamView
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder
from edge_server.plugins.vision.tracking import ByteTracker
from edge_server.protocol.frame_messages import (
    Credit,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    FrameTimes,
    Returns,
    ServerMessage,
    StreamOpened,
)

if TYPE_CHECKING:
    from edge_server.plugins.cameras.streams.model_inputs_and_outputs import OutputPlan
    from edge_server.plugins.cameras.zones.zone_monitor import ZoneMonitor

_MAX_NOTICES = 64
"""Maximum number of unsent drop notices; further drops appear only in the counts."""

_MAX_UNSENT = 2
"""Number of unsent results at which the stream stops running frames. Not 1: a single result often only waits for the
sending thread to wake up."""

_SPARE_CREDITS = 2
"""Number of frames that a client may send ahead of those that its mailbox holds."""


def _ignore_change() -> None:
    """Do nothing: placeholder until `CameraStream.watch` sets the callback."""


@dataclass(slots=True, eq=False)
class FrameInFlight:
    """One frame between reception and its result. Timestamps are of time.monotonic_ns; 0 means not reached yet.

    `frame` becomes None once the frame is answered or dropped. `load` returns a frame that is made only if it runs.
    `fault` is the error that answers a refused frame in its turn.
    `is_settled`: the worker has answered or refused it.
    """

    stream: CameraStream
    header: FrameHeader
    frame: Frame | None
    received_ns: int
    received_unix_ns: int
    fault: EdgeServerError | None = None
    load: Callable[[], Frame] | None = None
    taken_ns: int = 0
    queued_ns: int = 0
    started_ns: int = 0
    is_settled: bool = False
    result: FrameResult | None = None

    def times(self, finished_ns: int) -> FrameTimes:
        """Return the times for the client. A skipped stage has the time of the previous stage."""
        received_ns = self.received_ns
        taken_ns = self.taken_ns or received_ns
        queued_ns = self.queued_ns or taken_ns
        started_ns = self.started_ns or queued_ns
        return FrameTimes(
            self.received_unix_ns, max(0, taken_ns - received_ns) // 1000, max(0, queued_ns - received_ns) // 1000,
            max(0, started_ns - received_ns) // 1000, max(0, finished_ns - received_ns) // 1000,
        )  # fmt: skip


class CameraStream:
    """Frames and results of one stream.

    The reading thread adds frames with `receive`. A worker takes them with `take` and adds results with `finish`. One
    thread at a time gets the results in frame order from `next_message`.

    All streams share `lock`; methods marked *Locked* require that the caller holds it. The callbacks run with the lock
    held: `wake` when a worker may find this stream eligible, `leave` when the stream is over, `on_last_release` when a
    worker then releases the last frame, if it had any.
    """

    def __init__(
        self,
        lock: threading.Lock,
        settings: StreamSettings,
        tally: FrameTally,
        totals: ModelTotals,
        *,
        wake: Callable[[CameraStream], None],
        leave: Callable[[CameraStream], None],
        on_last_release: Callable[[CameraStream], None],
    ) -> None:
        self.settings = settings
        self._lock = lock
        self._tally = tally
        self._totals = totals
        self._wake = wake
        self._leave = leave
        self._on_last_release = on_last_release
        self._is_held = False
        self.view: StreamView | None = None
        """The view, since somebody first looked at this stream. Set by the registry; workers read it unlocked."""
        self.taken_count = 0
        """Number of frames that workers have taken and not released, including those of an ended stream."""
        self._limits = FrameLimits.of(settings.delivery)
        self._on_change: Callable[[], None] = _ignore_change
        self._on_result: Callable[[], None] = _ignore_change
        self.zones: ZoneMonitor | None = None
        """Counts the tracked objects in zones of the picture. Set by a source before its first frame."""
        self.is_finished = False
        """Whether everything is sent and the call ends without an error."""
        self.settled_returns: tuple[OutputPlan, Returns] | None = None
        """The results to send, and the output plan that they are settled for. Set by the workers."""
        self.perception: PerceptionDecoder | None = None
        """What the outputs of the model mean, as the stream was opened."""
        self._mailbox: Mailbox[FrameInFlight] = Mailbox(self._limits)
        self._order: deque[FrameInFlight] = deque()
        self._notices: deque[FrameDropped] = deque()
        self._dropped_since: dict[DropReason, int] = {}
        self.first_message: StreamOpened | None = None
        """The message that is sent before all others. Set by the registry."""
        self._read_count = 0
        self._told_allowance = 0
        self._is_input_closed = self._is_stopping = self._is_over = False
        self._error: EdgeServerError | None = None
        now_ns = time.monotonic_ns()
        self._opened_ns = now_ns
        self._rate_in, self._rate_out, self._ages_ns = Rate(now_ns), Rate(now_ns), RecentQuantiles()
        self._running_count = 0
        self.correlation_id: int | str | None = None
        """Correlation id of the stream's sequence; None before the first frame and for a model without sequences."""
        self._tracker: ByteTracker | None = None
        self._tracked_at_ns = (0, 0)
        """Stamp and time of arrival of the last tracked frame."""
        self._settled = threading.Condition(lock)
        """Notified when a taken frame is settled."""
        self.max_running = 2
        """Maximum number of chosen, unanswered frames: one runs while another is prepared."""

    # -- the reading thread

    def receive(self, frame: Frame, fault: EdgeServerError | None = None) -> None:
        """Add a received frame. A `fault` answers the frame when its turn comes; its data is not kept."""
        self._add(
            FrameInFlight(self, frame.header, None if fault else frame, time.monotonic_ns(), time.time_ns(), fault)
        )

    def receive_deferred(self, header: FrameHeader, load: Callable[[], Frame]) -> None:
        """Add a frame that `load` makes, on a worker's thread, only if it runs. An EdgeServerError of it answers."""
        self._add(FrameInFlight(self, header, None, time.monotonic_ns(), time.time_ns(), load=load))

    def _add(self, flight: FrameInFlight) -> None:
        now_ns = flight.received_ns
        with self._lock:
            if self._is_over:
                return
            self._read_count += 1
            self._tally.received += 1
            self._totals.received += 1
            self._rate_in.add(now_ns)
            dropped = self._mailbox.offer(flight, now_ns, reader_is_slow=self._reader_is_slow())
            if dropped is not None:
                self._drop(*dropped)
            if self._is_stopping:
                self._drop_waiting()
            if self._owes_credit():
                self._on_change()
            if self.is_eligible:
                self._wake(self)

    def close_input(self) -> None:
        """Mark the input as complete: the call ends without an error once everything is answered."""
        with self._lock:
            self._is_input_closed = True
            self._on_change()

    # -- workers

    @property
    def is_eligible(self) -> bool:
        """Whether a frame waits and there is room for its result. *Locked.*"""
        return (
            bool(self._mailbox.waiting)
            and not self._is_held
            and self._running_count < self.max_running
            # With several instances, later results may be ready before an earlier one.
            and len(self._order) < self.max_running + _MAX_UNSENT
            and not self._reader_is_slow()
        )

    def take(self, now_ns: int, estimate: RunEstimate) -> FrameInFlight | None:
        """Return the frame to run now, or None. Drop frames that are too old to run. *Locked.*"""
        flight, dropped = self._mailbox.take(now_ns, estimate)
        for each, reason in dropped:
            self._drop(each, reason)
        if flight is not None:
            flight.taken_ns = now_ns
            self._order.append(flight)
            self._running_count += 1
            self.taken_count += 1
        elif self._has_ended_well():
            self._on_change()
        return flight

    def release_frame(self) -> None:
        """Note that a worker has finished with a frame and makes no more model calls for it. *Locked.*"""
        self.taken_count -= 1
        if self._is_over and not self.taken_count:
            self._on_last_release(self)

    def hold(self, is_held: bool) -> None:
        """Hold the stream's frames back, or release them. *Locked.*"""
        self._is_held = is_held
        if self.is_eligible:
            self._wake(self)

    def track(
        self, flight: FrameInFlight, detections: tuple[Detection, ...], threshold: float, size: tuple[int, int]
    ) -> tuple[Detection, ...]:
        """Return the detections of a taken frame of `size` (width, height) with the numbers of their tracks and their
        zones.

        Waits until the stream's earlier frames are settled. It cannot wait for itself: a worker takes frames in order,
        at most one per stream at a time. `threshold` is that of ByteTracker.
        """

        def is_first() -> bool:
            return next(other for other in self._order if not other.is_settled) is flight

        with self._settled:
            self._settled.wait_for(lambda: self._is_over or is_first())
            if self._is_over:
                return detections
        # Only this thread uses the tracker until `finish` or `refuse`.
        tracker = self._tracker
        if tracker is None:
            tracker = self._tracker = ByteTracker(self._tally.track_ids.__next__, threshold)
        tracker.threshold = threshold
        header, (stamp_ns, received_ns) = flight.header, self._tracked_at_ns
        self._tracked_at_ns = header.sec * 1_000_000_000 + header.nanosec, flight.received_ns
        step_ns = self._tracked_at_ns[0] - stamp_ns
        if step_ns <= 0:  # frames without stamps, or a clock that was set back
            step_ns = flight.received_ns - received_ns
        boxes = np.array([(one.x_min, one.y_min, one.x_max, one.y_max) for one in detections], float).reshape(-1, 4)
        ids = tracker.update(boxes, np.array([one.score for one in detections], float), step_ns / 1e9)
        monitor = self.zones
        if monitor is None:
            return tuple(replace(one, track_id=track_id) for one, track_id in zip(detections, ids, strict=True))
        zones = monitor.update(detections, ids, tracker.ids, step_ns / 1e9, size)
        return tuple(
            replace(one, track_id=track_id, zones=found)
            for one, track_id, found in zip(detections, ids, zones, strict=True)
        )

    def refuse(self, flight: FrameInFlight, reason: DropReason, detail: str) -> None:
        """Drop a taken frame that does not run."""
        with self._lock:
            flight.is_settled = True
            self._settled.notify_all()
            if self._is_over:
                return
            self._order.remove(flight)
            self._running_count -= 1
            self._drop(flight, reason, detail)
            self._on_change()
            if self.is_eligible:
                self._wake(self)

    def finish(self, flight: FrameInFlight, result: FrameResult) -> None:
        """Set the result of a taken frame."""
        with self._lock:
            flight.is_settled = True
            self._settled.notify_all()
            if self._is_over:
                return
            flight.result = result
            flight.frame = flight.load = None
            self._running_count -= 1
            is_next = self._order[0] is flight
            if self.is_eligible:
                self._wake(self)
        if is_next:
            self._on_result()

    @property
    def is_over(self) -> bool:
        return self._is_over

    # -- the threads that send

    def watch(self, on_change: Callable[[], None], on_result: Callable[[], None] | None = None) -> None:
        """Call `on_change`, with the lock held, now and whenever there may be a message to send or the call may end.

        For the result of a frame, call `on_result` instead if it is given: on the worker's thread, without the lock.
        """
        with self._lock:
            self._on_change, self._on_result = on_change, on_result or on_change
            on_change()

    def next_message(self) -> tuple[ServerMessage, int] | None:
        """Return the message to send now and `frames_allowed`, or None if there is none: then check `is_finished`.

        Raises EdgeServerError with the status of a call that ends with an error.
        """
        with self._lock:
            message = self._next()
            if message is not None:
                self._told_allowance = self._allowance()
                return message, self._told_allowance
            if self._error is not None:
                raise self._error
            if self._is_over or self._has_ended_well():
                self.is_finished = True
            elif self._is_stopping and not self._order:
                raise Draining("the server is stopping: the stream was ended once its last result was sent")
            return None

    def end(self, error: EdgeServerError | None = None) -> None:
        """End the stream at once. Waiting and running frames count as CLOSED. `error` is the status of the call."""
        with self._lock:
            self.end_locked(error)

    def end_locked(self, error: EdgeServerError | None = None) -> None:
        """As `end`. *Locked.*"""
        if self._is_over:
            return
        self._is_over = True
        self._settled.notify_all()
        self._error = error
        self._notices.clear()
        self._drop_waiting()
        while self._order:
            self._drop(self._order.popleft(), DropReason.CLOSED)
        self._leave(self)
        self._on_change()

    def stop(self) -> None:
        """End the stream once the running frames are answered; drop the waiting ones."""
        with self._lock:
            self._is_stopping = True
            self._drop_waiting()
            self._on_change()

    def report(self) -> FrameStreamReport:
        with self._lock:
            now_ns = time.monotonic_ns()
            settings = self.settings
            return FrameStreamReport(
                stream_id=settings.stream_id,
                model=settings.model,
                version=settings.version or 0,
                client=settings.client,
                priority=settings.delivery.priority,
                weight=settings.delivery.weight,
                open_s=(now_ns - self._opened_ns) / 1e9,
                fps_in=self._rate_in.per_s(now_ns),
                fps_out=self._rate_out.per_s(now_ns),
                waiting_count=len(self._mailbox.waiting) + len(self._order),
                age_p50_ms=self._ages_ns.quantile(0.5) / 1e6,
                age_p99_ms=self._ages_ns.quantile(0.99) / 1e6,
                counts=self._tally.counts(),
            )

    def _next(self) -> ServerMessage | None:
        if self.first_message is not None:
            message, self.first_message = self.first_message, None
            return message
        if self._order and (result := self._order[0].result) is not None:
            self._complete(self._order.popleft(), result)
            if self.is_eligible:
                self._wake(self)
            return result
        if self._notices:
            return self._notices.popleft()
        if self._owes_credit() and not self._is_over:
            return Credit()
        return None

    def _complete(self, flight: FrameInFlight, result: FrameResult) -> None:
        """Count and complete a result that is sent now."""
        now_ns = time.monotonic_ns()
        if not result.error_code and self._mailbox.is_late(flight.received_ns, now_ns):
            result.is_late = True
            self._tally.late += 1
            self._totals.late += 1
        self._tally.answered += 1
        self._rate_out.add(now_ns)
        if result.error_code:
            self._totals.errors += 1
        else:
            self._ages_ns.add(now_ns - flight.received_ns)
        self._totals.add_answer(now_ns - flight.received_ns)
        result.dropped, self._dropped_since = self._dropped_since, {}
        result.counts = self._tally.counts()

    def _drop_waiting(self) -> None:
        for flight in self._mailbox.clear():
            self._drop(flight, DropReason.CLOSED)

    def _drop(self, flight: FrameInFlight, reason: DropReason, detail: str = "") -> None:
        flight.frame = flight.load = None
        self._tally.drop(reason)
        self._totals.dropped[reason] += 1
        self._dropped_since[reason] = self._dropped_since.get(reason, 0) + 1
        if self.settings.delivery.notifies_drops and not self._is_over and len(self._notices) < _MAX_NOTICES:
            self._notices.append(FrameDropped(flight.header, reason, detail))
            self._on_change()

    def _reader_is_slow(self) -> bool:
        """Whether the client leaves results unread. Frames that still run add to these."""
        order = self._order
        return len(order) >= _MAX_UNSENT and all(order[index].result is not None for index in range(_MAX_UNSENT))

    def _has_ended_well(self) -> bool:
        return self._is_input_closed and not self._order and not self._mailbox.waiting and not self._notices

    def _allowance(self) -> int:
        return self._read_count + self._window

    @property
    def _window(self) -> int:
        return self._limits.depth + _SPARE_CREDITS

    def _owes_credit(self) -> bool:
        """Whether the client used up half of its window since the last message with its allowance."""
        return 2 * (self._allowance() - self._told_allowance) >= self._window and not self._is_input_closed
