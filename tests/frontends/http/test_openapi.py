"""The OpenAPI document, and modules that are imported only on demand."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest


def test_nothing_for_pages_and_pictures_is_imported_before_its_first_use() -> None:
    code = "import sys, edge_server.process.http_routes; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    late = (
        "edge_server.frontends.http.openapi",
        "edge_server.frontends.http.schemas",
        "edge_server.plugins.cameras.streams",
        "edge_server.plugins.vision",
        "aiohttp",
        "cv2",
    )
    assert [name for name in loaded if name.startswith(late)] == []


def test_every_route_is_in_the_openapi_document(site: Any) -> None:
    document = site.get("/openapi.json").json
    paths = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    router = site.frontend._router
    assert paths == {(route.method, route.path) for route in router.routes}
    assert all(route.summary for route in router.routes)
    # What the document names is what the server answers.
    for method, path in paths:
        route, names = router.find(method, re.sub(r"\{(\w+)\}", r"\1", path))
        operation = document["paths"][path][method.lower()]
        assert operation["summary"] == route.summary
        declared = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
        assert declared == set(names)
    ids = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.full
def test_the_openapi_document_is_valid(site: Any) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(site.get("/openapi.json").json)
