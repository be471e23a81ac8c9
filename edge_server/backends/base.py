"""Backend interface: the contract between the serving core and a runtime.

A *Backend* knows one runtime: it can read a model file's inputs and outputs and open a *Session* on it. A Session is
one model on one device; it runs a batch at a time and knows nothing of queues, batching rules or wires. A runtime's
library is imported inside its backend file only, and only when a model first needs it.

Rules that every backend keeps:

- `Session.run` is called by one thread at a time, not always the same one. It releases the GIL while it computes.
- A session says whether it is bound to a thread, see `SessionInfo.is_bound`.
- It must not keep references to its inputs after it returned, nor write into them (they may be read-only views).
- Whatever the library raises leaves as BackendError (in `run`) or LoadError (in `inspect`, `open`), with the model's
  name, the runtime's words, and nothing that pins a tensor.
- `close` may be called once, after the last run; it gives the memory back.

A package of its own may add a backend: it derives from `Backend`, and registers the class, or a function of the name
that returns one, under the entry points `edge_server.backends`; in its pyproject.toml:

    [project.entry-points."edge_server.backends"]
    thermal = "thermal_runtime.serving:ThermalBackend"

Installed beside the server, it is imported and called as `ThermalBackend("thermal")` when a model first states
`backend: "thermal"`. Names that ship cannot be taken. Of this package it needs `backends.base`, `core.model`,
`core.tensor` and `errors`; what it raises otherwise fails the model alone, and is quoted with the package's name.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from edge_server.core.custom_metric import MetricSource
from edge_server.core.device_tensor import DeviceArray, DevicePiece, to_host_array
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.model_spec import ModelFile as ModelFile
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request, ResponseSink
from edge_server.core.tensorrt_engine import EngineFile, EngineOrder
from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """What a model file says about itself.

    Shapes are complete (a leading batch dimension included), -1 where any size goes. `is_batchable`: every input and
    output has a leading dimension of any size, so the model may be given `max_batch_size` > 0.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    is_batchable: bool
    most_rows: int | None = None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is in force in an open session, for the log, `status`, `check` and metrics.

    `runtime`: "onnxruntime 1.23.2". `device`: "CPU", "GPU:0". `precision`: the arithmetic in use: "f32", "bf16",
    "f16", "int8" ...; "int" for a model without floating point, "mixed", or "as the model says" where a device chooses
    by itself and does not tell. `options`: runtime options set, as text.

    `is_bound`: the session is bound to a thread, as what holds a CUDA context or a user's Python code is. It is opened,
    warmed and closed on one thread, its instance's own, and may still be run on others. One that is not bound has no
    thread: any thread may open, run and close it, and a pool of threads runs it. `keeps_thread`: once open, it is run
    on its instance's own thread alone, as code expects that keeps something for each thread.

    `only_computes`: a run ends by itself. It never waits for an answer of this server, as a user's program may, nor for
    anything else without end. Threads that read for many clients may run it then, if its runs are short.
    """

    runtime: str
    device: str
    precision: str
    options: Mapping[str, str] = field(default_factory=dict)
    keeps_thread: bool = False
    is_bound: bool = True
    only_computes: bool = False


class Session(abc.ABC):
    """One model opened by one runtime: tensors in, tensors out, all rows of a batch at once."""

    info: SessionInfo

    takes_requests: Literal[False] = False
    """What tells a Session from a RequestSession, at the cost of an attribute."""

    takes_device_memory: bool = False
    """Whether `run_on_device` does more than `run`: tensors in a GPU's memory are then handed over where they lie."""

    @abc.abstractmethod
    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run one batch and return the named outputs.

        Arrays have `(rows, *shape)` when the model batches, else the shape itself; element types are
        `DType.numpy` of the declared types (object arrays of bytes for BYTES, uint16 bit patterns for BF16).
        Returned arrays belong to the caller: the session neither reuses nor frees them.
        Raises BackendError.
        """

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> Mapping[str, Array | DeviceArray]:
        """Run one batch as `run` does, of which some inputs lie on a GPU, or some outputs are wanted there.

        What an input or a target cannot be used for as it lies (another GPU, another element type, too small) goes by
        way of the host. An output that was written to its target is a DeviceArray of it; a target is written only by a
        run that succeeds, and nothing of inputs or targets is touched after the return, whether by an error or not.
        """
        return self.run({name: to_host_array(array) for name, array in inputs.items()}, outputs)

    @abc.abstractmethod
    def close(self) -> None:
        """Give the model's memory back. Called once."""


NOT_ITERATIVE = "its configuration has no sequence_batching { iterative_sequence: true }"


class Execution(Protocol):
    """One request handed to a RequestSession, with the means to answer it any number of times."""

    request: Request

    def is_cancelled(self) -> bool: ...

    def send(
        self,
        outputs: Mapping[str, Array],
        *,
        is_final: bool = False,
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        """Send one response. The last one says `is_final`; `finish` closes without one."""

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        """Answer with an error, and close unless more is to come."""

    def finish(self) -> None:
        """Close the stream of responses without a further one."""

    def reschedule(self) -> None:
        """Close this execution, not its request: that comes again with a later batch, as an execution of its own, along
        with whatever is there by then. For models with `sequence_batching { iterative_sequence: true }`."""


class RequestSession(abc.ABC):
    """A model that sees requests rather than a batch of rows: decoupled models, models written in Python.

    Each execution must be closed exactly once (a final `send`, `fail`, `finish` or `reschedule`), now or later, from
    any thread.
    """

    info: SessionInfo

    takes_requests: Literal[True] = True

    @abc.abstractmethod
    def execute(self, executions: Sequence[Execution]) -> None:
        """Take the requests of one batch. What it raises fails every execution that is not closed."""

    has_health_check: bool = False
    """Whether `is_healthy` may ever say no, and may take time to say it."""

    def is_healthy(self) -> bool:
        """Say whether it can serve, within seconds; called from any thread, also while it executes."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Give the model's memory back. Called once."""


class BlsCall(Protocol):
    """A request that a model made of another model."""

    def cancel(self) -> None:
        """Take it back: its sink gets a final CANCELLED now, unless the final response was sent already."""


class ServerCalls(Protocol):
    """What a model may ask of the server that it lives in. From any thread; raises EdgeServerError."""

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> BlsCall:
        """Have a model answer. An error found at once is raised instead, and the sink is never called then.

        `hold_us`: for how many microseconds the calling thread may be held to compute it; math.inf: it waits anyway.
        """

    def model_spec(self, name: str, version: int | None) -> ModelSpec:
        """Return the current specification of the model."""

    def is_model_ready(self, name: str, version: int | None) -> bool: ...

    def load_model(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        """Load or reload, and wait for it."""

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None: ...

    def add_metrics(self, source: MetricSource) -> None:
        """Show the families of `source` on the metrics page from now on. The same source counts once."""

    def find_engine(self, order: EngineOrder) -> EngineFile | None:
        """Return the verified engine that matches an order. None where there is none: if engines are built here, it is
        built then, and the model loaded anew once it is there."""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """What a backend needs to open one instance. `device_id` counts GPUs; None is the CPU.

    `settings` are server-wide options for this backend (`--backend-config=name,key=value`). `server` is None where
    the model lives outside a server, as in a test of a backend alone."""

    spec: ModelSpec
    file: ModelFile
    instance_name: str
    device_id: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    server: ServerCalls | None = None


class Backend(abc.ABC):
    """One runtime. Made once, on first use; its constructor imports the library and raises BackendMissing with the
    pip line when it is not there or does not import."""

    name: str
    default_filename: str
    """File looked for in the version directory when the configuration names none; "" when the backend needs no file."""

    default_instance_count: int = 1
    default_max_batch_size: int = 4
    """max_batch_size given to a batchable model whose configuration states none (Triton: 4 for ORT and OpenVINO)."""

    runs_on_gpu: bool = False
    """Whether KIND_AUTO means the box's GPUs for this backend, when the box has any; KIND_CPU otherwise."""

    @abc.abstractmethod
    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        """Read the inputs and outputs from the file; None when this runtime cannot tell (the configuration must).

        Raises LoadError when the file is missing, corrupt, or not for this runtime.
        """

    def file_for(self, cc_filenames: Mapping[str, str]) -> str:
        """Return which of the files in `cc_model_filenames`, by compute capability, is made for the GPU in this box; ""
        when none is."""
        return ""

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        """Return the configuration as the model itself completes it, both as JSON; None when it has no say in it.

        For models that are programs; what a file declares is `inspect`'s. Raises LoadError.
        """
        return None

    @abc.abstractmethod
    def open(self, job: OpenJob) -> Session | RequestSession:
        """Open one instance. Raises LoadError."""
