"""HTTP routes /edge/v1/engines for TensorRT engines and their builds, with their handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import Unsupported
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.request import Handler, HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route

if TYPE_CHECKING:
    from edge_server.plugins.tensorrt.builds.build_queue import EngineBuildQueue

_NO_ENGINES = (
    "no engines are built here: there is no TensorRT, no driver or no GPU, or the server was started with "
    "--engine-builder=false"
)


def engines_json(queue: EngineBuildQueue | None) -> Mapping[str, object]:
    """Return the response of GET /edge/v1/engines; None: no engines are built. *Blocking* for milliseconds."""
    if queue is None:
        return {"enabled": False, "detail": _NO_ENGINES, "engines": []}
    return queue.report().as_json()


def engine_routes(queue: EngineBuildQueue | None, access: AccessCheck) -> Sequence[Route]:
    """Return the routes. Without a queue, they say why there is none."""

    async def engines(request: HttpRequest) -> HttpResponse:
        return json_response(await request.run_blocking(partial(engines_json, queue)))

    line = partial(Route, uses_aiohttp=True)
    change = partial(line, path="/edge/v1/engines/{model}", category="model-repository", changes_server=True)
    order_again, cancel = (None, None) if queue is None else (queue.order_again, queue.cancel)
    return (
        line("GET", "/edge/v1/engines", "statistics", "TensorRT engines and their builds", engines),
        change(
            "POST", summary="Repeat the engine builds for a model", handler=_changing(order_again, "ordered", access)
        ),
        change(
            "DELETE", summary="Cancel the engine builds for a model", handler=_changing(cancel, "cancelled", access)
        ),
    )


def _changing(change: Callable[[str], int] | None, result: str, access: AccessCheck) -> Handler:
    """Return the handler that changes the builds for the model in the path; None: that refuses to."""

    async def handle(request: HttpRequest) -> HttpResponse:
        access.check_change(request.peer)
        if change is None:
            raise Unsupported(_NO_ENGINES)
        await request.read_members(())
        model = request.names["model"]
        return json_response({"model": model, result: await request.run_blocking(partial(change, model))})

    return handle
