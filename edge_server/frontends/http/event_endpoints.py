"""HTTP handler of the server's events: sends them as a JSON array, or as a stream of server-sent events.

There is no queue for each client. A client's stream keeps the number of its last event, and reads the next ones from
the history of the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from edge_server.errors import Refusal
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import parse_boolean, parse_query, parse_whole_number
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.frontends.json_text import to_json
from edge_server.telemetry.event_bus import Event, EventBus

MAX_FOLLOWERS = 32
"""Maximum number of simultaneous streams: each occupies a connection without a time limit."""

KEEP_ALIVE_S = 15.0
"""Time without an event after which a comment is sent, so that proxies and clients keep the connection."""

_WRITE_LIMIT_S = 10.0
"""A client that reads nothing for this time is disconnected."""

RUN_HEADER = "Edge-Server-Run"
"""Header with the id of the server's run: the event numbers start again with each run."""


class EventEndpoints:
    """The handler and its streams, from `open` to `close`. Each stream is on the event loop of its connection."""

    def __init__(self, bus: EventBus, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._bus = bus
        self._keep_alive_s = keep_alive_s
        self._wakers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()
        """Guards `_wakers`."""
        self._is_closing = False
        self._unsubscribe: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Subscribe to the bus."""
        self._unsubscribe = self._bus.subscribe(lambda event: self._wake())

    def close(self) -> None:
        """Send the remaining events to each stream, and end it."""
        self._unsubscribe()
        self._is_closing = True
        self._wake()

    def routes(self) -> Sequence[Route]:
        route = Route(
            "GET",
            "/edge/v1/events",
            "model-repository",
            "Events, as a stream or a list",
            self.events,
            uses_aiohttp=True,
            schema="edge_server.frontends.http.schemas:EVENTS",
        )
        return (route,)

    async def events(self, request: HttpRequest) -> HttpResponse | None:
        """Return the events after a number as an array, or follow them as a stream."""
        query = parse_query(request.head.target, ("after", "follow"))
        after = parse_whole_number("after", query.get("after", "0"))
        last_id = request.head.headers.get("Last-Event-ID")
        if last_id is not None:
            # A client that reconnects repeats its first URL, and sends the number of its last event in this header.
            after = parse_whole_number("Last-Event-ID", last_id)
        if after > self._bus.latest():
            # A number of an earlier run: send all events of this run.
            after = 0
        headers = {RUN_HEADER: self._bus.run_id, "Cache-Control": "no-cache"}
        if parse_boolean("follow", query.get("follow", "true")):
            await self._follow(request, after, headers)
            return None
        response = json_response([event_json(event) for event in self._bus.history(after)])
        response.headers.update(headers)
        return response

    async def _follow(self, request: HttpRequest, after: int, headers: Mapping[str, str]) -> None:
        waker = asyncio.Event()
        with self._lock:
            if len(self._wakers) >= MAX_FOLLOWERS:
                raise Refusal(f"{MAX_FOLLOWERS} clients follow the events already", retry_after_s=10.0)
            self._wakers[waker] = asyncio.get_running_loop()
        try:
            # Without X-Accel-Buffering, nginx keeps events until a buffer is full.
            kind = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
            await request.begin_stream(200, {**headers, **kind})
            await _write(request, b": the events of edge-server\n\n")
            while True:
                if request.connection.transport is None:
                    # Before Python 3.12, `wait_for` drops a cancellation that comes together with its result.
                    raise ConnectionResetError("the client has disconnected")
                is_closing = self._is_closing
                waker.clear()
                for event in self._bus.history(after):
                    # JSON text has no line breaks, so that one "data:" line holds all of it.
                    lines = (event.number, event.kind.encode(), to_json(event_json(event)))
                    await _write(request, b"id: %d\nevent: %s\ndata: %s\n\n" % lines)
                    after = event.number
                if is_closing:
                    return
                try:
                    await asyncio.wait_for(waker.wait(), self._keep_alive_s)
                except asyncio.TimeoutError:
                    await _write(request, b": still here\n\n")
        finally:
            with self._lock:
                del self._wakers[waker]

    def _wake(self) -> None:
        """Wake each stream. For any thread."""
        with self._lock:
            wakers = list(self._wakers.items())
        for waker, loop in wakers:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(waker.set)


def event_json(event: Event) -> dict[str, object]:
    """Return an event as a JSON object."""
    return {**event.fields, "number": event.number, "time_s": event.time_s, "kind": event.kind}


async def _write(request: HttpRequest, data: bytes) -> None:
    """Write to a stream. Raises ConnectionError, also for a client that does not read."""
    try:
        await asyncio.wait_for(request.write(data), _WRITE_LIMIT_S)
    except asyncio.TimeoutError:
        raise ConnectionAbortedError("a client that follows the events does not read them") from None
