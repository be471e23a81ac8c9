"""HTTP server of the page: its files, what changed since the page asked last, and the orders to rollouts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from edge_server.errors import Forbidden, InvalidRequest, Unauthenticated
from edge_server.frontends.access_control import is_shared_key
from edge_server.frontends.http.connection import RequestTarget
from edge_server.frontends.http.cross_site_check import CrossSiteCheck
from edge_server.frontends.http.host_check import HostNames
from edge_server.frontends.http.request import HttpRequest, RequestContext, TaskTarget
from edge_server.frontends.http.request_head import Headers, RequestHead, parse_query, parse_whole_number
from edge_server.frontends.http.response import HttpResponse, failure_response, json_response, plain_error
from edge_server.frontends.http.routes import NoSuchMethod, PathRouter, Route
from edge_server.frontends.http.server import HttpServer
from edge_server.plugins.dashboard.page_endpoints import PAGE_FOLDER, send_file
from edge_server.plugins.fleet.page.fleet_state import FleetState
from edge_server.plugins.fleet.page.rollout_state import RolloutState
from edge_server.version import __version__

_FILES = Path(__file__).parent / "files"
_MAX_CONNECTIONS = 256
_MAX_RELEASE = 300


class PageServer:
    """Serves the page from `start` to `stop`. `key` lets a browser lead rollouts; "": none may. `problem` says why
    there are no reports, "" if there are. `allowed_hosts`: see HostNames."""

    def __init__(
        self,
        state: FleetState,
        rollouts: RolloutState,
        key: str,
        problem: Callable[[], str],
        allowed_hosts: Collection[str] = (),
    ) -> None:
        self._state = state
        self._rollouts = rollouts
        self._key = key
        self._problem = problem
        names = HostNames(allowed_hosts, "--page-allowed-host")
        self._cross_site_check = CrossSiteCheck("http", names, None)
        self._server = HttpServer("page", self._route, names)
        self._context: RequestContext | None = None
        order = "Lead the rollout of a model's newest release"
        self._router = PathRouter(
            (
                Route("GET", "/", "", "The page", self.index),
                Route("GET", "/page/{file}", "", "Files that it shares with the page of a server", self.shared_file),
                Route("GET", "/page/fleet/{file}", "", "Its own files", self.file),
                Route("GET", "/edge/v1/page", "", "What the page may change for this caller", self.access),
                Route("GET", "/edge/v1/fleet", "", "Boxes that changed after a revision, and releases", self.fleet),
                Route("POST", "/edge/v1/rollouts/{model}/{action}", "", order, self.order, changes_server=True),
            )
        )

    async def start(self, address: str, port: int) -> int:
        """Listen, and return the bound port. Raises ServingFault."""
        self._context = RequestContext()
        return await self._server.open(address, port, max_connections=_MAX_CONNECTIONS)

    async def stop(self) -> None:
        await self._server.close(1.0)

    def _route(self, head: RequestHead) -> RequestTarget | HttpResponse:
        assert self._context is not None
        try:
            route, names = self._router.find(head.method, head.target)
            self._cross_site_check.check(head, route.category, changes_server=route.changes_server)
            assert route.handler is not None
            return TaskTarget(route.handler, names, head, self._context)
        except NoSuchMethod as error:
            response = plain_error("Method Not Allowed", 405)
            response.headers["Allow"] = str(error)
            return response
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error
            return failure_response(error, f"request {head.method} {head.target}")

    async def index(self, request: HttpRequest) -> HttpResponse:
        return await send_file(request, _FILES, "index.html")

    async def file(self, request: HttpRequest) -> HttpResponse:
        return await send_file(request, _FILES, request.names["file"])

    async def shared_file(self, request: HttpRequest) -> HttpResponse:
        return await send_file(request, PAGE_FOLDER, request.names["file"])

    async def access(self, request: HttpRequest) -> HttpResponse:
        may_lead = self._has_key(request.head.headers)
        return json_response(
            {
                "version": __version__,
                "allowed": {},
                "may_change_models": may_lead,
                "is_key_accepted": may_lead,
                "takes_tokens": bool(self._key),
                "key_headers": [],
                "has_rollouts": self._rollouts.has_repository,
            }
        )

    async def fleet(self, request: HttpRequest) -> HttpResponse:
        """Return the boxes that changed after the revision `after` of the run `run`; all for another run.

        An answer holds so many of them as `snapshot` says. The next ones are asked for by its revision.
        """
        query = parse_query(request.head.target, ("after", "run"))
        after = parse_whole_number("after", query.get("after", "0"))
        found = self._state.snapshot(after if query.get("run") == self._state.run_id else 0)
        releases, count = self._rollouts.describe(self._state.answering())
        too_many = f"{len(releases)} of {count} releases are shown" if count > len(releases) else ""
        return json_response(
            {
                **found,
                "run": self._state.run_id,
                "started_s": self._state.started_s,
                "releases": releases,
                "problem": "\n".join(filter(None, (self._problem(), self._rollouts.problem, too_many))),
            }
        )

    async def order(self, request: HttpRequest) -> HttpResponse:
        """Continue, stop or roll back a rollout. The body has `release` and `wave`, as the page showed them."""
        if not self._key:
            raise Forbidden("this page leads no rollouts: start it with --repository and --keys")
        if not self._has_key(request.head.headers):
            raise Unauthenticated("expected the key of this page, as `edge-server fleet page` printed it")
        members = await request.read_members(("release", "wave"))
        release, wave = members.get("release"), members.get("wave")
        if not isinstance(release, str) or len(release) > _MAX_RELEASE or type(wave) is not int:
            raise InvalidRequest("expected `release`, a text, and `wave`, a whole number")
        model, action, boxes = request.names["model"], request.names["action"], self._state.answering()
        changed = await request.run_blocking(lambda: self._rollouts.lead(model, action, release, wave, boxes))
        return json_response({"changes": changed})

    def _has_key(self, headers: Headers) -> bool:
        return bool(self._key) and is_shared_key(headers.getall("Authorization"), f"Bearer {self._key}")
