"""Class `EnsembleVersion`, the loaded version of an ensemble: takes requests, and runs their steps on the versions of
other models. It has no instances; its steps run on the versions of other models."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from edge_server.core.ensemble_check import build_step_graph
from edge_server.core.ensemble_graph import StepGraph
from edge_server.core.ensemble_run import EnsembleRun
from edge_server.core.model_spec import ModelSpec
from edge_server.core.model_statistics import VersionStatistics, VersionWork
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.core.status_reports import InstanceReport, VersionReport
from edge_server.core.tensor import Tensor
from edge_server.core.version_lifecycle import Resolved, SampleRun, VersionSnapshot, VersionState, next_state
from edge_server.errors import DeadlineExceeded, Draining, EdgeServerError, MemberMissing, NotReady
from edge_server.serving.ensemble.ensemble_request import EnsembleContext, EnsembleRequest, StepLimiter, SubmitStep
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.latencies import NO_LATENCIES, LatencyOptions, make_latencies
from edge_server.serving.execution.ticket import Ticket
from edge_server.serving.execution.version_holds import VersionHolds
from edge_server.serving.execution.warmup import build, not_tried_error, probe_sample
from edge_server.serving.timer import Timer

if TYPE_CHECKING:
    from edge_server.serving.cache.lookup import CacheLookup
    from edge_server.serving.cache.response_cache import ResponseCache


class Members(Protocol):
    """The other models, as an ensemble uses them. Thread-safe."""

    @property
    def submit(self) -> SubmitStep:
        """Send a request to a member, like any other request."""

    def member_spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the specification of a member. Raises MemberMissing with the reason why it does not serve."""


class EnsembleVersion:
    """See ServedVersion. When a member changes, the ensemble gets a new generation.

    Queue and compute times in `statistics` are sums over the steps, parallel or not, as in Triton.
    """

    def __init__(
        self,
        resolved: Resolved,
        generation: int,
        fingerprint: str,
        members: Members,
        timer: Timer,
        cache: ResponseCache | None = None,
        latencies: LatencyOptions = NO_LATENCIES,
    ) -> None:
        self.spec = resolved.spec
        self.name = resolved.spec.name
        self.version = resolved.file.version
        self.generation = generation
        self.fingerprint = fingerprint
        self.state = VersionState.NEW
        self.reason = ""
        self.answers_made_up_inputs = False
        self.since_s = time.time()
        self._model_dir = resolved.file.model_dir
        self._confirm = resolved.confirm
        self._output_checks = resolved.output_checks
        self._members = members
        self._timer = timer
        self._cache = cache
        self._lookup: CacheLookup | None = None
        self._counters = VersionCounters(self.name, self.version, make_latencies(self.spec, latencies))
        self._check = RequestCheck(self.spec)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_flight: set[EnsembleRequest] = set()
        self._on_idle: Callable[[], None] | None = None
        self._holds = VersionHolds()
        self._refusal: Callable[[], EdgeServerError] | None = lambda: NotReady(f"model '{self.name}' is not ready yet")
        self._load_s = 0.0
        self._graph: StepGraph
        self._context: EnsembleContext

    def open(self) -> None:
        """Check the steps against the present members. Raises MemberMissing, BadModelConfig."""
        started = time.monotonic()
        self._move(VersionState.LOADING)
        try:
            members = self._member_specs()
            self._graph = build_step_graph(self.spec, members)
            if self.spec.is_cached:
                # Imported by the first ensemble that needs it: most servers have no cache.
                from edge_server.serving.cache.lookup import check_members_cacheable

                check_members_cacheable(self.spec, members)
            self._confirm()
        except BaseException as error:
            self.reason = str(error) or type(error).__name__
            self._move(VersionState.FAILED)
            raise
        for check in self._output_checks:
            self.spec = dataclasses.replace(self.spec, warnings=(*self.spec.warnings, *check(None)))
        self.spec = with_members(self.spec, self._graph, members)
        if self.spec.is_cached:
            self._use_cache()
        ensemble = self.spec.ensemble
        limit = ensemble.max_inflight_requests if ensemble is not None else 0
        self._context = EnsembleContext(
            self.spec,
            self.version,
            self._counters,
            self._members.submit,
            any(item.is_optional for item in self.spec.inputs),
            [StepLimiter(limit) for _ in self._graph.steps] if limit else (),
            self._remove,
        )
        self._move(VersionState.WARMING)
        self._load_s = time.monotonic() - started
        self._counters.record_load(self._load_s)
        self._counters.last_used_ns = time.monotonic_ns()
        self._refusal = None
        self._move(VersionState.READY)

    def _use_cache(self) -> None:
        """Create the cache lookup, if the server has a cache. The fingerprint changes with those of the members."""
        from edge_server.serving.cache.lookup import NO_CACHE, CacheLookup
        from edge_server.serving.cache.request_key import RequestKeys, identity

        if self._cache is None:
            self.spec = dataclasses.replace(self.spec, notes=(*self.spec.notes, NO_CACHE))
            return
        generation = 0 if self._cache.is_remote else self.generation
        who = identity(self.name, self.version, self.fingerprint, generation, self.spec.config_json)
        keys = RequestKeys(who, self.spec, sees_parameters=True)
        self._lookup = CacheLookup(self._cache, keys, self.spec, self.version, self._counters, self._timer)

    def _member_specs(self) -> list[ModelSpec]:
        assert self.spec.ensemble is not None
        specs = []
        for index, step in enumerate(self.spec.ensemble.steps, 1):
            try:
                specs.append(self._members.member_spec(step.model, step.version))
            except MemberMissing as error:
                raise MemberMissing(f"ensemble '{self.name}': step {index}: {error.message}") from error
        return specs

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> EnsembleRequest:
        """Check a request and begin. Raises InvalidRequest, DeadlineExceeded, or Draining if the version is being
        retired; the caller still owns the request then. An error of a member is sent as the answer."""
        item_count = self._check.check_header(request).item_count
        now_ns = time.monotonic_ns()
        if request.deadline_ns and request.deadline_ns <= now_ns:
            error = DeadlineExceeded(
                f"the deadline of the request to model '{self.name}' passed before it was taken up"
            )
            self._counters.record_failure(error, now_ns, now_ns)
            raise error
        plan = self._graph.plan(request.outputs)
        run: EnsembleRun[Tensor] = EnsembleRun(
            self._graph, plan, request.inputs, [item.name for item in self.spec.inputs]
        )
        call = None
        if self._lookup is not None and self._lookup.may_answer(request):
            sink = call = self._lookup.call(request, sink)
        ticket = Ticket(request, self.version, item_count, None, now_ns, sink, _no_cancel)
        ensemble_request = EnsembleRequest(self._context, ticket, plan, run)
        found, is_looked_up_later = None, False
        if self._lookup is not None and call is not None:
            is_looked_up_later = not self._lookup.is_quick(request, may_wait=hold_us == math.inf)
            if not is_looked_up_later:
                # Before the request is in flight: inputs that cannot be read raise, and must leave nothing behind.
                found = self._lookup.find(call)
        is_read_here = is_looked_up_later or request.trace is not None
        if is_read_here:
            # From now on another thread may fail the request, which would release the inputs.
            ensemble_request.hold_inputs()
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            self._in_flight.add(ensemble_request)
        if request.trace is not None:
            request.trace.begin(self.name, self.version, request.id, now_ns, request.inputs.values())
        if is_looked_up_later and self._lookup is not None and call is not None:
            self._lookup.begin(call, lambda found: self._continue_after_lookup(ensemble_request, found))
            return ensemble_request
        self._begin_or_answer(ensemble_request, found, hold_us=hold_us)
        if is_read_here:
            ensemble_request.release_inputs()
        return ensemble_request

    def _begin_or_answer(self, ensemble_request: EnsembleRequest, found: Response | None, *, hold_us: float) -> None:
        """Continue a request after its lookup in the response cache."""
        if found is None:
            ensemble_request.begin(hold_us=hold_us)
        else:
            ensemble_request.answer(found)

    def _continue_after_lookup(self, ensemble_request: EnsembleRequest, found: Response | None) -> None:
        self._begin_or_answer(ensemble_request, found, hold_us=0.0)
        ensemble_request.release_inputs()

    def _remove(self, request: EnsembleRequest) -> None:
        self._counters.last_used_ns = time.monotonic_ns()
        with self._lock:
            self._in_flight.discard(request)
            self._notify_if_idle()

    def resume(self) -> None:
        """Do nothing: requests that admission control holds back wait at the members."""

    def end_sequence(self, sequence_id: int | str) -> None:
        """Do nothing: the members' sequences end on their own."""

    def has_sequence(self, sequence_id: int | str) -> bool:
        """Return False: sequences live in the members."""
        return False

    def stop_accepting(self) -> None:
        """Refuse new requests once nobody holds the version; those in flight continue."""
        self._move(VersionState.DRAINING)
        self._holds.end_when_free(self._refuse_new)

    def hold(self) -> Callable[[], None]:
        """See ServedVersion.hold. The members serve as long as the ensemble needs them."""
        return self._holds.take(self._is_unloading)

    def _is_unloading(self) -> Draining:
        return Draining(f"model '{self.name}' version {self.version} is being unloaded")

    def _refuse_new(self) -> None:
        with self._lock:
            self._refusal = self._is_unloading
            self._notify_if_idle()

    def drain(self) -> None:
        """Wait, after `stop_accepting`, for the last request."""
        with self._lock:
            self._idle.wait_for(lambda: not self._in_flight)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call the function on the timer's thread once the last request is over; after `stop_accepting`. Returns at
        once."""
        with self._lock:
            self._on_idle = call
            self._notify_if_idle()

    def _notify_if_idle(self) -> None:
        if self._in_flight or self._refusal is None:
            return
        self._idle.notify_all()
        if self._on_idle is not None:
            self._timer.call_at(0, self._on_idle)
            self._on_idle = None

    def abandon_waiting(self) -> int:
        """Fail all requests in flight, which wait for a step. Return their number."""
        with self._lock:
            requests = list(self._in_flight)
        message = f"Server is stopping, scheduler for model '{self.name}' has stopped"
        return sum(request.fail(Draining(message)) for request in requests)

    def abandon_running(self) -> int:
        """Fail all unanswered requests, and return their number."""
        return self.abandon_waiting()

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
        self._move(VersionState.CLOSING)
        self._move(VersionState.RETIRED)

    def probe(self, examine: Callable[[SampleRun | None], None]) -> float:
        """Run one inference on made-up inputs, and return the seconds it took. Raises NotWarmedUp if they do not fit;
        an ensemble is served without such a run. `examine` gets None."""
        examine(None)
        done = threading.Event()
        responses: list[Response] = []

        def receive(response: Response) -> None:
            responses.append(response)
            if response.is_final:
                done.set()

        request = build(self.spec, probe_sample(self.spec), self._model_dir)
        started = time.monotonic()
        self.submit(request, receive, hold_us=math.inf)
        done.wait()
        seconds = time.monotonic() - started
        error = next((response.error for response in responses if response.error is not None), None)
        if error is not None:
            raise not_tried_error(self.spec, error)
        return seconds

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def last_used_ns(self) -> int:
        """Time of the last answer, else of the creation (time.monotonic_ns)."""
        return self._counters.last_used_ns

    @property
    def run_numbers(self) -> Mapping[str, int]:
        """None: only instances of members can hang."""
        return {}

    def end_hung_run(self, instance_name: str, reason: str) -> bool:
        return False

    def observe(self, observer: Callable[[int | None], None] | None) -> None:
        """See Counters.observe."""
        self._counters.observe(observer)

    def stop_for_good(self, reason: str) -> None:
        """Accept no more requests, for this reason."""
        self.reason = reason
        self._move(VersionState.FAILED)
        with self._lock:
            self._refusal = lambda: NotReady(reason, retry_after_s=None)

    def close_after_hang(self) -> None:
        """Answer all requests in flight, and close when the members have released them."""
        self.abandon_waiting()
        self.drain()
        self._move(VersionState.RETIRED)

    def snapshot(self) -> VersionSnapshot:
        return VersionSnapshot(self.version, self.generation, self.fingerprint, self.state)

    def is_healthy(self) -> bool:
        return True

    def statistics(self) -> VersionStatistics:
        return self._counters.snapshot(0)

    def work(self) -> VersionWork:
        return self._counters.work()

    def report(self) -> InstanceReport:
        steps = self.spec.ensemble.steps if self.spec.ensemble is not None else ()
        return InstanceReport(
            name=self.name,
            version=self.version,
            backend=self.spec.backend,
            runtime=f"ensemble of {len(steps)} step(s)",
            device="its members'",
            precision="its members'",
            instance_count=0,
            load_s=self._load_s,
            load_rss_bytes=0,
            notes=self.spec.notes,
            warnings=self.spec.warnings,
        )

    def version_report(self, share: float, reason: str = "") -> VersionReport:
        """Return the report of this version. See ModelVersion."""
        count, message = self._counters.success_count, reason or self.reason
        return VersionReport(
            self.name, self.version, self.generation, self.state.name, self.since_s, count, message, share
        )

    def _move(self, state: VersionState) -> None:
        self.state = next_state(self.state, state)
        self.since_s = time.time()


def _no_cancel(ticket: Ticket) -> None:
    raise AssertionError("a request to an ensemble is cancelled through its run")


def with_members(spec: ModelSpec, graph: StepGraph, members: list[ModelSpec]) -> ModelSpec:
    """Return the specification completed from the members: labels of outputs, and whether it is decoupled."""
    outputs = []
    for item in spec.outputs:
        producer = graph.producer(item.name)
        if producer is not None and not item.labels:
            name = next(name for name, tensor in producer.outputs if tensor == item.name)
            made = members[producer.index].output(name)
            item = item._replace(labels=made.labels if made is not None else ())
        outputs.append(item)
    config = json.loads(spec.config_json)
    is_decoupled = spec.is_decoupled or bool(graph.plan().response_origin)
    config.setdefault("model_transaction_policy", {})["decoupled"] = is_decoupled
    return dataclasses.replace(spec, outputs=tuple(outputs), is_decoupled=is_decoupled, config_json=json.dumps(config))
