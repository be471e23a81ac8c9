"""Event endpoint and operator endpoints: event frames, numbers, limits, and access."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edge_server.config import HttpConfig, RestrictedGroup
from edge_server.errors import Forbidden
from edge_server.frontends.http import event_endpoints as events_module
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.event_endpoints import MAX_FOLLOWERS
from edge_server.telemetry.event_bus import MODEL_FAILED, MODEL_READY
from tests.kit.eventually import eventually
from tests.kit.together import together

PATIENCE_S = 60.0


class Follower:
    """A client that follows the events."""

    def __init__(self, site: Any, path: str = "/edge/v1/events", headers: dict[str, str] | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
        self.connection.request("GET", path, headers=headers or {})
        self.answer = self.connection.getresponse()

    def frame(self) -> dict[str, str]:
        """Return the fields of the next event; comments are passed over."""
        fields: dict[str, str] = {}
        while True:
            line = self.line()
            if line and not line.startswith(":"):
                key, _, value = line.partition(": ")
                fields[key] = value
            elif not line and fields:
                return fields

    def line(self) -> str:
        raw = self.answer.readline()
        assert raw, "the stream ended"
        return raw.decode().rstrip("\n")

    def rest(self) -> str:
        return self.answer.read().decode()

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


@pytest.fixture
def follow(site: Any) -> Iterator[Callable[..., Follower]]:
    made: list[Follower] = []

    def begin(*arguments: Any, **options: Any) -> Follower:
        made.append(Follower(site, *arguments, **options))
        return made[-1]

    yield begin
    for follower in made:
        follower.close()


def test_remembered_events_come_as_an_array(site: Any) -> None:
    assert site.get("/edge/v1/events?follow=false").json == []
    site.service.events.publish(MODEL_READY, model="m", version=1)
    site.service.events.publish(MODEL_FAILED, model="m", version=2, reason='a "bad"\nfile')
    reply = site.get("/edge/v1/events?follow=false")
    first, second = reply.json
    assert (first["number"], first["kind"], first["model"], first["version"]) == (1, MODEL_READY, "m", 1)
    assert (second["number"], second["reason"]) == (2, 'a "bad"\nfile')
    assert abs(first["time_s"] - time.time()) < 3600
    assert reply.headers["Edge-Server-Run"] == site.service.events.run_id
    assert [event["number"] for event in site.get("/edge/v1/events?after=1&follow=false").json] == [2]


def test_a_follower_gets_what_is_remembered_and_then_what_happens(site: Any, follow: Any) -> None:
    site.service.events.publish(MODEL_READY, model="m", version=1)
    follower = follow()
    assert follower.answer.status == 200
    assert follower.answer.headers["Content-Type"].startswith("text/event-stream")
    frame = follower.frame()
    assert (frame["id"], frame["event"]) == ("1", MODEL_READY)
    for number in range(2, 12):
        site.service.events.publish(MODEL_FAILED, model="m", version=number, reason="line\nline")
        frame = follower.frame()
        assert (frame["id"], frame["event"]) == (str(number), MODEL_FAILED)
        data = json.loads(frame["data"])
        assert (data["number"], data["version"], data["reason"]) == (number, number, "line\nline")


def test_events_published_from_many_threads_reach_every_follower_once_and_in_order(site: Any, follow: Any) -> None:
    followers = [follow() for _ in range(3)]
    together(lambda _: [site.service.events.publish(MODEL_READY) for _ in range(10)], range(4))
    for follower in followers:
        assert [int(follower.frame()["id"]) for _ in range(40)] == list(range(1, 41))


def test_a_client_that_comes_back_says_how_far_it_came(site: Any, follow: Any) -> None:
    for _ in range(5):
        site.service.events.publish(MODEL_READY)
    assert follow("/edge/v1/events?after=3").frame()["id"] == "4"
    assert follow("/edge/v1/events?after=1", headers={"Last-Event-ID": "4"}).frame()["id"] == "5"


def test_a_number_of_an_earlier_run_means_from_the_beginning(site: Any, follow: Any) -> None:
    site.service.events.publish(MODEL_READY)
    assert follow("/edge/v1/events?after=900").frame()["id"] == "1"
    assert len(site.get("/edge/v1/events?after=900&follow=false").json) == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "query",
    ["after=-1", "after=x", "after=", "after=1.5", "after=9999999999999999999", "after=%D9%A1", "follow=maybe",
     "follow=", "since=1", "after=1&after=2", "after=%ff", "&".join(["follow=true"] * 40)],
)  # fmt: skip
def test_a_query_that_is_not_understood_is_refused_with_words(site: Any, query: str) -> None:
    reply = site.get(f"/edge/v1/events?{query}")
    assert reply.status == 400
    assert reply.error


def test_a_last_event_id_that_is_no_number_is_refused(site: Any) -> None:
    reply = site.get("/edge/v1/events", headers={"Last-Event-ID": "x" * 3000})
    assert reply.status == 400
    assert "'Last-Event-ID' must be a whole number" in reply.error
    assert len(reply.body) < 400


def test_a_quiet_line_is_kept_alive_by_comments(site: Any, follow: Any) -> None:
    site.events._keep_alive_s = 0.02
    follower = follow()
    seen = [follower.line() for _ in range(8)]
    assert seen.count(": still here") >= 2


def test_one_follower_too_many_is_refused_and_a_place_that_is_left_is_free_again(site: Any, follow: Any) -> None:
    followers = [follow() for _ in range(MAX_FOLLOWERS)]
    refused = site.get("/edge/v1/events")
    assert refused.status == 503
    assert refused.headers["Retry-After"]
    assert "follow the events already" in refused.error
    assert site.get("/edge/v1/events?follow=false").status == 200, "reading once takes no place"
    followers[0].close()
    assert eventually(lambda: len(site.events._wakers) < MAX_FOLLOWERS)
    site.service.events.publish(MODEL_READY)
    assert follow().frame()["id"] == "1"


def test_a_client_that_does_not_read_is_dropped_and_the_others_are_not(
    site: Any, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_WRITE_LIMIT_S", 0.3)
    reading = follow()
    idle = socket.socket()
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    idle.connect(("127.0.0.1", site.port))
    idle.sendall(b"GET /edge/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert eventually(lambda: len(site.events._wakers) == 2)
    count = 0

    def is_dropped() -> bool:
        nonlocal count
        site.service.events.publish(MODEL_FAILED, reason="x" * 500_000)
        count += 1
        assert int(reading.frame()["id"]) == count
        return len(site.events._wakers) == 1

    assert eventually(is_dropped)
    idle.close()


def test_stopping_gives_followers_the_last_events_and_ends_their_streams(site: Any, follow: Any) -> None:
    follower = follow()
    site.service.events.publish(MODEL_READY, model="last")
    site.run(site.stop(PATIENCE_S))
    text = follower.rest()
    assert '"last"' in text
    assert not site.events._wakers
    site.service.events.publish(MODEL_READY)


def test_the_endpoints_belong_to_the_category_of_the_repository(open_site: Any) -> None:
    site = open_site(restricted=(RestrictedGroup(("model-repository",), "x-key", "s3cret"),))
    for method, path in (
        ("GET", "/edge/v1/events?follow=false"),
        ("GET", "/edge/v1/versions"),
        ("POST", "/edge/v1/models/add/rollback"),
        ("POST", "/edge/v1/models/add/unpin"),
    ):
        assert site.ask(method, path).status == 403, path
        assert site.ask(method, path, headers={"x-key": "s3cret"}).status == 200, path


def test_versions_are_listed_with_their_history(site: Any) -> None:
    cold, ready = site.get("/edge/v1/versions").json["versions"]
    assert cold["state"] == "NOT_LOADED"
    assert cold["since_s"] is None
    assert not cold["is_pinned"]
    assert ready == {
        "name": "add", "version": 2, "state": "READY", "generation": 4, "since_s": 1700000000.5, "served_count": 12,
        "share": 1.0, "is_pinned": True, "reason": "",
    }  # fmt: skip
    assert site.get("/edge/v1/versions?model=add").status == 200
    assert site.get("/edge/v1/versions?model=nobody").status == 404
    assert site.get("/edge/v1/versions?name=add").status == 400


def test_rollback_and_unpin_hand_the_order_on_and_tell_what_came_of_it(site: Any) -> None:
    assert site.post("/edge/v1/models/a%20b/rollback", {"version": 7}).json == {
        "name": "a b", "pin": 7, "before": None, "serves": 7, "survives_restart": False, "problem": "",
    }  # fmt: skip
    assert site.post("/edge/v1/models/add/rollback").status == 200
    assert site.post("/edge/v1/models/add/rollback", {"version": None}).status == 200
    assert site.post("/edge/v1/models/add/unpin", {}).json["before"] == 1
    assert site.service.orders == [
        ("rollback", "a b", 7), ("rollback", "add", None), ("rollback", "add", None), ("unpin", "add"),
    ]  # fmt: skip


@pytest.mark.parametrize("members", [{"version": "1"}, {"version": True}, {"version": -1}, {"version": 1.0}, {"to": 1}])
def test_an_order_that_is_not_understood_is_not_given(site: Any, members: Any) -> None:
    reply = site.post("/edge/v1/models/add/rollback", members)
    assert reply.status == 400
    assert reply.error
    assert site.post("/edge/v1/models/add/unpin", {"version": 1}).status == 400
    assert site.service.orders == []


@pytest.mark.parametrize(
    ("remote", "is_guarded", "expected"),
    [
        ("127.0.0.1", False, True),
        ("127.8.9.1", False, True),
        ("::1", False, True),
        ("::ffff:127.0.0.1", False, True),
        ("192.168.1.4", False, False),
        ("::ffff:192.168.1.4", False, False),
        ("fe80::1%eth0", False, False),
        ("0.0.0.0", False, False),
        ("", False, False),
        (None, False, False),
        ("192.168.1.4", True, True),
    ],
)
def test_without_a_key_control_requests_are_accepted_from_this_machine_alone(
    remote: str | None, is_guarded: bool, expected: bool
) -> None:
    group = RestrictedGroup(("model-repository",), "x-key", "s3cret")
    access = AccessCheck(HttpConfig(restricted=(group,) if is_guarded else ()))
    with contextlib.nullcontext() if expected else pytest.raises(Forbidden, match="from this machine only"):
        access.check_change(remote)
