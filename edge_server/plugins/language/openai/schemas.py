"""JSON schemas of the requests and responses of OpenAI's API, for the OpenAPI document. Imported for its first reader
only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import ANY_OBJECT, EVENT_STREAM, OperationSchema, json_content

COMPLETION = OperationSchema(request=json_content(ANY_OBJECT), response={**json_content(ANY_OBJECT), **EVENT_STREAM})
EMBEDDING = OperationSchema(request=json_content(ANY_OBJECT))
