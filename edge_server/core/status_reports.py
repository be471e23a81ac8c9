"""What the server says about itself and its models: the answers to every question that is not an inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.core.frame import StreamCounts


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Answer to GET /v2: `extensions` lists Triton's names of what is served, in Triton's order."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One input or output as clients see it: v2 type name, shape with a leading -1 when the model batches."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Answer to GET /v2/models/NAME: `versions` are those that serve, or just the one asked for."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index. Empty `version`, `state` or `reason` are left out on the wire.

    `state` is one of UNKNOWN, READY, UNAVAILABLE, LOADING, UNLOADING, or "" for a model that was never loaded.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VersionReport:
    """One version with its past: `state` is a VersionState's name, or, as the service tells it, the repository index's
    word. `since_s` is the unix time of its last move.

    `generation` counts the loads of the model, 0 for one that was never loaded. `share` is how much of the requests
    that name no version it takes, 0 to 1.
    """

    name: str
    version: int
    generation: int
    state: str
    since_s: float
    served_count: int
    reason: str
    share: float


@dataclass(frozen=True, slots=True)
class PinReport:
    """What an order to pin or unpin a model came to.

    `pin` is the version it is pinned to now, `before` the one it was pinned to, `serves` the one that requests
    without a version meet; None is none. `problem`, when not empty, says why not all that is wished for is served.
    """

    name: str
    pin: int | None
    before: int | None
    serves: int | None
    survives_restart: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A registered system shared-memory region: `key` is the POSIX name, `byte_size` bytes from `offset`."""

    name: str
    key: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """A registered CUDA shared-memory region: the first `byte_size` bytes of an allocation on GPU `device_id`."""

    name: str
    device_id: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What is in force in one loaded version, for `status`, `check`, the start-up line and metrics.

    `load_rss_bytes` is how much the process's resident memory grew while it loaded; approximate when models load
    side by side.
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
    """Memory that its load took of each GPU, by the GPU's number."""
    live_sequences: int = 0
    """How many sequences hold a slot of the model, and `waiting_sequences` how many wait for one."""
    waiting_sequences: int = 0

    @property
    def how_it_runs(self) -> str:
        """Return it for a line of text; an ensemble has no instances of its own."""
        if not self.instance_count:
            return self.runtime
        return f"{self.runtime} on {self.device}, {self.precision}, {self.instance_count} instance(s)"


@dataclass(frozen=True, slots=True)
class FrameStreamReport:
    """One open frame stream. `version` 0 is the newest that serves; `counts` are those of the stream id.

    Rates are frames a second of the last seconds, ages those of the last results when they were sent.
    """

    stream_id: str
    model: str
    version: int
    client: str
    priority: int
    weight: float
    open_s: float
    fps_in: float
    fps_out: float
    waiting_count: int
    age_p50_ms: float
    age_p99_ms: float
    counts: StreamCounts


@dataclass(frozen=True, slots=True)
class GovernorState:
    """What the box's heat, power and memory allow: NORMAL, WARM, HOT, THROTTLED or CRITICAL, and why in plain words."""

    level: str = "NORMAL"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine that is, or is to be, built for one version of a model.

    `state`: "waiting", "building", "paused", "verifying", "ready", "failed" or "cancelled". `reason` says why it is
    built, why it waits, or why there is none; `retry_s` is the unix time of the next try, None when only new files, or
    an order, help. `difference` is how far its answers are from the serving runtime's, None before they were compared,
    or where nothing else serves the model. `took_s` is what the build took.
    """

    model: str
    version: int
    library: str
    precision: str
    digest: str
    state: str
    phase: str
    percent: float
    reason: str
    since_s: float
    attempt_count: int
    retry_s: float | None
    took_s: float
    difference: float | None
    tolerance: float


@dataclass(frozen=True, slots=True)
class EngineBuildsReport:
    """Everything that is known of engines. `pause` says why none is built now, "" when one may be."""

    engines: tuple[EngineReport, ...]
    cached_count: int
    cached_bytes: int
    pause: str
