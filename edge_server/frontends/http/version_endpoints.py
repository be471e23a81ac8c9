"""Handlers of HTTP endpoints below /edge/v1 for model versions: history, rollback, and removal of a pin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edge_server.errors import InvalidRequest
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import parse_query
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.frontends.json_text import json_type
from edge_server.frontends.v2 import control_responses
from edge_server.service import InferenceService

_SCHEMAS = "edge_server.frontends.http.schemas"


class VersionEndpoints:
    """The handlers."""

    def __init__(self, service: InferenceService, access: AccessCheck) -> None:
        self._service = service
        self._access = access

    def routes(self) -> Sequence[Route]:
        get = partial(Route, "GET", uses_aiohttp=True)
        change = partial(Route, "POST", category="model-repository", uses_aiohttp=True, changes_server=True)
        model = "/edge/v1/models/{model}"
        versions = "Every version with its state, history and reason"
        rollback = "Pin a model to a version; without one, to the version before"
        return (
            get("/edge/v1/versions", "model-repository", versions, self.versions, schema=f"{_SCHEMAS}:VERSIONS"),
            change(f"{model}/rollback", summary=rollback, handler=self.rollback, schema=f"{_SCHEMAS}:ROLLBACK"),
            change(f"{model}/unpin", summary="Remove a model's pin", handler=self.unpin, schema=f"{_SCHEMAS}:UNPIN"),
        )

    async def versions(self, request: HttpRequest) -> HttpResponse:
        name = parse_query(request.head.target, ("model",)).get("model")
        reports = await request.run_blocking(partial(self._service.versions, name))
        return json_response({"versions": control_responses.version_reports(reports, self._service.pins())})

    async def rollback(self, request: HttpRequest) -> HttpResponse:
        self._access.check_change(request.peer)
        version = (await request.read_members(("version",))).get("version")
        if version is not None and (type(version) is not int or version < 0):
            given = str(version)[:40] if type(version) is int else json_type(version)
            raise InvalidRequest(f"Unable to parse 'version': expected a number of 0 or more, got {given}")
        report = await request.run_blocking(partial(self._service.rollback, request.names["model"], version))
        return json_response(control_responses.pin_report(report))

    async def unpin(self, request: HttpRequest) -> HttpResponse:
        self._access.check_change(request.peer)
        await request.read_members(())
        return json_response(
            control_responses.pin_report(
                await request.run_blocking(partial(self._service.unpin, request.names["model"]))
            )
        )
