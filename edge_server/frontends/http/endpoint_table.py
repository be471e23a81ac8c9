"""The table of endpoints: Triton's paths, what answers them, and the category each can be restricted by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_server.frontends.access_control import ORDERING_CATEGORIES
from edge_server.frontends.http.aiohttp_server import Handler
from edge_server.frontends.http.control_endpoints import ControlEndpoints
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.generate_endpoints import GenerationEndpoints, GenerationHandler
from edge_server.frontends.http.operator_endpoints import OperatorEndpoints
from edge_server.frontends.http.path_router import PathRouter


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """What answers a path and verb; `category` is one of `config.CATEGORIES`. `handler`: by aiohttp; `generation`: by
    a task of ours; neither: an inference. `is_order`: it changes something, and is judged by `OrderRule`."""

    category: str
    handler: Handler | None = None
    is_order: bool = False
    generation: GenerationHandler | None = None


def build_router(
    control: ControlEndpoints, generation: GenerationEndpoints, events: EventEndpoints, operator: OperatorEndpoints
) -> PathRouter[HttpEndpoint]:
    router: PathRouter[HttpEndpoint] = PathRouter()
    # Triton asks for the index with a POST.
    questions = (control.repository_index, control.named_repository)

    def add(category: str, patterns: tuple[str, ...], **handlers: Handler) -> None:
        is_ordering = category in ORDERING_CATEGORIES
        endpoints = {
            verb: HttpEndpoint(category, handler, is_order=is_ordering and verb != "GET" and handler not in questions)
            for verb, handler in handlers.items()
        }
        for pattern in patterns:
            router.add(pattern, endpoints)

    # Inference first: the patterns are tried in this order.
    for pattern in _of_model("/infer"):
        router.add(pattern, {"POST": HttpEndpoint("inference")})
    for action, handler in (("/generate", generation.generate), ("/generate_stream", generation.generate_stream)):
        for pattern in _of_model(action):
            router.add(pattern, {"POST": HttpEndpoint("inference", generation=handler)})
    add("health", ("/v2/health/live",), GET=control.live)
    add("health", ("/v2/health/ready",), GET=control.ready)
    add("health", _of_model("/ready"), GET=control.model_ready)
    add("statistics", ("/v2/models/stats", *_of_model("/stats")), GET=control.statistics)
    add("model-config", _of_model("/config"), GET=control.model_config)
    trace = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")
    add("trace", trace, GET=control.trace_setting, POST=control.update_trace_setting)
    add("logging", ("/v2/logging",), GET=control.log_settings, POST=control.update_log_settings)
    _add_repository(add, control)
    _add_shared_memory(add, control)
    # Last: "stats" above is not a model's name here.
    add("metadata", _of_model(""), GET=control.model_metadata)
    add("metadata", ("/v2",), GET=control.server_metadata)
    # Ours, not Triton's: which runtime, device and precision serve each model.
    add("metadata", ("/edge/v1/models",), GET=control.instance_reports)
    # Ours too: what happened, what there is, and going back to an earlier version.
    add("model-repository", ("/edge/v1/events",), GET=events.events)
    add("model-repository", ("/edge/v1/versions",), GET=operator.versions)
    add("statistics", ("/edge/v1/streams",), GET=operator.frame_streams)
    add("statistics", ("/edge/v1/governor",), GET=operator.governor)
    add("statistics", ("/edge/v1/engines",), GET=operator.engines)
    engine = ("/edge/v1/engines/{model}",)
    add("model-repository", engine, POST=operator.build_engine, DELETE=operator.cancel_engine)
    add("model-repository", ("/edge/v1/models/{model}/rollback",), POST=operator.rollback)
    add("model-repository", ("/edge/v1/models/{model}/unpin",), POST=operator.unpin)
    return router


def _of_model(action: str) -> tuple[str, str]:
    return (f"/v2/models/{{model}}{action}", f"/v2/models/{{model}}/versions/{{version}}{action}")


def _add_repository(add: Callable[..., None], control: ControlEndpoints) -> None:
    add("model-repository", ("/v2/repository/index",), POST=control.repository_index)
    add("model-repository", ("/v2/repository/models/{model}/load",), POST=control.load)
    add("model-repository", ("/v2/repository/models/{model}/unload",), POST=control.unload)
    named = (
        "/v2/repository/{repository}/index",
        "/v2/repository/{repository}/models/{model}/load",
        "/v2/repository/{repository}/models/{model}/unload",
    )
    add("model-repository", named, POST=control.named_repository)


def _add_shared_memory(add: Callable[..., None], control: ControlEndpoints) -> None:
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
