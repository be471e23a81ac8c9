"""Adapter to Ray Serve (ray.io): an application whose replicas each hold an inference server in their process. Needs
the extra `ray`.

Clients of KServe v2 use Ray's own gRPC and HTTP ports. Ray sends gRPC messages to the replicas by pickle. The classes
of tritonclient cannot be pickled, so all messages are bytes here. Nothing imports this module; Ray does.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import aiohttp

from edge_server.config.setting_sources import process_environment
from edge_server.errors import BackendMissing, install_hint
from edge_server.process.embedded import Family, RpcError, Server

try:
    import grpc
    from ray import serve
    from ray.serve import metrics
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
except ImportError as error:
    raise BackendMissing(f"edge_server.ray needs Ray Serve ({error}); {install_hint('ray')}") from error

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
UNARY_METHODS = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics",
    "RepositoryIndex", "ModelInfer",
)  # fmt: skip
"""The others change the state of one server, and a client cannot choose the replica."""

_PATHS = re.compile(r"/(v[13]/.*|v2(/(health|models)(/.*)?)?|v2/repository/index)")
"""HTTP paths that are passed on, for the same reason."""

_MAX_ONGOING_REQUESTS = 16
_METRICS_INTERVAL_S = 5.0
"""Time between two copies of the metrics. Ray collects them from its processes every 10 s."""

_OWN_HEADERS = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding"))
"""Headers that belong to one connection."""


def build_app(settings: Mapping[str, Any]) -> serve.Application:
    """Return the application. `settings` come from `serve run edge_server.ray:build_app NAME=VALUE ...` or a file.

    `num_replicas`, `max_ongoing_requests` (16), `autoscaling_config` and `ray_actor_options` are options of the
    deployment; all others are those of `edge_server.Server`, such as `model_repository`. In a file, name the gRPC
    service too: `grpc_servicer_functions: [edge_server.ray.add_bytes_servicer]`.
    """
    options = {"max_ongoing_requests": _MAX_ONGOING_REQUESTS}
    rest = dict(settings)
    for name in ("num_replicas", "max_ongoing_requests", "autoscaling_config", "ray_actor_options"):
        if name in rest:
            value = rest.pop(name)
            options[name] = int(value) if isinstance(value, str) and value.isdigit() else value
    return serve.deployment(Replica, name="edge_server", **options).bind(rest)


def add_bytes_servicer(servicer: Any, server: Any) -> None:
    """Add Triton's GRPCInferenceService to Ray's gRPC proxy, for `grpc_servicer_functions`."""
    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in UNARY_METHODS}
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(servicer.ModelStreamInfer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class _Message:
    """A response for Ray, which serializes what a replica returns."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class Replica:
    """One replica: an embedded server. Has a method for each RPC."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        # The HTTP port is on the loopback interface, for `__call__`.
        self._server = Server(**{"http_port": 0, **settings}).start()
        self._session: aiohttp.ClientSession | None = None
        self._has_ended = threading.Event()
        threading.Thread(target=self._report_metrics, name="edge-server-ray-metrics", daemon=True).start()

    def check_health(self) -> None:
        """Raise if the server has ended. A model that failed is no reason to restart the replica."""
        if not self._server.live():
            raise RuntimeError("the embedded server has ended")

    def __del__(self) -> None:
        """Drain and close. Ray calls it after the last request."""
        if hasattr(self, "_has_ended"):
            self._has_ended.set()
            self._server.stop()

    async def __call__(self, request: Request) -> Response:
        """Pass an HTTP request on to the server's port."""
        # Without the application's route prefix, which the server does not know.
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if not _PATHS.fullmatch(path):
            return PlainTextResponse(
                f"'{path}' is not served here: a request reaches any one of the replicas. Change the model "
                "repository instead",
                404,
            )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "Content-Type"),  # only what the client sent
                timeout=aiohttp.ClientTimeout(total=None),
            )
        url = f"http://127.0.0.1:{self._server.http_port}{path}"
        answer = await self._session.request(
            request.method,
            f"{url}?{request.url.query}" if request.url.query else url,
            data=await request.body(),
            headers=[item for item in request.headers.items() if item[0].lower() not in _OWN_HEADERS],
        )
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}
        if answer.content_type == "text/event-stream":
            return StreamingResponse(_body(answer), answer.status, headers)
        async with answer:
            return Response(await answer.read(), answer.status, headers)

    def _report_metrics(self) -> None:
        """Copy the server's metrics to Ray's until the replica ends. For a thread of its own."""
        reporter = _MetricsReporter()
        while not self._has_ended.wait(_METRICS_INTERVAL_S):
            try:
                reporter.report(self._server.metric_families())
            except Exception:  # the replica serves on without metrics
                log.exception("the metrics of this replica do not reach Ray any more")
                return

    async def ModelStreamInfer(self, messages: AsyncIterator[bytes], grpc_context: Any) -> AsyncIterator[_Message]:
        try:
            async for message in self._server.acall_stream("ModelStreamInfer", messages):
                yield _Message(message)
        except RpcError as error:
            _set_status(grpc_context, error)


class _MetricsReporter:
    """Copies counters and gauges to metrics of Ray Serve, which adds the tags application, deployment and replica."""

    def __init__(self) -> None:
        self._metrics: dict[str, metrics.Counter | metrics.Gauge] = {}
        self._tag_keys: dict[str, tuple[str, ...]] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges: set[tuple[str, tuple[str, ...]]] = set()

    def report(self, families: Iterable[Family]) -> None:
        """Report all samples. Histograms, which only frame streams and models' own metrics have, are left out."""
        gauges = set()
        for family in families:
            samples = list(family.samples())
            if family.kind == "histogram" or not samples:
                continue
            # Ray adds "_total" to the names of counters itself.
            name = family.name.removesuffix("_total")
            if name not in self._metrics:
                keys = tuple(sorted({key for _, labels, _ in samples for key in labels}))
                kind = metrics.Counter if family.kind == "counter" else metrics.Gauge
                self._metrics[name], self._tag_keys[name] = kind(name, family.help, keys), keys
            metric, keys = self._metrics[name], self._tag_keys[name]
            for _, labels, value in samples:
                series = name, tuple(labels.get(key, "") for key in keys)
                tags = dict(zip(keys, series[1], strict=True))
                if family.kind == "gauge":
                    metric.set(value, tags)
                    gauges.add(series)
                    continue
                before = self._counts.get(series, 0.0)
                # A count begins at 0 again when its model is loaded again.
                growth = value - before if value >= before else value
                self._counts[series] = value
                if growth > 0:
                    metric.inc(growth, tags)
        # Ray keeps the last value of a gauge that is not on the page any more, such as those of an unloaded model.
        for name, values in self._gauges - gauges:
            self._metrics[name].set(0, dict(zip(self._tag_keys[name], values, strict=True)))
        self._gauges = gauges


def _unary(name: str) -> Any:
    async def call(self: Replica, message: bytes, grpc_context: Any) -> _Message:
        try:
            return _Message(await self._server.acall(name, message))
        except RpcError as error:
            _set_status(grpc_context, error)
            return _Message(b"")

    return call


for _name in UNARY_METHODS:
    setattr(Replica, _name, _unary(_name))


def _set_status(grpc_context: Any, error: RpcError) -> None:
    grpc_context.set_code(grpc.StatusCode[error.code])
    grpc_context.set_details(error.details)


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for part in answer.content.iter_any():
            yield part


def __getattr__(name: str) -> serve.Application:
    """Build `app` when it is asked for: the application for the repository in EDGE_SERVER_MODEL_REPOSITORY."""
    if name != "app":
        raise AttributeError(f"module 'edge_server.ray' has no attribute '{name}'")
    return build_app({"model_repository": process_environment().get("EDGE_SERVER_MODEL_REPOSITORY", "models")})
