"""JSON schemas of the requests and responses of the HTTP API (JSON Schema, draft 2020-12), for the OpenAPI document.

The line of a route names its OperationSchema as `module:NAME`. Such modules are imported for the first reader of the
document only. A plugin has one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
BYTES: Json = {"type": "string", "format": "binary"}
COUNT: Json = {"type": "integer", "minimum": 0}
NUMBER: Json = {"type": "number"}
FLAG: Json = {"type": "boolean"}
ANY_OBJECT: Json = {"type": "object"}


class NamedSchema(Json):
    """Reference to a schema that the document has once, under a name."""

    def __init__(self, name: str, schema: Json) -> None:
        super().__init__({"$ref": f"#/components/schemas/{name}"})
        self.name = name
        self.schema = schema


def list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def object_of(required: tuple[str, ...] = (), /, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


@dataclass(frozen=True, slots=True)
class OperationSchema:
    """What a request may bring, and what answers it. Each content is media type -> {"schema": ...}; {}: no body."""

    request: Json = field(default_factory=dict)
    response: Json = field(default_factory=lambda: json_content(ANY_OBJECT))
    query: tuple[Json, ...] = ()


ERROR = NamedSchema("Error", object_of(("error",), error={**TEXT, "description": "What is wrong, expected and given."}))

JSON_BODY = OperationSchema(request=json_content(ANY_OBJECT))
NO_CONTENT = OperationSchema(response={})
LIVE = OperationSchema(response=json_content(object_of(("live",), live=FLAG)))
READY = OperationSchema(response=json_content(object_of(("ready",), ready=FLAG)))
REGISTER = OperationSchema(request=json_content(ANY_OBJECT), response={})

EVENT_STREAM: Json = {"text/event-stream": {"schema": TEXT}}
GENERATE_STREAM = OperationSchema(request=json_content(ANY_OBJECT), response=EVENT_STREAM)

IMAGE: Json = {"image/*": {"schema": BYTES}}
_PARAMETERS: Json = {**ANY_OBJECT, "description": "Values are strings, numbers or booleans."}
_TENSOR = object_of(
    ("name", "datatype", "shape"),
    name=TEXT,
    datatype={**TEXT, "examples": ["FP32", "INT64", "UINT8", "BYTES"]},
    shape=list_of({"type": "integer"}),
)
_REQUEST_TENSOR = NamedSchema(
    "RequestTensor",
    {
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
)
_INFER_REQUEST = NamedSchema(
    "InferRequest",
    object_of(
        ("inputs",),
        id=TEXT,
        parameters=_PARAMETERS,
        inputs=list_of(_REQUEST_TENSOR),
        outputs=list_of(object_of(("name",), name=TEXT, parameters=_PARAMETERS)),
    ),
)
_INFER_RESPONSE = NamedSchema(
    "InferResponse",
    object_of(
        ("model_name", "model_version", "outputs"),
        id=TEXT,
        model_name=TEXT,
        model_version=TEXT,
        parameters=_PARAMETERS,
        outputs=list_of(_REQUEST_TENSOR),
    ),
)
_BINARY: Json = {"application/octet-stream": {"schema": BYTES}}
INFER = OperationSchema(
    request={**json_content(_INFER_REQUEST), **_BINARY, **IMAGE},
    response={**json_content(_INFER_RESPONSE), **_BINARY},
)

SERVER_METADATA = OperationSchema(
    response=json_content(
        NamedSchema("ServerMetadata", object_of((), name=TEXT, version=TEXT, extensions=list_of(TEXT)))
    )
)
_TENSOR_METADATA = NamedSchema("TensorMetadata", _TENSOR)
MODEL_METADATA = OperationSchema(
    response=json_content(
        NamedSchema(
            "ModelMetadata",
            object_of(
                (),
                name=TEXT,
                versions=list_of(TEXT),
                platform=TEXT,
                inputs=list_of(_TENSOR_METADATA),
                outputs=list_of(_TENSOR_METADATA),
            ),
        )
    )
)

_INDEX_ENTRY = NamedSchema(
    "IndexEntry",
    object_of(
        ("name",),
        name=TEXT,
        version=TEXT,
        state={**TEXT, "enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
        reason=TEXT,
        digest=TEXT,
    ),
)
INDEX = OperationSchema(request=json_content(object_of((), ready=FLAG)), response=json_content(list_of(_INDEX_ENTRY)))
_LOAD = NamedSchema(
    "Load", object_of((), parameters=object_of((), config={**TEXT, "description": "A configuration as JSON."}))
)
LOAD = OperationSchema(request=json_content(_LOAD), response={})
_UNLOAD = NamedSchema("Unload", object_of((), parameters=object_of((), unload_dependents=FLAG)))
UNLOAD = OperationSchema(request=json_content(_UNLOAD), response={})

_VERSION = NamedSchema(
    "Version",
    object_of(
        (),
        name=TEXT,
        version=COUNT,
        state=TEXT,
        generation=COUNT,
        since_s={"type": ["number", "null"]},
        served_count=COUNT,
        share=NUMBER,
        is_pinned=FLAG,
        reason=TEXT,
    ),
)
VERSIONS = OperationSchema(
    response=json_content(object_of((), versions=list_of(_VERSION))),
    query=({"name": "model", "in": "query", "schema": TEXT},),
)
_PIN = NamedSchema(
    "Pin",
    object_of(
        (),
        name=TEXT,
        pin={"type": ["integer", "null"]},
        before={"type": ["integer", "null"]},
        serves={"type": ["integer", "null"]},
        survives_restart=FLAG,
        problem=TEXT,
    ),
)
ROLLBACK = OperationSchema(
    request=json_content(NamedSchema("Rollback", object_of((), version=COUNT))), response=json_content(_PIN)
)
UNPIN = OperationSchema(response=json_content(_PIN))

_EVENT = NamedSchema(
    "Event",
    {
        **object_of(("number", "time_s", "kind"), number=COUNT, time_s=NUMBER, kind=TEXT),
        "description": "Further members depend on the kind.",
    },
)
EVENTS = OperationSchema(
    response={**EVENT_STREAM, **json_content(list_of(_EVENT))},
    query=(
        {"name": "after", "in": "query", "schema": COUNT, "description": "Only events with higher numbers."},
        {"name": "follow", "in": "query", "schema": FLAG, "description": "true: a stream; false: a list."},
    ),
)
