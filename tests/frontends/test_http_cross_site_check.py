"""Cross-site check: a web page of another site cannot change the server."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.frontends.http import control_endpoints

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
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(("verb", "path"), ORDERS)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Origin": "http://evil.example", **JSON},
        {"Sec-Fetch-Site": "cross-site", **JSON},
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
    assert reply.error
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
    ],
)
def test_the_origin_of_a_browsers_order_must_be_this_server(site: Any, host: str, origin: str) -> None:
    assert site.post(LOAD, {}, {"Host": host, "Origin": origin, **JSON}).status == 403
    assert site.service.loads == []


@pytest.mark.parametrize("host", ["192.168.1.4:8000", "[fe80::1]:8000", "LOCALHOST", "box.example:80"])
def test_a_page_of_this_server_gives_orders(open_site: Any, host: str) -> None:
    site = open_site(allowed_hosts=("Box.example",))
    headers = {"Host": host, "Origin": f"http://{host.lower()}", "Sec-Fetch-Site": "same-origin"}
    for content_type in ("application/json; charset=utf-8", "application/octet-stream"):
        assert site.post(LOAD, {}, {**headers, "Content-Type": content_type}).status == 200
    assert site.post(LOAD, {}, {**headers, "Content-Type": "application/x-www-form-urlencoded"}).status == 403
    assert site.post(LOAD, {}, headers).status == 403
    assert len(site.service.loads) == 2


def test_a_page_under_the_name_of_this_machine_gives_orders(open_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Jetson-7.lab.example")
    site = open_site()
    for host in ("jetson-7.lab.example:8000", "jetson-7:8000", "jetson-7.local:8000"):
        assert site.post(LOAD, {}, {"Host": host, "Origin": f"http://{host}", **JSON}).status == 200


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "application/json", "image/jpeg"])
def test_other_clients_give_orders_under_any_name_of_the_server(site: Any, content_type: str | None) -> None:
    headers = {"Host": "anything.example:8000"} | ({"Content-Type": content_type} if content_type else {})
    assert site.post(LOAD, {}, headers).status == 200


def test_questions_are_not_judged(site: Any) -> None:
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    assert site.post("/v2/repository/index", {}, headers).status == 200
    assert site.get("/v2/logging", headers=headers).status == 200


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
