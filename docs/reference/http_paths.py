"""Generator of http-paths.md, from the OpenAPI document of a server with all own plugins and no models."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from typing import NamedTuple

from edge_server import Server

_INTRODUCTION = """\
# Paths of HTTP

`/openapi.json` of a server describes bodies and answers, and `/docs/api` shows them. `[...]` may be left out. The
categories are those of `--http-restricted-api` and of [tokens](../deployment.md#tokens); `open` needs neither.
[HTTP and gRPC](../http-and-grpc.md) has what they have in common.
"""
_SECTIONS = (
    ("KServe v2 and Triton's extensions", ("/v2",)),
    ("APIs of others for text, speech and pictures", ("/v1/", "/api/", "/rerank")),
    ("This server", ("/",)),
)
_VERSION = "/versions/{version}"


class _Endpoint(NamedTuple):
    method: str
    path: str
    summary: str
    category: str


def generate() -> str:
    waiting = _endpoints()
    parts = [_INTRODUCTION]
    for title, beginnings in _SECTIONS:
        rows = [endpoint for endpoint in waiting if endpoint.path.startswith(beginnings)]
        waiting = [endpoint for endpoint in waiting if endpoint not in rows]
        parts += [f"## {title}\n", "| Path | Method | Category | Content |\n|---|---|---|---|"]
        parts[-1] += (
            "".join(f"\n| `{row.path}` | {row.method} | {row.category} | {row.summary} |" for row in rows) + "\n"
        )
    return "\n".join(parts)


def _endpoints() -> list[_Endpoint]:
    """Return each endpoint once: other spellings of a path that do the same are a part of its line."""
    with tempfile.TemporaryDirectory() as empty, Server(empty, http_port=0) as server:
        url = f"http://127.0.0.1:{server.http_port}/openapi.json"
        with urllib.request.urlopen(url, timeout=60) as answer:
            paths = json.load(answer)["paths"]
    found = []
    for path, methods in paths.items():
        same = (path.replace(_VERSION, ""), path.replace("/v3/", "/v1/", 1), path.removeprefix("/"))
        if any(other != path and other in paths for other in same):
            continue
        text = path
        if path.startswith("/v2/models/{model}") and path.replace("{model}", "{model}" + _VERSION) in paths:
            text = path.replace("{model}", f"{{model}}[{_VERSION}]")
        also = "; also under `/v3`" if path.replace("/v1/", "/v3/", 1) in paths and path.startswith("/v1/") else ""
        found += [
            _Endpoint(method.upper(), text, operation["summary"] + also, operation["tags"][0])
            for method, operation in methods.items()
        ]
    return found
