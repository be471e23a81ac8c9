"""OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.0) of the HTTP port, generated from its routes.

The routes give paths, methods, categories and summaries. This module adds the bodies that have schemas. It is imported
for the first reader only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from edge_server.frontends.http.response import MOTION_JPEG_TYPE
from edge_server.frontends.http.routes import Route

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_FLAG: Json = {"type": "boolean"}
_ANY_OBJECT: Json = {"type": "object"}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _object(required: tuple[str, ...] = (), /, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_PARAMETERS: Json = {**_ANY_OBJECT, "description": "Values are strings, numbers or booleans."}
_TENSOR = _object(
    ("name", "datatype", "shape"),
    name=_TEXT,
    datatype={**_TEXT, "examples": ["FP32", "INT64", "UINT8", "BYTES"]},
    shape=_list({"type": "integer"}),
)

_SCHEMAS: Json = {
    "Error": _object(("error",), error={**_TEXT, "description": "What is wrong, expected and given."}),
    "InferRequest": _object(
        ("inputs",),
        id=_TEXT,
        parameters=_PARAMETERS,
        inputs=_list(_ref("RequestTensor")),
        outputs=_list(_object(("name",), name=_TEXT, parameters=_PARAMETERS)),
    ),
    "RequestTensor": {
        **_TENSOR,
        "properties": {
            **_TENSOR["properties"],
            "parameters": _PARAMETERS,
            "data": {
                "description": "Values, flat or nested. Absent if bytes follow the JSON.",
                "type": "array",
            },
        },
    },
    "InferResponse": _object(
        ("model_name", "model_version", "outputs"),
        id=_TEXT,
        model_name=_TEXT,
        model_version=_TEXT,
        parameters=_PARAMETERS,
        outputs=_list(_ref("RequestTensor")),
    ),
    "ServerMetadata": _object((), name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
    "TensorMetadata": _TENSOR,
    "ModelMetadata": _object(
        (),
        name=_TEXT,
        versions=_list(_TEXT),
        platform=_TEXT,
        inputs=_list(_ref("TensorMetadata")),
        outputs=_list(_ref("TensorMetadata")),
    ),
    "IndexEntry": _object(
        ("name",),
        name=_TEXT,
        version=_TEXT,
        state={**_TEXT, "enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
        reason=_TEXT,
        digest=_TEXT,
    ),
    "Version": _object(
        (),
        name=_TEXT,
        version=_COUNT,
        state=_TEXT,
        generation=_COUNT,
        since_s={"type": ["number", "null"]},
        served_count=_COUNT,
        share=_NUMBER,
        is_pinned=_FLAG,
        reason=_TEXT,
    ),
    "Pin": _object(
        (),
        name=_TEXT,
        pin={"type": ["integer", "null"]},
        before={"type": ["integer", "null"]},
        serves={"type": ["integer", "null"]},
        survives_restart=_FLAG,
        problem=_TEXT,
    ),
    "Event": {
        **_object(("number", "time_s", "kind"), number=_COUNT, time_s=_NUMBER, kind=_TEXT),
        "description": "Further members depend on the kind.",
    },
    "FrameStream": _object(
        (),
        stream_id=_TEXT,
        model=_TEXT,
        version=_COUNT,
        client=_TEXT,
        priority=_COUNT,
        weight=_NUMBER,
        open_s=_NUMBER,
        fps_in=_NUMBER,
        fps_out=_NUMBER,
        received=_COUNT,
        answered=_COUNT,
        waiting=_COUNT,
        dropped={**_ANY_OBJECT, "additionalProperties": _COUNT},
        age_p50_ms=_NUMBER,
        age_p99_ms=_NUMBER,
    ),
    "Perception": _object(
        (),
        model=_TEXT,
        version=_TEXT,
        width=_COUNT,
        height=_COUNT,
        classes=_list(_object((), index=_COUNT, label=_TEXT, score=_NUMBER)),
        detections=_list(
            _object(
                (),
                x_min=_NUMBER,
                y_min=_NUMBER,
                x_max=_NUMBER,
                y_max=_NUMBER,
                score=_NUMBER,
                class_index=_COUNT,
                label=_TEXT,
                keypoints=_list(_list(_NUMBER)),
            )
        ),
        mask=_object(
            (),
            classes=_list(_object((), index=_COUNT, label=_TEXT, share=_NUMBER)),
            png={**_TEXT, "description": "Class of each pixel, one byte each, as base64."},
        ),
    ),
    "Load": _object((), parameters=_object((), config={**_TEXT, "description": "A configuration as JSON."})),
    "Unload": _object((), parameters=_object((), unload_dependents=_FLAG)),
    "Rollback": _object((), version=_COUNT),
}

_IMAGE: Json = {"image/*": {"schema": {"type": "string", "format": "binary"}}}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


_REQUESTS: Mapping[tuple[str, str], Json] = {
    ("POST", "/infer"): {
        **_json(_ref("InferRequest")),
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        **_IMAGE,
    },
    ("POST", "/perception"): _IMAGE,
    ("POST", "/generate"): _json(_ANY_OBJECT),
    ("POST", "/generate_stream"): _json(_ANY_OBJECT),
    ("POST", "/completions"): _json(_ANY_OBJECT),
    ("POST", "/embeddings"): _json(_ANY_OBJECT),
    ("POST", "/index"): _json(_object((), ready=_FLAG)),
    ("POST", "/load"): _json(_ref("Load")),
    ("POST", "/unload"): _json(_ref("Unload")),
    ("POST", "/rollback"): _json(_ref("Rollback")),
    ("POST", "/setting"): _json(_ANY_OBJECT),
    ("POST", "/logging"): _json(_ANY_OBJECT),
    ("POST", "/register"): _json(_ANY_OBJECT),
}
"""Method and end of the path -> contents of the request body. Other requests need no body."""

_RESPONSES: Mapping[tuple[str, str], Json] = {
    ("POST", "/infer"): {
        **_json(_ref("InferResponse")),
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
    ("POST", "/perception"): _json(_ref("Perception")),
    ("POST", "/generate"): _json(_ANY_OBJECT),
    ("POST", "/generate_stream"): {"text/event-stream": {"schema": _TEXT}},
    ("POST", "/completions"): {**_json(_ANY_OBJECT), "text/event-stream": {"schema": _TEXT}},
    ("POST", "/index"): _json(_list(_ref("IndexEntry"))),
    ("POST", "/rollback"): _json(_ref("Pin")),
    ("POST", "/unpin"): _json(_ref("Pin")),
    ("GET", "/v2"): _json(_ref("ServerMetadata")),
    ("GET", "/v2/models/{model}"): _json(_ref("ModelMetadata")),
    ("GET", "/v2/models/{model}/versions/{version}"): _json(_ref("ModelMetadata")),
    ("GET", "/edge/v1/versions"): _json(_object((), versions=_list(_ref("Version")))),
    ("GET", "/edge/v1/streams"): _json(_object((), streams=_list(_ref("FrameStream")))),
    ("GET", "/edge/v1/events"): {"text/event-stream": {"schema": _TEXT}, **_json(_list(_ref("Event")))},
    ("GET", "/view"): {MOTION_JPEG_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    ("GET", "/frames"): {MOTION_JPEG_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    ("GET", "/picture"): {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}},
    ("GET", "/"): {"text/html": {"schema": _TEXT}},
    ("GET", "/docs/api"): {"text/html": {"schema": _TEXT}},
    ("GET", "/page/{file}"): {"*/*": {"schema": {"type": "string", "format": "binary"}}},
    ("GET", "/ready"): {},
    ("GET", "/live"): {},
    ("POST", "/load"): {},
    ("POST", "/unload"): {},
    ("POST", "/register"): {},
    ("POST", "/unregister"): {},
}
"""Method, and path or its last segment -> contents of the response. Others answer a JSON object."""

_QUERIES: Mapping[str, tuple[Json, ...]] = {
    "/edge/v1/versions": ({"name": "model", "in": "query", "schema": _TEXT},),
    "/edge/v1/events": (
        {"name": "after", "in": "query", "schema": _COUNT, "description": "Only events with higher numbers."},
        {"name": "follow", "in": "query", "schema": _FLAG, "description": "true: a stream; false: a list."},
    ),
}

_TAGS: Mapping[str, str] = {
    "inference": "Run models",
    "metadata": "Models and their inputs and outputs",
    "health": "Whether the server and its models are ready",
    "statistics": "Counts, durations, streams, heat and power",
    "model-config": "Configurations of models",
    "model-repository": "Load, unload, roll back; states and events",
    "shared-memory": "Regions of shared memory",
    "trace": "Traces of requests",
    "logging": "Log settings",
    "view": "Camera pictures",
    "openapi": "This reference, open to everyone unless a line of the tokens file names it",
    "open": "Open to everyone: the page",
}


def openapi_document(routes: Iterable[Route]) -> Json:
    """Return the document, with the routes in the given order. The access category becomes the tag."""
    paths: dict[str, Json] = {}
    for route in routes:
        method, path, category = route.method, route.path, route.category
        names = re.findall(r"\{(\w+)\}", path)
        last = "/" + path.rpartition("/")[2]
        operation_name = re.sub(r"[{}]", "", path).strip("/").replace("/", ".") or "index"
        operation: Json = {
            "operationId": f"{method.lower()}.{operation_name}",
            "summary": route.summary,
            "tags": [category or "open"],
            "responses": {
                "200": {"description": "Success", **_content(_RESPONSES, method, path, last, _json(_ANY_OBJECT))},
                "default": {"description": "Error", "content": _json(_ref("Error"))},
            },
        }
        parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
        parameters += _QUERIES.get(path, ())
        if parameters:
            operation["parameters"] = parameters
        if body := _content(_REQUESTS, method, path, last, {}):
            operation["requestBody"] = body
        if category:
            operation["security"] = [{}, {"token": []}]
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edge-server",
            "version": "1",  # of this API; that of the server would help an attacker
            "summary": "KServe v2 inference with Triton's extensions, OpenAI's API for text, control of the server",
            "description": "Tags are access categories. The server's settings decide which of them need a bearer token "
            "or a header with a key.",
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {"schemas": _SCHEMAS, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _content(table: Mapping[tuple[str, str], Json], method: str, path: str, last: str, default: Json) -> Json:
    found = table.get((method, path), table.get((method, last), default))
    return {"content": found} if found else {}
