"""JSON schemas of the route that adds a model file, for the OpenAPI document. Imported for its first reader only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import TEXT, NamedSchema, OperationSchema, json_content, object_of

_ADDED_MODEL = NamedSchema(
    "AddedModel",
    object_of(("model", "report"), model=TEXT, report={**TEXT, "description": "What `edge-server add` says about it."}),
)
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
ADDED_MODEL = OperationSchema(request=_FILE, response=json_content(_ADDED_MODEL))
