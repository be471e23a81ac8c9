"""Class `ModelVersion`, one load of one version of a model (a reload makes a new object): accepts requests, passes them
to its scheduler, and ends after the last response."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends import open_session
from edge_server.backends.base import OpenJob, RequestSession, ServerCalls, Session, SessionInfo
from edge_server.config.server_config import settings_of_backend
from edge_server.core.batch import BatchPlan
from edge_server.core.gpu_fault import GpuFault, classify_gpu_fault
from edge_server.core.model_spec import InstanceGroup, InstanceKind, ModelSpec
from edge_server.core.model_statistics import VersionStatistics
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request, ResponseSink
from edge_server.core.status_reports import InstanceReport
from edge_server.core.tensor import DType
from edge_server.core.version_lifecycle import Resolved, SampleRun, VersionState
from edge_server.errors import (
    BadModelConfig,
    DeadlineTooShort,
    DeviceLost,
    Draining,
    EdgeServerError,
    NotWarmedUp,
    SessionLost,
    WarmupFailed,
)
from edge_server.memory.malloc_settings import read_resident_bytes
from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.gpu_state import Gpus, gpus_of
from edge_server.serving.execution.inline_rule import InlineRule
from edge_server.serving.execution.instance import Instance
from edge_server.serving.execution.latencies import NO_LATENCIES, LatencyOptions, make_latencies
from edge_server.serving.execution.rate_limiter import RateLimiter, needs_of
from edge_server.serving.execution.served_version import CLOSE_TIMEOUT_S, ServedVersion
from edge_server.serving.execution.thread_pool import RunPool
from edge_server.serving.execution.ticket import Ticket
from edge_server.serving.execution.warmup import check_opened, probe, sample_run, warm
from edge_server.serving.sequence.scheduler import SequenceScheduler, schedule
from edge_server.serving.timer import Timer

if TYPE_CHECKING:
    from edge_server.serving.cache.response_cache import ResponseCache
    from edge_server.serving.cache.scheduler_adapter import CachedScheduler

log = logging.getLogger(__name__)

_RETRY_AFTER_NS = 1_000_000_000
"""After this time without a run, a request is run although the known run times say that it would be late."""


OnGpuFault = Callable[[ServedVersion, GpuFault, EdgeServerError], None]

MAX_MEMORY_REFUSALS = 3
"""Number of successive runs without memory on the GPU after which a version fails."""

_MIN_GROWTH = 0.5
"""Least growth of the process during a load that measures the model, in sizes of its files. A runtime holds at least
the weights, in 16 bits; what goes into memory that the process kept from an earlier load does not make it grow."""


class ModelVersion(ServedVersion):
    """See ServedVersion. Its requests run in batches on its instances."""

    def __init__(
        self,
        resolved: Resolved,
        generation: int,
        fingerprint: str,
        timer: Timer,
        settings: Mapping[str, Mapping[str, str]],
        admission_control: AdmissionControl = ADMIT_ALL,
        limiter: RateLimiter | None = None,
        server: ServerCalls | None = None,
        cache: ResponseCache | None = None,
        *,
        pool: RunPool,
        gpus: Gpus,
        on_gpu_fault: OnGpuFault,
        must_answer: bool,
        latencies: LatencyOptions = NO_LATENCIES,
    ) -> None:
        """`must_answer`: the load fails if generated inputs do; else that is a warning, because others may suit."""
        spec = resolved.spec
        counters = VersionCounters(spec.name, resolved.file.version, make_latencies(spec, latencies))
        self._plan = BatchPlan(spec, self._log_output_note)
        self._scheduler, self._execute, self._states = schedule(
            spec, self._plan, counters, timer, admission_control, limiter
        )
        super().__init__(resolved, generation, fingerprint, counters, self._scheduler)
        self._settings = settings_of_backend(settings, self.spec.backend)
        self._server = server
        self._inline = InlineRule(SessionInfo("", "", ""), self.spec.is_decoupled)
        self._check = RequestCheck(self.spec)
        self._needs_utf8 = False
        """Whether a string input that is not UTF-8 would fail its batch."""
        self._admission_control = admission_control
        self._has_limiter = limiter is not None
        self._cancel = self._scheduler.cancel
        self._claim_lock: threading.Lock | None = None
        """Guards the claims of all tickets, for a model with one response for each request."""
        self._pool = pool
        self._timer = timer
        self._cache = cache
        self._cached_scheduler: CachedScheduler | None = None
        self._instances: list[Instance] = []
        self._info: SessionInfo | None = None
        self._load_rss_bytes = 0
        self._retried_ns = 0
        self._gpus = gpus
        self._on_gpu_fault = on_gpu_fault
        """Called with errors that say something about the version's GPU."""
        self._gpu_bytes: Mapping[int, int] = {}
        self._memory_refusals = 0
        self._runs_at_refusal = -1
        self._must_answer = must_answer

    def open(self) -> None:
        """Open and warm up every instance, then accept requests. Raises the backend's errors; nothing stays open
        then."""
        devices = gpus_of(self.spec)
        try:
            with self._gpus.reserve_for_load(self.name, devices) as taken:
                self._open()
        except EdgeServerError as error:
            fault = classify_gpu_fault(error) if devices and not isinstance(error, DeviceLost) else None
            if fault is not None and fault.is_device_unusable:
                self._on_gpu_fault(self, fault, error)
            raise
        self._gpu_bytes = taken
        if devices:
            self._execute.on_failure = self._report_gpu_failure

    def _open(self) -> None:
        started = time.monotonic()
        resident_bytes = read_resident_bytes()
        self._move(VersionState.LOADING)
        try:
            if self.spec.is_cached:
                # Imported by the first model that needs it: most servers have no cache.
                from edge_server.serving.cache.lookup import check_cacheable

                check_cacheable(self.spec)
            if self._states is not None:
                self._states.load(self._file.model_dir)
            self._instances += [self._make_instance(*planned) for planned in self._instance_names()]
            self._scheduler.register_resources(self._instances)
            for instance in self._instances:
                self._info = instance.open()
                self._gpus.check_limits(self.name, gpus_of(self.spec))
            self._move(VersionState.WARMING)
            for instance in self._instances:
                instance.warm()
            self._instances[0].check()
            if self.spec.is_cached:
                self._open_cache()
            self._confirm()
        except BaseException as error:
            self.reason = str(error) or type(error).__name__
            self._close_instances()
            self._move(VersionState.FAILED)
            raise
        if self._info is not None:
            has_strings = any(item.dtype is DType.BYTES for item in self.spec.inputs)
            self._needs_utf8 = has_strings and self._info.needs_utf8
            self.spec = with_facts_in_force(self.spec, self._info)
            self._inline = InlineRule(self._info, self.spec.is_decoupled)
            self._execute.inline = self._inline if self._inline.depends_on_runs else None
        if not self._instances[0].sees_requests:
            self._claim_lock = threading.Lock()
        self._load_s = time.monotonic() - started
        growth_bytes = read_resident_bytes() - resident_bytes
        if growth_bytes < _MIN_GROWTH * _size_of_files(self._file.version_dir):
            growth_bytes = 0
        # A model in a child process takes its memory there.
        self._load_rss_bytes = max(growth_bytes, self._file.memory_bytes)
        self._counters.record_load(self._load_s)
        self._counters.last_used_ns = time.monotonic_ns()
        self._scheduler.open(self._instances)
        self._move(VersionState.READY)

    def _report_gpu_failure(self, error: EdgeServerError) -> None:
        """Report a failed run if the error is about the GPU; a lack of memory only if it happens again and again."""
        fault = classify_gpu_fault(error)
        if fault is None:
            return
        if fault is GpuFault.OUT_OF_MEMORY:
            count = self._counters.success_count
            self._memory_refusals = self._memory_refusals + 1 if self._runs_at_refusal == count else 1
            self._runs_at_refusal = count
            if self._memory_refusals < MAX_MEMORY_REFUSALS:
                return
        self._on_gpu_fault(self, fault, error)

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> Ticket:
        """Check and enqueue a request. Raises InvalidRequest, QueueFull, Throttled, DeadlineExceeded if it cannot be
        finished in time, or Draining if the version is being retired. The caller still owns the request then."""
        memo = request.memo
        header = None if memo is None else memo.checked_header
        if header is None or header.check is not self._check or not header.is_certain:
            header = self._check.check_header(request)
        if self._needs_utf8:
            self._check.check_utf8(request)
        if self._cached_scheduler is not None:
            sink = self._cached_scheduler.sink(request, sink)
        ticket = Ticket(
            request,
            self.version,
            header.item_count,
            header.key,
            time.monotonic_ns(),
            sink,
            self._cancel,
            header.outputs,
            self._claim_lock,
        )
        if self._cached_scheduler is None or not self._cached_scheduler.take(
            ticket, sink, may_wait=hold_us == math.inf
        ):
            self._admit(ticket, is_inline=hold_us > self._inline.needed_hold_us)
        return ticket

    def _admit(self, ticket: Ticket, *, is_inline: bool = False) -> None:
        """Compute the ticket, if admission control and its deadline allow it."""
        request = ticket.request
        try:
            if request.deadline_ns:
                self._set_latest_start(ticket, request.deadline_ns)
            if not self._admission_control.is_open:
                ticket.charged_s = self._admission_control.admit(
                    self.spec, request, ticket.item_count * self._counters.item_ns / 1e9
                )
            if request.trace is not None:
                request.trace.begin(self.name, self.version, request.id, ticket.arrived_ns, request.inputs.values())
            self._scheduler.submit(ticket, is_inline=is_inline)
        except EdgeServerError as error:
            if request.trace is not None:
                request.trace.refuse(time.monotonic_ns())
            if ticket.charged_s:
                self._admission_control.correct_charge(ticket.charged_s, 0.0)
                ticket.charged_s = 0.0
            if not isinstance(error, Draining):
                self._counters.record_failure(error, ticket.arrived_ns, time.monotonic_ns())
            raise

    def _set_latest_start(self, ticket: Ticket, deadline_ns: int) -> None:
        """Refuse a request that cannot finish in time, by the measured run times."""
        run_ns = int(self._counters.run_ns)
        ticket.start_by_ns = deadline_ns - run_ns
        left_ns = deadline_ns - ticket.arrived_ns
        if run_ns < left_ns:
            return
        if left_ns <= 0:
            raise DeadlineTooShort(f"the deadline of the request to model '{self.name}' passed before it was taken up")
        if ticket.arrived_ns - max(self._retried_ns, self._counters.last_used_ns) > max(_RETRY_AFTER_NS, 4 * run_ns):
            # Some requests must run, because only they show whether runs have become faster.
            self._retried_ns = ticket.arrived_ns
            ticket.start_by_ns = deadline_ns
            return
        raise DeadlineTooShort(
            f"model '{self.name}' takes about {run_ns / 1e6:.1f} ms, "
            f"and the request's deadline is in {left_ns / 1e6:.1f} ms"
        )

    def resume(self) -> None:
        self._scheduler.resume()

    def end_sequence(self, sequence_id: int | str) -> None:
        self._scheduler.end_sequence(sequence_id)

    def has_sequence(self, sequence_id: int | str) -> bool:
        return self._scheduler.has_sequence(sequence_id)

    def abandon_waiting(self) -> int:
        return self._scheduler.abandon_waiting()

    def abandon_running(self) -> int:
        return self._scheduler.abandon_running()

    def probe(self, examine: Callable[[SampleRun | None], None]) -> float:
        """Run one inference past the queue on an instance of its own, and return the seconds it took. `examine` is
        called before, and gets what runs more of them there. An instance that hangs in its close is left behind."""
        device_id = self._instance_names()[0][1]
        seconds = 0.0

        def measure(session: Session | RequestSession) -> None:
            nonlocal seconds
            examine(sample_run(session, self.spec, self._plan, self._file.model_dir))
            seconds = probe(session, self.spec, self._plan, self._file.model_dir)

        instance = Instance(
            f"{self.name}_probe", lambda: self._open_session("probe", device_id), measure, self._execute
        )
        try:
            instance.open()
            instance.warm()
        finally:
            instance.close(CLOSE_TIMEOUT_S)
        return seconds

    @property
    def run_numbers(self) -> Mapping[str, int]:
        numbers: dict[str, int] = {}
        for name, instance in self._named_instances().items():
            session = instance.session
            own = session.run_number if isinstance(session, RequestSession) else None
            numbers[name] = instance.run_number if own is None else own
        return numbers

    def _named_instances(self) -> dict[str, Instance]:
        named: dict[str, Instance] = {}
        for instance in list(self._instances):
            # A group that names a GPU twice has two instances of one name there.
            named[f"{instance.name} ({len(named)})" if instance.name in named else instance.name] = instance
        return named

    def end_hung_run(self, instance_name: str, reason: str) -> bool:
        instance = self._named_instances().get(instance_name)
        session = None if instance is None else instance.session
        return isinstance(session, RequestSession) and session.end_hung_run(reason)

    def close_after_hang(self) -> None:
        lost = SessionLost(self.reason)
        self._scheduler.abandon_waiting(lost)
        self._scheduler.abandon_running(lost)
        # A hung run may never end; other models must not wait for its resources.
        self._scheduler.release_resources()
        self._scheduler.wait_idle()
        self._close_instances()
        self._move(VersionState.RETIRED)

    def is_healthy(self) -> bool:
        return all(instance.is_healthy() for instance in list(self._instances))

    def statistics(self) -> VersionStatistics:
        found = self._counters.snapshot(self._scheduler.pending_count)
        found.gpu_bytes = dict(self._gpu_bytes)
        if self.spec.sequence is not None:
            found.live_sequences, found.waiting_sequences = self._sequence_counts()
        return found

    def _sequence_counts(self) -> tuple[int, int]:
        """Return the number of sequences with a slot, and of those that wait for one."""
        scheduler = self._scheduler
        if not isinstance(scheduler, SequenceScheduler):
            return 0, 0
        return scheduler.live_count, scheduler.backlog_count

    def report(self) -> InstanceReport:
        info = self._info or SessionInfo("", "", "")
        live_sequences, waiting_sequences = self._sequence_counts()
        return InstanceReport(
            name=self.name,
            version=self.version,
            backend=self.spec.backend,
            runtime=info.runtime,
            device=info.device,
            precision=info.precision,
            instance_count=len(self._instances),
            load_s=self._load_s,
            load_rss_bytes=self._load_rss_bytes,
            notes=(*self.spec.unlogged_notes, *self.spec.notes),
            routine_notes=self.spec.routine_notes,
            warnings=(*self.spec.warnings, *self._plan.output_notes.values()),
            gpu_bytes=dict(self._gpu_bytes),
            recognised={} if self.spec.recognised is None else self.spec.recognised.parameters,
            live_sequences=live_sequences,
            waiting_sequences=waiting_sequences,
        )

    def _open_cache(self) -> None:
        """Create the cache lookup, if the server has a cache. The files are those that were opened, see `_confirm`."""
        from edge_server.serving.cache.lookup import NO_CACHE, CacheLookup
        from edge_server.serving.cache.request_key import RequestKeys, content_digest, identity
        from edge_server.serving.cache.scheduler_adapter import CachedScheduler

        cache, spec = self._cache, self.spec
        if cache is None:
            self.spec = dataclasses.replace(spec, notes=(*spec.notes, NO_CACHE))
            return
        made_from: object = (self.fingerprint, self.generation)
        if cache.is_remote:
            # Machines that serve the same files share answers, also after a restart.
            made_from = content_digest(self._file, spec, self._settings)
        who = identity(self.name, self.version, made_from, spec.backend, self._info)
        keys = RequestKeys(who, spec, sees_parameters=self._instances[0].sees_requests)
        recall = CacheLookup(cache, keys, spec, self.version, self._counters, self._timer)
        self._cached_scheduler = CachedScheduler(recall, self._scheduler, self._admit)

    def _make_instance(self, name: str, device_id: int | None, group: InstanceGroup) -> Instance:
        instance = Instance(
            name,
            lambda: self._open_session(name, device_id),
            lambda session: warm(session, self.spec, self._plan, self._file.model_dir),
            self._execute,
            self._check_opened,
            needs_of(group.resources, device_id) if self._has_limiter else None,
            group.rate_priority,
        )
        instance.attach(self._scheduler.serve, self._pool)
        return instance

    def _log_output_note(self, note: str) -> None:
        # What a warm-up shows is logged with the report of the load.
        if self.state is not VersionState.WARMING:
            log.warning("model '%s': %s", self.name, note)

    def _check_opened(self, session: Session | RequestSession) -> None:
        """Run the checks of a warmed-up session. Raises LoadError; doubts become warnings of the version."""
        try:
            self.answers_generated_inputs = check_opened(session, self.spec, self._plan, self._file.model_dir)
        except NotWarmedUp as doubt:
            if self._must_answer:
                raise WarmupFailed(
                    f"{doubt.__cause__}; the inputs were generated, and the version that serves answers such inputs: "
                    "declare a model_warmup in config.pbtxt, or set the parameter warmup_probe to false to go without "
                    "this check"
                ) from doubt
            self.spec = dataclasses.replace(self.spec, warnings=(*self.spec.warnings, str(doubt)))
        for check in self._output_checks:
            warnings = check(sample_run(session, self.spec, self._plan, self._file.model_dir))
            self.spec = dataclasses.replace(self.spec, warnings=(*self.spec.warnings, *warnings))

    def _open_session(self, name: str, device_id: int | None) -> Session | RequestSession:
        job = OpenJob(self.spec, self._file, name, device_id, self._settings, self._server)
        return open_session(job)

    def _instance_names(self) -> list[tuple[str, int | None, InstanceGroup]]:
        names: list[tuple[str, int | None, InstanceGroup]] = []
        for group in self.spec.instance_groups:
            for index in range(group.count):
                if group.kind is InstanceKind.GPU:
                    names += [(f"{group.name}_{index}_{gpu}", gpu, group) for gpu in group.gpus]
                else:
                    names.append((f"{group.name}_{index}", None, group))
        if not names:
            raise BadModelConfig(f"model '{self.name}': instance_group asks for no instance at all")
        return names

    def _close_instances(self) -> None:
        self._scheduler.release_resources()
        for instance in self._instances:
            instance.close()
        self._instances.clear()


def _size_of_files(folder: Path) -> int:
    """Return the size of the files in a version's folder; 0 if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except OSError:
        return 0


def with_facts_in_force(spec: ModelSpec, info: SessionInfo) -> ModelSpec:
    """Return the specification with what was decided at load in its returned configuration, among `parameters`."""
    config = json.loads(spec.config_json)
    facts = {"edge_runtime": info.runtime, "edge_device": info.device, "edge_precision": info.precision}
    config.setdefault("parameters", {}).update({name: {"string_value": value} for name, value in facts.items()})
    return dataclasses.replace(spec, config_json=json.dumps(config))
