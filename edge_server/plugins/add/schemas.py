"""JSON schemas of the route that adds a model file, for the OpenAPI document. Imported for its first reader only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import TEXT, Json, NamedSchema, OperationSchema, json_content, object_of

_ADDED_MODEL = NamedSchema(
    "AddedModel",
    object_of(("model", "report"), model=TEXT, report={**TEXT, "description": "What `edge-server add` says about it."}),
)
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_QUERY: tuple[Json, ...] = (
    {
        "name": "picture_bytes", "in": "query", "schema": {"type": "integer", "minimum": 0},
        "description": "Size of a picture before the file, to try the model on.",
    },
)  # fmt: skip
ADDED_MODEL = OperationSchema(request=_FILE, response=json_content(_ADDED_MODEL), query=_QUERY)
