"""Endpoint table of HTTP: paths, handlers and access categories, and the router that finds an endpoint."""

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
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.generate_endpoints import GenerationEndpoints, GenerationHandler
from edge_server.frontends.http.openai_endpoints import OpenAiEndpoints
from edge_server.frontends.http.operator_endpoints import OperatorEndpoints

_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")
_CACHED_PATHS = 256


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """An endpoint: a path and a method. `category` is one of `config.CATEGORIES`.

    `handler` runs in aiohttp, `generation` in a task of its own; an endpoint with neither is inference.
    `changes_server`: the request can change the server's state, so `CrossSiteCheck` checks it.
    """

    category: str
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
        self._patterns: list[tuple[re.Pattern[str], dict[str, HttpEndpoint]]] = []
        # Clients repeat the same few paths.
        self._match = functools.lru_cache(maxsize=_CACHED_PATHS)(self._match_patterns)

    def add(self, pattern: str, endpoints: Mapping[str, HttpEndpoint]) -> None:
        """Add one path; `endpoints` maps methods to endpoints."""
        expression = _PLACEHOLDER.sub(r"(?P<\1>[^/]+)", re.escape(pattern))
        self._patterns.append((re.compile(expression + "/?"), dict(endpoints)))

    def find(self, method: str, target: str) -> tuple[HttpEndpoint, Mapping[str, str]]:
        """Return the endpoint and the names found in the path. Raises NoSuchPath, NoSuchMethod, InvalidRequest.

        `target` is that of the request line, still percent-encoded, with or without a query.
        """
        endpoints, names = self._match(target.partition("?")[0])
        endpoint = endpoints.get(method)
        if endpoint is None:
            raise NoSuchMethod(tuple(sorted(endpoints)))
        return endpoint, names

    def _match_patterns(self, path: str) -> tuple[dict[str, HttpEndpoint], Mapping[str, str]]:
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
) -> PathRouter:
    """Return a router with all endpoints."""
    router = PathRouter()
    # These change nothing, although Triton uses POST for them.
    queries = (control.repository_index, control.named_repository)

    def add(category: str, patterns: tuple[str, ...], **handlers: Handler) -> None:
        may_change_server = category in ORDERING_CATEGORIES
        endpoints = {
            verb: HttpEndpoint(
                category, handler, changes_server=may_change_server and verb != "GET" and handler not in queries
            )
            for verb, handler in handlers.items()
        }
        for pattern in patterns:
            router.add(pattern, endpoints)

    # Inference first: patterns are tried in this order.
    for pattern in _model_paths("/infer"):
        router.add(pattern, {"POST": HttpEndpoint("inference")})
    for action, handler in (("/generate", generation.generate), ("/generate_stream", generation.generate_stream)):
        for pattern in _model_paths(action):
            router.add(pattern, {"POST": HttpEndpoint("inference", generation=handler)})
    for base in ("/v1", "/v3"):  # OpenVINO Model Server has this API under /v3
        router.add(f"{base}/chat/completions", {"POST": HttpEndpoint("inference", generation=openai.chat)})
        router.add(f"{base}/completions", {"POST": HttpEndpoint("inference", generation=openai.complete)})
        router.add(f"{base}/embeddings", {"POST": HttpEndpoint("inference", generation=openai.embed)})
        router.add(f"{base}/models", {"GET": HttpEndpoint("metadata", generation=openai.models)})
        router.add(f"{base}/models/{{model}}", {"GET": HttpEndpoint("metadata", generation=openai.model)})
    add("health", ("/v2/health/live",), GET=control.live)
    add("health", ("/v2/health/ready",), GET=control.ready)
    add("health", _model_paths("/ready"), GET=control.model_ready)
    add("statistics", ("/v2/models/stats", *_model_paths("/stats")), GET=control.statistics)
    add("model-config", _model_paths("/config"), GET=control.model_config)
    trace = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")
    add("trace", trace, GET=control.trace_setting, POST=control.update_trace_setting)
    add("logging", ("/v2/logging",), GET=control.log_settings, POST=control.update_log_settings)
    add("model-repository", ("/v2/repository/index",), POST=control.repository_index)
    add("model-repository", ("/v2/repository/models/{model}/load",), POST=control.load)
    add("model-repository", ("/v2/repository/models/{model}/unload",), POST=control.unload)
    named = (
        "/v2/repository/{repository}/index",
        "/v2/repository/{repository}/models/{model}/load",
        "/v2/repository/{repository}/models/{model}/unload",
    )
    add("model-repository", named, POST=control.named_repository)
    for kind, status, register, unregister in (
        (
            "systemsharedmemory",
            control.shared_memory_status,
            control.register_shared_memory,
            control.unregister_shared_memory,
        ),
        ("cudasharedmemory", control.cuda_memory_status, control.register_cuda_memory, control.unregister_cuda_memory),
    ):
        one, every = f"/v2/{kind}/region/{{region}}", f"/v2/{kind}"
        add("shared-memory", (f"{every}/status", f"{one}/status"), GET=status)
        add("shared-memory", (f"{one}/register",), POST=register)
        add("shared-memory", (f"{every}/unregister", f"{one}/unregister"), POST=unregister)
    # After the statistics: "stats" is not a model's name in /v2/models/stats.
    add("metadata", _model_paths(""), GET=control.model_metadata)
    add("metadata", ("/v2",), GET=control.server_metadata)
    # Endpoints of this server, which Triton does not have.
    add("metadata", ("/edge/v1/models",), GET=control.instance_reports)
    add("model-repository", ("/edge/v1/events",), GET=events.events)
    add("model-repository", ("/edge/v1/versions",), GET=operator.versions)
    add("statistics", ("/edge/v1/streams",), GET=operator.frame_streams)
    add("statistics", ("/edge/v1/cameras",), GET=operator.cameras)
    add("statistics", ("/edge/v1/governor",), GET=operator.governor)
    add("statistics", ("/edge/v1/engines",), GET=operator.engines)
    engine = ("/edge/v1/engines/{model}",)
    add("model-repository", engine, POST=operator.build_engine, DELETE=operator.cancel_engine)
    add("model-repository", ("/edge/v1/models/{model}/rollback",), POST=operator.rollback)
    add("model-repository", ("/edge/v1/models/{model}/unpin",), POST=operator.unpin)
    return router


def _model_paths(action: str) -> tuple[str, str]:
    """Return the two paths of a model's action, without and with a version."""
    return (f"/v2/models/{{model}}{action}", f"/v2/models/{{model}}/versions/{{version}}{action}")
