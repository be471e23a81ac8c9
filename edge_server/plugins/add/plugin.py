"""Entry module of the plugin `add`: declares the command `edge-server add`, and adds its HTTP route and its section
of the dashboard's page."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.plugin import Command, Plugin, RunningPlugin, ServingCore

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.frontends.http.access_check import AccessCheck
    from edge_server.frontends.http.request import HttpRequest
    from edge_server.frontends.http.response import HttpResponse
    from edge_server.frontends.http.routes import Route
    from edge_server.plugins.add.model_upload import ModelUploads


class AddPlugin(Plugin):
    name = "add"
    commands = (
        Command(
            "add",
            "put a model file into a repository: say what it is, write its configuration, and try it",
            "edge_server.plugins.add.command",
            "Models",
        ),
    )

    def prepare(self, config: ServerConfig) -> RunningPlugin | None:
        local = next((path for path in config.repository.paths if "://" not in path), None)
        if local is None:
            return None
        return AddedModels(Path(local).absolute(), config.repository.measurements_dir)


class AddedModels(RunningPlugin):
    """Route and section of the page that add a model file. Imports the rest with the first file."""

    panel = Path(__file__).with_name("panel.js")
    _access: AccessCheck

    def __init__(self, repository: Path, measurements_dir: str) -> None:
        self._repository = repository
        self._measurements_dir = measurements_dir

    def build(self, core: ServingCore) -> None:
        self._access = core.access

    def routes(self) -> Sequence[Route]:
        from edge_server.frontends.http.routes import Route

        async def add(request: HttpRequest) -> HttpResponse:
            return await self._uploads.add(request)

        path, schema = "/edge/v1/new-models/{file}", "edge_server.plugins.add.schemas:ADDED_MODEL"
        summary = "Add a model file to the repository, and try it"
        return (Route("POST", path, "model-repository", summary, add, changes_server=True, schema=schema),)

    @functools.cached_property
    def _uploads(self) -> ModelUploads:
        from edge_server.plugins.add.model_upload import ModelUploads

        return ModelUploads(self._repository, self._measurements_dir, self._access)

    def stop(self, timeout_s: float) -> None:
        if "_uploads" in self.__dict__:
            self._uploads.stop()


PLUGIN = AddPlugin()
