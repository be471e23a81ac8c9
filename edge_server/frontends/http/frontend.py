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

from edge_server.config import CATEGORIES, HttpConfig, RestrictedGroup
from edge_server.core.status_reports import CamerasReport, FrameStreamReport
from edge_server.errors import EdgeServerError, Forbidden, NotFound, Unauthenticated
from edge_server.frontends.access_control import is_shared_key
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.http.accept_loop import max_connections
from edge_server.frontends.http.aiohttp_server import AiohttpServer, AiohttpTarget
from edge_server.frontends.http.connection import RequestTarget
from edge_server.frontends.http.control_endpoints import ControlEndpoints
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.cross_site_check import CrossSiteCheck
from edge_server.frontends.http.deepstack_endpoints import DeepStackEndpoints
from edge_server.frontends.http.endpoint_table import NoSuchMethod, NoSuchPath, PathRouter, build_router
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.generate_endpoints import GenerationEndpoints, GenerationRequest, GenerationTarget
from edge_server.frontends.http.inference_route import InferenceContext
from edge_server.frontends.http.listener import Listener, server_tls
from edge_server.frontends.http.openai_endpoints import OpenAiEndpoints
from edge_server.frontends.http.operator_endpoints import EngineView, GovernorView, OperatorEndpoints
from edge_server.frontends.http.page_endpoints import PageEndpoints
from edge_server.frontends.http.request_head import Headers, RequestHead
from edge_server.frontends.http.response import HttpResponse, failure_response, plain_error
from edge_server.frontends.http.view_endpoints import ViewEndpoints
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.frontends.memory_budget import MemoryBudget, budget_bytes
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
        tokens: Tokens | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """`budget` limits the bodies being received; without it, the front end has a budget of its own.

        `view` returns the view of a frame stream, `metrics_port` the port of the metrics page if there is one.
        """
        largest = config.max_input_size_bytes
        self._budget = budget or MemoryBudget(budget_bytes(config.max_body_bytes_in_flight, largest), largest)
        self._tokens = tokens or Tokens()
        self._engines = engines
        self._service = service
        self._config = config
        self._streams = streams
        self._view = view
        self._metrics_port = metrics_port
        self._cameras = cameras
        self._governor = governor
        self._restricted: Mapping[str, RestrictedGroup] = {
            category: group for group in config.restricted for category in group.categories
        }
        self._cross_site_check = CrossSiteCheck("https" if config.tls_cert else "http", config.allowed_hosts)
        self._allows_code_upload = allows_code_upload
        self._tls: ssl.SSLContext | None = None
        self._cors = CorsPolicy(config.allowed_origins)
        self._listener = Listener("HTTP", self._find, service, self._cors if config.allowed_origins else None)
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
        self._inference = InferenceContext(self._service, dispatch, self._workers, self._tokens, pattern)
        view = ViewEndpoints(
            self._service,
            dispatch,
            self._cross_site_check,
            self._view,
            is_guarded=partial(self._is_guarded, "view"),
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
                is_guarded=self._is_guarded("model-repository"),
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
        self._tokens.on_change(lambda: loop.call_soon_threadsafe(self._listener.forget_heads))
        return await self._listener.open(
            config.address,
            config.port,
            reuses_port=config.reuses_port,
            tls=self._tls,
            budget=self._budget,
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
        try:
            endpoint, names = self._router.find(head.method, head.target)
            if endpoint.handler is None and endpoint.generation is None:
                # The head is cached, so the target counts each request itself, when its body is complete.
                caller = self._admit(head.headers, endpoint.category, self._name_of)
                assert self._inference is not None
                return self._inference.target(head, names["model"], names.get("version", ""), caller)
            caller = self._admit(head.headers, endpoint.category, self._tokens.admit)
            if endpoint.changes_server:
                self._cross_site_check.check(head)
                if caller:
                    _LOG.info("'%s' requested: %s %s", caller, head.method, head.target)
            if endpoint.generation is not None:
                return GenerationTarget(endpoint.generation, names, head, self._workers)
            assert endpoint.handler is not None
            return AiohttpTarget(self._aiohttp, endpoint.handler, names, head)
        except NoSuchPath:
            return plain_error("Not Found", 404)
        except NoSuchMethod as error:
            if (preflight := self._cors.preflight(head, error.allowed)) is not None:
                return preflight
            response = plain_error("Method Not Allowed", 405)
            response.headers["Allow"] = str(error)
            return response
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error
            return failure_response(error, f"request {head.method} {head.target}")

    def _is_guarded(self, category: str) -> bool:
        """Return whether requests of a category need a key or a token."""
        return category in self._restricted or self._tokens.requires_token(category)

    def _access(self, view: ViewEndpoints, request: GenerationRequest) -> Mapping[str, object]:
        """Return the rights that the page has for the caller of a request.

        It may change models only where a key or a token is required and given.
        """
        headers = request.target.head.headers
        allowed = {category: self._may_use(headers, category) for category in CATEGORIES}
        if allowed["view"]:
            try:
                view.check(request)
            except Forbidden:
                allowed["view"] = False
        return {
            "version": self._service.server_metadata().version if allowed["metadata"] else "",
            "is_ready": self._service.is_ready() if allowed["health"] else None,
            "allowed": allowed,
            "may_change_models": self._is_guarded("model-repository") and allowed["model-repository"],
            "loads_on_request": self._service.is_explicit,
            "takes_tokens": self._tokens.is_used,
            "key_headers": sorted({group.key for group in self._restricted.values()}),
            "metrics_port": self._metrics_port(),
        }

    def _may_change_models(self, head: RequestHead) -> bool:
        """Return whether a request that was admitted for something else may also load and unload models."""
        try:
            self._cross_site_check.check(head)
        except Forbidden:
            return False
        return self._may_use(head.headers, "model-repository")

    def _may_use(self, headers: Headers, category: str) -> bool:
        try:
            self._admit(headers, category, self._tokens.name_of)
        except Unauthenticated:
            if "Authorization" in headers:
                self._tokens.count_refused(category)  # somebody may be guessing
            return False
        except Forbidden:
            return False
        return True

    def _name_of(self, authorization: Sequence[str], category: str) -> str:
        try:
            return self._tokens.name_of(authorization, category)
        except EdgeServerError:
            self._tokens.count_refused(category)
            raise

    def _admit(self, headers: Headers, category: str, token_name: Callable[[Sequence[str], str], str]) -> str:
        """Return the name of the request's token, "" when it needs none or has a shared key.

        `token_name` returns the name for Authorization headers. Raises Unauthenticated, Forbidden.
        """
        group = self._restricted.get(category)
        if group is not None and is_shared_key(headers.getall(group.key), group.value):
            return ""
        if self._tokens.requires_token(category):
            return token_name(headers.getall("Authorization"), category)
        if group is not None:
            raise Forbidden(f"This API is restricted, expecting header '{group.key}'")
        return ""
