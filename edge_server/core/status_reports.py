"""Data classes of the server's answers about itself and its models: metadata, repository index, version history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import NamedTuple

from edge_server.record import record

EARLIER_GENERATION = "an earlier generation serves; the newest failed"
"""Start of the reason of a version that serves although its newest files failed to load."""

NOT_LOADED = "NOT_LOADED"
"""State of a version that is in the repository but not in the desired state. Triton's index has no name for it."""
UNLOADED = "unloaded"
"""Triton's reason of a version that is no longer desired."""

CANARY_FELL_BACK = "takes only requests that name it, the canary fell back"
"""Start of the reason of a canary that was not good enough."""


class ServerMetadata(NamedTuple):
    """Response to GET /v2. `extensions` are Triton's names of the supported extensions, in Triton's order."""

    name: str
    version: str
    extensions: tuple[str, ...]


class TensorMetadata(NamedTuple):
    """One input or output for clients: v2 type name, shape with a leading -1 if the model batches."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(NamedTuple):
    """Response to GET /v2/models/NAME. `versions` are all that serve, or only the requested one."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class IndexEntry(NamedTuple):
    """One entry of the repository index. Empty fields are omitted on the wire. `digest` is not in Triton.

    `state` is UNKNOWN, READY, UNAVAILABLE, LOADING, UNLOADING, or "" for a model that was never loaded.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    digest: str = ""
    """"sha256:..." of the files of a version that serves, see ContentDigests; "" while it is computed."""
    is_machines_fault: bool = False
    """Whether the same files may load on another machine, or later on this one. Not on the wire."""


def find_failed(entries: Iterable[IndexEntry]) -> list[IndexEntry]:
    """Return the entries whose newest files do not serve: versions that failed to load, models with an invalid
    configuration, versions whose earlier generation serves, and canaries that were not good enough.

    A version below one that serves is superseded: it does not count.
    """
    listed = list(entries)
    newest: dict[str, int] = {}
    for entry in listed:
        if entry.state == "READY":
            newest[entry.name] = max(newest.get(entry.name, 0), int(entry.version))
    return [
        entry
        for entry in listed
        if not (entry.version and int(entry.version) < newest.get(entry.name, 0))
        and (
            (entry.state == "UNAVAILABLE" and not entry.reason.startswith("unloaded"))
            or entry.reason.startswith((EARLIER_GENERATION, CANARY_FELL_BACK))
        )
    ]


class VersionReport(NamedTuple):
    """State and history of one version. `state` is the name of a VersionState; the service replaces it by the state of
    the repository index. `since_s` is the unix time of the last state change.

    `generation` counts the loads of the model; 0: never loaded. `share`, 0 to 1, is the version's share of the
    requests that name no version.
    """

    name: str
    version: int
    generation: int
    state: str
    since_s: float
    served_count: int
    reason: str
    share: float


class PinReport(NamedTuple):
    """Result of pinning or unpinning a model.

    `pin` is the pinned version now, `before` the pinned version before, `serves` the version for requests that name
    none; None: no version. `problem`, if not empty, says why the actual state is not the desired state.
    """

    name: str
    pin: int | None
    before: int | None
    serves: int | None
    survives_restart: bool
    problem: str = ""


class SharedRegion(NamedTuple):
    """A registered system shared-memory region: `key` is the POSIX name, `byte_size` bytes from `offset`."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(NamedTuple):
    """A registered CUDA shared-memory region: the first `byte_size` bytes of an allocation on GPU `device_id`."""

    name: str
    device_id: int
    byte_size: int


@record(frozen=True, slots=True)
class InstanceReport:
    """Runtime, device and resources of one loaded version, for `status`, `check`, the start-up line and metrics.

    `load_rss_bytes` is the growth of the process's resident memory during the load, or what the backend has computed
    if that is more. It is approximate if models load in parallel. 0: not measured, as after a reload into memory that
    the process has kept.
    """

    name: str
    version: int
    backend: str
    runtime: str
    device: str
    precision: str
    instance_count: int
    load_s: float
    load_rss_bytes: int
    notes: tuple[str, ...]
    gpu_bytes: Mapping[int, int] = field(default_factory=dict)
    """GPU memory used by its load, by GPU number."""
    live_sequences: int = 0
    """Number of sequences with a slot. `waiting_sequences` wait for a slot."""
    waiting_sequences: int = 0
    digest: str = ""
    """"sha256:..." of its files, see ContentDigests; "" while it is computed."""
    warnings: tuple[str, ...] = ()
    """Sentences about probable mistakes in the model's configuration."""
    routine_notes: tuple[str, ...] = ()
    """Those of the notes that report an ordinary choice and no obstacle."""
    recognised: Mapping[str, str] = field(default_factory=dict)
    """Parameters that were recognised by the file's metadata."""

    @property
    def how_it_runs(self) -> str:
        """Return runtime, device, precision and instances as one line. An ensemble has no instances."""
        if not self.instance_count:
            return self.runtime
        return f"{self.runtime} on {self.device}, {self.precision}, {self.instance_count} instance(s)"


class GovernorState(NamedTuple):
    """State of the governor: NORMAL, WARM, HOT, THROTTLED or CRITICAL, and the reason as text."""

    level: str = "NORMAL"
    detail: str = ""
