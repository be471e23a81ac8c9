"""Endpoint table of HTTP: paths, handlers, access categories and summaries, and the router that finds an endpoint."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from edge_server.errors import InvalidRequest
from edge_server.frontends.access_control import ORDERING_CATEGORIES
from edge_server.frontends.http.aiohttp_server import Handler
from edge_server.frontends.http.control_endpoints import ControlEndpoints
from edge_server.frontends.http.deepstack_endpoints import DeepStackEndpoints
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.generate_endpoints import GenerationEndpoints, GenerationHandler
from edge_server.frontends.http.openai_endpoints import OpenAiEndpoints
from edge_server.frontends.http.operator_endpoints import OperatorEndpoints
from edge_server.frontends.http.page_endpoints import PageEndpoints, Route
from edge_server.frontends.http.view_endpoints import ViewEndpoints

_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")
_CACHED_PATHS = 256


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """An endpoint: a path and a method. `category` is one of `config.CATEGORIES`, or "" if it is open to everyone.

    `summary` is its line in the OpenAPI document. `handler` runs in aiohttp, `generation` in a task of its own; an
    endpoint with neither is inference.
    `changes_server`: the request can change the server's state, so `CrossSiteCheck` accepts only this server's pages.
    """

    category: str
    summary: str
    handler: Handler | None = None
    changes_server: bool = False
    generation: GenerationHandler | None = None


class NoSuchPath(Exception):
    """No endpoint has this path: 404."""


class NoSuchMethod(Exception):
    """The path exists, but not with this method: 405."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__(", ".join(allowed))
        self.allowed = allowed


class PathRouter:
    """Finds endpoints by method and path. Patterns are tried in the order of their addition.

    A pattern is a path with names in braces: "/v2/models/{model}/infer". A name matches one segment, never an empty
    one, and is percent-decoded. Add all patterns before the first `find`.
    """

    def __init__(self) -> None:
        self.routes: list[Route] = []
        """All endpoints, in the order of their addition."""
        self._patterns: list[tuple[re.Pattern[str], Mapping[str, HttpEndpoint]]] = []
        # Clients repeat the same few paths.
        self._match = functools.lru_cache(maxsize=_CACHED_PATHS)(self._match_patterns)

    def add(self, pattern: str, endpoints: Mapping[str, HttpEndpoint]) -> None:
        """Add one path; `endpoints` maps methods to endpoints."""
        expression = _PLACEHOLDER.sub(r"(?P<\1>[^/]+)", re.escape(pattern))
        self.routes += [(method, pattern, one.category, one.summary) for method, one in endpoints.items()]
        self._patterns.append((re.compile(expression + "/?"), endpoints))

    def find(self, method: str, target: str) -> tuple[HttpEndpoint, Mapping[str, str]]:
        """Return the endpoint and the names found in the path. Raises NoSuchPath, NoSuchMethod, InvalidRequest.

        `target` is that of the request line, still percent-encoded, with or without a query.
        """
        endpoints, names = self._match(target.partition("?")[0])
        endpoint = endpoints.get(method)
        if endpoint is None:
            raise NoSuchMethod(tuple(sorted(endpoints)))
        return endpoint, names

    def _match_patterns(self, path: str) -> tuple[Mapping[str, HttpEndpoint], Mapping[str, str]]:
        for pattern, endpoints in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                try:
                    return endpoints, {name: unquote(text, errors="strict") for name, text in match.groupdict().items()}
                except UnicodeDecodeError:
                    raise InvalidRequest("the path is not UTF-8") from None
        raise NoSuchPath(path)


def build_router(
    control: ControlEndpoints,
    generation: GenerationEndpoints,
    openai: OpenAiEndpoints,
    events: EventEndpoints,
    operator: OperatorEndpoints,
    deepstack: DeepStackEndpoints,
    page: PageEndpoints,
    view: ViewEndpoints,
) -> PathRouter:
    """Return a router with all endpoints."""
    router = PathRouter()
    # These change nothing, although Triton uses POST for them.
    queries = (control.repository_index, control.named_repository)

    def add(category: str, patterns: tuple[str, ...], **methods: tuple[str, Handler]) -> None:
        """Add paths with their methods, each a summary and a handler."""
        may_change_server = category in ORDERING_CATEGORIES
        endpoints = {
            verb: HttpEndpoint(
                category,
                summary,
                handler,
                changes_server=may_change_server and verb != "GET" and handler not in queries,
            )
            for verb, (summary, handler) in methods.items()
        }
        for pattern in patterns:
            router.add(pattern, endpoints)

    def add_task(category: str, patterns: tuple[str, ...], method: str, summary: str, run: GenerationHandler) -> None:
        """Add paths whose handler runs in a task of its own."""
        for pattern in patterns:
            router.add(pattern, {method: HttpEndpoint(category, summary, generation=run)})

    # Inference first: patterns are tried in this order.
    for pattern in _model_paths("/infer"):
        router.add(pattern, {"POST": HttpEndpoint("inference", "Run a model on tensors or on an image file")})
    add_task(
        "inference",
        _model_paths("/generate"),
        "POST",
        "Run a model on a flat JSON object, for one response",
        generation.generate,
    )
    add_task(
        "inference",
        _model_paths("/generate_stream"),
        "POST",
        "Run a model on a flat JSON object; each response is a server-sent event",
        generation.generate_stream,
    )
    for base in ("/v1", "/v3"):  # OpenVINO Model Server has this API under /v3
        chat = "Continue a chat, as in OpenAI's API"
        add_task("inference", (f"{base}/chat/completions",), "POST", chat, openai.chat)
        add_task("inference", (f"{base}/completions",), "POST", "Complete a text, as in OpenAI's API", openai.complete)
        add_task("inference", (f"{base}/embeddings",), "POST", "Embed texts, as in OpenAI's API", openai.embed)
        add_task("metadata", (f"{base}/models",), "GET", "List the models for text, as in OpenAI's API", openai.models)
        add_task("metadata", (f"{base}/models/{{model}}",), "GET", "One model, as in OpenAI's API", openai.model)
    add_task(
        "inference",
        ("/v1/vision/detection", "/v1/vision/custom/{model}"),
        "POST",
        "Detect objects in the image of a form, as in DeepStack's API",
        deepstack.detect,
    )
    add("health", ("/v2/health/live",), GET=("Whether the server runs", control.live))
    add("health", ("/v2/health/ready",), GET=("Whether the server and its models accept inference", control.ready))
    add("health", _model_paths("/ready"), GET=("Whether a model accepts inference", control.model_ready))
    add(
        "statistics",
        ("/v2/models/stats", *_model_paths("/stats")),
        GET=("Counts and durations of requests", control.statistics),
    )
    add("model-config", _model_paths("/config"), GET=("Configuration of a model", control.model_config))
    add(
        "trace",
        ("/v2/trace/setting", "/v2/models/{model}/trace/setting"),
        GET=("Trace settings", control.trace_setting),
        POST=("Change trace settings", control.update_trace_setting),
    )
    add(
        "logging",
        ("/v2/logging",),
        GET=("Log settings", control.log_settings),
        POST=("Change log settings", control.update_log_settings),
    )
    index = ("Models of the repository with their states", control.repository_index)
    add("model-repository", ("/v2/repository/index",), POST=index)
    load = ("Load or reload a model", control.load)
    add("model-repository", ("/v2/repository/models/{model}/load",), POST=load)
    unload = ("Unload a model", control.unload)
    add("model-repository", ("/v2/repository/models/{model}/unload",), POST=unload)
    named = (
        "/v2/repository/{repository}/index",
        "/v2/repository/{repository}/models/{model}/load",
        "/v2/repository/{repository}/models/{model}/unload",
    )
    add("model-repository", named, POST=("Not supported: repositories have no names", control.named_repository))
    for kind, memory, status, register, unregister in (
        (
            "systemsharedmemory",
            "system shared memory",
            control.shared_memory_status,
            control.register_shared_memory,
            control.unregister_shared_memory,
        ),
        (
            "cudasharedmemory",
            "CUDA shared memory",
            control.cuda_memory_status,
            control.register_cuda_memory,
            control.unregister_cuda_memory,
        ),
    ):
        one, every = f"/v2/{kind}/region/{{region}}", f"/v2/{kind}"
        add("shared-memory", (f"{every}/status", f"{one}/status"), GET=(f"Registered regions of {memory}", status))
        add("shared-memory", (f"{one}/register",), POST=(f"Register a region of {memory}", register))
        paths = (f"{every}/unregister", f"{one}/unregister")
        add("shared-memory", paths, POST=(f"Unregister regions of {memory}", unregister))
    # After the statistics: "stats" is not a model's name in /v2/models/stats.
    add("metadata", _model_paths(""), GET=("Inputs, outputs and versions of a model", control.model_metadata))
    add("metadata", ("/v2",), GET=("Name, version and extensions of the server", control.server_metadata))
    # Endpoints of this server, which Triton does not have.
    loaded = ("Loaded versions: runtime, device, precision, memory", control.instance_reports)
    add("metadata", ("/edge/v1/models",), GET=loaded)
    add("model-repository", ("/edge/v1/events",), GET=("Events, as a stream or a list", events.events))
    versions = ("Every version with its state, history and reason", operator.versions)
    add("model-repository", ("/edge/v1/versions",), GET=versions)
    add("statistics", ("/edge/v1/streams",), GET=("Frame streams: rates, drops, ages", operator.frame_streams))
    cameras = ("Cameras that the server opens, and receivers of their results", operator.cameras)
    add("statistics", ("/edge/v1/cameras",), GET=cameras)
    add("statistics", ("/edge/v1/governor",), GET=("Heat, power, and what is held back", operator.governor))
    add("statistics", ("/edge/v1/activity",), GET=("Queues, cache and tokens of all models", operator.activity))
    add("statistics", ("/edge/v1/engines",), GET=("TensorRT engines and their builds", operator.engines))
    add(
        "model-repository",
        ("/edge/v1/engines/{model}",),
        POST=("Repeat the engine builds for a model", operator.build_engine),
        DELETE=("Cancel the engine builds for a model", operator.cancel_engine),
    )
    rollback = ("Pin a model to a version; without one, to the version before", operator.rollback)
    add("model-repository", ("/edge/v1/models/{model}/rollback",), POST=rollback)
    add("model-repository", ("/edge/v1/models/{model}/unpin",), POST=("Remove a model's pin", operator.unpin))
    add_task(
        "inference",
        ("/edge/v1/models/{model}/perception",),
        "POST",
        "Classes, detections and mask of an image file",
        view.perception,
    )
    pictures = "Live pictures of a frame stream with its results drawn in, as MJPEG"
    add_task("view", ("/edge/v1/streams/{stream}/view",), "GET", pictures, view.pictures)
    frames = "Live pictures of a frame stream, and before each a part of JSON with its results"
    add_task("view", ("/edge/v1/streams/{stream}/frames",), "GET", frames, view.frames)
    picture = "The next picture of a frame stream with its results drawn in, as JPEG"
    add_task("view", ("/edge/v1/streams/{stream}/picture",), "GET", picture, view.picture)
    # The page, open to everyone: a browser cannot send a key for the page itself.
    add_task("", ("/",), "GET", "The page of the server", page.index)
    add_task("", ("/page/{file}",), "GET", "Files of the page", page.file)
    add_task("", ("/edge/v1/page",), "GET", "What the page may show and change for this caller", page.access)
    add_task("", ("/docs/api",), "GET", "Reference of this API as a page", page.reference)
    add_task("openapi", ("/openapi.json",), "GET", "Reference of this API as OpenAPI 3.1", page.openapi)
    return router


def _model_paths(action: str) -> tuple[str, str]:
    """Return the two paths of a model's action, without and with a version."""
    return (f"/v2/models/{{model}}{action}", f"/v2/models/{{model}}/versions/{{version}}{action}")
