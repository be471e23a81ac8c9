"""Generator of the OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.0) of the HTTP port, from its routes.

The routes give paths, methods, categories, summaries and the names of their schemas. It is imported for the first
reader only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name

from edge_server.frontends.http.routes import Route
from edge_server.frontends.http.schemas import ERROR, TEXT, Json, NamedSchema, OperationSchema, json_content

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
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    schemas: dict[str, Json] = {}
    _collect(paths, schemas)
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
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route) -> Json:
    """Return the description of a route."""
    schema = resolve_name(route.schema) if route.schema else OperationSchema()
    names = re.findall(r"\{(\w+)\}", route.path)
    operation_name = re.sub(r"[{}]", "", route.path).strip("/").replace("/", ".") or "index"
    operation: Json = {
        "operationId": f"{route.method.lower()}.{operation_name}",
        "summary": route.summary,
        "tags": [route.category or "open"],
        "responses": {
            "200": {"description": "Success", **({"content": schema.response} if schema.response else {})},
            "default": {"description": "Error", "content": json_content(ERROR)},
        },
    }
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    parameters += schema.query
    if parameters:
        operation["parameters"] = parameters
    if schema.request:
        operation["requestBody"] = {"content": schema.request}
    if route.category:
        operation["security"] = [{}, {"token": []}]
    return operation


def _collect(value: object, schemas: dict[str, Json]) -> None:
    """Add the named schemas that a value refers to."""
    if isinstance(value, NamedSchema):
        if value.name not in schemas:
            schemas[value.name] = value.schema
            _collect(value.schema, schemas)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, schemas)
    elif isinstance(value, list):
        for item in value:
            _collect(item, schemas)
