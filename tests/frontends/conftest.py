"""Fixtures: a front end on a real socket, with shared memory and log settings, over a service in plain Python."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.config import HttpConfig, LogConfig
from edge_server.core.metric_family import MetricFamilyView, MetricSample
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.model_statistics import BatchStatistics, Duration, ResponseStatistics, VersionStatistics
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request, Response
from edge_server.core.status_reports import (
    IndexEntry,
    ModelMetadata,
    PinReport,
    ServerMetadata,
    TensorMetadata,
    VersionReport,
)
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import (
    Cancelled,
    EdgeServerError,
    InvalidRequest,
    NotReady,
    QueueFull,
    Throttled,
    UnknownModel,
)
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.frontend import HttpFrontend
from edge_server.frontends.http.inference_route import BodyDecoder
from edge_server.frontends.http.routes import Route
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.plugins.language.routes import language_routes, refusal_body
from edge_server.plugins.speech.routes import speech_routes
from edge_server.plugins.tensorrt.builds.http_routes import engine_routes
from edge_server.process.http_routes import http_routes
from edge_server.telemetry.event_bus import EventBus
from edge_server.telemetry.log import LogSettings
from edge_server.telemetry.tracing import Traces

Compute = Callable[[Request], list[Response]]


def spec_of(name: str, inputs: list[InputSpec], outputs: list[OutputSpec], **more: Any) -> ModelSpec:
    fields: dict[str, Any] = {"max_batch_size": 0, **more}
    return ModelSpec(
        name=name,
        backend="stub",
        platform="",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        instance_groups=(),
        **fields,
    )


ADD = spec_of(
    "add",
    [InputSpec("INPUT0", DType.INT32, (4,)), InputSpec("INPUT1", DType.INT32, (4,))],
    [
        OutputSpec("OUTPUT0", DType.INT32, (4,), labels=("zero", "one", "two")),
        OutputSpec("OUTPUT1", DType.INT32, (4,)),
    ],
    max_batch_size=8,
    config_json='{"name":"add","max_batch_size":8}',
)
IMAGE = spec_of(
    "image",
    [InputSpec("pixels", DType.FP32, (3, 4, 4))],
    [OutputSpec("scores", DType.FP32, (3,), labels=("red", "green", "blue"))],
    max_batch_size=4,
    parameters={"image_color": "rgb", "image_top_k": "2"},
)


def same(name: str, dtype: DType, dims: tuple[int, ...] = (-1,), **more: Any) -> ModelSpec:
    return spec_of(name, [InputSpec("IN", dtype, dims)], [OutputSpec("OUT", dtype, dims)], **more)


def _answer(request: Request, *tensors: Tensor, **more: Any) -> Response:
    return Response(request.model, request.version or 1, request.id, outputs=tensors, **more)


def compute_add(request: Request) -> list[Response]:
    first, second = request.inputs["INPUT0"].array, request.inputs["INPUT1"].array
    wanted = request.outputs or ("OUTPUT0", "OUTPUT1")
    values = {"OUTPUT0": first + second, "OUTPUT1": first - second}
    return [_answer(request, *(Tensor(name, DType.INT32, values[name]) for name in values if name in wanted))]


def compute_same(request: Request) -> list[Response]:
    given = request.inputs["IN"]
    return [_answer(request, Tensor("OUT", given.dtype, given.array.copy()), parameters=request.parameters)]


def compute_repeat(request: Request) -> list[Response]:
    count = int(request.inputs["IN"].array.reshape(-1)[0])
    parts = [_answer(request, Tensor("OUT", DType.INT32, np.array([i], "<i4")), is_final=False) for i in range(count)]
    return [*parts, _answer(request, is_empty=True)]


def compute_image(request: Request) -> list[Response]:
    means = request.inputs["pixels"].array.mean(axis=(2, 3)).astype("<f4")
    return [_answer(request, Tensor("scores", DType.FP32, means))]


def failing(error: EdgeServerError) -> Compute:
    return lambda request: [_answer(request, error=error)]


def compute_never(request: Request) -> list[Response]:
    return []


@dataclass
class StubTicket:
    request: Request
    sink: Callable[[Response], None]
    was_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.was_cancelled.set()
        self.sink(_answer(self.request, error=Cancelled("cancelled")))


class StubService:
    """Responds from a thread of its own, like the serving core, and records its calls."""

    def __init__(self) -> None:
        self.models: dict[str, tuple[ModelSpec, Compute]] = {
            "add": (ADD, compute_add),
            "text": (same("text", DType.BYTES), compute_same),
            "half": (same("half", DType.FP16), compute_same),
            "float": (same("float", DType.FP32), compute_same),
            "bytes1": (same("bytes1", DType.BYTES, (1,), max_batch_size=4), compute_same),
            "raw": (same("raw", DType.FP32, (-1, 2), max_batch_size=4), compute_same),
            "repeat": (same("repeat", DType.INT32, (1,), is_decoupled=True), compute_repeat),
            "image": (IMAGE, compute_image),
            "sink": (same("sink", DType.INT32, (1,)), lambda request: [_answer(request)]),
            "full": (ADD, failing(QueueFull("Exceeds maximum queue size"))),
            "hot": (ADD, failing(Throttled("too hot", retry_after_s=2.5))),
            "never": (ADD, compute_never),
            "broken": (ADD, lambda request: [_answer(request, Tensor("OUTPUT0", DType.BYTES, np.array([1], object)))]),
        }
        self.shared_memory = SharedMemoryRegistry(is_allowed=True)
        self.log_settings = LogSettings(LogConfig())
        self.traces = Traces()
        self.events = EventBus(history_size=50)
        self.ready = True
        self.is_explicit = False
        self.is_in_drain_delay = False
        self.suggests_models = True
        self.loads: list[tuple[str, str | None, dict[str, bytes]]] = []
        self.may_carry_code: list[bool] = []
        self.unloads: list[tuple[str, bool]] = []
        self.orders: list[tuple[Any, ...]] = []
        self.requests: list[Request] = []
        self.holds_us: list[float] = []
        self.tickets: list[StubTicket] = []
        self.submitted = threading.Event()

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return self.ready

    def is_model_ready(self, name: str, version: int | None) -> bool:
        self.model_spec(name, version)
        return name != "never"

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "1.2.3", ("classification", "statistics"))

    def model_metadata(self, name: str, version: int | None) -> ModelMetadata:
        spec = self.model_spec(name, version)
        tensors = tuple(TensorMetadata(i.name, i.dtype.value, spec.wire_dims(i.dims)) for i in spec.inputs)
        return ModelMetadata(name, ("1",), "stub", tensors, ())

    def model_spec(self, name: str, version: int | None) -> ModelSpec:
        if name not in self.models:
            raise UnknownModel(f"Request for unknown model: '{name}' is not found")
        if version == 3:
            raise NotReady(f"Request for unknown model: '{name}' version 3 is not at ready state")
        return replace(self.models[name][0], name=name)

    def handle_cache(self) -> SimpleNamespace:
        return SimpleNamespace(find=self.find)

    def find(self, name: str, version: int | None) -> SimpleNamespace:
        return SimpleNamespace(spec=self.model_spec(name, version), submit=self.submit)

    def statistics(self, name: str | None, version: int | None) -> list[VersionStatistics]:
        if name is not None and name not in self.models:
            raise InvalidRequest(f"requested model '{name}' is not available")
        counters = VersionStatistics("add", 1, last_inference_ms=7, inference_count=3, success=Duration(2, 50))
        counters.batches[2] = BatchStatistics(2, compute_infer=Duration(1, 9))
        counters.responses[0] = ResponseStatistics(success=Duration(1, 5))
        return [counters]

    def repository_index(self, *, only_ready: bool = False) -> list[IndexEntry]:
        ready = [IndexEntry("add", "1", "READY")]
        return ready if only_ready else [*ready, IndexEntry("cold"), IndexEntry("bad", "2", "UNAVAILABLE", "corrupt")]

    def versions(self, name: str | None = None) -> list[VersionReport]:
        if name not in (None, "add"):
            raise UnknownModel(f"Request for unknown model: '{name}' is not found")
        return [
            VersionReport("add", 1, 0, "NOT_LOADED", 0.0, 0, "", 0.0),
            VersionReport("add", 2, 4, "READY", 1700000000.5, 12, "", 1.0),
        ]

    def pins(self) -> Mapping[str, int]:
        return {"add": 2}

    def rollback(self, name: str, version: int | None = None) -> PinReport:
        self.orders.append(("rollback", name, version))
        return PinReport(name, version or 1, None, version or 1, False)

    def unpin(self, name: str) -> PinReport:
        self.orders.append(("unpin", name))
        return PinReport(name, None, 1, 2, True)

    def load_model(
        self,
        name: str,
        config_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        may_carry_code: bool = True,
    ) -> None:
        self.may_carry_code.append(may_carry_code)
        self.loads.append((name, config_json, dict(files or {})))

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self.unloads.append((name, unload_dependents))

    @property
    def keep_alives(self) -> list[tuple[str, float]]:
        return [(order[1], order[2]) for order in self.orders if order[0] == "keep_alive"]

    def set_keep_alive(self, model: str, seconds: float) -> None:
        self.orders.append(("keep_alive", model, seconds))

    def model_families(self) -> list[MetricFamilyView]:
        counts = {"prompt_tokens_total": 3, "generation_tokens_total": 7, "num_requests_running": 1, "other": 9}
        labels = {"model": "chat"}
        return [
            MetricFamilyView(f"vllm:{name}", "counter", "", (MetricSample(labels, value),))
            for name, value in counts.items()
        ]

    def submit(
        self,
        request: Request,
        sink: Callable[[Response], None],
        *,
        hold_us: float = 0.0,
        may_stand_in: bool = True,
    ) -> StubTicket:
        spec, compute = self.models[request.model]
        try:
            RequestCheck(replace(spec, name=request.model)).count_items(request)
        except EdgeServerError:
            if request.release is not None:
                request.release()
            raise
        ticket = StubTicket(request, sink)
        self.requests.append(request)
        self.holds_us.append(hold_us)
        self.tickets.append(ticket)

        def work() -> None:
            responses = compute(request)
            if request.release is not None:
                request.release()
            for response in responses:
                sink(response)

        threading.Thread(target=work).start()
        self.submitted.set()
        return ticket


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        members = self.json
        assert list(members) == ["error"], "an error body has the single key 'error'"
        return str(members["error"])


class Site:
    """A started front end with its loop on a thread, and a client for it."""

    def __init__(
        self,
        service: StubService,
        config: HttpConfig,
        access: AccessCheck | None = None,
        more: Sequence[Route] = (),
        body_decoders: Mapping[str, BodyDecoder] = MappingProxyType({}),
        thread_count: int = 1,
        **parts: Any,
    ) -> None:
        """`more` are routes besides those of the server's parts and of OpenAI's and ollama's APIs."""
        self.service = service
        self.config = config
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.frontend = HttpFrontend(
            service,  # type: ignore[arg-type]
            config,
            access=access,
            body_decoders=body_decoders,
            thread_count=thread_count,
        )
        self.events = EventEndpoints(service.events)
        parts_routes = http_routes(self.frontend, service, config, self.events, **parts)  # type: ignore[arg-type]
        texts = language_routes(service, self.frontend.access_check.may_change_models)  # type: ignore[arg-type]
        speech = speech_routes(service, self.frontend.access_check.may_change_models)  # type: ignore[arg-type]
        self.routes = [*parts_routes, *texts, *speech, *engine_routes(None, self.frontend.access_check), *more]
        self.port = self.run(self._start())

    async def _start(self) -> int:
        self.events.open()
        return await self.frontend.start(self.routes, refusal_body)

    async def stop(self, grace_s: float) -> None:
        self.events.close()
        await self.frontend.stop(grace_s)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=30)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Reply:
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}), **options)
            answer = connection.getresponse()
            return Reply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Reply:
        return self.ask("GET", path, **options)

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, **options: Any) -> Reply:
        return self.ask("POST", path, body, headers, **options)

    def close(self) -> None:
        self.run(self.stop(1.0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.service.shared_memory.close()


@pytest.fixture
def open_site() -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def start(
        *,
        allows_code_upload: bool = False,
        tokens: Tokens | None = None,
        more: Sequence[Route] = (),
        body_decoders: Mapping[str, BodyDecoder] = MappingProxyType({}),
        thread_count: int = 1,
        **config: Any,
    ) -> Site:
        settings = HttpConfig(port=0, **config)
        access = AccessCheck(settings, tokens)
        site = Site(
            StubService(), settings, access, more, body_decoders, thread_count, allows_code_upload=allows_code_upload
        )
        sites.append(site)
        return sites[-1]

    yield start
    for site in sites:
        site.close()


@pytest.fixture
def site(open_site: Callable[..., Site]) -> Site:
    return open_site()


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    return same
