"""Server: the inference server inside a Python program. The names are those of NVIDIA's package `tritonserver`.

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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.config import GrpcConfig
from edge_server.config.merge_settings import parse_serve
from edge_server.core.request_response import Parameter, Request, Response, SequenceStep
from edge_server.core.status_reports import IndexEntry
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest, LoadError, NotReady, Unsupported
from edge_server.frontends.grpc.call import Methods
from edge_server.frontends.grpc.direct_call import DirectCall, DirectStream
from edge_server.frontends.grpc.direct_call import RpcError as RpcError
from edge_server.frontends.grpc.rpc_table import served_methods
from edge_server.process.composition_root import ServerParts, build
from edge_server.process.server import ServerProcess
from edge_server.process.systemd_supervision import EndRequest, ProcessEnvironment, summary
from edge_server.service import READING_THREAD_HOLD_US, InferenceService
from edge_server.telemetry.log import LogSettings

if TYPE_CHECKING:
    import numpy.typing as npt


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

    Several servers may run at once. An instance is started once. A program that ends without `stop` drops the requests
    in flight. A child process that was forked from a running server has no server: there the methods raise NotReady,
    and `stop` does nothing.
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
        self._config = parse_serve(_flags(given | settings), {}).config
        self._lock = threading.Lock()
        self._core: ServerParts | None = None
        self._process: ServerProcess | None = None
        self._thread: threading.Thread | None = None
        self._methods: Methods = {}
        self._has_progress = threading.Event()
        """Set when the models are loaded or have failed, and when the server has ended."""
        self._error: BaseException | None = None
        self._process_id = 0
        """The process that started the server, 0 before. A forked child inherits this object, but no thread."""

    def start(self) -> Server:
        """Start, and wait until each model is loaded or has failed. Return the server itself.

        Raises EdgeServerError for a port that is taken or a repository that cannot be read; with `exit_on_error=True`
        LoadError if a model has failed. A second call only waits.
        """
        if self._process_id:
            self._check_process()
        # Before the lock: a child that is forked meanwhile must not wait for a lock that nobody there releases.
        self._process_id = os.getpid()
        with self._lock:
            if self._thread is None:
                log_settings = LogSettings(self._config.log, sets_levels=False)
                end = EndRequest()
                self._core = build(self._config, log_settings)
                self._process = ServerProcess(self._config, self._core, ProcessEnvironment(), log_settings, end)
                # Without the keys of the configuration, which are for the ports.
                self._methods = served_methods(self._core.service, GrpcConfig())
                self._thread = threading.Thread(
                    target=self._run, args=(self._process,), name="edge-server", daemon=True
                )
                self._thread.start()
        self._has_progress.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def stop(self) -> None:
        """Refuse new requests, drain for at most `exit_timeout_secs`, and close everything. Does nothing if the server
        does not run."""
        thread = self._thread
        if thread is None or self._process is None or self._is_forked:
            return
        self._process.stop()
        thread.join()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

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

    # -- inference

    def infer(self, model: str, inputs: Mapping[str, npt.ArrayLike], **options: Any) -> InferResult:
        """Send one request and wait for its response.

        `inputs` are arrays by name, with the batch dimension if the model has one; text is str or bytes. They must not
        change before the response. Options: `version` (int), `outputs` (names, default all), `deadline_ms` (a request
        that cannot be answered in time is refused), `request_id`, `parameters`, `priority`, `sequence_id`,
        `sequence_start`, `sequence_end`.

        Raises EdgeServerError with the same codes and messages as a client gets; Unsupported for a decoupled model.
        """
        request = self._unary_request(model, inputs, options)
        done = threading.Event()
        kept = _OneResponse(done.set)
        ticket = self._service.submit(request, kept.receive, hold_us=math.inf)
        try:
            done.wait()
        finally:
            ticket.cancel()  # after an exception such as KeyboardInterrupt; else it has no effect
        return kept.answer()

    async def ainfer(self, model: str, inputs: Mapping[str, npt.ArrayLike], **options: Any) -> InferResult:
        """As `infer`, for an event loop. A cancelled task cancels the request."""
        request = self._unary_request(model, inputs, options)
        done = asyncio.Event()
        kept = _OneResponse(_from_any_thread(done.set))
        ticket = self._service.submit(request, kept.receive, hold_us=READING_THREAD_HOLD_US)
        try:
            await done.wait()
        finally:
            ticket.cancel()
        return kept.answer()

    def stream(self, model: str, inputs: Mapping[str, npt.ArrayLike], **options: Any) -> Iterator[InferResult]:
        """Send one request at the first `next`, and yield its responses: any number if the model is decoupled.

        Inputs, options and errors as for `infer`. Closing the iterator cancels the request. Responses that the program
        has not taken are kept in memory.
        """
        request = _request(model, inputs, **options)
        arrived: queue.SimpleQueue[Response] = queue.SimpleQueue()
        ticket = self._service.submit(request, arrived.put)
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

    async def acall_stream(self, method: str, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
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
            raise NotReady("the server is not started: call start(), or use it in a with statement")
        self._check_process()

    @property
    def _is_forked(self) -> bool:
        return self._process_id != os.getpid()

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
        if self._config.lifecycle.exits_on_error and self._core.manager.has_failures():
            self._error = LoadError(summary(self._core.manager.index()))
        else:
            self._has_progress.set()

    def _unary_request(self, model: str, inputs: Mapping[str, npt.ArrayLike], options: Mapping[str, Any]) -> Request:
        request = _request(model, inputs, **options)
        if self._service.model_spec(model, request.version).is_decoupled:
            raise Unsupported(f"model '{model}' is decoupled: use stream() instead of infer()")
        return request


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


def _from_any_thread(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function for any thread that makes this event loop call `function`, unless the loop is closed."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function)

    return call


def _flags(settings: Mapping[str, object]) -> list[str]:
    flags = []
    for name, value in settings.items():
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for item in values:
            flags.append(f"--{name.replace('_', '-')}={str(item).lower() if isinstance(item, bool) else item}")
    return flags


def _request(
    model: str,
    inputs: Mapping[str, npt.ArrayLike],
    *,
    version: int | None = None,
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
        inputs={name: _tensor(model, name, value) for name, value in inputs.items()},
        version=version,
        id=request_id,
        outputs=tuple(outputs),
        parameters=dict(parameters or {}),
        priority=priority,
        sequence=SequenceStep(sequence_id, sequence_start, sequence_end) if sequence_id else None,
        deadline_ns=0 if deadline_ms is None else time.monotonic_ns() + int(deadline_ms * 1e6),
    )


def _tensor(model: str, name: str, value: npt.ArrayLike) -> Tensor:
    try:
        array = np.asarray(value)
        if array.dtype.kind in "SU" and not isinstance(value, np.ndarray):
            array = np.asarray(value, object)  # numpy's own text types drop NULs at the end
    except ValueError as error:
        raise InvalidRequest(f"input '{name}' for model '{model}' is no array: {error}") from None
    if array.dtype.name == "bfloat16":  # of the package ml_dtypes
        return Tensor(name, DType.BF16, np.ascontiguousarray(array).view(np.uint16).reshape(array.shape))
    try:
        dtype = DType.from_numpy(array.dtype)
    except KeyError:
        raise InvalidRequest(
            f"input '{name}' for model '{model}': no tensor type for numpy type {array.dtype}"
        ) from None
    if dtype is DType.BYTES:
        texts = np.empty(array.size, object)
        for place, item in enumerate(array.ravel().tolist()):
            if not isinstance(item, str | bytes):
                raise InvalidRequest(
                    f"input '{name}' for model '{model}': expected text or bytes, got {type(item).__name__}"
                )
            texts[place] = item.encode() if isinstance(item, str) else item
        return Tensor(name, dtype, texts.reshape(array.shape))
    return Tensor(name, dtype, np.ascontiguousarray(array, dtype.numpy).reshape(array.shape))


def _answer(response: Response) -> InferResult:
    if response.error is not None:
        raise response.error
    outputs = {tensor.name: tensor.array for tensor in response.outputs}
    return InferResult(response.model, response.version, response.request_id, outputs, response.parameters)
