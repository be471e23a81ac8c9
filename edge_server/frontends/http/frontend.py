"""HTTP/REST front end: starts the listener, finds the endpoint of a request, and checks access."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from edge_server.config import CATEGORIES, HttpConfig
from edge_server.core.status_reports import CamerasReport, FrameStreamReport
from edge_server.errors import EdgeServerError, Forbidden, InvalidRequest, NotFound, ServingFault
from edge_server.frontends.connection_limit import ConnectionLimit
from edge_server.frontends.http.accept_loop import max_connections
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.aiohttp_server import AiohttpServer, AiohttpTarget
from edge_server.frontends.http.connection import RequestTarget
from edge_server.frontends.http.control_endpoints import ControlEndpoints
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.cross_site_check import CrossSiteCheck
from edge_server.frontends.http.deepstack_endpoints import DeepStackEndpoints
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.generate_endpoints import GenerationEndpoints, GenerationRequest, GenerationTarget
from edge_server.frontends.http.host_check import HostNames
from edge_server.frontends.http.inference_route import InferenceContext
from edge_server.frontends.http.listener import Listener, server_tls
from edge_server.frontends.http.openai_endpoints import OpenAiEndpoints, is_openai_path
from edge_server.frontends.http.operator_endpoints import EngineView, GovernorView, OperatorEndpoints
from edge_server.frontends.http.page_endpoints import PageEndpoints
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, failure_response, plain_error
from edge_server.frontends.http.routes import NoSuchMethod, NoSuchPath, PathRouter, build_router
from edge_server.frontends.http.view_endpoints import ViewEndpoints
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.frontends.memory_budget import MemoryBudget, budget_bytes
from edge_server.frontends.openai.text_answer import UnknownPath, error_object
from edge_server.frontends.v2.json_parser import to_json
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.streams.stream_view import StreamView

_LOG = logging.getLogger(__name__)

# Threads for calls that wait for model loads; a few such calls must not delay each other or status requests.
_BLOCKING_THREADS = 8
_MAX_WORKER_THREADS = 4


def _no_view(stream: str) -> AbstractContextManager[StreamView]:
    raise NotFound(f"no frame stream '{stream[:80]}' is open")


class HttpFrontend:
    """Serves KServe v2 with Triton's extensions over HTTP. `start` and `stop` run on the loop that serves."""

    def __init__(
        self,
        service: InferenceService,
        config: HttpConfig,
        *,
        streams: Callable[[], Sequence[FrameStreamReport]] = tuple,
        view: Callable[[str], AbstractContextManager[StreamView]] = _no_view,
        metrics_port: Callable[[], int | None] = lambda: None,
        cameras: Callable[[], CamerasReport] | None = None,
        governor: GovernorView | None = None,
        engines: EngineView | None = None,
        allows_code_upload: bool = False,
        access: AccessCheck | None = None,
        budget: MemoryBudget | None = None,
        limit: ConnectionLimit | None = None,
    ) -> None:
        """`budget` limits the bodies being received, `limit` the connections of all listeners. Without them, the front
        end has its own.

        `access` knows the keys and tokens; without it, only `config.restricted` counts.
        `view` returns the view of a frame stream, `metrics_port` the port of the metrics page if there is one.
        """
        largest = config.max_input_size_bytes
        self._budget = budget or MemoryBudget(budget_bytes(config.max_body_bytes_in_flight, largest), largest)
        self._access_check = access or AccessCheck(config.restricted)
        self._limit = limit
        self._engines = engines
        self._service = service
        self._config = config
        self._streams = streams
        self._view = view
        self._metrics_port = metrics_port
        self._cameras = cameras
        self._governor = governor
        self._cors = CorsPolicy(config.allowed_origins)
        names = HostNames(config.allowed_hosts)
        self._cross_site_check = CrossSiteCheck("https" if config.tls_cert else "http", names, self._cors)
        self._allows_code_upload = allows_code_upload
        self._tls: ssl.SSLContext | None = None
        self._listener = Listener("HTTP", self._find, names, service, self._cors if config.allowed_origins else None)
        self._inference: InferenceContext | None = None
        self._blocking = ThreadPoolExecutor(_BLOCKING_THREADS, "http-blocking")
        self._workers = ThreadPoolExecutor(min(_MAX_WORKER_THREADS, os.cpu_count() or 1), "http-worker")
        self._events = EventEndpoints(service.events)
        self._aiohttp = AiohttpServer(self._workers)
        self._router: PathRouter = PathRouter()

    async def start(self) -> int:
        """Listen and return the bound port. Raises ServingFault (address taken, certificate unreadable)."""
        config = self._config
        if config.tls_cert and config.tls_key:
            self._tls = server_tls(config.tls_cert, config.tls_key, config.client_ca)

            def use_newest_context(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
                # Called at the start of each handshake, also without a server name.
                if self._tls is not None:
                    connection.context = self._tls

            self._tls.sni_callback = use_newest_context
        loop = asyncio.get_running_loop()
        dispatch = LoopDispatch(loop)
        pattern = config.header_pattern
        tokens = self._access_check.tokens
        self._inference = InferenceContext(self._service, dispatch, self._workers, tokens, pattern)
        view = ViewEndpoints(
            self._service,
            dispatch,
            self._cross_site_check,
            self._view,
            is_guarded=partial(self._access_check.is_guarded, "view"),
            is_open=config.is_view_open,
        )
        self._events.open()
        self._router = build_router(
            ControlEndpoints(
                self._service,
                self._blocking,
                self._governor,
                allows_code_upload=self._allows_code_upload,
            ),
            GenerationEndpoints(self._service, dispatch, self._workers, pattern),
            OpenAiEndpoints(self._service, dispatch, self._may_change_models),
            self._events,
            OperatorEndpoints(
                self._service,
                self._blocking,
                is_guarded=self._access_check.is_guarded("model-repository"),
                streams=self._streams,
                cameras=self._cameras,
                governor=self._governor,
                engines=self._engines,
            ),
            DeepStackEndpoints(self._service, dispatch),
            PageEndpoints(partial(self._access, view), lambda: self._router.routes),
            view,
        )
        # Cached heads were checked against the previous tokens: check them again.
        tokens.on_change(lambda: loop.call_soon_threadsafe(self._listener.forget_heads))
        return await self._listener.open(
            config.address,
            config.port,
            reuses_port=config.reuses_port,
            tls=self._tls,
            budget=self._budget,
            limit=self._limit,
            max_connections=max_connections(config.max_connections),
        )

    def prepare(self) -> None:
        """Import aiohttp on another thread. Call this when the server is ready."""
        self._aiohttp.prepare()

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context of new connections, also after `renew_tls`; None without TLS or before `start`."""
        return self._tls

    def renew_tls(self, cert: str, key: str, client_ca: str = "") -> None:
        """Use these files for new connections. Raises ServingFault, and changes nothing then."""
        if self._tls is None:
            return
        # A new context: files loaded into a context in use could give a handshake a certificate without its key.
        self._tls = server_tls(cert, key, client_ca)

    async def stop(self, grace_s: float) -> None:
        """Accept no new connections, wait `grace_s` for open requests, abort the rest. May be called again."""
        self._events.close()
        await self._listener.close(grace_s)
        self._blocking.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _find(self, head: RequestHead) -> RequestTarget | HttpResponse:
        """Return the target of requests with a head, or the response that refuses them."""
        failure: EdgeServerError
        try:
            endpoint, names = self._router.find(head.method, head.target)
            self._cross_site_check.check(head, endpoint.category, changes_server=endpoint.changes_server)
            if endpoint.handler is None and endpoint.generation is None:
                # The head is cached, so the target counts each request itself, when its body is complete.
                caller = self._access_check.admit_uncounted(head.headers, endpoint.category)
                assert self._inference is not None
                return self._inference.target(head, names["model"], names.get("version", ""), caller)
            caller = self._access_check.admit(head.headers, endpoint.category)
            if endpoint.changes_server and caller:
                _LOG.info("'%s' requested: %s %s", caller, head.method, head.target)
            if endpoint.generation is not None:
                return GenerationTarget(endpoint.generation, names, head, self._workers)
            assert endpoint.handler is not None
            return AiohttpTarget(self._aiohttp, endpoint.handler, names, head)
        except NoSuchPath:
            response, failure = plain_error("Not Found", 404), UnknownPath(head.method, head.target)
        except NoSuchMethod as error:
            if (preflight := self._cors.preflight(head, error.allowed)) is not None:
                return preflight
            response, failure = plain_error("Method Not Allowed", 405), InvalidRequest(f"{head.method}: use {error}")
            response.headers["Allow"] = str(error)
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error
            response = failure_response(error, f"request {head.method} {head.target}")
            failure = error if isinstance(error, EdgeServerError) else ServingFault("internal error")
        if is_openai_path(head.target):
            response.body = to_json(error_object(failure))
        return response

    def _may_change_models(self, head: RequestHead) -> bool:
        """Return whether a request may load and unload models: neither a page of another site nor a key forbids it."""
        try:
            self._cross_site_check.check(head, "model-repository", changes_server=True)
        except Forbidden:
            return False
        return self._access_check.may_use(head.headers, "model-repository")

    def _access(self, view: ViewEndpoints, request: GenerationRequest) -> Mapping[str, object]:
        """Return the rights that the page has for the caller of a request.

        It may change models only where a key or a token is required and given.
        """
        headers, access = request.target.head.headers, self._access_check
        allowed = {category: access.may_use(headers, category) for category in CATEGORIES}
        if allowed["view"]:
            try:
                view.check(request)
            except Forbidden:
                allowed["view"] = False
        return {
            "version": self._service.server_metadata().version if allowed["metadata"] else "",
            "is_ready": self._service.is_ready() if allowed["health"] else None,
            "allowed": allowed,
            "may_change_models": access.is_guarded("model-repository") and allowed["model-repository"],
            "loads_on_request": self._service.is_explicit,
            "takes_tokens": access.tokens.is_used,
            "key_headers": access.key_headers,
            "metrics_port": self._metrics_port(),
        }
