"""The limit of all listeners' connections: which silent connection ends for a new one, and when none does."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from edge_server.errors import Refusal
from edge_server.frontends import connection_limit
from edge_server.frontends.connection_limit import ConnectionLimit, SilentConnection

OTHER_FILES = 30
LONG_AGO_S = 10.0


@dataclass(eq=False)
class StubListener:
    """A listener whose connections are names. `later` has the calls from other threads."""

    name: str = "HTTP"
    max_connections: int = 1000
    busy: int = 0
    silent: dict[str, tuple[bool, float]] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    later: list[Callable[[], None]] = field(default_factory=list)

    @property
    def connection_count(self) -> int:
        return self.busy + len(self.silent)

    def add_silent(self, *names: str, has_served: bool = False, age_s: float = LONG_AGO_S) -> None:
        self.silent |= {name: (has_served, time.monotonic() - age_s) for name in names}

    def silent_connections(self) -> list[SilentConnection]:
        return [SilentConnection(has_served, at_s, self, name) for name, (has_served, at_s) in self.silent.items()]

    def run_soon(self, call: Callable[[], None]) -> None:
        self.later.append(call)

    def close_silent(self, silent: SilentConnection, on_closed: Callable[[], None]) -> bool:
        if self.silent.get(silent.connection) != (silent.has_served, silent.since_s):
            return False
        del self.silent[silent.connection]
        self.closed.append(silent.connection)
        on_closed()
        return True


@pytest.fixture
def http() -> StubListener:
    return StubListener("HTTP")


@pytest.fixture
def grpc() -> StubListener:
    return StubListener("gRPC")


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, http: StubListener, grpc: StubListener) -> ConnectionLimit:
    """A process that may open 100 files, 25 of them not for connections, and uses 30 itself: 45 connections."""
    made = ConnectionLimit()
    for listener in (http, grpc):
        made.add(listener)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))

    def opened_files(path: str) -> list[str]:
        new_one_and_folder = 2
        return [""] * (OTHER_FILES + http.connection_count + grpc.connection_count + new_one_and_folder)

    monkeypatch.setattr(os, "listdir", opened_files)
    return made


def end_search(limit: ConnectionLimit) -> None:
    """Make the next decision search again for silent connections."""
    limit._searched_s = 0.0


def admit(limit: ConnectionLimit, listener: StubListener) -> float:
    return limit.admit(listener, time.monotonic())


def test_with_descriptors_left_no_connection_ends(limit: ConnectionLimit, http: StubListener) -> None:
    http.add_silent(*(f"silent {number}" for number in range(44)))
    assert admit(limit, http) == 0.0
    assert http.closed == []


def test_connections_without_a_request_are_closed_first_and_then_the_longest_silent(
    limit: ConnectionLimit, http: StubListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limit, "_MIN_SILENCE_S", 0.0)  # each decision searches
    http.busy = 41
    http.add_silent("served first", has_served=True, age_s=30)
    http.add_silent("served last", has_served=True, age_s=20)
    http.add_silent("stranger", age_s=1)
    http.add_silent("older stranger", age_s=2)
    for _ in range(4):
        assert admit(limit, http) == 0.0
        http.busy += 1
    assert http.closed == ["older stranger", "stranger", "served first", "served last"]


def test_silent_connections_of_another_listener_end_on_its_thread(
    limit: ConnectionLimit, http: StubListener, grpc: StubListener
) -> None:
    http.busy = 20
    grpc.add_silent(*(f"silent {number}" for number in range(25)))
    assert admit(limit, http) == 0.0
    assert grpc.closed == []
    http.busy += 1
    # The one that is being closed counts as closed.
    assert admit(limit, http) == 0.0
    assert len(grpc.later) == 2
    for call in grpc.later:
        call()
    assert grpc.closed == ["silent 0", "silent 1"]


def test_no_more_are_admitted_while_many_still_have_their_descriptors(
    limit: ConnectionLimit, http: StubListener, grpc: StubListener
) -> None:
    http.busy = 20
    grpc.add_silent(*(f"silent {number}" for number in range(40)))
    assert admit(limit, http) == 0.0
    assert len(grpc.later) == 16  # the reserve is restored
    assert admit(limit, http) > 0
    for call in grpc.later:
        call()
    assert admit(limit, http) == 0.0


def test_a_connection_that_is_no_longer_silent_stays(limit: ConnectionLimit, http: StubListener) -> None:
    http.busy = 43
    http.add_silent("a", age_s=20)
    http.add_silent("b", age_s=10)
    found = http.silent_connections()
    http.silent_connections = lambda: found  # type: ignore[method-assign]
    http.add_silent("a", has_served=True, age_s=0)
    assert admit(limit, http) == 0.0
    assert http.closed == ["b"]


def test_a_new_connection_waits_for_one_that_was_accepted_a_moment_ago(
    limit: ConnectionLimit, http: StubListener
) -> None:
    http.busy = 43
    http.add_silent("new", age_s=0)
    http.add_silent("served", has_served=True)
    assert 0 < admit(limit, http) <= 0.05
    assert http.closed == []
    http.add_silent("new", age_s=1)
    end_search(limit)
    assert admit(limit, http) == 0.0
    assert http.closed == ["new"]


def test_a_new_connection_does_not_wait_for_ever(limit: ConnectionLimit, http: StubListener) -> None:
    http.busy = 44
    http.add_silent("new", age_s=0)
    with pytest.raises(Refusal, match="all but 25 of 100 file descriptors are in use"):
        limit.admit(http, time.monotonic() - 1.0)
    assert http.closed == []


def test_without_a_silent_connection_new_ones_are_refused(
    limit: ConnectionLimit, http: StubListener, caplog: pytest.LogCaptureFixture
) -> None:
    http.busy = 45
    for _ in range(20):
        with pytest.raises(Refusal, match="all but 25 of 100 file descriptors are in use"):
            admit(limit, http)
    assert [record.getMessage() for record in caplog.records] == [
        "all but 25 of 100 file descriptors are in use, and none is idle: new ones are refused"
    ]


def test_the_limit_of_one_listener_ends_only_its_own_connections(
    limit: ConnectionLimit, http: StubListener, grpc: StubListener
) -> None:
    grpc.add_silent("other", age_s=100)
    http.max_connections, http.busy = 3, 2
    http.add_silent("own")
    assert admit(limit, http) == 0.0
    assert (http.closed, grpc.closed, grpc.later) == (["own"], [], [])
    http.busy += 1
    end_search(limit)
    with pytest.raises(Refusal, match="3 HTTP connections are open already"):
        admit(limit, http)


def test_few_connections_may_use_the_reserve(
    limit: ConnectionLimit, http: StubListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (OTHER_FILES + 5, 100))
    http.add_silent(*(f"silent {number}" for number in range(7)))
    assert admit(limit, http) == 0.0
    assert http.closed == []


def test_a_process_without_a_limit_of_files_has_none_here(
    limit: ConnectionLimit, http: StubListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    http.busy = 10**6
    http.max_connections = 10**7
    assert admit(limit, http) == 0.0


def test_the_servers_own_files_are_counted_again(
    limit: ConnectionLimit, http: StubListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.busy = 40
    assert admit(limit, http) == 0.0
    monkeypatch.setattr(os, "listdir", lambda path: [""] * (OTHER_FILES + 20 + 42))
    monkeypatch.setattr(connection_limit, "_COUNT_EVERY_S", 0.0)
    with pytest.raises(Refusal):
        admit(limit, http)


def test_a_listener_that_is_closed_gives_nothing(
    limit: ConnectionLimit, http: StubListener, grpc: StubListener
) -> None:
    grpc.add_silent("other")
    limit.remove(grpc)
    http.busy = 45
    with pytest.raises(Refusal):
        admit(limit, http)
    limit.remove(grpc)
