"""InferenceService: the one door that every front end uses.

Front ends turn wires into core nouns and back; everything they may ask of the server stands here. All methods may be
called from any thread. Those marked *blocking* may take as long as a model load: call them off the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from edge_server.core.lifecycle import ModelWish
from edge_server.core.message import Request, ResponseSink
from edge_server.core.model import InputSpec, ModelSpec, OutputSpec
from edge_server.core.statistics import VersionStatistics
from edge_server.core.view import IndexEntry, InstanceReport, ModelMetadata, ServerMetadata, TensorMetadata
from edge_server.errors import Draining, InvalidRequest, LoadError, NotReady, Refusal, ServingFault, UnknownModel
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.serving.manager import Manager
from edge_server.serving.version import ModelVersion
from edge_server.telemetry.log import LogSettings

EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
)
"""Triton's names, in Triton's order, of the extensions that this server serves."""

_STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"

_ROUTE_ATTEMPTS = 16
"""How often a request that met a version just being retired looks for its successor. One is the rule."""


class Ticket(Protocol):
    """A submitted request, as the front end that submitted it sees it."""

    def cancel(self) -> None:
        """Take the request back: it is answered CANCELLED at once, its batch mates are not disturbed.

        Does nothing when the final response was sent already.
        """


class ModelSource(Protocol):
    """Where models come from: the repository, as the load and unload calls see it."""

    def names(self) -> Iterable[str]:
        """Return the models that are there, loaded or not."""

    def wish(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> ModelWish | None:
        """Return what should be served of a model, with the overrides in place, or None when it is not there."""


class InferenceService:
    """See the module's text. Holds no request: what it hands out belongs to versions and tickets."""

    def __init__(
        self,
        manager: Manager,
        source: ModelSource,
        shared_memory: SharedMemoryRegistry,
        log_settings: LogSettings,
        *,
        server_id: str,
        server_version: str,
        is_explicit: bool,
        is_strict: bool,
    ) -> None:
        self.shared_memory = shared_memory
        self.log_settings = log_settings
        self._manager = manager
        self._source = source
        self._metadata = ServerMetadata(server_id, server_version, EXTENSIONS)
        self._is_explicit = is_explicit
        self._is_strict = is_strict
        self._has_started = False
        self._is_stopping = False

    def started(self) -> None:
        """Say that the first wish was worked off: from now on the server may be ready."""
        self._has_started = True

    def stop_taking(self) -> None:
        """Refuse inference from now on; what waits or runs goes on."""
        self._is_stopping = True

    def is_live(self) -> bool:
        return not self._is_stopping

    def is_ready(self) -> bool:
        """Return whether inference is offered: with strict readiness, of everything that is wished for."""
        if self._is_stopping or not self._has_started:
            return False
        return not self._is_strict or not self._manager.has_failures()

    def is_model_ready(self, name: str, version: int | None) -> bool:
        """Return whether it can serve. Raises UnknownModel for a name that no repository holds."""
        if self._is_stopping:
            return False
        try:
            self._manager.route(name, version)
        except NotReady:
            return False
        except UnknownModel:
            if version is None and self._manager.is_known(name):
                return False
            raise
        return True

    def server_metadata(self) -> ServerMetadata:
        return self._metadata

    def model_metadata(self, name: str, version: int | None) -> ModelMetadata:
        """Return names, types and shapes as clients see them. Raises UnknownModel, NotReady."""
        found = self._manager.route(name, version)
        spec = found.spec
        versions = [found] if version is not None else self._manager.ready_versions(name)
        return ModelMetadata(
            name=name,
            versions=tuple(str(item.version) for item in sorted(versions, key=lambda item: item.version)),
            platform=spec.platform or spec.backend,
            inputs=tuple(_tensor_metadata(spec, item) for item in spec.inputs),
            outputs=tuple(_tensor_metadata(spec, item) for item in spec.outputs),
        )

    def model_spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the specification that a request to (name, version) would meet now.

        Raises UnknownModel, NotReady, and Draining once the server stops.
        """
        if self._is_stopping:
            raise Draining(_STOPPING)
        return self._manager.route(name, version).spec

    def statistics(self, name: str | None, version: int | None) -> list[VersionStatistics]:
        """Return counters of all serving versions, of one model, or of one version.

        Raises InvalidRequest "requested model 'x' is not available" for an absent one.
        """
        if name is None:
            return [item.statistics() for item in self._manager.all_ready()]
        versions = [item for item in self._manager.ready_versions(name) if version in (None, item.version)]
        if not versions:
            which = name if version is None else f"{name}' version '{version}"
            raise InvalidRequest(f"requested model '{which}' is not available")
        return [item.statistics() for item in reversed(versions)]

    def instance_reports(self) -> list[InstanceReport]:
        return [item.report() for item in self._manager.all_ready()]

    def metric_tags(self, name: str, version: int) -> Mapping[str, str]:
        """Return the `metric_tags` of a version, none when it does not serve any more."""
        serving = self._manager.ready_versions(name)
        return next((item.spec.metric_tags for item in serving if item.version == version), {})

    def repository_index(self, *, only_ready: bool = False) -> list[IndexEntry]:
        """Return every model there is, with the state and reason of each version that was ever wished for."""
        entries = self._manager.index()
        if only_ready:
            return [entry for entry in entries if entry.state == "READY"]
        listed = {entry.name for entry in entries}
        entries += [IndexEntry(name) for name in self._source.names() if name not in listed]
        return sorted(entries, key=lambda entry: entry.name)

    def load_model(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload, and wait for it. *Blocking.*

        `config_json` overrides config.pbtxt; `files` maps "1/model.onnx" to contents that stand in for the disk's.
        Raises Refusal outside explicit mode, LoadError, ServingFault.
        """
        self._check_control()
        wish = self._source.wish(name, config_json, files or {})
        if wish is None:
            raise ServingFault(f"failed to load '{name}', failed to poll from model repository")
        self._manager.wish_for(wish, retry=True)
        self._wait_settled(name)
        reason = self._manager.failure(name)
        if reason is not None:
            raise LoadError(f"load failed for model '{name}': {reason}")
        if not wish.versions:
            raise LoadError(f"load failed for model '{name}': at least one version must be available")

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop offering a model and drain it in the background. *Blocking* for the hand-over only.

        A model that is not loaded is left as it is. Raises Refusal outside explicit mode. No model depends on
        another yet, so `unload_dependents` has nothing more to unload.
        """
        self._check_control()
        if self._manager.is_known(name):
            self._manager.wish_for(ModelWish(name))
            self._wait_settled(name)

    def submit(self, request: Request, sink: ResponseSink, *, may_run: bool = False) -> Ticket:
        """Check and enqueue one request; `sink` then takes its responses, the last one with `is_final`.

        `may_run`: the calling thread may be used to compute the answer before this returns (a thread that would only
        wait otherwise). An error found at once (unknown model, wrong tensor, full queue) is raised instead of sent,
        and then `request.release` has been called and the sink is never called.
        """
        try:
            return self._submit(request, sink, may_run=may_run)
        except BaseException:
            if request.release is not None:
                request.release()
            raise

    def _submit(self, request: Request, sink: ResponseSink, *, may_run: bool) -> Ticket:
        for _ in range(_ROUTE_ATTEMPTS):
            if self._is_stopping:
                raise Draining(_STOPPING)
            version: ModelVersion = self._manager.route(request.model, request.version)
            try:
                return version.submit(request, sink, may_run=may_run)
            except Draining:
                # Retired between the look and the call: the routing table names its successor, or says there is none.
                continue
        raise NotReady(f"model '{request.model}' is being replaced faster than requests can follow")

    def _wait_settled(self, name: str) -> None:
        if not self._manager.wait_settled([name]):
            raise Draining(f"Server is stopping, model '{name}' can be neither loaded nor unloaded")

    def _check_control(self) -> None:
        if not self._is_explicit:
            raise Refusal("explicit model load / unload is not allowed if polling is enabled", retry_after_s=None)


def _tensor_metadata(spec: ModelSpec, item: InputSpec | OutputSpec) -> TensorMetadata:
    return TensorMetadata(item.name, item.dtype.value, spec.wire_dims(item.dims))
