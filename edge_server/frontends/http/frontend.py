"""HTTP front end of the API: finds the handler of each request by the routes, checks access first, and renews the TLS
certificate."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from types import MappingProxyType
from typing import NamedTuple

from edge_server.config import HttpConfig
from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault
from edge_server.frontends.connection_limit import ConnectionLimit
from edge_server.frontends.http.accept_loop import max_connections
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.aiohttp_adapter import AiohttpServer, AiohttpTarget
from edge_server.frontends.http.connection import RequestTarget
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.host_check import HostNames
from edge_server.frontends.http.inference_route import INFER_ROUTES, BodyDecoder, InferenceContext
from edge_server.frontends.http.request import HttpRequest, RequestContext, TaskTarget
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, failure_response, json_response, plain_error
from edge_server.frontends.http.routes import NoSuchMethod, PathRouter, RefusalBody, Route
from edge_server.frontends.http.server import HttpServer, LoopThread, server_tls
from edge_server.frontends.memory_budget import MemoryBudget, budget_bytes
from edge_server.service import InferenceService

_LOG = logging.getLogger(__name__)

# Threads for calls that wait for model loads; a few such calls must not delay each other or status requests.
_BLOCKING_THREADS = 8
_MAX_WORKER_THREADS = 4


def _usual_body(head: RequestHead, error: EdgeServerError) -> None:
    """Return None: the usual JSON object."""


class _LoopContext(NamedTuple):
    """What the requests on one event loop share."""

    requests: RequestContext
    inference: InferenceContext
    aiohttp: AiohttpServer


class HttpFrontend:
    """Serves KServe v2 with Triton's extensions over HTTP. `start` and `stop` run on the loop that serves, alone or
    with those of `thread_count - 1` further threads."""

    def __init__(
        self,
        service: InferenceService,
        config: HttpConfig,
        *,
        access: AccessCheck | None = None,
        budget: MemoryBudget | None = None,
        limit: ConnectionLimit | None = None,
        body_decoders: Mapping[str, BodyDecoder] = MappingProxyType({}),
        thread_count: int = 1,
    ) -> None:
        """`budget` limits the bodies being received, `limit` the connections of all listeners. Without them, the front
        end has its own.

        `access` knows the tokens; without it, only `config` counts. `body_decoders`: beginning of a content type -> the
        decoder of such a body of an inference request.
        """
        largest = config.max_input_size_bytes
        self._budget = budget or MemoryBudget(budget_bytes(config.max_body_bytes_in_flight, largest), largest)
        self.access_check = access or AccessCheck(config)
        self._limit = limit
        self._body_decoders = body_decoders
        self._service = service
        self._config = config
        self._cors = CorsPolicy(config.allowed_origins)
        names = HostNames(config.allowed_hosts)
        self._tls: ssl.SSLContext | None = None
        self._server = HttpServer("HTTP", self._route, names, service, self._cors if config.allowed_origins else None)
        self._thread_count = thread_count
        self._threads: list[LoopThread] = []
        self._contexts: dict[int, _LoopContext] = {}
        """Those of the event loops, by their threads."""
        self._blocking = ThreadPoolExecutor(_BLOCKING_THREADS, "http-blocking")
        self._workers = ThreadPoolExecutor(min(_MAX_WORKER_THREADS, os.cpu_count() or 1), "http-worker")
        self._router = PathRouter()
        self._refusal_body: RefusalBody = _usual_body

    async def start(self, routes: Iterable[Route], refusal_body: RefusalBody = _usual_body) -> int:
        """Listen and return the bound port. Serve inference, the OpenAPI document, and `routes`.

        Raises ServingFault (address taken, certificate unreadable, two routes with one method and path).
        """
        config = self._config
        summary = "Reference of this API as OpenAPI 3.1"
        self._router = PathRouter(
            (*INFER_ROUTES, *routes, Route("GET", "/openapi.json", "openapi", summary, self._describe_routes))
        )
        self._refusal_body = refusal_body
        if config.tls_cert and config.tls_key:
            self._tls = server_tls(config.tls_cert, config.tls_key, config.client_ca)

            def use_newest_context(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
                # Called at the start of each handshake, also without a server name.
                if self._tls is not None:
                    connection.context = self._tls

            self._tls.sni_callback = use_newest_context
        # The access of cached headers was checked with the previous tokens: check it again.
        self.access_check.tokens.on_change(self._server.drop_cached_headers)
        await self._add_context()
        try:
            for _ in range(self._thread_count - 1):
                self._threads.append(LoopThread())
                await self._threads[-1].run(self._add_context())
            return await self._server.open(
                config.address,
                config.port,
                reuses_port=config.reuses_port,
                tls=self._tls,
                budget=self._budget,
                limit=self._limit,
                max_connections=max_connections(config.max_connections),
                threads=self._threads,
            )
        except ServingFault:
            self._stop_threads()
            raise

    async def _add_context(self) -> None:
        """Add what the requests on this event loop share."""
        requests = RequestContext(self._workers, self._blocking)
        inference = InferenceContext(
            self._service,
            requests.dispatch,
            self._workers,
            self.access_check.tokens,
            self._config.header_pattern,
            self._body_decoders,
        )
        self._contexts[get_ident()] = _LoopContext(requests, inference, AiohttpServer(self._workers))

    def _stop_threads(self) -> None:
        while self._threads:
            self._threads.pop().stop()

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
        await self._server.close(grace_s)
        self._stop_threads()
        self._blocking.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _route(self, head: RequestHead) -> RequestTarget | HttpResponse:
        """Return the target of requests with a head, or the response that refuses them."""
        failure: EdgeServerError
        try:
            route, names = self._router.find(head.method, head.target)
            self.access_check.cross_site_check.check(head, route.category, changes_server=route.changes_server)
            if route.handler is None:
                # The head is cached, so the target counts each request itself, when its body is complete.
                caller = self.access_check.admit_uncounted(head.headers, route.category)
                return self._contexts[get_ident()].inference.target(
                    head, names["model"], names.get("version", ""), caller
                )
            caller = self.access_check.admit(head.headers, route.category)
            if route.changes_server and caller:
                _LOG.info("'%s' requested: %s %s", caller, head.method, head.target)
            context = self._contexts[get_ident()]
            if route.uses_aiohttp:
                return AiohttpTarget(context.aiohttp, route.handler, names, head, context.requests)
            return TaskTarget(route.handler, names, head, context.requests)
        except NoSuchMethod as error:
            if (preflight := self._cors.preflight(head, error.allowed)) is not None:
                return preflight
            response = plain_error(f"Method Not Allowed{error.hint}", 405)
            failure = InvalidRequest(f"{head.method}: use {error}{error.hint}")
            response.headers["Allow"] = str(error)
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error
            response = failure_response(error, f"request {head.method} {head.target}")
            failure = error if isinstance(error, EdgeServerError) else ServingFault("internal error")
        response.body = self._refusal_body(head, failure) or response.body
        return response

    async def _describe_routes(self, request: HttpRequest) -> HttpResponse:
        # Imported for the first reader: the schemas are large.
        from edge_server.frontends.http.openapi import openapi_document

        return json_response(openapi_document(self._router.routes))
