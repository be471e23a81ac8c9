"""Operator endpoints beyond Triton's API: version history, rollback, unpin, governor, engine builds, frame streams,
cameras, activity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from edge_server.core.status_reports import CamerasReport, EngineBuildsReport, FrameStreamReport, GovernorState
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.http.aiohttp_server import read_members
from edge_server.frontends.http.request_head import parse_query
from edge_server.frontends.http.response import HttpResponse, json_response, plain_error
from edge_server.frontends.v2 import control_responses
from edge_server.frontends.v2.json_parser import json_type
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from aiohttp import web

Names = Mapping[str, str]


class GovernorView(Protocol):
    """The governor's state, as these endpoints show it. Both methods return at once."""

    def state(self) -> GovernorState:
        """Return the state in one word, and its reason."""

    def report(self) -> Mapping[str, object]:
        """Return the complete state as JSON values."""


class EngineView(Protocol):
    """Engine builds, as these endpoints show and change them. All methods return within milliseconds."""

    def report(self) -> EngineBuildsReport: ...

    def cancel(self, model: str, version: int | None = None) -> int:
        """Cancel the builds for a model; return their number. Raises UnknownModel."""

    def order_again(self, model: str, version: int | None = None) -> int:
        """Repeat failed or cancelled builds; return their number. Raises UnknownModel."""


_Result = TypeVar("_Result")

_NO_ENGINES = (
    "no engines are built here: there is no TensorRT, no driver or no GPU, or the server was started with "
    "--engine-builder=false"
)

_NOT_ALLOWED = (
    "rollback, unpin and changes of engine builds are allowed from this machine only; to allow them from other "
    "machines, require a key: --http-restricted-api=model-repository:<key>=<value>"
)


class OperatorEndpoints:
    """The handlers. `is_guarded`: requests of the category model-repository need a key or a token.

    Otherwise only this machine may make changes. Unlike load and unload, these changes work in every model control
    mode, so the mode cannot forbid them.
    """

    def __init__(
        self,
        service: InferenceService,
        blocking: Executor,
        *,
        is_guarded: bool,
        streams: Callable[[], Sequence[FrameStreamReport]] = tuple,
        cameras: Callable[[], CamerasReport] | None = None,
        governor: GovernorView | None = None,
        engines: EngineView | None = None,
    ) -> None:
        self._engines = engines
        self._service = service
        self._streams = streams
        self._cameras = cameras
        self._governor = governor
        self._blocking = blocking
        self._is_guarded = is_guarded

    async def versions(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        name = parse_query(request.raw_path, ("model",)).get("model")
        reports = await self._run_blocking(partial(self._service.versions, name))
        return json_response({"versions": control_responses.version_reports(reports, self._service.pins())})

    async def frame_streams(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response({"streams": control_responses.frame_streams(self._streams())})

    async def activity(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(
            control_responses.activity(self._service.statistics(None, None), self._service.model_families())
        )

    async def cameras(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if self._cameras is None:
            return json_response({"enabled": False, "sources": [], "sinks": []})
        return json_response(control_responses.cameras(self._cameras()))

    async def governor(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if self._governor is None:
            return json_response({"enabled": False, "detail": "the server was started with --governor=false"})
        return json_response(self._governor.report())

    async def engines(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if self._engines is None:
            return json_response({"enabled": False, "detail": _NO_ENGINES, "engines": []})
        return json_response(control_responses.engine_builds(await self._run_blocking(self._engines.report)))

    async def cancel_engine(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return await self._change_builds(request, names["model"], "cancelled")

    async def build_engine(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return await self._change_builds(request, names["model"], "ordered")

    async def _change_builds(self, request: web.BaseRequest, model: str, result: str) -> HttpResponse:
        if not self._may_change(request):
            return plain_error(_NOT_ALLOWED, 403)
        if self._engines is None:
            raise Unsupported(_NO_ENGINES)
        await self._members(request)
        change = self._engines.cancel if result == "cancelled" else self._engines.order_again
        return json_response({"model": model, result: await self._run_blocking(partial(change, model))})

    async def rollback(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if not self._may_change(request):
            return plain_error(_NOT_ALLOWED, 403)
        members = await self._members(request, "version")
        version = members.get("version")
        if version is not None and (type(version) is not int or version < 0):
            given = str(version)[:40] if type(version) is int else json_type(version)
            raise InvalidRequest(f"Unable to parse 'version': expected a number of 0 or more, got {given}")
        report = await self._run_blocking(partial(self._service.rollback, names["model"], version))
        return json_response(control_responses.pin_report(report))

    async def unpin(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        if not self._may_change(request):
            return plain_error(_NOT_ALLOWED, 403)
        await self._members(request)
        return json_response(
            control_responses.pin_report(await self._run_blocking(partial(self._service.unpin, names["model"])))
        )

    def _may_change(self, request: web.BaseRequest) -> bool:
        return self._is_guarded or is_this_machine(request.remote)

    async def _members(self, request: web.BaseRequest, *known: str) -> dict[str, object]:
        """Return the members of the body. Raises InvalidRequest for a member that is not in `known`."""
        members = await read_members(request)
        for key in members:
            if key not in known:
                raise InvalidRequest(f"unexpected member '{key[:80]}', expected {', '.join(known) or 'none'}")
        return members

    async def _run_blocking(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._blocking, call)
