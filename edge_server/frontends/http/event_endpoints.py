"""The events of the bus over HTTP: as a JSON array, or followed as server-sent events.

No event is queued for a client: each keeps the number of the last one it got and reads on in the bus's own history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from edge_server.errors import Refusal
from edge_server.frontends.http.aiohttp_server import Answer
from edge_server.frontends.http.query_string import parse_query, truth, whole_number
from edge_server.frontends.http.response import SERVER, json_reply
from edge_server.frontends.v2.json_parser import to_json
from edge_server.telemetry.event_bus import Event, EventBus

if TYPE_CHECKING:
    from aiohttp import web

MAX_FOLLOWERS = 32
"""Most clients that follow at a time; each holds a connection for as long as it likes."""

KEEP_ALIVE_S = 15.0
"""After so long without an event a comment is sent, so that proxies and clients know that the line is alive."""

_WRITE_LIMIT_S = 10.0
"""How long a client may leave what was sent to it unread before it is dropped."""

RUN_HEADER = "Edge-Server-Run"
"""Names the run of the server that the numbers belong to: they begin anew with the next."""


class EventEndpoints:
    """Lives on one event loop, between `open` and `close`."""

    def __init__(self, bus: EventBus, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._bus = bus
        self._keep_alive_s = keep_alive_s
        self._wakers: set[asyncio.Event] = set()
        self._is_closing = False
        self._unsubscribe: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Begin to listen to the bus. Call on the loop that serves."""
        loop = asyncio.get_running_loop()

        def receive(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                # The loop ended while the event was on its way: nobody follows any more.
                return

        self._unsubscribe = self._bus.subscribe(receive)

    def close(self) -> None:
        """Let every follower have what happened so far, and end its answer."""
        self._unsubscribe()
        self._is_closing = True
        self._wake()

    async def events(self, request: web.BaseRequest, names: Mapping[str, str]) -> Answer:
        query = parse_query(request.raw_path, ("after", "follow"))
        after = whole_number("after", query.get("after", "0"))
        last_id = request.headers.get("Last-Event-ID")
        if last_id is not None:
            # A client that lost the line repeats the address it began with, and says here how far it came.
            after = whole_number("Last-Event-ID", last_id)
        if after > self._bus.latest():
            # A number of an earlier run: all that this run remembers is news.
            after = 0
        headers = {RUN_HEADER: self._bus.run_id, "Cache-Control": "no-cache"}
        if truth("follow", query.get("follow", "true")):
            return await self._follow(request, after, headers)
        reply = json_reply([event_json(event) for event in self._bus.history(after)])
        reply.headers.update(headers)
        return reply

    async def _follow(self, request: web.BaseRequest, after: int, headers: Mapping[str, str]) -> web.StreamResponse:
        from aiohttp import web

        if len(self._wakers) >= MAX_FOLLOWERS:
            raise Refusal(f"{MAX_FOLLOWERS} clients follow the events already", retry_after_s=10.0)
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            # X-Accel-Buffering: nginx would keep events back until a buffer is full.
            kind = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
            reply = web.StreamResponse(headers={**headers, **kind, "Server": SERVER})
            await reply.prepare(request)
            await _write(request, reply, b": the events of edge-server\n\n")
            await self._send_all(request, reply, after, waker)
            return reply
        finally:
            self._wakers.discard(waker)

    async def _send_all(
        self, request: web.BaseRequest, reply: web.StreamResponse, after: int, waker: asyncio.Event
    ) -> None:
        while True:
            is_closing = self._is_closing
            waker.clear()
            for event in self._bus.history(after):
                await _write(request, reply, _frame(event))
                after = event.number
            if is_closing:
                return
            try:
                await asyncio.wait_for(waker.wait(), self._keep_alive_s)
            except asyncio.TimeoutError:
                await _write(request, reply, b": still here\n\n")

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()


def event_json(event: Event) -> dict[str, object]:
    return {**event.fields, "number": event.number, "time_s": event.time_s, "kind": event.kind}


def _frame(event: Event) -> bytes:
    # JSON text has no line breaks of its own, so that one "data:" line holds all of it.
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.number, event.kind.encode(), to_json(event_json(event)))


async def _write(request: web.BaseRequest, reply: web.StreamResponse, data: bytes) -> None:
    """Write, and cut the connection of a client that does not read. Raises ConnectionError then."""
    try:
        await asyncio.wait_for(reply.write(data), _WRITE_LIMIT_S)
    except asyncio.TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("a client that follows the events does not read them") from None
