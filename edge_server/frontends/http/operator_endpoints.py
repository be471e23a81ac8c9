"""What an operator asks and orders beyond Triton's endpoints: versions with their past, rollback, unpin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from edge_server.core.status_reports import EngineBuildsReport, FrameStreamReport, GovernorState
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.http.aiohttp_server import read_members
from edge_server.frontends.http.query_string import parse_query
from edge_server.frontends.http.response import HttpResponse, json_reply, plain_error
from edge_server.frontends.v2 import control_responses
from edge_server.frontends.v2.json_parser import json_type
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from aiohttp import web

Names = Mapping[str, str]


class GovernorView(Protocol):
    """What the governor tells of the box. Both return at once."""

    def state(self) -> GovernorState:
        """Return the state in one word, and why."""

    def report(self) -> Mapping[str, object]:
        """Return everything that is known, as JSON values."""


class EngineView(Protocol):
    """What is known of engines, and what may be ordered. All return within milliseconds."""

    def report(self) -> EngineBuildsReport: ...

    def cancel(self, model: str, version: int | None = None) -> int:
        """Take back the builds for a model; return how many. Raises UnknownModel."""

    def order_again(self, model: str, version: int | None = None) -> int:
        """Build what failed or was taken back; return how many. Raises UnknownModel."""


_Result = TypeVar("_Result")

_NO_ENGINES = (
    "no engines are built here: there is no TensorRT, no driver or no GPU, or the server was started with "
    "--engine-builder=false"
)

_NOT_ALLOWED = (
    "rollback, unpin and orders about engines are answered to this machine only; to allow them from elsewhere, guard "
    "them by a key: --http-restricted-api=model-repository:<key>=<value>"
)


class OperatorEndpoints:
    """`is_guarded`: every request that comes here has shown the key of the category model-repository.

    Without a key, orders are taken from this machine alone: unlike load and unload they work in every control mode, so
    the choice of a mode does not allow them.
    """

    def __init__(
        self,
        service: InferenceService,
        blocking: Executor,
        *,
        is_guarded: bool,
        streams: Callable[[], Sequence[FrameStreamReport]] = tuple,
        governor: GovernorView | None = None,
        engines: EngineView | None = None,
    ) -> None:
        self._engines = engines
        self._service = service
        self._streams = streams
        self._governor = governor
        self._blocking = blocking
        self._is_guarded = is_guarded

    async def versions(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        name = parse_query(request.raw_path, ("model",)).get("model")
        reports = await self._run(partial(self._service.versions, name))
        return json_reply({"versions": control_responses.version_reports(reports, self._service.pins())})

    async def frame_streams(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_reply({"streams": control_responses.frame_streams(self._streams())})

    async def governor(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if self._governor is None:
            return json_reply({"enabled": False, "detail": "the server was started with --governor=false"})
        return json_reply(self._governor.report())

    async def engines(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if self._engines is None:
            return json_reply({"enabled": False, "detail": _NO_ENGINES, "engines": []})
        return json_reply(control_responses.engine_works(await self._run(self._engines.report)))

    async def cancel_engine(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return await self._order_engine(request, names["model"], "cancelled")

    async def build_engine(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return await self._order_engine(request, names["model"], "ordered")

    async def _order_engine(self, request: web.BaseRequest, model: str, told: str) -> HttpResponse:
        if not self._may_order(request):
            return plain_error(_NOT_ALLOWED, 403)
        if self._engines is None:
            raise Unsupported(_NO_ENGINES)
        await self._members(request)
        order = self._engines.cancel if told == "cancelled" else self._engines.order_again
        return json_reply({"model": model, told: await self._run(partial(order, model))})

    async def rollback(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if not self._may_order(request):
            return plain_error(_NOT_ALLOWED, 403)
        members = await self._members(request, "version")
        version = members.get("version")
        if version is not None and (type(version) is not int or version < 0):
            raise InvalidRequest(f"Unable to parse 'version': expected a number of 0 or more, got {_told(version)}")
        report = await self._run(partial(self._service.rollback, names["model"], version))
        return json_reply(control_responses.pin_report(report))

    async def unpin(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if not self._may_order(request):
            return plain_error(_NOT_ALLOWED, 403)
        await self._members(request)
        return json_reply(control_responses.pin_report(await self._run(partial(self._service.unpin, names["model"]))))

    def _may_order(self, request: web.BaseRequest) -> bool:
        return self._is_guarded or is_this_machine(request.remote)

    async def _members(self, request: web.BaseRequest, *known: str) -> dict[str, object]:
        members = await read_members(request)
        for key in members:
            if key not in known:
                raise InvalidRequest(f"unexpected member '{key[:80]}', expected {', '.join(known) or 'none'}")
        return members

    async def _run(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._blocking, call)


def _told(value: object) -> str:
    return str(value)[:40] if type(value) is int else json_type(value)
