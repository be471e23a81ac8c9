"""Counters of the requests and batches of one model version, for statistics and metrics. A batch is counted before its
responses are sent, so a client that reads statistics after its response finds itself counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from edge_server.core.model_statistics import (
    LAST_POSITION,
    BatchStatistics,
    Duration,
    ResponseStatistics,
    VersionStatistics,
    VersionWork,
)
from edge_server.errors import Cancelled, EdgeServerError, Refusal, Throttled
from edge_server.serving.execution.latencies import Latencies

REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's label values of nv_inference_request_failure."""

_SLOWER_PART, _FASTER_PART = 0.1, 0.5
"""Weight of the newest run in the average run times. A slow run changes them little. A fast run changes them more,
because requests with a deadline are refused by these averages."""


_MAX_RERUNS = 3
_RERUN_PERIOD_NS = 60_000_000_000
"""At most so many failed batches in this time run again, so that clients with bad values cannot multiply the work."""


class VersionCounters:
    """Thread-safe; every method holds the lock for a few additions only.

    Counts of every request are plain integers: one count serves success, queue and compute.
    """

    def __init__(self, name: str, version: int, latencies: Latencies | None = None) -> None:
        self._latencies = latencies
        self._lock = threading.Lock()
        self._values = VersionStatistics(name, version, failures=dict.fromkeys(REASONS, 0))
        self._batches: dict[int, list[int]] = {}
        """By batch size: executions, and the nanoseconds that went into inputs, computing and outputs."""
        self._inference_ns = 0
        """When a request was last answered, since the epoch; 0: never."""
        self._inference_count = 0
        self._success_count = 0
        self._queue_ns = 0
        self._other_ns = 0
        """Times of answered requests that are neither in the queue nor in a batch."""
        self._more_ns = [0, 0, 0]
        """What a request's time counts for inputs, computing and outputs beyond that of its batch: the statistics of
        requests count a batch once for each of its requests."""
        self._reruns_ns: list[int] = []
        """When the latest failed batches were run again, one request at a time."""
        self.is_cached = False
        """Whether answers may come from the response cache."""
        self._observer: Callable[[int | None], None] | None = None
        self.run_ns = 0.0
        """Average run time of a batch in nanoseconds, and `item_ns` of one of its items; newer runs have more weight.
        0: nothing ran yet."""
        self.item_ns = 0.0
        self.last_used_ns = time.monotonic_ns()
        """Time of the last answer, else of the creation of the version (time.monotonic_ns)."""

    @property
    def success_count(self) -> int:
        return self._success_count

    def observe(self, observer: Callable[[int | None], None] | None) -> None:
        """Call `observer` for each request answered from now on: with its latency in nanoseconds, or None if it failed
        for a reason that is not the caller's."""
        self._observer = observer

    def record_batch(
        self,
        arrivals_ns: Sequence[int],
        item_count: int,
        batch_size: int,
        start_ns: int,
        input_end_ns: int,
        infer_end_ns: int,
        end_ns: int,
        *,
        executions: int = 1,
    ) -> None:
        """Count an execution of `batch_size` items that answered requests which arrived at `arrivals_ns`.

        `item_count` is the number of items of these requests. It is less than `batch_size` if others of the batch were
        cancelled, or are answered later. `executions` is 0 if the execution was counted before. Times are of
        time.monotonic_ns.
        """
        count, arrived = len(arrivals_ns), sum(arrivals_ns)
        input_ns, infer_ns, output_ns = input_end_ns - start_ns, infer_end_ns - input_end_ns, end_ns - infer_end_ns
        with self._lock:
            self.last_used_ns, self._inference_ns = end_ns, time.time_ns()
            self._inference_count += item_count
            self._success_count += count
            self._queue_ns += count * start_ns - arrived
            if count != executions:
                for index, spent_ns in enumerate((input_ns, infer_ns, output_ns)):
                    self._more_ns[index] += (count - executions) * spent_ns
            if executions:
                run_ns = end_ns - start_ns
                item_ns = run_ns / batch_size
                mean_ns, mean_item_ns = self.run_ns or run_ns, self.item_ns or item_ns
                # Written out, because it runs for every request.
                self.run_ns = mean_ns + (_SLOWER_PART if run_ns > mean_ns else _FASTER_PART) * (run_ns - mean_ns)
                self.item_ns = mean_item_ns + (_SLOWER_PART if item_ns > mean_item_ns else _FASTER_PART) * (
                    item_ns - mean_item_ns
                )
                batch = self._batches.get(batch_size)
                if batch is None:
                    batch = self._batches[batch_size] = [0, 0, 0, 0]
                batch[0] += 1
                batch[1] += input_ns
                batch[2] += infer_ns
                batch[3] += output_ns
        if (latencies := self._latencies) is not None:
            for arrived_ns in arrivals_ns:
                latencies.add(end_ns, end_ns - arrived_ns, start_ns - arrived_ns, input_ns, infer_ns, output_ns)
        if (observer := self._observer) is not None:
            for arrived_ns in arrivals_ns:
                observer(end_ns - arrived_ns)

    def record_composed(self, arrived_ns: int, item_count: int, now_ns: int, queue_ns: int, infer_ns: int) -> None:
        """Count a request that other models answered: `queue_ns` and `infer_ns` are sums over its steps."""
        with self._lock:
            self.last_used_ns, self._inference_ns = now_ns, time.time_ns()
            self._inference_count += item_count
            self._success_count += 1
            self._queue_ns += queue_ns
            self._other_ns += now_ns - arrived_ns - queue_ns - infer_ns
            batch = self._batches.setdefault(item_count, [0, 0, 0, 0])
            batch[0] += 1
            batch[2] += infer_ns
        if self._latencies is not None:
            self._latencies.add(now_ns, now_ns - arrived_ns, queue_ns, 0, infer_ns, 0)
        if (observer := self._observer) is not None:
            observer(now_ns - arrived_ns)

    def record_cache_hit(self, arrived_ns: int, now_ns: int, spent_ns: int) -> None:
        """Count a request that was answered from the response cache in `spent_ns`.

        Observers are not called: the model did not run.
        """
        with self._lock:
            self.last_used_ns, self._inference_ns = now_ns, time.time_ns()
            self._values.cache_hit.add(spent_ns)
            self._success_count += 1
            self._other_ns += now_ns - arrived_ns
        if self._latencies is not None:
            self._latencies.add(now_ns, now_ns - arrived_ns, 0)

    def record_cache_miss(self, spent_ns: int) -> None:
        """Count a request that was not in the response cache; looking it up and storing its answer took `spent_ns`."""
        with self._lock:
            self._values.cache_miss.add(spent_ns)

    def record_failure(self, error: EdgeServerError, arrived_ns: int, now_ns: int, *, in_backend: bool = False) -> None:
        """Count one request that was answered with `error`; `in_backend`: it failed while it executed."""
        if isinstance(error, Cancelled):
            reason = "CANCELED"
        elif in_backend:
            reason = "BACKEND"
        else:
            reason = "REJECTED" if isinstance(error, Refusal | Throttled) else "OTHER"
        with self._lock:
            self._values.failures[reason] += 1
            self._values.fail.add(now_ns - arrived_ns)
        # A request refused because of heat is not the version's fault either.
        is_fault = reason in ("BACKEND", "REJECTED") and not isinstance(error, Throttled)
        if (observer := self._observer) is not None and is_fault:
            observer(None)

    def record_rerun(self, now_ns: int) -> bool:
        """Count a failed batch whose requests run again singly. Return False, and count nothing, if there were too many
        of them in the last minute."""
        with self._lock:
            self._reruns_ns = [at_ns for at_ns in self._reruns_ns if now_ns - at_ns < _RERUN_PERIOD_NS]
            if len(self._reruns_ns) == _MAX_RERUNS:
                return False
            self._reruns_ns.append(now_ns)
            self._values.batch_rerun_count += 1
            return True

    def record_response(self, index: int, infer_ns: int, *, is_empty: bool = False, has_failed: bool = False) -> None:
        """Count the response at position `index` of a decoupled stream, `infer_ns` after the one before it.

        Positions beyond LAST_POSITION count there: a stream may run for days, and every copy of the counters carries
        all of them.
        """
        with self._lock:
            values = self._values.responses.setdefault(min(index, LAST_POSITION), ResponseStatistics())
            values.compute_infer.add(infer_ns)
            if is_empty:
                values.empty_response.add(infer_ns)
            else:
                (values.fail if has_failed else values.success).add(infer_ns)

    def record_first_response(self, spent_ns: int) -> None:
        """Count the first response of a decoupled model, `spent_ns` after the request's arrival."""
        if self._latencies is not None:
            self._latencies.add_first_response(spent_ns)

    def record_load(self, seconds: float) -> None:
        with self._lock:
            self._values.load_duration_s = seconds

    def work(self) -> VersionWork:
        """Return the work since the load."""
        values = self._values
        with self._lock:
            batches = {
                size: (runs, input_ns + infer_ns + output_ns)
                for size, (runs, input_ns, infer_ns, output_ns) in self._batches.items()
            }
            return VersionWork(values.name, values.version, batches, values.failures["REJECTED"])

    def snapshot(self, pending_count: int) -> VersionStatistics:
        """Return a consistent copy that does not change."""
        with self._lock:
            values = self._values.copy()
            values.last_inference_ms = self._inference_ns // 1_000_000
            values.inference_count = self._inference_count
            input_ns, infer_ns, output_ns = self._more_ns
            for size, (runs, *spent_ns) in self._batches.items():
                values.execution_count += runs
                values.batches[size] = BatchStatistics(size, *(Duration(runs, ns) for ns in spent_ns))
                input_ns, infer_ns, output_ns = input_ns + spent_ns[0], infer_ns + spent_ns[1], output_ns + spent_ns[2]
            count = self._success_count
            computed_ns = input_ns + infer_ns + output_ns
            values.success = Duration(count, self._queue_ns + computed_ns + self._other_ns)
            values.queue = Duration(count, self._queue_ns)
            computed = count - values.cache_hit.count
            values.compute_input = Duration(computed, input_ns)
            values.compute_infer = Duration(computed, infer_ns)
            values.compute_output = Duration(computed, output_ns)
            values.is_cached = self.is_cached
        values.pending_count = pending_count
        if self._latencies is not None:
            values.latencies = self._latencies.snapshot()
        return values
