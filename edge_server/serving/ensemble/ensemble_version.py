"""Class `EnsembleVersion`, the loaded version of an ensemble: takes requests, and runs their steps on the versions of
other models, as it has no instances of its own."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from edge_server.core.ensemble_check import build_step_graph
from edge_server.core.ensemble_graph import StepGraph
from edge_server.core.ensemble_run import EnsembleRun
from edge_server.core.model_spec import ModelSpec
from edge_server.core.model_statistics import VersionStatistics
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.core.status_reports import InstanceReport
from edge_server.core.tensor import Tensor
from edge_server.core.version_lifecycle import Resolved, SampleRun, VersionState
from edge_server.errors import DeadlineExceeded, Draining, MemberMissing
from edge_server.serving.ensemble.ensemble_request import EnsembleContext, EnsembleRequest, StepLimiter, SubmitStep
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.latencies import NO_LATENCIES, LatencyOptions, make_latencies
from edge_server.serving.execution.requests_in_flight import RequestsInFlight
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.execution.ticket import Ticket
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


class EnsembleVersion(ServedVersion):
    """See ServedVersion. When a member changes, the ensemble gets a new generation. Sequences live in the members, and
    there the requests wait that admission control holds back. Only instances of members can hang.

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
        spec = resolved.spec
        counters = VersionCounters(spec.name, resolved.file.version, make_latencies(spec, latencies))
        self._in_flight: RequestsInFlight[EnsembleRequest] = RequestsInFlight(spec.name, timer)
        super().__init__(resolved, generation, fingerprint, counters, self._in_flight)
        self._members = members
        self._timer = timer
        self._cache = cache
        self._lookup: CacheLookup | None = None
        self._check = RequestCheck(self.spec)
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
        self._in_flight.accept()
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
        call = None if self._lookup is None else self._lookup.call(request, sink)
        ticket = Ticket(request, self.version, item_count, None, now_ns, call or sink, _no_cancel)
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
        self._in_flight.add(ensemble_request)
        if request.trace is not None:
            request.trace.begin(self.name, self.version, request.id, now_ns, request.inputs.values())
        if is_looked_up_later and self._lookup is not None and call is not None:
            self._lookup.begin(call, lambda found: ensemble_request.begin(found, hold_us=0.0, holds_inputs=True))
        else:
            ensemble_request.begin(found, hold_us=hold_us, holds_inputs=is_read_here)
        return ensemble_request

    def _remove(self, request: EnsembleRequest) -> None:
        self._counters.last_used_ns = time.monotonic_ns()
        self._in_flight.remove(request)

    def abandon_waiting(self) -> int:
        """Fail all requests in flight, which wait for a step. Return their number."""
        message = f"Server is stopping, scheduler for model '{self.name}' has stopped"
        return sum(request.fail(Draining(message)) for request in self._in_flight.items())

    def abandon_running(self) -> int:
        """Fail all unanswered requests, and return their number."""
        return self.abandon_waiting()

    def probe(self, examine: Callable[[SampleRun | None], None]) -> float:
        """Run one inference on generated inputs, and return the seconds it took. Raises NotWarmedUp if they do not fit;
        an ensemble is served without such a run. `examine` gets None."""
        examine(None)
        done = threading.Event()
        responses: list[Response] = []

        def receive(response: Response) -> None:
            responses.append(response)
            if response.is_final:
                done.set()

        request = build(self.spec, probe_sample(self.spec), self._file.model_dir)
        started = time.monotonic()
        self.submit(request, receive, hold_us=math.inf)
        done.wait()
        seconds = time.monotonic() - started
        error = next((response.error for response in responses if response.error is not None), None)
        if error is not None:
            raise not_tried_error(self.spec, error)
        return seconds

    def close_after_hang(self) -> None:
        """Answer all requests in flight, and close when the members have released them."""
        self.abandon_waiting()
        self.drain()
        self._move(VersionState.RETIRED)

    def statistics(self) -> VersionStatistics:
        return self._counters.snapshot(0)

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
