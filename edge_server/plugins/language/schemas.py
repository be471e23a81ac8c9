"""JSON schemas of the requests and responses of the text APIs, for the OpenAPI document. Imported for its first reader
only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import ANY_OBJECT, EVENT_STREAM, TEXT, OperationSchema, json_content

COMPLETION = OperationSchema(request=json_content(ANY_OBJECT), response={**json_content(ANY_OBJECT), **EVENT_STREAM})
LINE_STREAM = OperationSchema(
    request=json_content(ANY_OBJECT),
    response={**json_content(ANY_OBJECT), "application/x-ndjson": {"schema": TEXT}},
)
