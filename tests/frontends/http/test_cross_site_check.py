"""Cross-site check: a web page of another site can neither change the server nor use it."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from edge_server.config import parse_serve
from edge_server.frontends.http import control_endpoints
from edge_server.frontends.http.cross_site_check import CrossSiteCheck

LOAD = "/v2/repository/models/add/load"
ORDERS = [
    ("POST", LOAD),
    ("POST", "/v2/repository/models/add/unload"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/models/add/trace/setting"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/systemsharedmemory/region/r/unregister"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("POST", "/v2/cudasharedmemory/region/r/register"),
    ("POST", "/v2/cudasharedmemory/unregister"),
    ("POST", "/edge/v1/models/add/rollback"),
    ("POST", "/edge/v1/models/add/unpin"),
    ("POST", "/edge/v1/engines/add"),
    ("DELETE", "/edge/v1/engines/add"),
]
INFER = "/v2/models/add/infer"
INDEX = "/v2/repository/index"
INFERENCES = [
    INFER,
    "/v2/models/add/versions/1/infer",
    "/v2/models/add/generate",
    "/v2/models/repeat/generate_stream",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v3/chat/completions",
]
JSON = {"Content-Type": "application/json"}
EVIL = {"Origin": "http://evil.example"}
PAGE = "https://page.example"
ADD = {
    "inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]} for i in range(2)]
}  # fmt: skip


@pytest.mark.parametrize(("verb", "path"), ORDERS)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Origin": "http://evil.example", **JSON},
        {"Sec-Fetch-Site": "cross-site", **JSON},
        {"Sec-Fetch-Site": "none", **JSON},
        {"Content-Type": "text/plain;charset=UTF-8"},
        {"Content-Type": "Multipart/Form-Data; boundary=x"},
    ],
)
def test_no_order_is_taken_from_a_page_of_another_site(
    site: Any, verb: str, path: str, headers: dict[str, str]
) -> None:
    before = site.service.log_settings.get()
    reply = site.ask(verb, path, {}, headers)
    assert reply.status == 403
    assert ("got Origin 'http://evil.example'" in reply.error) == ("Origin" in headers)
    assert (site.service.loads, site.service.unloads, site.service.orders) == ([], [], [])
    assert site.service.log_settings.get() == before


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:8000", "http://evil.example:8000"),  # a name of theirs that leads to this machine
        ("127.0.0.1:8000", "http://127.0.0.1:3000"),
        ("127.0.0.1:8000", "https://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://localhost:8000"),
        ("127.0.0.1:8000", "http://user@127.0.0.1:8000"),
        ("127.0.0.1:8000", "null"),
        ("127.0.0.1:99999", "http://127.0.0.1:99999"),
        ("127.0.0.1.evil.example", "http://127.0.0.1.evil.example"),
        ("[", "http://["),
        ("", "null"),
        ("", "file://"),
    ],
)
def test_the_origin_of_a_browsers_order_must_be_this_server(open_site: Any, host: str, origin: str) -> None:
    site = open_site(address="0.0.0.0")
    assert site.post(LOAD, {}, {"Host": host, "Origin": origin, **JSON}).status == 403
    assert site.service.loads == []


@pytest.mark.parametrize(
    "host", ["192.168.1.4:8000", "[fe80::1]:8000", "[::1]:8000", "LOCALHOST", "box.example:80", "127.0.0.1"]
)
def test_a_page_of_this_server_may_send_control_requests(open_site: Any, host: str) -> None:
    site = open_site(allowed_hosts=("Box.example",))
    headers = {"Host": host, "Origin": f"http://{host.lower()}", "Sec-Fetch-Site": "same-origin"}
    for content_type in ("application/json; charset=utf-8", "application/octet-stream"):
        assert site.post(LOAD, {}, {**headers, "Content-Type": content_type}).status == 200
    assert site.post(LOAD, {}, {**headers, "Content-Type": "application/x-www-form-urlencoded"}).status == 403
    assert site.post(LOAD, {}, headers).status == 403
    assert len(site.service.loads) == 2


def test_a_page_under_the_name_of_this_machine_may_send_control_requests(
    open_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Jetson-7.lab.example")
    site = open_site()
    for host in ("jetson-7.lab.example:8000", "jetson-7:8000", "jetson-7.local:8000"):
        assert site.post(LOAD, {}, {"Host": host, "Origin": f"http://{host}", **JSON}).status == 200
    # Browsers leave out the port 80.
    assert site.post(LOAD, {}, {"Host": "jetson-7:80", "Origin": "http://jetson-7", **JSON}).status == 200


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "application/json", "image/jpeg"])
def test_other_clients_may_send_control_requests_under_any_name_of_the_server(
    open_site: Any, content_type: str | None
) -> None:
    site = open_site(address="0.0.0.0")
    headers = {"Host": "anything.example:8000"} | ({"Content-Type": content_type} if content_type else {})
    assert site.post(LOAD, {}, headers).status == 200


def test_a_get_of_a_page_of_another_site_passes_since_the_browser_hides_the_response(site: Any) -> None:
    reply = site.get("/v2/logging", headers={**EVIL, "Content-Type": "text/plain"})
    assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200, None)


@pytest.mark.parametrize(
    "headers",
    [
        {**EVIL, "Content-Type": "text/plain"},
        {**EVIL, **JSON},
        {**EVIL, "Content-Type": "image/jpeg"},
        {**EVIL, "Content-Type": "multipart/form-data; boundary=x"},
        {"Origin": "null", **JSON},
        {"Sec-Fetch-Site": "cross-site", **JSON},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:3000", **JSON},
    ],
)
def test_a_page_of_another_site_runs_and_lists_no_model(site: Any, headers: dict[str, str]) -> None:
    for path in (*INFERENCES, INDEX):
        reply = site.post(path, ADD, headers)
        assert (reply.status, site.service.requests) == (403, []), path
        assert "--http-allowed-origin" in reply.error


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=x", "image/jpeg", None])
@pytest.mark.parametrize(
    "headers", [{}, {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}, {"Sec-Fetch-Site": "none"}]
)
def test_other_clients_and_own_pages_run_and_list_models_with_any_content_type(
    site: Any, content_type: str | None, headers: dict[str, str]
) -> None:
    content = {"Content-Type": content_type} if content_type else {}
    for path in (*INFERENCES, INDEX):
        assert site.post(path, ADD, {**headers, **content}).status != 403, path


def test_a_cached_head_decides_for_its_own_bytes_only_and_is_not_compared_again(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    check = CrossSiteCheck.check
    monkeypatch.setattr(
        CrossSiteCheck,
        "check",
        lambda self, head, *more, **options: compared.append(head.target) or check(self, head, *more, **options),
    )
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=30)
    statuses = []
    for headers in (JSON, JSON, {**JSON, **EVIL}, {**JSON, **EVIL}, JSON, JSON):
        connection.request("POST", INFER, json.dumps(ADD), headers)
        with connection.getresponse() as reply:
            statuses.append(reply.status)
            reply.read()
    connection.close()
    assert statuses == [200, 200, 403, 403, 200, 200]
    assert len(compared) == 3, "once for the head that is remembered, and for each that is refused"


def test_a_listed_origin_infers_and_lists_but_changes_nothing(open_site: Any) -> None:
    site = open_site(allowed_origins=(PAGE,))
    headers = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site", **JSON}
    assert [site.post(path, ADD, headers).status for path in (INFER, INDEX)] == [200, 200]
    for verb, path in ORDERS:
        assert site.ask(verb, path, {}, headers).status == 403
    assert (site.service.loads, site.service.unloads, site.service.orders) == ([], [], [])
    assert site.post(INFER, ADD, {**EVIL, **JSON}).status == 403


def test_an_asterisk_admits_inference_only(open_site: Any) -> None:
    site = open_site(allowed_origins=("*",))
    for origin in (EVIL, {"Origin": "null"}, {"Origin": PAGE}):
        assert site.post(INFER, ADD, {**origin, **JSON}).status == 200
        assert site.post(INDEX, {}, {**origin, **JSON}).status == 403
        assert site.post(LOAD, {}, {**origin, **JSON}).status == 403


@pytest.mark.parametrize(
    ("listed", "origin", "status"),
    [
        ("chrome-extension://abcdefghij", "chrome-extension://abcdefghij", 200),
        ("chrome-extension://abcdefghij", "chrome-extension://klmnopqrst", 403),
        ("app://obsidian.md", "app://obsidian.md", 200),
        ("vscode-webview://*", "vscode-webview://0m2abc", 200),
        ("vscode-webview://*", "chrome-extension://abcdefghij", 403),
        ("safari-web-extension://9AB-CD", "safari-web-extension://9AB-CD", 200),
        ("app://*", "app", 403),
    ],
)
def test_extensions_and_apps_in_the_list_infer_and_read_but_change_nothing(
    open_site: Any, listed: str, origin: str, status: int
) -> None:
    config = parse_serve(["--model-repository=/m", f"--http-allowed-origin={listed}"], {}).config.http
    site = open_site(allowed_origins=config.allowed_origins)
    reply = site.post(INFER, ADD, {"Origin": origin, **JSON})
    assert reply.status == status
    assert reply.headers["Access-Control-Allow-Origin"] == (origin if status == 200 else None)
    assert site.post(LOAD, {}, {"Origin": origin, **JSON}).status == 403


@pytest.mark.parametrize("path", ["/v2", "/edge/v1/events?follow=false"])
def test_a_page_of_another_site_opens_no_websocket(site: Any, path: str) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    assert site.get(path, headers={**upgrade, **EVIL}).status == 403
    own = {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}
    assert site.get(path, headers={**upgrade, **own}).status == 200
    assert site.get(path, headers=upgrade).status == 200


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("box.example", "https://box.example", 200),
        ("box.example", "http://box.example", 200),
        ("box.example:8443", "https://box.example:8443", 200),
        ("box.example:8443", "https://box.example", 403),
        ("box.example", "https://other.example", 403),
        ("127.0.0.1:8000", "https://127.0.0.1:8000", 403),
        ("localhost:8000", "https://localhost:8000", 403),
    ],
)
def test_behind_a_proxy_that_ends_tls_an_allowed_host_is_the_own_origin_with_https_too(
    open_site: Any, host: str, origin: str, status: int
) -> None:
    site = open_site(allowed_hosts=("Box.example",))
    headers = {"Host": host, "Origin": origin, "Sec-Fetch-Site": "same-origin", **JSON}
    assert [site.post(path, ADD if path == INFER else {}, headers).status for path in (INFER, LOAD)] == [status] * 2


def test_code_is_taken_from_this_machine_and_from_others_where_that_is_allowed(
    open_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    site = open_site()
    site.post(LOAD, {})
    monkeypatch.setattr(control_endpoints, "is_this_machine", lambda address: asked.append(address) or False)
    site.post(LOAD, {})
    assert site.service.may_carry_code == [True, False]
    assert asked == ["127.0.0.1"]
    open_to_code = open_site(allows_code_upload=True)
    open_to_code.post(LOAD, {})
    assert open_to_code.service.may_carry_code == [True]
