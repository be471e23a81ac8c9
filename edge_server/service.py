"""`InferenceService`, the interface between the front ends and the serving core: inference, metadata, status, loading
and unloading of models.

Front ends translate between a wire and the types of core. All that they may ask of the server is here. Any thread may
call the methods. Those marked *blocking* may take as long as a model load: call them off the event loop.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from edge_server.config.setting import nearest
from edge_server.core.metric_family import MetricFamilyView, MetricSource
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.model_statistics import VersionStatistics, VersionWork
from edge_server.core.request_response import Request, ResponseSink, SubmittedRequest
from edge_server.core.status_reports import (
    NOT_LOADED,
    IndexEntry,
    InstanceReport,
    ModelMetadata,
    PinReport,
    ServerMetadata,
    TensorMetadata,
    VersionReport,
)
from edge_server.core.trace_settings import parse_trace_change
from edge_server.core.version_lifecycle import INDEX_STATES, DesiredModel, VersionState
from edge_server.errors import Draining, EdgeServerError, InvalidRequest, NotReady, UnknownModel
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.serving.execution.served_version import CLOSE_TIMEOUT_S, ServedVersion
from edge_server.serving.lifecycle.lifecycle_parts import ModelLifecycle
from edge_server.serving.lifecycle.model_control import ModelControl, ModelSource
from edge_server.serving.lifecycle.variants import Variants, with_variant_name
from edge_server.serving.lifecycle.version_routes import Routes
from edge_server.telemetry.event_bus import SERVER_READY, SERVER_STOPPING, EventBus
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.tracing import Traces

log = logging.getLogger(__name__)

EXTENSIONS = (
    "classification",
    "sequence",
    "sequence(string_id)",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Extensions that this server has, with Triton's names and in Triton's order."""

_CUDA_MEMORY = "cuda_shared_memory"
"""Listed only if there is a GPU whose memory can be registered, and clients may do so."""

_STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"

READING_THREAD_HOLD_US = 300.0
"""How long a thread that reads for many clients may be held to compute one answer, in microseconds. A shorter run
delays the requests behind it less than passing it to another thread delays them all."""

_ROUTE_ATTEMPTS = 16
"""How often a request retries if its version is just being retired. One retry is normal."""

_MAX_MISSPELT_LENGTH = 64
_MAX_SIMILAR_NAMES = 32
_MAX_SUGGESTIONS_PER_S = 10
"""Limits for the search of the model that a client may have meant, which takes up to 4 ms: a client may send unknown
names as fast as it can."""


class Readiness(enum.Enum):
    """Which models must serve for the server to be ready. A model with any serving version counts as serving."""

    STRICT = "every model of the desired state"
    KEEPS_SERVING = "every model that has served since it was added"
    ANY = "none"


class Handle:
    """One generation of a version as a request holds it: `InferenceService.find` returns it, and all later questions of
    the request go to it. Thread-safe.

    A stream finds a handle for each of its requests: a reload, a canary or an eviction changes the generation.
    """

    __slots__ = ("_service", "_version", "spec")

    def __init__(self, service: InferenceService, spec: ModelSpec, version: ServedVersion | None) -> None:
        """`version` None: each submit chooses it, because a canary is on trial, sequences of several versions are open,
        or the model is evicted."""
        self._service = service
        self._version = version
        self.spec = spec

    def submit(
        self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0, may_stand_in: bool = True
    ) -> SubmittedRequest:
        """Check and enqueue one request; `sink` then gets its responses, the last one with `is_final`.

        `may_stand_in`: a model variant may answer. `hold_us`: microseconds for which the calling thread may compute the
        answer: 0, READING_THREAD_HOLD_US, or math.inf if it would only wait. It counts as 0 if hung calls are watched
        for. An error found at once is raised; `request.release` was called then, and the sink is never called.
        """
        service, version = self._service, self._version
        if not service._callers_may_run:
            hold_us = 0.0
        try:
            if service.variants.choice is not None and may_stand_in and request.version is None:
                return service._submit_to_variant(request, sink, hold_us=hold_us)
            if version is not None and not service._is_stopping:
                try:
                    return version.submit(request, sink, hold_us=hold_us)
                except Draining:
                    # Retired since it was found: the ordinary lookup finds its successor.
                    pass
            return service._route_and_submit(request, sink, hold_us=hold_us)
        except BaseException:
            if request.release is not None:
                request.release()
            raise

    def end_sequence(self, sequence_id: int | str) -> None:
        """End a sequence of this handle's requests. Does nothing for an unknown one. Returns at once."""
        if self._version is not None:
            self._version.end_sequence(sequence_id)
        else:
            self._service.end_sequence(self.spec.name, None, sequence_id)


class HandleCache:
    """Finds handles, and keeps them until the map of routes changes. May be used by any thread.

    Each thread that reads requests has its own: a Python without an interpreter lock locks a dictionary to read what
    another thread has put into it.
    """

    __slots__ = ("_known", "_service", "_table")

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._table = service.table
        self._known: tuple[Mapping[str, Routes], dict[tuple[str, int | None], Handle]] = ({}, {})
        """A map of routes, and the handles that were made from it. Replaced with the map."""

    def find(self, name: str, version: int | None) -> Handle:
        """See InferenceService.find."""
        routes, handles = self._known
        if routes is self._table.routes and not self._service._is_stopping:
            handle = handles.get((name, version))
            if handle is not None:
                return handle
        return self._make_handle(name, version)

    def _make_handle(self, name: str, version: int | None) -> Handle:
        service = self._service
        if service._is_stopping:
            raise Draining(_STOPPING)
        routes, known = self._table.routes, self._known
        if known[0] is not routes:
            known = self._known = (routes, {})
        found = routes.get(name)
        serving = None
        if found is not None:
            serving = found.first if version is None else found.ready.get(version)
        if found is None or serving is None:
            return Handle(service, service._spec(name, version), None)
        is_open = version is None and found.decides_each_request
        handle = known[1][name, version] = Handle(service, serving.spec, None if is_open else serving)
        return handle


class InferenceService:
    """Thread-safe. Holds no request: submitted ones belong to versions and tickets."""

    def __init__(
        self,
        models: ModelLifecycle,
        source: ModelSource,
        shared_memory: SharedMemoryRegistry,
        log_settings: LogSettings,
        *,
        server_id: str,
        server_version: str,
        is_explicit: bool,
        readiness: Readiness = Readiness.STRICT,
        events: EventBus | None = None,
        traces: Traces | None = None,
        digest_of: Callable[[str, int, str], str] = lambda name, version, fingerprint: "",
        may_serve: Callable[[], bool] = lambda: True,
        plugin: Callable[[str], object | None] = lambda name: None,
        suggests_models: bool = False,
    ) -> None:
        """`digest_of`: see ContentDigests.get. `may_serve`: whether each other part is there without which the server
        is not ready. `plugin`: see `plugin`. `suggests_models`: whether the error for an unknown model may name
        another."""
        self.shared_memory = shared_memory
        self.log_settings = log_settings
        self.traces = traces or Traces()
        self.events = events or EventBus()
        self._plugin = plugin
        self.suggests_models = suggests_models
        self._suggestions = [0, 0]
        """The newest second with suggestions, and how many there were in it."""
        self._digest_of = digest_of
        self._may_serve = may_serve
        self.table = models.table
        """States of the models: the desired state, and waiting for it."""
        self.router = models.router
        """Versions that serve, and questions about the states."""
        self.checks = models.checks
        self._models = models
        # Models call the service.
        models.loader.server = self
        # A front end's own thread must not hang in a runtime.
        self._callers_may_run = models.settings.hang_timeout_s <= 0
        self.variants = Variants(self.table)
        self._handles = HandleCache(self)
        self._source = source
        self._control = ModelControl(self.table, self.router, source, self.events, is_explicit=is_explicit)
        extensions = EXTENSIONS if shared_memory.cuda.is_usable else tuple(x for x in EXTENSIONS if x != _CUDA_MEMORY)
        self._metadata = ServerMetadata(server_id, server_version, extensions)
        self.is_explicit = is_explicit
        """Whether models are loaded and unloaded on request."""
        self._readiness = readiness
        self.has_started = False
        """Whether the first desired state was reached."""
        self._is_stopping = False
        self.is_in_drain_delay = False
        """Whether the server stops soon: it is not ready, but still answers everything."""
        self._metric_sources: list[MetricSource] = []

    # -- the server --------------------------------------------------------------------------------------------------

    def started(self) -> None:
        """Mark the first desired state as done: from now on the server may be ready."""
        self.has_started = True
        self.events.publish(SERVER_READY)

    def begin_drain_delay(self) -> None:
        """Report not ready from now on, and answer everything until `stop_accepting`."""
        self.is_in_drain_delay = True

    def stop_accepting(self) -> None:
        """Refuse inference from now on; waiting and running requests continue. May be called again."""
        if not self._is_stopping:
            self._is_stopping = True
            self.events.publish(SERVER_STOPPING)

    def resume(self) -> None:
        """Start waiting requests, because admission control allows more than before. Returns at once."""
        for version in self.table.loaded_versions():
            version.resume()

    def close(self, timeout_s: float) -> bool:
        """Drain the requests for at most `timeout_s`, after `stop_accepting`, and close every model. Return False if
        requests were failed.

        A thread that hangs in a runtime cannot be stopped; it is left behind, and a warning names its model.
        """
        deadline = time.monotonic() + timeout_s
        version_count = len(self.table.loaded_versions())
        for item in self.table.close():
            item.fail(Draining(f"Server is stopping, model '{item.request.model}' is not loaded any more"))
        self._models.events.publish()
        self.table.wait_finished(deadline - time.monotonic())
        failed_count = sum(version.abandon_waiting() for version in self.table.loaded_versions())
        self.table.wait_finished(CLOSE_TIMEOUT_S)
        left_behind = self.table.loaded_versions()
        if version_count:
            log.info("%d of %d model versions are unloaded", version_count - len(left_behind), version_count)
        for version in left_behind:
            failed_count += version.abandon_running()
            log.warning(
                "model '%s' version %d is left behind: a run, or the close of its runtime (finalize), has not ended",
                version.name,
                version.version,
            )
        self._models.loader.pool.close()
        return failed_count == 0

    def is_live(self) -> bool:
        return not self._is_stopping

    def is_ready(self) -> bool:
        """Return whether the server, and every model that counts for `Readiness`, accepts inference."""
        if self._is_stopping or self.is_in_drain_delay or not self.has_started or not self._may_serve():
            return False
        return self._readiness is Readiness.ANY or not self.router.has_unserved(
            ever_served=self._readiness is Readiness.KEEPS_SERVING
        )

    def server_metadata(self) -> ServerMetadata:
        return self._metadata

    # -- one model, or all that serve --------------------------------------------------------------------------------

    def is_model_ready(self, name: str, version: int | None) -> bool:
        """Return whether the model can serve; its own health check counts too. *Blocking*, for seconds if it has one.

        Raises UnknownModel for a name that no repository has.
        """
        if self._is_stopping or self.is_in_drain_delay:
            return False
        try:
            self._spec(name, version)
        except NotReady:
            return False
        except UnknownModel:
            if version is None and self.router.is_known(name):
                return False
            raise
        return self.router.is_healthy(name, version)

    def model_metadata(self, name: str, version: int | None) -> ModelMetadata:
        """Return names, types and shapes as clients see them. Raises UnknownModel, NotReady."""
        spec = self._spec(name, version)
        versions = [version] if version is not None else self.router.offered_versions(name)
        return ModelMetadata(
            name=name,
            versions=tuple(map(str, versions)),
            platform=spec.platform or spec.backend,
            inputs=tuple(_tensor_metadata(spec, item) for item in spec.inputs),
            outputs=tuple(_tensor_metadata(spec, item) for item in spec.outputs),
        )

    def _spec(self, name: str, version: int | None) -> ModelSpec:
        try:
            return self.router.spec(name, version)
        except UnknownModel as error:
            raise self._unknown(name, error) from None

    def _unknown(self, name: str, error: UnknownModel) -> EdgeServerError:
        """Return the error, with the nearest name, after the models found at the start are loaded, or failed to load.
        Before that an unknown model may only not be loaded yet: clients and load balancers should try again."""
        if not self.has_started:
            return NotReady(f"the server is starting: {error.message}")
        if not self.suggests_models or len(name) > _MAX_MISSPELT_LENGTH or self.router.is_known(name):
            return error
        second = int(time.monotonic())
        if self._suggestions[0] != second:
            self._suggestions = [second, 0]
        self._suggestions[1] += 1
        if self._suggestions[1] > _MAX_SUGGESTIONS_PER_S:
            return error
        return UnknownModel(error.message + _suggestion(name, self.table.routes))

    def statistics(self, name: str | None, version: int | None) -> list[VersionStatistics]:
        """Return counters of all serving versions, of one model, or of one version.

        Raises InvalidRequest "requested model 'x' is not available" for an absent one.
        """
        if name is None:
            return [item.statistics() for item in self.router.all_ready()]
        versions = [item for item in self.router.ready_versions(name) if version in (None, item.version)]
        if not versions:
            which = name if version is None else f"{name}' version '{version}"
            raise InvalidRequest(f"requested model '{which}' is not available")
        return [item.statistics() for item in reversed(versions)]

    def work(self) -> list[VersionWork]:
        """Return the work of all serving versions since their loads."""
        return [item.work() for item in self.router.all_ready()]

    def trace_settings(self, name: str = "") -> dict[str, str | list[str]]:
        """Return the trace settings of a model; with "", those of models without their own. Raises InvalidRequest for a
        model that does not serve."""
        self._check_traceable(name)
        return self.traces.get(name)

    def update_trace_settings(self, name: str, raw: Mapping[str, object]) -> dict[str, str | list[str]]:
        """Change what is traced, see core.trace_settings.parse_trace_change, and return all settings. *Blocking* for a
        moment.

        Raises InvalidRequest, and Unsupported for the file.
        """
        self._check_traceable(name)
        return self.traces.update(name, parse_trace_change(raw))

    def _check_traceable(self, name: str) -> None:
        if not name:
            return
        try:
            self.router.spec(name, None)
        except (NotReady, UnknownModel):
            raise InvalidRequest(f"Request for unknown model : {name}") from None

    def instance_reports(self) -> list[InstanceReport]:
        reports = []
        for item in self.router.all_ready():
            report, note = item.report(), self.variants.note(item.name)
            notes = (*report.notes, note) if note else report.notes
            digest = self._digest_of(item.name, item.version, item.fingerprint)
            reports.append(dataclasses.replace(report, notes=notes, digest=digest))
        return reports

    # -- the repository, and orders for it ---------------------------------------------------------------------------

    def repository_index(self, *, only_ready: bool = False) -> list[IndexEntry]:
        """Return every model with the state and reason of each version that was ever desired.

        A file or folder that cannot be a model is UNAVAILABLE, with the reason.
        """
        pins = self._source.pins()
        digests = {
            (item.name, str(item.version)): self._digest_of(item.name, item.version, item.fingerprint)
            for item in self.router.all_ready()
        }
        entries = [
            _with_pin(entry, pins.get(entry.name))._replace(digest=digests.get((entry.name, entry.version), ""))
            for entry in self.router.index()
        ]
        if only_ready:
            return [entry for entry in entries if entry.state == "READY"]
        listed = {entry.name for entry in entries}
        absent = [IndexEntry(name) for name in self._source.names() if name not in listed]
        entries += [_with_pin(entry, pins.get(entry.name)) for entry in absent]
        entries += [IndexEntry(name, "", "UNAVAILABLE", why) for name, why in self._source.passed_over().items()]
        return sorted(entries, key=lambda entry: entry.name)

    def versions(self, name: str | None = None) -> list[VersionReport]:
        """Return every version of every model, or of one, with its history, including those that are only on disk.
        *Blocking.*

        States are those of the repository index, and NOT_LOADED. Raises UnknownModel, ServingFault.
        """
        reports = [
            report._replace(state=INDEX_STATES[VersionState[report.state]]) for report in self.router.versions(name)
        ]
        known = {(report.name, report.version) for report in reports}
        problems = {entry.name: entry.reason for entry in self.router.index() if not entry.version}
        for model in self._source.names() if name is None else [name]:
            there = [version for version in self._source.versions(model) if (model, version) not in known]
            state, reason = ("UNAVAILABLE", problems[model]) if model in problems else (NOT_LOADED, "")
            reports += [VersionReport(model, version, 0, state, 0.0, 0, reason, 0.0) for version in there]
        if name is not None and not reports:
            raise UnknownModel(f"Request for unknown model: '{name}' is not found")
        return sorted(reports, key=lambda report: (report.name, report.version, report.generation))

    def pins(self) -> Mapping[str, int]:
        """Return the models that an operator pinned, each with its version."""
        return self._source.pins()

    def set_desired_state(self, desired: Mapping[str, DesiredModel]) -> None:
        """Set the whole desired state that a scan found, by model name. Models left out are unloaded."""
        self._control.set_desired_state(desired)

    def load_model(
        self,
        name: str,
        config_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        may_carry_code: bool = True,
    ) -> None:
        """Load or reload, and wait for it. *Blocking*, see ModelControl.load."""
        self._control.load(name, config_json, files, may_carry_code=may_carry_code)

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop offering a model and drain it in the background. *Blocking*, see ModelControl.unload."""
        self._control.unload(name, unload_dependents=unload_dependents)

    def rollback(self, name: str, version: int | None = None) -> PinReport:
        """Pin a model to a version (None: the one before), and wait for it. *Blocking*, see ModelControl.rollback."""
        return self._control.rollback(name, version)

    def unpin(self, name: str) -> PinReport:
        """Remove a pin, so that the version policy applies. *Blocking*, see ModelControl.unpin."""
        return self._control.unpin(name)

    # -- for models -------------------------------------------------------------------------------------

    def metric_tags(self, name: str, version: int) -> Mapping[str, str]:
        """Return the `metric_tags` of a version; none if it does not serve any more."""
        serving = self.router.ready_versions(name)
        return next((item.spec.metric_tags for item in serving if item.version == version), {})

    def add_metrics(self, source: MetricSource) -> None:
        """Add a model's own metric families to the metrics page. Adding a source again has no effect."""
        if source not in self._metric_sources:
            self._metric_sources.append(source)

    def work_share(self) -> float:
        """See backends.base.ServerCalls."""
        return self._models.admission_control.allowed_fraction

    def plugin(self, name: str) -> object | None:
        """See backends.base.ServerCalls."""
        return self._plugin(name)

    def model_families(self) -> list[MetricFamilyView]:
        """Return the metric families that models made."""
        return [view for source in list(self._metric_sources) for view in source()]

    # -- requests ----------------------------------------------------------------------------------------------------

    def find(self, name: str, version: int | None) -> Handle:
        """Return the handle on the generation that serves requests to (name, version) now.

        Raises UnknownModel, NotReady, and Draining once the server stops.
        """
        return self._handles.find(name, version)

    def hold(self, name: str) -> tuple[Handle, Callable[[], None] | None]:
        """Choose a generation of a model, a canary by its share, and let it take all requests of the returned handle,
        also after it was retired, until the returned function is called. None in its place: the model is evicted, and
        a request through the handle loads it.

        Raises UnknownModel, NotReady, and Draining once the server stops.
        """
        for _ in range(_ROUTE_ATTEMPTS):
            handle = self.find(name, None)
            try:
                version = self.router.route_request(name, None)
                return Handle(self, version.spec, version), version.hold()
            except (NotReady, UnknownModel):
                return handle, None
            except Draining:
                continue  # retired since it was found
        raise NotReady(f"model '{name}' is being replaced faster than requests can follow")

    def handle_cache(self) -> HandleCache:
        """Return a cache for one of the threads that read requests."""
        return HandleCache(self)

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> SubmittedRequest:
        """Submit a request, for a caller that asks nothing else about the model. See Handle.submit.

        Raises the errors of `find` as well.
        """
        if not self._callers_may_run:
            hold_us = 0.0
        try:
            if self.variants.choice is not None and request.version is None:
                return self._submit_to_variant(request, sink, hold_us=hold_us)
            return self._route_and_submit(request, sink, hold_us=hold_us)
        except BaseException:
            if request.release is not None:
                request.release()
            raise

    def set_keep_alive(self, model: str, seconds: float) -> None:
        """Set how long a model stays loaded without requests, until it is unloaded; math.inf: for ever. Does nothing
        for a model that neither serves nor is awaited by a request: call it after `submit`."""
        self.table.set_keep_alive(model, seconds)

    def end_sequence(self, model: str, version: int | None, sequence_id: int | str) -> None:
        """End a sequence whose client has disconnected. Does nothing for an unknown one. Returns at once."""
        self.router.end_sequence(model, version, sequence_id)

    def gets_requests(self, model: str, version: int) -> bool:
        """Return whether requests without a version, or new sequences of them, may go to this version now."""
        routes = self.table.routes.get(model)
        serving = None if routes is None else routes.ready.get(version)
        return routes is not None and serving is not None and routes.share_of(serving) > 0

    def _submit_to_variant(self, request: Request, sink: ResponseSink, *, hold_us: float) -> SubmittedRequest:
        """Submit to the active variant, or to the model itself."""
        for _ in range(_ROUTE_ATTEMPTS):
            lighter = self.variants.tensor_variant_for(request.model)
            if lighter is None or self._is_stopping:
                break
            try:
                version = self.router.route_request(lighter, None)
                return version.submit(request, with_variant_name(sink, lighter), hold_us=hold_us)
            except (Draining, UnknownModel):
                # Retired between lookup and call: look up again, or use the model itself.
                continue
        return self._route_and_submit(request, sink, hold_us=hold_us)

    def _route_and_submit(self, request: Request, sink: ResponseSink, *, hold_us: float) -> SubmittedRequest:
        if self._is_stopping:
            raise Draining(_STOPPING)
        try:
            return self.router.submit(request, sink, hold_us=hold_us)
        except (NotReady, UnknownModel) as error:
            if self._is_stopping:
                raise Draining(_STOPPING) from error
            if isinstance(error, UnknownModel):
                raise self._unknown(request.model, error) from None
            raise


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean '...'?` with the known name that is nearest to a misspelt one, "" if none is near."""
    # A misspelt name begins or ends like the right one: only such names are compared, and not too many.
    third = len(name) // 3 or 1
    similar = (one for one in known if one.startswith(name[:third]) or one.endswith(name[-third:]))
    return nearest(name, itertools.islice(similar, _MAX_SIMILAR_NAMES))


def _tensor_metadata(spec: ModelSpec, item: InputSpec | OutputSpec) -> TensorMetadata:
    return TensorMetadata(item.name, item.dtype.value, spec.wire_dims(item.dims))


def _with_pin(entry: IndexEntry, pin: int | None) -> IndexEntry:
    """Return the entry with the pin as a reason, if the pin concerns this version or the whole model."""
    if pin is None or entry.version not in ("", str(pin)):
        return entry
    note = f"pinned to version {pin}"
    return entry._replace(reason=f"{entry.reason}; {note}" if entry.reason else note)
