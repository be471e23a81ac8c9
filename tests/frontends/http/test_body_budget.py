"""Memory budget for all received bodies: real sockets, large incomplete uploads, and honest clients beside them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import Refusal
from edge_server.frontends import memory_budget as budgets
from edge_server.frontends.http.body_reader import BodyReader
from edge_server.frontends.memory_budget import MemoryBudget
from edge_server.memory.available_memory import MemoryReading
from edge_server.memory.malloc_settings import trim
from tests.kit.eventually import eventually

MIB = 1 << 20
PATIENCE_S = 60.0
PATH = "/v2/models/float/infer"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"

WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "compressed answer": ("Accept-Encoding: gzip",),
    "in chunks": ("Transfer-Encoding: chunked",),
}


def message(count: int, *lines: str) -> bytes:
    """Return a request with `count` raw numbers, as one chunk where `lines` say so."""
    raw = np.zeros(count, "<f4").tobytes()
    tensor = {"name": "IN", "shape": [count], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = text + raw
    is_chunked = "Transfer-Encoding: chunked" in lines
    head = [f"POST {PATH} HTTP/1.1", "Host: localhost", f"Inference-Header-Content-Length: {len(text)}", *lines]
    if is_chunked:
        body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    else:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def resident_bytes() -> int:
    """Without what the allocator keeps for the next requests, of this test and of those before it."""
    trim()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def connect() -> Iterator[Callable[[Any], socket.socket]]:
    with contextlib.ExitStack() as opened:

        def start(site: Any) -> socket.socket:
            client = opened.enter_context(socket.socket())
            client.settimeout(PATIENCE_S)
            client.connect(("127.0.0.1", site.port))
            return client

        yield start


def budget_of(site: Any) -> MemoryBudget:
    found: MemoryBudget = site.frontend._budget
    return found


def held_by(site: Any) -> int:
    """Return the bytes held between two events of the site's loop. Another thread could look while a piece is counted
    that the budget has not yet freed memory for."""

    async def look() -> int:
        return budget_of(site).held

    held: int = site.run(look())
    return held


def head_of(client: socket.socket) -> bytes:
    text = b""
    while b"\r\n\r\n" not in text:
        data = client.recv(1 << 16)
        assert data, text
        text += data
    return text


def everything(client: socket.socket) -> bytes:
    """Return all that comes until the server closes. A reset is an error."""
    parts = []
    while data := client.recv(1 << 20):
        parts.append(data)
    return b"".join(parts)


@pytest.mark.parametrize("way", WAYS)
def test_a_half_sent_huge_body_gives_way_to_one_that_comes_whole(
    open_site: Any, connect: Callable[..., socket.socket], way: str
) -> None:
    site = open_site(max_body_bytes_in_flight=4 * MIB)
    budget = budget_of(site)
    huge = message(900_000, *WAYS[way])
    hoarder = connect(site)
    hoarder.sendall(huge[: 3 * MIB])
    assert eventually(lambda: budget.held > 2.9 * MIB)
    honest = connect(site)
    honest.sendall(message(500_000, *WAYS[way]))
    assert head_of(honest).startswith(b"HTTP/1.1 200 ")
    assert budget.refused == 1
    # The client gets the response although it sends the rest before it reads; then the connection ends.
    hoarder.sendall(huge[3 * MIB :])
    told = everything(hoarder) if way == "plain" else head_of(hoarder)
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 5\r\n" in told
    if way == "plain":
        assert b"hold more than 4194304 bytes together (--http-max-body-bytes-in-flight)" in told
    assert eventually(lambda: budget.held == 0)


def test_a_refused_body_is_answered_at_once(open_site: Any, connect: Callable[..., socket.socket]) -> None:
    site = open_site(max_body_bytes_in_flight=4 * MIB)
    hoarder, honest = connect(site), connect(site)
    hoarder.sendall(message(900_000)[: 3 * MIB])
    assert eventually(lambda: budget_of(site).held > 2.9 * MIB)
    honest.sendall(message(500_000))
    assert head_of(hoarder).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_gives_its_bytes_back(
    open_site: Any, connect: Callable[..., socket.socket], way: str
) -> None:
    site = open_site()
    budget = budget_of(site)
    client = connect(site)
    client.sendall(message(900_000, *WAYS[way])[: 3 * MIB])
    assert eventually(lambda: budget.held > 2.9 * MIB)
    client.close()
    assert eventually(lambda: budget.held == 0)
    assert budget.refused == 0


@pytest.mark.parametrize("way", WAYS)
def test_bodies_that_come_whole_leave_nothing_behind(
    open_site: Any, connect: Callable[..., socket.socket], way: str
) -> None:
    site = open_site(max_body_bytes_in_flight=4 * MIB)
    for _ in range(4):
        client = connect(site)
        client.sendall(message(900_000, "Connection: close", *WAYS[way]))
        assert everything(client).startswith(b"HTTP/1.1 200 ")
    assert eventually(lambda: budget_of(site).held == 0)
    assert budget_of(site).refused == 0


def test_many_half_sent_huge_bodies_stay_below_the_bound_and_small_requests_go_on(
    open_site: Any, connect: Callable[..., socket.socket]
) -> None:
    site = open_site(max_body_bytes_in_flight=8 * MIB)
    budget = budget_of(site)
    most, before = 0, resident_bytes()
    for number in range(30):
        client = connect(site)
        client.sendall(message(1_500_000, *list(WAYS.values())[number % 3])[: 3 * MIB])
        honest = connect(site)
        honest.sendall(message(100_000))
        assert head_of(honest).startswith(b"HTTP/1.1 200 ")
        honest.close()
        most = max(most, held_by(site))
    assert eventually(lambda: budget.refused > 20)
    assert 0 < most <= 8 * MIB
    assert held_by(site) <= 8 * MIB
    # 90 MiB were sent.
    assert resident_bytes() - before < 40 * MIB


def test_a_body_larger_than_the_bound_is_refused_before_it_comes(
    open_site: Any, connect: Callable[..., socket.socket]
) -> None:
    site = open_site(max_body_bytes_in_flight=MIB)
    client = connect(site)
    client.sendall(message(500_000)[:1000])
    told = b""
    while not told.endswith(b"}"):
        told += client.recv(1 << 16)
    assert told.startswith(b"HTTP/1.1 400 ")
    assert b"is larger than the limit of 1048576 bytes" in told


@pytest.mark.parametrize("before", [b"", LIVE], ids=["alone", "pipelined"])
@pytest.mark.parametrize("line", ["X-Plain: yes", "Content-Encoding: identity"])
def test_a_body_for_which_there_is_no_memory_is_refused_and_its_connection_stays_in_order(
    open_site: Any, connect: Callable[..., socket.socket], before: bytes, line: str
) -> None:
    size = 5 * 10**17  # more than a process can address
    site = open_site(max_input_size_bytes=size, max_body_bytes_in_flight=size)
    head = f"POST /v2/models/float/infer HTTP/1.1\r\nHost: localhost\r\n{line}\r\nContent-Length: {size}\r\n\r\n"
    client = connect(site)
    client.sendall(before + head.encode() + b"begun")
    text = b""
    while b"}" not in text.replace(b'{"live":true}', b""):
        data = client.recv(65536)
        assert data, text
        text += data
    assert b"HTTP/1.1 503 " in text
    assert b"there is no memory for a request body of 500000000000000000 bytes" in text
    server = site.frontend._server._setups[0].connections
    site.run(_ticked(server))
    assert site.get("/v2/health/live").status == 200


async def _ticked(server: Any) -> None:
    server._tick()


def test_what_an_inflated_body_holds_counts(open_site: Any, connect: Callable[..., socket.socket]) -> None:
    site = open_site(max_body_bytes_in_flight=4 * MIB)
    hoarder, honest = connect(site), connect(site)
    hoarder.sendall(message(900_000)[: 3 * MIB])
    assert eventually(lambda: budget_of(site).held > 2.9 * MIB)
    body = gzip.compress(message(500_000).partition(b"\r\n\r\n")[2])
    length = message(500_000).partition(b"Content-Length: ")[2].partition(b"\r\n")[0].decode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
    honest.sendall(f"{head}Inference-Header-Content-Length: {length}\r\n\r\n".encode() + body)
    assert head_of(honest).startswith(b"HTTP/1.1 200 ")
    assert head_of(hoarder).startswith(b"HTTP/1.1 503 ")


def test_a_body_of_another_thread_makes_one_give_way_that_holds_more(
    open_site: Any, connect: Callable[..., socket.socket]
) -> None:
    site = open_site(max_body_bytes_in_flight=4 * MIB)
    budget = budget_of(site)
    hoarder, other = connect(site), Body(budget)
    part = message(900_000)[: 3 * MIB]
    hoarder.sendall(part)
    # All of it: the end of a connection with unread bytes could overtake its answer.
    assert eventually(lambda: budget.held >= len(part) - part.index(b"\r\n\r\n") - 4)
    other.grow(2 * MIB)
    assert head_of(hoarder).startswith(b"HTTP/1.1 503 ")
    assert (other.refusal, budget.refused) == (None, 1)
    assert eventually(lambda: budget.held == 2 * MIB)
    budget.leave(other)
    honest = connect(site)
    honest.sendall(message(500_000))
    assert head_of(honest).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_came_whole_meanwhile_is_not_refused() -> None:
    async def settle_first() -> None:
        budget = MemoryBudget(1000, 1000)
        refusals: list[str] = []
        loop = asyncio.get_running_loop()
        body = BodyReader(None, budget, loop, lambda refusal: refusals.append(refusal.message))
        body.append(memoryview(bytes(600)))
        other = threading.Thread(target=lambda: Body(budget).grow(500))
        other.start()
        other.join()  # the loop's thread waits, so the refusal that it was handed comes after this:
        data = bytes(body.finish())
        await asyncio.sleep(0)
        assert (refusals, data) == ([], bytes(600))
        body.release()

    asyncio.run(settle_first())


class Body:
    def __init__(self, budget: MemoryBudget) -> None:
        self.filled = 0
        self.refusal: Refusal | None = None
        self._budget = budget
        budget.enter(self)

    def grow(self, count: int) -> None:
        self._budget.grow(self, count)

    def refuse(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self._budget.leave(self)


def test_those_give_way_that_hold_most_for_longest() -> None:
    now_s = 0.0
    budget = MemoryBudget(1000, 10_000, lambda: now_s)
    assert budget.each == 1000
    old, small = Body(budget), Body(budget)
    old.grow(400)
    small.grow(10)
    now_s = 30.0
    young = Body(budget)
    young.grow(590)
    assert old.refusal is None
    young.grow(1)
    assert old.refusal is not None
    assert "after 400 bytes" in old.refusal.message
    assert (young.refusal, small.refusal, budget.held, budget.refused) == (None, None, 601, 1)
    # As many as it takes until an eighth is free.
    others = [Body(budget) for _ in range(3)]
    for other in others:
        other.grow(100)
    now_s = 31.0
    young.grow(100)
    assert [body.refusal is None for body in (young, small, *others)] == [False, True, True, True, True]
    assert budget.held == 310


def reader(budget: MemoryBudget) -> tuple[BodyReader, list[str]]:
    """Return a body in chunks, and what it is refused with."""
    refusals: list[str] = []
    return BodyReader(None, budget, None, lambda refusal: refusals.append(refusal.message)), refusals


def test_a_body_that_is_all_there_does_not_give_way_and_what_grows_beyond_it_does() -> None:
    budget = MemoryBudget(1000, 1000)
    settled, settled_refusals = reader(budget)
    settled.append(memoryview(bytes(900)))
    settled.finish()
    late, late_refusals = reader(budget)
    late.append(memoryview(bytes(101)))
    assert "after 101 bytes" in late_refusals[0]
    assert (budget.held, settled_refusals) == (900, [])
    settled.release()
    assert (budget.held, budget.refused) == (0, 1)


def test_decompressed_bytes_of_a_complete_body_are_refused_when_the_budget_is_used_up() -> None:
    async def inflate() -> None:
        budget = MemoryBudget(1000, 1000)
        settled, _ = reader(budget)
        settled.append(memoryview(zlib.compress(bytes(999))))
        with pytest.raises(Refusal, match="hold more than 1000 bytes together"):
            await settled.decompress(settled.finish(), "deflate", None)
        assert (budget.held, budget.refused) == (0, 1)

    asyncio.run(inflate())


def test_settled_bodies_leave_the_rest_of_the_room_to_small_ones() -> None:
    budget = MemoryBudget(1000, 1000)
    settled, _ = reader(budget)
    settled.append(memoryview(bytes(900)))
    settled.finish()
    small, large = Body(budget), Body(budget)
    small.grow(20)
    large.grow(81)
    assert (small.refusal is None, large.refusal is None, budget.held) == (True, False, 920)


def test_a_body_that_gave_way_holds_nothing_and_takes_nothing_more() -> None:
    budget = MemoryBudget(1000, 1000)
    (first, refusals), (other, _) = reader(budget), reader(budget)
    first.append(memoryview(bytes(600)))
    other.append(memoryview(bytes(500)))
    assert first.buffer is None
    first.append(memoryview(bytes(400)))
    first.begin_chunk(5000)
    assert (budget.held, len(refusals)) == (500, 1)


@pytest.mark.parametrize(
    ("setting", "largest", "available", "expected"),
    [
        (5, 1, 1 << 40, 5),
        (0, 64 * MIB, 8192 * MIB, 2048 * MIB),
        (0, 64 * MIB, 512 * MIB, 256 * MIB),
        (0, 64 * MIB, 0, 256 * MIB),
        (0, 1024 * MIB, 2048 * MIB, 1024 * MIB),
        (0, 1 << 40, 2048 * MIB, 2048 * MIB),
    ],
)
def test_the_bound_is_a_quarter_of_the_memory_at_hand_and_never_less_than_one_body_needs(
    monkeypatch: pytest.MonkeyPatch, setting: int, largest: int, available: int, expected: int
) -> None:
    monkeypatch.setattr(budgets, "read_memory", lambda: MemoryReading(available, None))
    assert budgets.budget_bytes(setting, largest) == expected
