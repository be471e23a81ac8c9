"""CORS: off by default; allowed origins read responses of every kind of endpoint, and change nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_server.config import parse_serve
from edge_server.config.setting_sources import ConfigError

PAGE = "https://dashboard.example:3000"
ADD = {
    "inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]} for i in range(2)]
}  # fmt: skip
JSON = {"Content-Type": "application/json"}


def preflight(site: Any, origin: str, path: str = "/v2/models/add/infer", headers: str = "content-type") -> Any:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    return site.ask("OPTIONS", path, headers={"Origin": origin, **asked})


def test_without_allowed_origins_no_response_has_cors_headers(site: Any) -> None:
    replies = [site.get("/v2", headers={"Origin": PAGE}), preflight(site, PAGE), site.post("/v2/models/add/infer", ADD)]
    assert [reply.status for reply in replies] == [200, 405, 200]
    assert not [name for reply in replies for name in reply.headers if name.startswith("Access-Control")]


def test_an_allowed_origin_reads_every_kind_of_endpoint(open_site: Any) -> None:
    site = open_site(allowed_origins=(PAGE, "http://other.example"))
    origin = {"Origin": PAGE}
    replies = [
        site.get("/v2", headers=origin),
        site.post("/v2/models/add/infer", json.dumps(ADD).encode(), headers={**origin, **JSON}),
        site.post("/v2/models/add/infer", json.dumps(ADD).encode(), headers={**origin, **JSON}),
        site.post("/v2/models/repeat/generate_stream", {"IN": 2}, headers=origin),
        site.get("/nothing", headers=origin),
        site.get("/openapi.json", headers=origin),
        site.get("/edge/v1/events?follow=false", headers=origin),
    ]
    assert [reply.status for reply in replies] == [200, 200, 200, 200, 404, 200, 200]
    assert {reply.headers["Access-Control-Allow-Origin"] for reply in replies} == {PAGE}
    assert {reply.headers["Vary"] for reply in replies} == {"Origin"}


@pytest.mark.parametrize("origin", ["https://dashboard.example", "null", "https://dashboard.example:3000.evil", ""])
def test_another_origin_reads_nothing_and_vary_says_so(open_site: Any, origin: str) -> None:
    site = open_site(allowed_origins=(PAGE,))
    reply = site.get("/v2", headers={"Origin": origin})
    assert reply.headers["Access-Control-Allow-Origin"] is None
    assert reply.headers["Vary"] == "Origin"
    assert preflight(site, origin).status == 405


def test_a_preflight_names_the_methods_of_the_path_and_the_headers_asked_for(open_site: Any) -> None:
    site = open_site(allowed_origins=("*",))
    reply = preflight(site, PAGE, "/edge/v1/engines/m", "authorization, content-type")
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["Access-Control-Allow-Origin"] == "*"
    assert reply.headers["Access-Control-Allow-Methods"] == "DELETE, POST"
    assert reply.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert preflight(site, PAGE, headers="x y").headers["Access-Control-Allow-Headers"] is None
    assert preflight(site, PAGE, "/nothing").status == 404


def test_an_allowed_origin_still_changes_nothing(open_site: Any) -> None:
    site = open_site(allowed_origins=("*", PAGE))
    reply = site.post("/v2/repository/models/m/load", b"{}", headers={"Origin": PAGE, **JSON})
    assert (reply.status, site.service.loads) == (403, [])
    assert "own web pages" in reply.error


@pytest.mark.parametrize(
    "text",
    [
        "dashboard.example",
        "https://a/b",
        "HTTPS://A",
        "https://u@a",
        "https://a b",
        "",
        "null",
        "https://*",
        "app://",
        "app://a/b",
        "App://a",
        "://a",
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="--http-allowed-origin"):
        parse_serve(["--model-repository=/m", f"--http-allowed-origin={text}"], {})
