"""JSON schemas of the route that adds a model file, for the OpenAPI document. Imported for its first reader only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import TEXT, Json, NamedSchema, OperationSchema, json_content, object_of

_REPORT: Json = {
    "type": "object",
    "description": "The same as a table. A row whose title is a number begins a layout that may be chosen.",
    "properties": {
        "rows": {"type": "array", "items": object_of(("title", "text"), title=TEXT, text=TEXT)},
        "chosen": {"type": ["integer", "null"]},
        "runtimes": {"type": "array", "items": {"type": "object"}},
    },
}
_ADDED_MODEL = NamedSchema(
    "AddedModel",
    object_of(
        ("model", "report", "reports"),
        model=TEXT,
        report={**TEXT, "description": "What `edge-server add` says about it."},
        reports={"type": "array", "items": _REPORT},
    ),
)
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_QUERY: tuple[Json, ...] = (
    {
        "name": "picture_bytes", "in": "query", "schema": {"type": "integer", "minimum": 0},
        "description": "Size of a picture before the file, to try the model on.",
    },
    {
        "name": "choose", "in": "query", "schema": {"type": "integer", "minimum": 1},
        "description": "Number of a layout in the report of this file, which was added and is not decided.",
    },
)  # fmt: skip
ADDED_MODEL = OperationSchema(request=_FILE, response=json_content(_ADDED_MODEL), query=_QUERY)
