"""Worker threads of one model: choose the next frames of its streams, and run them as batches."""

from __future__ import annotations

import threading
import time

from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.streams.camera_stream import CameraStream, FrameInFlight
from edge_server.plugins.cameras.streams.fair_scheduling import FairChoice
from edge_server.plugins.cameras.streams.frame_mailbox import RunEstimate
from edge_server.plugins.cameras.streams.frame_pipeline import FramePipeline
from edge_server.plugins.cameras.streams.model_inputs_and_outputs import InputPlan
from edge_server.protocol.frame_messages import DropReason
from edge_server.serving.execution.admission_control import AdmissionControl


class ModelWorkers:
    """Worker threads of one model, one more than it has instances.

    The extra worker prepares one frame while another runs, and no further frame waits behind it. So a result is at most
    two runs of the model older than the frame in its mailbox. While all instances are busy, the choice is delayed as
    long as this should cost no throughput: the chosen frames are fresher, and a batch holds frames of more cameras.
    Streams that keep several frames choose at once if they could not share a batch.

    `lock` is the lock of all streams, `priority_weight` that of `FairChoice`. Workers live as long as
    there are streams.
    """

    def __init__(
        self,
        lock: threading.Lock,
        pipeline: FramePipeline,
        admission: AdmissionControl,
        name: str,
        priority_weight: int,
    ) -> None:
        self.pipeline = pipeline
        self._admission = admission
        self._name = name
        self._lock = lock
        self._idle: list[threading.Lock] = []
        """Waiting workers, each by a lock that wakes it. The last one is woken first: its memory is still in the
        processor's caches."""
        self._delaying_count = 0
        """Waiting workers that wake by themselves to choose."""
        self._streams: list[CameraStream] = []
        self._ready: dict[CameraStream, None] = {}
        """The eligible streams, and perhaps some that no longer are: of many cameras, few have a frame now."""
        self._turns: FairChoice[CameraStream] = FairChoice(priority_weight)
        self._estimate = RunEstimate()
        self._instance_count = 1
        self._max_rows = 1
        self.is_sequence = False
        """Whether a stream's frames are a sequence."""
        self._worker_count = 0
        self._chosen_ns: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether no stream uses these workers. *Locked.*"""
        return not self._streams

    def enter(self, stream: CameraStream) -> None:
        """Add a stream and start the workers it needs. *Locked.*

        Raises RuntimeError if no thread can be started; the caller must call `leave` then too.
        """
        delivery = stream.settings.delivery
        self._streams.append(stream)
        self._turns.add(stream, delivery.priority, delivery.weight)
        stream.max_running = self._max_running
        self._start_workers()

    def leave(self, stream: CameraStream) -> None:
        """Remove a stream. *Locked.*"""
        self._streams.remove(stream)
        self._ready.pop(stream, None)
        self._turns.remove(stream)
        if not self._streams:
            self._wake_all()

    def wake(self, stream: CameraStream) -> None:
        """Have a stream that became eligible considered. *Locked.*"""
        self._ready[stream] = None
        self._wake_one()

    def _wake_one(self) -> None:
        """Wake a worker, unless one delays its choice while all instances are busy: it looks again when the delay
        ends."""
        is_in_time = self._delaying_count > 0 and len(self._chosen_ns) >= self._instance_count
        if self._idle and not is_in_time:
            self._idle.pop().release()

    def adapt(self) -> InputPlan | None:
        """Adopt the instance count, the batch size and the sequence setting of the model's current configuration.

        Return the input plan for the next frames, or None if the model does not serve.
        """
        try:
            plan = self.pipeline.input_plan()
        except EdgeServerError:
            return None  # each frame is answered with this error, and the model may return unchanged
        now = (plan.instance_count, plan.max_rows, plan.is_sequence)
        if now == (self._instance_count, self._max_rows, self.is_sequence):
            return plan
        with self._lock:
            self._instance_count, self._max_rows, self.is_sequence = now
            for stream in self._streams:
                stream.max_running = self._max_running
                self._ready[stream] = None
            self._start_workers()
            self._wake_all()
        return plan

    @property
    def _max_workers(self) -> int:
        return self._instance_count + 1

    @property
    def _max_running(self) -> int:
        """How many frames of one stream may run at once: 1 in a sequence, which must keep its order."""
        return 1 if self.is_sequence else self._max_workers

    def _start_workers(self) -> None:
        while self._streams and self._worker_count < self._max_workers:
            worker = threading.Thread(target=self._work, name=f"frames-{self._name}"[:60], daemon=True)
            try:
                worker.start()
            except RuntimeError:  # the system grants no further thread: the existing workers do the work
                if self._worker_count:
                    return
                raise
            self._worker_count += 1

    def _work(self) -> None:
        while flights := self._next():
            self._run(flights, self.adapt())
            # Free the last frames and their streams while waiting for the next.
            del flights

    def _run(self, flights: list[FrameInFlight], plan: InputPlan | None) -> None:
        allowed = []
        for flight in flights:
            priority = flight.stream.settings.delivery.priority or self.pipeline.priority
            reason = self._admission.refuse_frame(self._name, priority)
            if reason is None:
                allowed.append(flight)
            else:
                flight.stream.refuse(flight, DropReason.GOVERNOR, reason)
        if allowed:
            self.pipeline.run(allowed, plan)
        first = flights[0]
        run_ns = time.monotonic_ns() - first.taken_ns
        with self._lock:
            self._chosen_ns.remove(first.taken_ns)
            for flight in flights:
                flight.stream.release_frame()
            if first.started_ns:
                self._estimate.add(run_ns, first.queued_ns - first.taken_ns)
            if any(stream.is_eligible for stream in self._ready):
                # A worker may delay its choice until this one is done.
                self._wake_one()

    def _next(self) -> list[FrameInFlight]:
        """Wait for frames to run. Return an empty list if this worker is surplus and must end."""
        with self._lock:
            while True:
                if not self._streams or self._worker_count > self._max_workers:
                    self._worker_count -= 1
                    # The notification that woke this worker may have been for one that stays.
                    self._wake_one()
                    return []
                now_ns = time.monotonic_ns()
                pause_s = self._pause_s(now_ns)
                if pause_s is None:
                    flights = self._take(now_ns)
                    if flights:
                        self._chosen_ns.append(now_ns)
                        return flights
                self._wait(pause_s)

    def _wait(self, timeout_s: float | None) -> None:
        """Release the lock until the worker is woken, or for that time. *Locked.*"""
        woken = threading.Lock()
        woken.acquire()
        self._idle.append(woken)
        is_delaying = timeout_s is not None
        self._delaying_count += is_delaying
        self._lock.release()
        woken.acquire(timeout=-1 if timeout_s is None else timeout_s)
        self._lock.acquire()
        self._delaying_count -= is_delaying
        if woken in self._idle:
            self._idle.remove(woken)

    def _wake_all(self) -> None:
        while self._idle:
            self._idle.pop().release()

    def _take(self, now_ns: int) -> list[FrameInFlight]:
        """Return the frames of the next batch: at most one per stream, so that none fills a batch alone."""
        flights: list[FrameInFlight] = []
        eligible = [stream for stream in self._ready if stream.is_eligible]
        while len(flights) < self._max_rows:
            stream = self._turns.choose(eligible)
            if stream is None:
                break
            eligible.remove(stream)
            flight = stream.take(now_ns, self._estimate)
            if flight is not None:
                self._turns.charge(stream)
                flights.append(flight)
        self._ready = {stream: None for stream in self._ready if stream.is_eligible}
        return flights

    def _pause_s(self, now_ns: int) -> float | None:
        """Return the seconds to delay the choice, or None to choose now. A freed instance ends the delay early."""
        if len(self._chosen_ns) < self._instance_count:
            return None
        if min(self._max_rows, len(self._streams)) == 1 and all(
            stream.settings.delivery.depth > 1 for stream in self._streams
        ):
            # Their oldest frames run next, now or later.
            return None
        left_ns = self._estimate.best_choice_ns(min(self._chosen_ns)) - now_ns
        return left_ns / 1e9 if left_ns > 0 else None
