"""A small InferenceService for the gRPC front end: real front end, real channel, no serving core."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.config import GrpcConfig, LogConfig
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.model_statistics import VersionStatistics
from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.core.status_reports import IndexEntry, ModelMetadata, ServerMetadata, SharedRegion, TensorMetadata
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Cancelled, EdgeServerError, InvalidRequest, NotFound, UnknownModel
from edge_server.frontends.grpc.server import GrpcFrontend
from edge_server.memory.cuda_shared_memory import CudaMemoryRegistry
from edge_server.protocol import messages
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.tracing import Traces

if TYPE_CHECKING:
    import grpc


@dataclass
class Call:
    """One submitted request that a test answers by hand. It is the ticket as well."""

    request: Request
    sink: ResponseSink
    hold_us: float
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def answer(
        self, *outputs: Tensor, is_final: bool = True, error: EdgeServerError | None = None, **extra: object
    ) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = is_final
        response = Response(self.request.model, 1, self.request.id, outputs, error=error, is_final=is_final, **extra)
        if is_final and self.request.release is not None:
            self.request.release()
        self.sink(response)

    def cancel(self) -> None:
        self.is_cancelled.set()
        self.answer(error=Cancelled("cancelled by the client"))


class FakePin:
    device = None

    def __init__(self, regions: FakeRegions, view: memoryview) -> None:
        self.view = view
        self._regions = regions
        self._is_held = True

    def release(self) -> None:
        assert self._is_held
        self._is_held = False
        self._regions.count(-1)

    def write(self, data: bytes | memoryview) -> None:
        self.view[: memoryview(data).nbytes] = data


class FakeRegions:
    def __init__(self) -> None:
        self.cuda = CudaMemoryRegistry(True, "there is no GPU here", lambda: pytest.fail("no GPU was to be asked for"))
        self.memory: dict[str, bytearray] = {}
        self.registered: dict[str, SharedRegion] = {}
        self.pinned = 0
        self._changed = threading.Condition()

    def count(self, more: int) -> None:
        with self._changed:
            self.pinned += more
            self._changed.notify_all()

    def wait_until_unpinned(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.pinned == 0, timeout=20), f"{self.pinned} pins are held"

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self.registered[name] = SharedRegion(name, key, offset, byte_size)
        self.memory[name] = bytearray(byte_size)

    def unregister(self, name: str | None = None) -> None:
        for gone in [name] if name is not None else list(self.registered):
            self.registered.pop(gone, None)

    def status(self, name: str | None = None) -> list[SharedRegion]:
        if name is None:
            return list(self.registered.values())
        if name not in self.registered:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        return [self.registered[name]]

    def pin(self, name: str, offset: int, byte_size: int, *, writable: bool = False) -> FakePin:
        if name not in self.registered:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        self.count(1)
        return FakePin(self, memoryview(self.memory[name])[offset : offset + byte_size])


Behaviour = Callable[[Call], None]


def echo(call: Call) -> None:
    """Answer with the inputs, as outputs OUTPUT<n>, in their order."""
    outputs = tuple(
        Tensor(f"OUTPUT{index}", tensor.dtype, tensor.array)
        for index, tensor in enumerate(call.request.inputs.values())
    )
    call.answer(*outputs, parameters=dict(call.request.parameters))


def repeat(call: Call) -> None:
    """Answer with each element of IN on its own, then close without outputs."""
    for value in call.request.inputs["IN"].array.reshape(-1).tolist():
        call.answer(Tensor("OUT", DType.INT32, np.array([value], "<i4")), is_final=False)
    call.answer(is_empty=True)


class FakeService:
    """Models are behaviours. "held" keeps its calls in `calls` until a test answers them."""

    def __init__(self) -> None:
        self.shared_memory = FakeRegions()
        self.log_settings = LogSettings(LogConfig())
        self.traces = Traces()
        self.ready = True
        self.behaviours: dict[str, Behaviour] = {"echo": echo, "repeat": repeat, "held": lambda call: None}
        self.behaviours["held_stream"] = self.behaviours["held"]
        self.decoupled = {"repeat", "held_stream"}
        self.calls: list[Call] = []
        self.arrived = threading.Condition()
        self.loads: list[tuple[str, str | None, Mapping[str, bytes]]] = []
        self.may_carry_code: list[bool] = []
        self.unloads: list[tuple[str, bool]] = []

    def wait_for_calls(self, count: int) -> list[Call]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.calls) >= count, timeout=20)
            return list(self.calls)

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> Call:
        call = Call(request, sink, hold_us)
        with self.arrived:
            self.calls.append(call)
            self.arrived.notify_all()
        if "REFUSED" in request.inputs:
            if request.release is not None:
                request.release()
            raise InvalidRequest(f"unexpected inference input 'REFUSED' for model '{request.model}'")
        self.behaviours[request.model](call)
        return call

    def model_spec(self, name: str, version: int | None) -> ModelSpec:
        if name not in self.behaviours:
            raise UnknownModel(f"Request for unknown model: '{name}' is not found")
        if version not in (None, 1):
            raise UnknownModel(f"Request for unknown model: '{name}' version {version} is not found")
        config = {
            "name": name,
            "backend": "stub",
            "max_batch_size": 8,
            "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        }
        return ModelSpec(
            name,
            "stub",
            "stub_plan",
            8,
            (InputSpec("INPUT0", DType.FP32, (4,)),),
            (OutputSpec("OUTPUT0", DType.FP32, (4,), labels=("cat", "dog")),),
            (),
            is_decoupled=name in self.decoupled,
            config_json=json.dumps(config),
        )

    def handle_cache(self) -> SimpleNamespace:
        return SimpleNamespace(find=self.find)

    def find(self, name: str, version: int | None) -> SimpleNamespace:
        return SimpleNamespace(spec=self.model_spec(name, version), submit=self.submit)

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return self.ready

    def is_model_ready(self, name: str, version: int | None) -> bool:
        self.model_spec(name, version)
        return self.ready

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "1.2.3", ("classification", "statistics"))

    def model_metadata(self, name: str, version: int | None) -> ModelMetadata:
        self.model_spec(name, version)
        tensor = TensorMetadata("INPUT0", "FP32", (-1, 4))
        return ModelMetadata(name, ("1",), "stub_plan", (tensor,), (tensor,))

    def statistics(self, name: str | None, version: int | None) -> list[VersionStatistics]:
        if name is not None and name not in self.behaviours:
            raise InvalidRequest(f"requested model '{name}' is not available")
        found = VersionStatistics(name or "echo", 1, inference_count=2**40)
        found.success.add(7, 3)
        return [found]

    def repository_index(self, *, only_ready: bool = False) -> list[IndexEntry]:
        entries = [IndexEntry("echo", "1", "READY"), IndexEntry("old", "2", "UNAVAILABLE", "unloaded")]
        return entries[:1] if only_ready else entries

    def load_model(
        self,
        name: str,
        config_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        may_carry_code: bool = True,
    ) -> None:
        self.may_carry_code.append(may_carry_code)
        self.loads.append((name, config_json, files or {}))

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self.unloads.append((name, unload_dependents))


class RunningFrontEnd:
    """A started front end and raw calls to it: bytes out, bytes in, so that tests can send what no client would."""

    def __init__(self, service: FakeService, **config: object) -> None:
        self.service = service
        tokens = config.pop("tokens", None)
        allows_code_upload = bool(config.pop("allows_code_upload", False))
        self.frontend = GrpcFrontend(
            service,  # type: ignore[arg-type]
            GrpcConfig(port=0, **config),  # type: ignore[arg-type]
            allows_code_upload=allows_code_upload,
            tokens=tokens,  # type: ignore[arg-type]
        )
        self.port = self.frontend.start()
        self.address = f"127.0.0.1:{self.port}"
        self._channels: list[grpc.Channel] = []

    def channel(self) -> grpc.Channel:
        import grpc

        limit = 2**31 - 1
        options = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
        options.append(("grpc.use_local_subchannel_pool", 1))
        self._channels.append(grpc.insecure_channel(self.address, options))
        return self._channels[-1]

    def call(self, rpc: str, request: object = None, *, metadata: object = None, timeout: float | None = 20) -> object:
        """Call a unary RPC of GRPCInferenceService with messages. A bytes `request` is sent as it is."""
        method = next(m for m in messages.service_methods(messages.GRPC_SERVICE) if m.name == rpc)
        message = method.input_class() if request is None else request
        data = message if isinstance(message, bytes) else message.SerializeToString()
        answer = self.channel().unary_unary(method.path)(data, timeout=timeout, metadata=metadata)
        return method.output_class.FromString(answer)

    def stream(self, requests: object, *, metadata: object = None, timeout: float = 20) -> object:
        """Start ModelStreamInfer with an iterable of messages or bytes; iterating over the result gives messages."""
        return self.channel().stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )(iter(requests), timeout=timeout, metadata=metadata)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.frontend.stop(0)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture(params=["http2", pytest.param("grpcio", marks=pytest.mark.full)])
def transport(request: pytest.FixtureRequest) -> str:
    """What carries the calls."""
    return str(request.param)


@pytest.fixture
def open_front_end(service: FakeService, transport: str) -> Iterator[Callable[..., RunningFrontEnd]]:
    """Open front ends with GrpcConfig fields of the test's choice."""
    doors: list[RunningFrontEnd] = []

    def open_one(**config: object) -> RunningFrontEnd:
        doors.append(RunningFrontEnd(service, **{"transport": transport, **config}))
        return doors[-1]

    yield open_one
    for front_end in doors:
        front_end.close()


@pytest.fixture
def front_end(open_front_end: Callable[..., RunningFrontEnd]) -> RunningFrontEnd:
    return open_front_end()


def infer_request(model: str = "echo", values: object = (1.0, 2.0, 3.0, 4.0), **fields: object) -> object:
    """Return a ModelInferRequest with one raw FP32 input INPUT0 of shape (1, n); IN as INT32 for decoupled models."""
    is_stream = model in ("repeat", "held_stream")
    array = np.array([values], "<i4" if is_stream else "<f4")
    message = messages.ModelInferRequest(model_name=model, **fields)
    message.inputs.add(
        name="IN" if is_stream else "INPUT0", datatype="INT32" if is_stream else "FP32", shape=array.shape
    )
    message.raw_input_contents.append(array.tobytes())
    return message


@pytest.fixture
def make_request() -> Callable[..., object]:
    return infer_request
