"""Class `Server`: the inference server inside a Python program, whose classes and methods are named as those of
NVIDIA's Python package `tritonserver`.

    with edge_server.Server(model_repository="models") as server:
        answer = server.infer("my_model", {"INPUT0": array}, deadline_ms=50)
        print(answer.outputs["OUTPUT0"])

Nothing of the process is changed: no signal handlers, no logging handlers or levels, no settings of the interpreter or
the allocator. The server's log records go to the logger `edge_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from edge_server.config import GrpcConfig
from edge_server.config.merge_settings import parse_serve
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_check import UNKNOWN_ID
from edge_server.core.request_response import Parameter, Request, Response, ResponseSink, SequenceStep, SubmittedRequest
from edge_server.core.status_reports import IndexEntry
from edge_server.core.tensor import DType, Tensor, bf16_bits
from edge_server.errors import InvalidRequest, LoadError, NotReady, Unsupported
from edge_server.frontends.grpc.call import Methods
from edge_server.frontends.grpc.in_process_call import DirectCall, DirectStream
from edge_server.frontends.grpc.in_process_call import RpcError as RpcError
from edge_server.frontends.grpc.rpc_table import served_methods
from edge_server.frontends.v2 import control_responses
from edge_server.frontends.v2.version_text import parse_version
from edge_server.plugin import find_plugins
from edge_server.process.composition_root import ServerParts, build
from edge_server.process.server import ServerProcess
from edge_server.process.systemd_supervision import EndRequest, ProcessEnvironment, summary
from edge_server.service import READING_THREAD_HOLD_US, InferenceService
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.metrics_page import Family as Family

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack  # type checkers bring it along; it is not installed with this package


class InferOptions(TypedDict, total=False):
    """Options of a request, all optional: arguments of `Server.infer`, `ainfer`, `stream` and `astream`."""

    version: int | str | None
    """The model version, 1 or "1". None or "": the highest that serves."""
    outputs: Sequence[str]
    """Names of the outputs to compute; none: all."""
    deadline_ms: float | None
    """A request that cannot be answered in this time is refused."""
    request_id: str
    """Comes back in the result, and stands in the messages of errors."""
    parameters: Mapping[str, Parameter] | None
    priority: int
    """1 is the highest, 0 the model's default."""
    sequence_id: int | str
    """0 and "": the request belongs to no sequence."""
    sequence_start: bool
    sequence_end: bool


@dataclass(frozen=True, slots=True)
class InferResult:
    """One response. `outputs` are arrays by name, owned by the receiver; strings are bytes objects."""

    model: str
    version: int
    request_id: str
    outputs: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, Parameter]


class Server:
    """A server in this process, on threads of its own. All methods may be called from any thread.

    Several servers may run at once. An instance is started once, and not again after `stop`; `with` and `async with` do
    both. A program that ends without `stop` drops the requests in flight. A child process that was forked from a
    running server has no server: there the methods raise NotReady, and `stop` does nothing.
    """

    def __init__(
        self,
        model_repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        **settings: object,
    ) -> None:
        """`..._port`: None opens no port, 0 any free one. `settings` are the flags of `edge-server serve` with
        underscores, such as `model_control_mode="explicit"` or `load_model=["a", "b"]`.

        The process's environment variables are not read. Raises ConfigError for wrong settings.
        """
        given: dict[str, object] = {"model_repository": model_repository}
        for name, port in (("http", http_port), ("grpc", grpc_port), ("metrics", metrics_port)):
            given |= {f"allow_{name}": False} if port is None else {f"{name}_port": port}
        self._plugins = find_plugins().plugins
        config = parse_serve(_flags(given | settings), {}, self._plugins).config
        # A library writes only where its user says.
        repository = replace(config.repository, measurements_dir=config.repository.state_dir)
        self._config = replace(config, repository=repository)
        self._lock = threading.Lock()
        self._core: ServerParts | None = None
        self._process: ServerProcess | None = None
        self._thread: threading.Thread | None = None
        self._methods: Methods = {}
        self._has_progress = threading.Event()
        """Set when the models are loaded or have failed, and when the server has ended."""
        self._error: BaseException | None = None
        self._is_stopped = False
        self._process_id = 0
        """The process that started the server, 0 before. A forked child inherits this object, but no thread."""

    def start(self) -> Server:
        """Start, and wait until each model is loaded or has failed. Return the server itself.

        Raises EdgeServerError for a port that is taken or a repository that cannot be read; with `exit_on_error=True`
        LoadError if a model has failed; NotReady after `stop`. A second call only waits.
        """
        if self._process_id:
            self._check_process()
        self._check_not_stopped()
        # Before the lock: a child that is forked meanwhile must not wait for a lock that no thread there releases.
        self._process_id = os.getpid()
        with self._lock:
            if self._thread is None:
                log_settings = LogSettings(self._config.log, sets_levels=False)
                end = EndRequest()
                self._core = build(self._config, log_settings, self._plugins)
                self._process = ServerProcess(self._config, self._core, ProcessEnvironment(), log_settings, end)
                # Without the keys of the configuration, which are for the ports.
                self._methods = served_methods(self._core.service, GrpcConfig())
                self._thread = threading.Thread(
                    target=self._run, args=(self._process,), name="edge-server", daemon=True
                )
                self._thread.start()
                if self._is_stopped:  # meanwhile, by a `stop` that saw no thread yet
                    self._process.stop()
        self._has_progress.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        self._check_not_stopped()
        return self

    def stop(self) -> None:
        """Refuse new requests, drain for at most `exit_timeout_secs`, and close everything. The server cannot be
        started again."""
        if self._process_id and self._is_forked:
            return
        # Before the thread is read, and without the lock: see `start`.
        self._is_stopped = True
        thread = self._thread
        if thread is None or self._process is None:
            return
        self._process.stop()
        thread.join()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Server:
        """Start as `start` does, while the event loop goes on."""
        try:
            return await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.stop)  # the thread of the start goes on without it
            raise

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    # -- state

    @property
    def http_port(self) -> int | None:
        """The open port, None if there is none."""
        return self._port("http")

    @property
    def grpc_port(self) -> int | None:
        return self._port("grpc")

    @property
    def metrics_port(self) -> int | None:
        return self._port("metrics")

    def live(self) -> bool:
        """Return whether the server runs and is not stopping."""
        is_running = self._thread is not None and self._thread.is_alive() and not self._is_forked
        return is_running and self._service.is_live()

    def ready(self) -> bool:
        """Return whether the server is ready, by the rule of `/v2/health/ready`."""
        return self.live() and self._service.is_ready()

    def models(self) -> list[IndexEntry]:
        """Return name, version, state and reason of each model version."""
        return self._service.repository_index()

    def load(self, model: str) -> None:
        """Load a model or load it again, and wait. Needs `model_control_mode="explicit"`. Raises EdgeServerError."""
        self._service.load_model(model)

    def unload(self, model: str) -> None:
        """Unload a model. Returns at once. Needs `model_control_mode="explicit"`. Raises EdgeServerError."""
        self._service.unload_model(model)

    def metadata(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Return the JSON object of `GET /v2`, or of `GET /v2/models/MODEL`: versions, platform, inputs and outputs.

        Raises UnknownModel, NotReady.
        """
        if model is None:
            return control_responses.server_metadata(self._service.server_metadata())
        return control_responses.model_metadata(self._service.model_metadata(model, _version(version)))

    def statistics(self, model: str | None = None, version: int | str | None = None) -> dict[str, Any]:
        """Return the JSON object of `GET /v2/models/MODEL/stats`: counts and durations in nanoseconds of each version
        that serves, by default of all models. Raises InvalidRequest for a model that does not serve."""
        return control_responses.statistics(self._service.statistics(model, _version(version)))

    def metrics(self) -> str:
        """Return the metrics page, in the text format of Prometheus. Needs no `metrics_port`."""
        self._check_running()
        assert self._process is not None
        return self._process.metrics.render()[0].decode()

    def metric_families(self) -> list[Family]:
        """Return the metric families of the page, without those of the process; for bridges to other collectors."""
        self._check_running()
        assert self._process is not None
        return list(self._process.metrics.families())

    # -- inference

    def infer(self, model: str, inputs: Mapping[str, npt.ArrayLike], **options: Unpack[InferOptions]) -> InferResult:
        """Send one request and wait for its response.

        `inputs` are arrays by name, with the batch dimension if the model has one; text is str or bytes. Numbers and
        lists of Python's int, float and bool take the model's type, if they fit into it; arrays keep theirs. Inputs
        must not change before the response. Options: see InferOptions.

        Raises EdgeServerError with the same codes and messages as a client gets; Unsupported for a decoupled model.
        """
        done = threading.Event()
        kept = _OneResponse(done.set)
        ticket = self._submit(model, inputs, options, kept.receive, is_unary=True, hold_us=math.inf)
        try:
            done.wait()
        finally:
            ticket.cancel()  # after an exception such as KeyboardInterrupt; else it has no effect
        return kept.answer()

    async def ainfer(
        self, model: str, inputs: Mapping[str, npt.ArrayLike], **options: Unpack[InferOptions]
    ) -> InferResult:
        """As `infer`, for an event loop. A cancelled task cancels the request."""
        done = asyncio.Event()
        kept = _OneResponse(_from_any_thread(done.set))
        ticket = self._submit(model, inputs, options, kept.receive, is_unary=True, hold_us=READING_THREAD_HOLD_US)
        try:
            await done.wait()
        finally:
            ticket.cancel()
        return kept.answer()

    def stream(
        self, model: str, inputs: Mapping[str, npt.ArrayLike], **options: Unpack[InferOptions]
    ) -> Generator[InferResult, None, None]:
        """Send one request at the first `next`, and yield its responses: any number if the model is decoupled.

        Inputs, options and errors as for `infer`. Closing the iterator cancels the request. Responses that the program
        has not taken are kept in memory.
        """
        arrived: queue.SimpleQueue[Response] = queue.SimpleQueue()
        ticket = self._submit(model, inputs, options, arrived.put)
        try:
            is_final = False
            while not is_final:
                self._check_running()
                response = arrived.get()
                is_final = response.is_final
                if not response.is_empty:
                    yield _answer(response)
        finally:
            ticket.cancel()

    async def astream(
        self, model: str, inputs: Mapping[str, npt.ArrayLike], **options: Unpack[InferOptions]
    ) -> AsyncGenerator[InferResult, None]:
        """As `stream`, for an event loop. A cancelled task cancels the request; so does `aclose` of the generator."""
        arrived: asyncio.Queue[Response] = asyncio.Queue()
        ticket = self._submit(model, inputs, options, _from_any_thread(arrived.put_nowait))
        try:
            is_final = False
            while not is_final:
                self._check_running()
                response = await arrived.get()
                is_final = response.is_final
                if not response.is_empty:
                    yield _answer(response)
        finally:
            ticket.cancel()

    def call(self, method: str, message: bytes) -> bytes:
        """Call a unary method of Triton's GRPCInferenceService, such as "ModelInfer" or "RepositoryIndex".

        `message` and the result are serialized protobuf messages. Raises RpcError.
        """
        self._check_running()
        done = threading.Event()
        call = DirectCall(self._methods, method, message, done.set, math.inf)
        try:
            done.wait()
        except BaseException:  # such as KeyboardInterrupt
            call.cancel()
            raise
        return call.result()

    async def acall(self, method: str, message: bytes) -> bytes:
        """As `call`, for an event loop. A cancelled task cancels the request."""
        self._check_running()
        done = asyncio.Event()
        call = DirectCall(self._methods, method, message, _from_any_thread(done.set), READING_THREAD_HOLD_US)
        try:
            await done.wait()
        except asyncio.CancelledError:
            call.cancel()
            raise
        return call.result()

    async def acall_stream(self, method: str, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Call a stream method of Triton's GRPCInferenceService, "ModelStreamInfer": yield a message for each response.

        Closing the generator cancels the open requests. Raises RpcError.
        """
        self._check_running()
        responses = DirectStream(self._methods, method, READING_THREAD_HOLD_US).run(messages)
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response

    # -- inside

    @property
    def _service(self) -> InferenceService:
        self._check_running()
        assert self._core is not None
        return self._core.service

    def _check_running(self) -> None:
        if self._core is None:
            self._check_not_stopped()
            raise NotReady("the server is not started: call start(), or use it in a with statement")
        self._check_process()

    @property
    def _is_forked(self) -> bool:
        return self._process_id != os.getpid()

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise NotReady("the server was stopped and cannot be started again: make a new edge_server.Server")

    def _check_process(self) -> None:
        if self._is_forked:
            raise NotReady(
                f"the server runs in process {self._process_id}, from which this process {os.getpid()} was forked: "
                "start the server after the fork, in each process that needs one"
            )

    def _port(self, name: str) -> int | None:
        return None if self._process is None or self._is_forked else self._process.ports.get(name)

    def _run(self, process: ServerProcess) -> None:
        try:
            asyncio.run(process.run(self._on_started))
        except BaseException as error:  # noqa: BLE001 - `start` raises it on the thread of its caller
            self._error = error
        finally:
            self._has_progress.set()

    def _on_started(self) -> None:
        assert self._core is not None
        if self._config.lifecycle.exits_on_error and self._core.service.router.has_failures():
            self._error = LoadError(summary(self._core.service.router.index()))
        else:
            self._has_progress.set()

    def _submit(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        options: InferOptions,
        sink: ResponseSink,
        *,
        is_unary: bool = False,
        hold_us: float = 0.0,
    ) -> SubmittedRequest:
        handle = self._service.find(model, _version(options.get("version")))
        if is_unary and handle.spec.is_decoupled:
            raise Unsupported(f"model '{model}' is decoupled: use stream() instead of infer()")
        request = _request(model, inputs, handle.spec, **options)
        try:
            return handle.submit(request, sink, hold_us=hold_us)
        except InvalidRequest as error:
            raise _without_unknown_id(error) from None


class _OneResponse:
    """Keeps the response of a model that is not decoupled, and calls `on_end` after the final one."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._response: Response | None = None

    def receive(self, response: Response) -> None:
        if self._response is None or not response.is_empty:
            self._response = response
        if response.is_final:
            self._on_end()

    def answer(self) -> InferResult:
        assert self._response is not None
        return _answer(self._response)


def _from_any_thread(function: Callable[..., object]) -> Callable[..., None]:
    """Return a function for any thread that makes this event loop call `function`, unless the loop is closed."""
    loop = asyncio.get_running_loop()

    def call(*arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(function, *arguments)

    return call


def _flags(settings: Mapping[str, object]) -> list[str]:
    flags = []
    for name, value in settings.items():
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for item in values:
            flags.append(f"--{name.replace('_', '-')}={str(item).lower() if isinstance(item, bool) else item}")
    return flags


def _version(version: int | str | None) -> int | None:
    return parse_version(version) if isinstance(version, str) else version


def _request(
    model: str,
    inputs: Mapping[str, npt.ArrayLike],
    spec: ModelSpec,
    *,
    version: int | str | None = None,
    outputs: Sequence[str] = (),
    deadline_ms: float | None = None,
    request_id: str = "",
    parameters: Mapping[str, Parameter] | None = None,
    priority: int = 0,
    sequence_id: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
) -> Request:
    return Request(
        model=model,
        inputs={name: _tensor(spec, name, value) for name, value in inputs.items()},
        version=_version(version),
        id=request_id,
        outputs=tuple(outputs),
        parameters=dict(parameters or {}),
        priority=priority,
        sequence=SequenceStep(sequence_id, sequence_start, sequence_end) if sequence_id else None,
        deadline_ns=0 if deadline_ms is None else time.monotonic_ns() + int(deadline_ms * 1e6),
    )


def _tensor(spec: ModelSpec, name: str, value: npt.ArrayLike) -> Tensor:
    error_prefix = f"input '{name}' for model '{spec.name}'"
    try:
        array = np.asarray(value)
        if array.dtype.kind in "SU" and not isinstance(value, np.ndarray):
            array = np.asarray(value, object)  # numpy's own text types drop NULs at the end
    except ValueError as error:
        raise InvalidRequest(f"{error_prefix} is no array: {error}") from None
    if isinstance(value, _PLAIN):
        for item in spec.inputs:
            if item.name == name and item.dtype.numpy != array.dtype:
                array = _with_type(array, item.dtype, error_prefix)
                if item.dtype is DType.BF16 and array.dtype == np.uint16:
                    return Tensor(name, item.dtype, array)
    if array.dtype.name == "bfloat16":  # of the package ml_dtypes
        return Tensor(name, DType.BF16, np.ascontiguousarray(array).view(np.uint16).reshape(array.shape))
    try:
        dtype = DType.from_numpy(array.dtype)
    except KeyError:
        raise InvalidRequest(f"{error_prefix}: no tensor type for numpy type {array.dtype}") from None
    if dtype is DType.BYTES:
        return Tensor(name, dtype, _encode_texts(array, error_prefix))
    return Tensor(name, dtype, np.ascontiguousarray(array, dtype.numpy).reshape(array.shape))


def _encode_texts(array: npt.NDArray[Any], error_prefix: str) -> npt.NDArray[np.object_]:
    texts = np.empty(array.size, object)
    for place, item in enumerate(array.ravel().tolist()):
        if not isinstance(item, str | bytes):
            raise InvalidRequest(f"{error_prefix}: expected text or bytes, got {type(item).__name__}")
        texts[place] = item.encode() if isinstance(item, str) else item
    return texts.reshape(array.shape)


_PLAIN = (bool, int, float, list, tuple)
"""Python's own types, which say nothing of the type of a tensor."""


def _with_type(array: npt.NDArray[Any], expected: DType, error_prefix: str) -> npt.NDArray[Any]:
    """Return Python's integers and floats as an array of the model's type; unchanged if it is of another kind.

    Integers become integers and floats, floats only floats, as in JSON over HTTP. Raises InvalidRequest for a number
    out of range.
    """
    if array.size == 0:
        return array.astype(expected.numpy)
    if array.dtype.kind == "O" and set(map(type, array.ravel().tolist())) <= {int} and expected is not DType.BYTES:
        raise InvalidRequest(f"{error_prefix}: a number is out of range for {expected.value}")
    if array.dtype not in (np.int64, np.uint64, np.float64) or expected in (DType.BOOL, DType.BYTES):
        return array
    if expected.numpy.kind in "iu" and expected is not DType.BF16:
        if array.dtype.kind == "f":
            return array
        limits = np.iinfo(str(expected.numpy))
        lowest, highest = int(array.min()), int(array.max())
        if lowest < limits.min or highest > limits.max:
            wrong = lowest if lowest < limits.min else highest
            raise InvalidRequest(
                f"{error_prefix}: {wrong} is out of range for {expected.value}, {limits.min} to {limits.max}"
            )
        return array.astype(expected.numpy)
    with np.errstate(over="ignore"):
        if expected is DType.BF16:
            found: npt.NDArray[Any] = bf16_bits(array.astype(np.float32))
            is_infinite = found & 0x7FFF == 0x7F80
        else:
            found = array.astype(expected.numpy)
            is_infinite = np.isinf(found)
    if is_infinite.any() and not np.array_equal(is_infinite, np.isinf(array)):
        raise InvalidRequest(f"{error_prefix}: a number is out of range for {expected.value}")
    return found


def _without_unknown_id(error: InvalidRequest) -> InvalidRequest:
    """Return the error without Triton's note that the request has no id: a caller in this process knows its request."""
    if error.message.startswith(UNKNOWN_ID):
        return InvalidRequest(error.message.removeprefix(UNKNOWN_ID))
    return error


def _answer(response: Response) -> InferResult:
    if response.error is not None:
        error = response.error
        raise _without_unknown_id(error) if isinstance(error, InvalidRequest) else error
    outputs = {tensor.name: tensor.array for tensor in response.outputs}
    return InferResult(response.model, response.version, response.request_id, outputs, response.parameters)
