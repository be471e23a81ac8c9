"""InferenceService: the one door that every front end uses.

Front ends turn wires into core nouns and back; everything they may ask of the server stands here. All methods may be
called from any thread. Those marked *blocking* may take as long as a model load: call them off the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edge_server.core.message import Request, ResponseSink
from edge_server.core.model import ModelSpec
from edge_server.core.statistics import VersionStatistics
from edge_server.core.view import IndexEntry, InstanceReport, ModelMetadata, ServerMetadata
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.telemetry.log import LogSettings


class Ticket(Protocol):
    """A submitted request, as the front end that submitted it sees it."""

    def cancel(self) -> None:
        """Take the request back: it is answered CANCELLED at once, its batch mates are not disturbed.

        Does nothing when the final response was sent already.
        """


class InferenceService:
    """See the module's text. Implemented below; front ends rely on nothing else of the server."""

    shared_memory: SharedMemoryRegistry
    log_settings: LogSettings

    def is_live(self) -> bool: ...

    def is_ready(self) -> bool: ...

    def is_model_ready(self, name: str, version: int | None) -> bool:
        """Return whether it can serve. Raises UnknownModel for a name that no repository holds."""

    def server_metadata(self) -> ServerMetadata: ...

    def model_metadata(self, name: str, version: int | None) -> ModelMetadata:
        """Raises UnknownModel, NotReady."""

    def model_spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the specification that a request to (name, version) would meet now. Raises UnknownModel, NotReady."""

    def statistics(self, name: str | None, version: int | None) -> list[VersionStatistics]:
        """Return counters of all serving versions, of one model, or of one version.

        Raises InvalidRequest "requested model 'x' is not available" for an absent one.
        """

    def instance_reports(self) -> list[InstanceReport]: ...

    def repository_index(self, *, only_ready: bool = False) -> list[IndexEntry]: ...

    def load_model(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload, and wait for it. *Blocking.*

        `config_json` overrides config.pbtxt; `files` maps "1/model.onnx" to contents that stand in for the disk's.
        Raises Refusal outside explicit mode, LoadError, ServingFault.
        """

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop offering, drain in the background. *Blocking* for the hand-over only. Raises as load_model does."""

    def submit(self, request: Request, sink: ResponseSink, *, may_run: bool = False) -> Ticket:
        """Check and enqueue one request; `sink` then takes its responses, the last one with `is_final`.

        `may_run`: the calling thread may be used to compute the answer before this returns (a thread that would only
        wait otherwise). An error found at once (unknown model, wrong tensor, full queue) is raised instead of sent,
        and then `request.release` has been called and the sink is never called.
        """
