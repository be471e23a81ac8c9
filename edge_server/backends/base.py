"""Abstract classes that a backend implements, and the server functions that a backend may call.

A **backend** is the adapter for one runtime (onnxruntime, TensorRT, ...). It reads the inputs and outputs of a model
file, and opens sessions. A **session** is one model, opened on one device. It runs one batch at a time, and knows
nothing of queues, batching or protocols. There are two kinds: a `Session` gets the tensors of a whole batch, a
`RequestSession` gets the single requests and may send any number of responses to each.

Life of a session:

1. `Backend.inspect` reads the model file's inputs and outputs.
2. `Backend.open` opens one session for each instance.
3. `Session.run` is called once per batch, by one thread at a time. Successive calls may come from different threads.
4. `Session.close` is called once, after the last run. It frees the model's memory.

Rules for every backend:

- The runtime's library is imported in the backend's own file, and only when a model first needs it.
- `run` releases the GIL while it computes.
- `run` does not write into its inputs, which may be read-only views, and keeps no reference to them after it returns.
- Exceptions of the library become LoadError in `inspect` and `open`, and BackendError in `run`. The message contains
  the model's name and the library's message. The new exception is raised outside of the `except` block: a chained
  traceback would keep the batch's tensors in memory.
- `SessionInfo` says on which threads the session may be opened and run.

Other packages can add backends. They derive from `Backend` and register the class, or a function that takes the name
and returns a Backend, as an entry point in pyproject.toml:

    [project.entry-points."edge_server.backends"]
    thermal = "thermal_runtime.serving:ThermalBackend"

When a model's configuration names `backend: "thermal"` for the first time, the server imports the class and calls
`ThermalBackend("thermal")`. The names of the server's own backends cannot be replaced. Such a package needs only
`backends.base`, `core.model_spec`, `core.tensor` and `errors`. Any other exception fails only that model, and is
reported with the package's name.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from edge_server.core.device_tensor import DeviceArray, DevicePiece, to_host_array
from edge_server.core.metric_family import MetricSource
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.model_spec import ModelFile as ModelFile
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request, ResponseSink
from edge_server.errors import EdgeServerError
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"


MAX_METADATA_TEXT = 1 << 20


class ModelSignature(NamedTuple):
    """Inputs and outputs of a model file.

    Shapes are complete, with a leading batch dimension if there is one. -1 is a dimension of any size. `is_batchable`:
    every input and output has a leading dimension of any size, so that `max_batch_size` may be greater than 0.
    `most_rows`: the largest batch that the file allows, None if it has no limit. `metadata`: texts that the exporter
    wrote into the file, by key, of at most MAX_METADATA_TEXT characters. They may be hostile. `warnings` are sentences
    about results of this runtime that may be wrong. If the runtime was chosen and not stated, another one is taken.
    `unranked`: names of inputs and outputs whose number of dimensions the file does not declare; their shape is (-1,)
    here. `unusable`: further outputs, which requests cannot carry, each with the reason. A configuration may leave them
    out.
    `notes` are for the log and the index.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    is_batchable: bool
    most_rows: int | None = None
    metadata: Mapping[str, str] = MappingProxyType({})
    warnings: tuple[str, ...] = ()
    unranked: frozenset[str] = frozenset()
    unusable: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class SessionInfo:
    """Properties of an open session, for scheduling, the log, `status`, `check` and metrics.

    For people: `runtime`, as "onnxruntime 1.23.2"; `device`, "CPU" or "GPU:0"; `precision`, the arithmetic in use
    ("f32", "bf16", "f16", "int8"; "int" for a model without floating point; "mixed"; "as the model says" if the device
    chooses and does not report it); `options`, the runtime's options as text.

    For checks of requests: `needs_utf8`, whether string inputs must be UTF-8.

    For threads:

    - `is_bound`: the session is opened, warmed up and closed on its instance's own thread, for example because it holds
      a CUDA context. It may still run on other threads. A session that is not bound may be opened, run and closed on
      any thread, and a pool of threads runs it.
    - `keeps_thread`: the session also runs only on its instance's own thread, because its code keeps state per thread.
    - `only_computes`: a run always ends by itself. It does not wait for this server or a network. If such runs are
      short, they may execute on the thread that received the request.
    """

    runtime: str
    device: str
    precision: str
    options: Mapping[str, str] = field(default_factory=dict)
    keeps_thread: bool = False
    is_bound: bool = True
    only_computes: bool = False
    needs_utf8: bool = False


class Session(abc.ABC):
    """A model that computes whole batches: input tensors of all rows in, output tensors of all rows out."""

    info: SessionInfo

    takes_requests: Literal[False] = False
    """Tells a Session from a RequestSession without a slow `isinstance`."""

    takes_device_memory: bool = False
    """Whether the session overrides `run_on_device`. It then gets tensors in GPU memory without a copy."""

    is_repeatable: bool = False
    """Whether a run has no side effects and keeps no state, so that the server may run the requests of a failed batch
    again, one by one."""

    @abc.abstractmethod
    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Run one batch and return the outputs named in `outputs`.

        If the model batches, arrays have the shape `(rows, *shape)`, else `shape`. Element types are `DType.numpy` of
        the declared types: object arrays of bytes for BYTES, uint16 bit patterns for BF16. The caller owns the returned
        arrays; the session must not reuse or free their memory. Raises BackendError.
        """

    def run_on_device(
        self, inputs: Mapping[str, Array | DeviceArray], outputs: Sequence[str], targets: Mapping[str, DevicePiece]
    ) -> Mapping[str, Array | DeviceArray]:
        """Run one batch as `run` does, with inputs or output targets in GPU memory.

        An input or target that cannot be used in place (other GPU, other element type, too small) is copied through the
        host. An output that was written to its target is returned as a DeviceArray of it. Targets are written only by a
        run that succeeds. After the return, with or without an error, the session does not access inputs and targets.
        """
        return self.run({name: to_host_array(array) for name, array in inputs.items()}, outputs)

    @abc.abstractmethod
    def close(self) -> None:
        """Free the model's memory. Called once, after the last run."""


NOT_ITERATIVE = "its configuration has no sequence_batching { iterative_sequence: true }"


class Execution(Protocol):
    """One request in a RequestSession, with the methods to respond to it any number of times.

    It is closed by a final `send` or `fail`, by `finish`, or by `reschedule`, exactly once. Any thread may call it.
    """

    request: Request

    def is_cancelled(self) -> bool:
        """Return whether the client no longer waits for responses."""

    def send(
        self,
        outputs: Mapping[str, Array],
        *,
        is_final: bool = False,
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        """Send one response. `is_final` closes the execution; `finish` closes it without another response."""

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        """Send an error, and close the execution unless `is_final` is False."""

    def finish(self) -> None:
        """Close the execution without another response."""

    def reschedule(self) -> None:
        """Close this execution and run its request again with a later batch, as a new execution.

        Only for models with `sequence_batching { iterative_sequence: true }`, of a backend that `runs_programs`.
        """


HEALTH_LIMIT_S = 5.0
"""Time limit of a model's health check. Triton has the same for `is_ready`."""


class RequestSession(abc.ABC):
    """A model that handles single requests: a decoupled model, or one written in Python.

    Each execution must be closed exactly once, during `execute` or later, from any thread (see Execution).
    """

    info: SessionInfo

    takes_requests: Literal[True] = True

    @abc.abstractmethod
    def execute(self, executions: Sequence[Execution]) -> None:
        """Handle the requests of one batch. An exception fails all executions that are not closed."""

    hands_over: bool = False
    """Whether `execute` only hands the requests to a thread of the session, and returns at once. In a child process the
    thread that receives messages then calls it."""

    @property
    def run_number(self) -> int | None:
        """Number of beginnings and ends of runs, odd while one is in progress; None if the runs are the calls of
        `execute`. A session that hands over counts what its own thread does."""
        return None

    def end_hung_run(self, reason: str) -> bool:
        """End a run that does not return, by ending the process that it is in. Return False if it is in this process.

        `reason` completes the sentence "its process ..." in the errors of the requests. A new process is started.
        """
        return False

    has_health_check: bool = False
    """Whether `is_healthy` does more than return True."""

    def is_healthy(self) -> bool:
        """Return whether the model can serve, within HEALTH_LIMIT_S. Called from any thread, also during `execute`."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Free the model's memory. Called once, after the last `execute` has returned."""


class BlsCall(Protocol):
    """A request that a model sent to another model."""

    def cancel(self) -> None:
        """Cancel the request. Its sink gets a final CANCELLED response, unless the final response was sent before."""


class CalledModel(Protocol):
    """The generation of another model that a request goes to."""

    @property
    def spec(self) -> ModelSpec: ...

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> BlsCall:
        """Send a request to the model; `sink` receives the responses. If this raises, `sink` is never called.

        `hold_us`: time in microseconds for which the calling thread may run the other model itself. math.inf: the
        caller would only wait anyway.
        """


class ServerCalls(Protocol):
    """The server's functions for models. Any thread may call them. They raise EdgeServerError."""

    def find(self, name: str, version: int | None) -> CalledModel:
        """Return the model that serves requests now. Raises NotFound, NotReady."""

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> BlsCall:
        """Find the model of a request and submit it, see CalledModel.submit."""

    def is_model_ready(self, name: str, version: int | None) -> bool:
        """Return whether the model, or the given version of it, can answer requests now."""

    def load_model(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        """Load or reload a model, and wait for it. `files` maps paths in the model's folder to contents."""

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model; with `unload_dependents` also the models that an ensemble consists of."""

    def add_metrics(self, source: MetricSource) -> None:
        """Add the families of `source` to the metrics page. Adding a source again has no effect."""

    def work_share(self) -> float:
        """Return the part of its time that a model may compute now: above 0, and 1 unless the governor limits work.

        For models that compute for long on their own, between responses. Returns at once.
        """

    def plugin(self, name: str) -> object | None:
        """Return the server's part of a plugin, for the backends that the plugin brings; None if it is not there."""


@record(frozen=True, slots=True)
class OpenJob:
    """Arguments of `Backend.open`: one instance of a model.

    `device_id` is the number of a GPU, None for the CPU. `settings` are the options for all models of this backend
    (`--backend-config=name,key=value`). `server` is None outside of a server, as in a test of a backend.
    """

    spec: ModelSpec
    file: ModelFile
    instance_name: str
    device_id: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    server: ServerCalls | None = None


class Backend(abc.ABC):
    """Adapter for one runtime. The server creates it once, on first use.

    The constructor imports the runtime's library. If that fails it raises BackendMissing with the `pip install` line.
    """

    name: str
    default_filename: str
    """Name of the file in the version folder if the configuration names none; "" if the backend needs no file."""

    default_instance_count: int = 1
    default_max_batch_size: int = 4
    """max_batch_size of a batchable model whose configuration has none (Triton: 4 for onnxruntime and OpenVINO)."""

    isolates_itself: bool = False
    """Whether `open` decides what runs in a child process. For others the server does, by the parameter `isolation`."""

    runs_on_gpu: bool = False
    """Whether KIND_AUTO instances run on the machine's GPUs, if there are any. Otherwise they run on the CPU."""

    no_gpu_reason: str = ""
    """Why instances of KIND_GPU are refused, as "computes on the CPU". "" if they are not."""

    may_end_process: bool = False
    """Whether a damaged file can end the process that opens it. Then a file that this machine has never opened is
    opened in a child process first."""

    compares_output_sizes: bool = False
    """Whether a size that the configuration states for an output, where the file leaves it open, is refused, as by
    Triton's backend of this name."""

    needs_every_input: bool = False
    """Whether no run may leave out an input of the file, unless `inspect` says that it is optional: the runtime fails,
    or computes with what an earlier request left there."""

    names_parameters: bool = False
    """Whether models name parameters of their own, so that no unknown name is a misspelt one."""

    runs_programs: bool = False
    """Whether models are programs: they may have no inputs or no outputs, keep the states of sequences themselves, and
    may ask to be run again for one request (`RequestExecution.reschedule`)."""

    used_fields: Collection[str] = ()
    """Those fields of config.pbtxt that this backend uses and others do not, of `cc_model_filenames`,
    `model_operations`, `optimization.cuda` and `instance_group.secondary_devices`."""

    @abc.abstractmethod
    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        """Return the inputs and outputs of the file; None if only the configuration can declare them.

        Raises LoadError when the file is missing, corrupt, or not for this runtime.
        """

    def file_for(self, cc_filenames: Mapping[str, str]) -> str:
        """Return the file in `cc_model_filenames` (by compute capability) that fits this machine's GPU, or ""."""
        return ""

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        """Return the configuration as the model completes it, both as JSON; None if the model does not complete it.

        Only for models that are programs; `inspect` reads files. Raises LoadError.
        """
        return None

    def memory_parts(self, file: ModelFile, model: str, parameters: Mapping[str, str]) -> Mapping[str, int]:
        """Return the memory of one instance in bytes, by what takes it ("weights", "KV cache").

        A load that does not fit is refused with the sum. Empty: it is estimated from the size of the files. Raises
        LoadError.
        """
        return {}

    @abc.abstractmethod
    def open(self, job: OpenJob) -> Session | RequestSession:
        """Open one instance of a model. Raises LoadError."""
