"""Host check: on a loopback address, a name that another site lets lead here is served by no route."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
from typing import Any

import pytest

from edge_server.frontends.http.host_check import HostCheck
from edge_server.frontends.http.metrics_endpoint import MetricsFrontend

EVIL = {"Host": "evil.example:8000"}
ADD = {
    "inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]} for i in range(2)]
}  # fmt: skip


def test_no_route_answers_for_a_foreign_host(site: Any) -> None:
    """All routes of the server, GET too, with the names in their paths filled in; and a path that is none."""
    lines = site.frontend._router.routes
    routes = [(line.method, line.path.replace("{", "").replace("}", "")) for line in lines]
    assert len(routes) > 40
    for method, path in (*routes, ("GET", "/nothing"), ("OPTIONS", "/v2")):
        assert site.ask(method, path, headers=EVIL).status == 421, (method, path)
    assert site.service.requests == site.service.loads == site.service.orders == []


def test_the_refusal_names_the_option(site: Any) -> None:
    reply = site.get("/v2/health/live", headers=EVIL)
    assert (reply.status, reply.headers["Content-Type"]) == (421, "application/json")
    assert "--http-allowed-host=evil.example" in reply.error


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000", "127.0.0.1", "10.1.2.3", "[::1]:8000", "[fe80::1]", "localhost", "LocalHost.:80",
        "app.localhost", "a.b.localhost:8000", "box.example", "BOX.example:443", "",
        "jetson-7.lab.example", "jetson-7:8000", "jetson-7.local",
    ],
)  # fmt: skip
def test_names_of_this_machine_and_allowed_ones_are_served(
    open_site: Any, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    site = open_site(allowed_hosts=("Box.example",))
    # After the start: the name of a machine may change later.
    monkeypatch.setattr("socket.gethostname", lambda: "Jetson-7.lab.example")
    assert site.get("/v2/health/live", headers={"Host": host}).status == 200
    assert site.post("/v2/models/add/infer", ADD, {"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1.nip.io", "evillocalhost",
        "[", "[::1", "a:b", "a@localhost", "localhost/x", "box.example.evil.example", "\xe4.example", "local", ".local",
    ],
)  # fmt: skip
def test_any_other_host_is_refused(open_site: Any, host: str) -> None:
    site = open_site(allowed_hosts=("box.example",))
    assert site.get("/v2/health/live", headers={"Host": host}).status == 421
    assert site.post("/v2/models/add/infer", ADD, {"Host": host}).status == 421


def test_a_request_without_host_passes_and_one_with_a_foreign_second_host_does_not(site: Any) -> None:
    def status(head: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:
            client.sendall(b"GET /v2/health/ready HTTP/1." + head + b"\r\n\r\n")
            return client.recv(65536).split()[1]

    assert status(b"0") == b"200"
    assert status(b"0\r\nHost: evil.example") == b"421"
    assert status(b"1\r\nHost: localhost\r\nHost: evil.example") == b"421"


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_every_loopback_address_is_checked(open_site: Any, address: str) -> None:
    site = open_site(address=address)
    reached = "127.0.0.1" if address == "localhost" else address
    connection = http.client.HTTPConnection(reached, site.port, timeout=30)
    connection.request("GET", "/v2/health/live", headers=EVIL)
    assert connection.getresponse().status == 421
    connection.close()


def test_a_listener_that_others_reach_answers_for_any_host(open_site: Any) -> None:
    site = open_site(address="0.0.0.0")
    assert site.get("/v2/health/live", headers=EVIL).status == 200


def test_each_refused_name_is_logged_once_and_only_some_names(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    for host in ("evil.example", "evil.example:81", "EVIL.example", *(f"a{number}.example" for number in range(100))):
        assert site.get("/v2", headers={"Host": host}).status == 421
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("'evil.example'" in line for line in lines) == 1
    assert "--http-allowed-host=evil.example" in lines[0]
    assert len(lines) == 33
    assert "further hosts" in lines[-1]


def test_a_cached_head_is_not_checked_again(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    refusal = HostCheck.refusal
    monkeypatch.setattr(HostCheck, "refusal", lambda self, head: checked.append(head) or refusal(self, head))
    replies = [site.post("/v2/models/add/infer", ADD, {"Content-Type": "application/json"}) for _ in range(5)]
    assert ([reply.status for reply in replies], len(checked)) == ([200] * 5, 1)


def test_the_metrics_listener_refuses_foreign_hosts_too() -> None:
    async def status(port: int, head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1." + head + b"\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.split()[1]

    async def statuses(address: str) -> list[bytes]:
        front = MetricsFrontend(lambda: (b"up 1\n", "text/plain"), address, 0, allowed_hosts=("box.example",))
        port = await front.start()
        hosts = (b"1\r\nHost: evil.example", b"1\r\nHost: box.example", b"1\r\nHost: localhost", b"0")
        found = [await status(port, head) for head in hosts]
        await front.stop(1)
        return found

    assert asyncio.run(statuses("127.0.0.1")) == [b"421", b"200", b"200", b"200"]
    assert asyncio.run(statuses("0.0.0.0")) == [b"200"] * 4
