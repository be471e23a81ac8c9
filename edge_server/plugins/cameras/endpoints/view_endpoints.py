"""HTTP handlers for people who watch a camera: the newest picture of a stream, or live pictures, with results drawn
in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import MOTION_JPEG_TYPE, HttpResponse
from edge_server.frontends.json_text import to_json
from edge_server.plugins.vision.perception_endpoint import results_as_json

if TYPE_CHECKING:
    from edge_server.plugins.cameras.streams.stream_view import StreamView
    from edge_server.protocol.frame_messages import Buffer

_WRITE_LIMIT_S = 10.0
"""A viewer that does not read a picture for this time is disconnected."""

_PICTURE_WAIT_S = 2.0
"""How long a request for one picture waits: a camera may be silent, and browsers open few connections to a server."""

_PICTURE_HEADERS = {
    "Cache-Control": "no-store",
    # A page of another site must not show the pictures.
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Accel-Buffering": "no",
}


class ViewEndpoints:
    """The handlers. `view` returns the view of a frame stream, see StreamRegistry.view."""

    def __init__(self, access: AccessCheck, view: Callable[[str], AbstractContextManager[StreamView]]) -> None:
        self._access = access
        self._view = view

    async def picture(self, request: HttpRequest) -> HttpResponse:
        """Respond with the next picture, or with 204 if none comes within a moment."""
        self._access.check_pictures(request.head, request.peer)
        with self._view(request.names["stream"]) as view:
            try:
                is_there = await asyncio.wait_for(_comes(view), _PICTURE_WAIT_S)
            except asyncio.TimeoutError:
                is_there = False
            if not is_there:
                return HttpResponse(status=204, headers={"Cache-Control": "no-store"})
            jpeg = await request.run_on_worker(view.jpeg)
        return HttpResponse(bytes(jpeg), headers={"Content-Type": "image/jpeg", **_PICTURE_HEADERS})

    async def pictures(self, request: HttpRequest) -> None:
        """Send pictures with the results drawn in until the stream ends or the viewer leaves."""
        await self._send(request, _drawn)

    async def frames(self, request: HttpRequest) -> None:
        """Send the results as JSON before each picture, until the stream ends or the viewer leaves."""
        await self._send(request, _apart)

    async def _send(self, request: HttpRequest, parts_of: Callable[[StreamView], bytes]) -> None:
        self._access.check_pictures(request.head, request.peer)
        with self._view(request.names["stream"]) as view:
            await request.begin_stream(
                200, {"Content-Type": f"{MOTION_JPEG_TYPE}; boundary=picture", **_PICTURE_HEADERS}
            )
            while await _comes(view):
                parts = await request.run_on_worker(partial(parts_of, view))
                try:
                    await asyncio.wait_for(request.write(parts), _WRITE_LIMIT_S)
                except asyncio.TimeoutError:
                    raise ConnectionAbortedError("a viewer does not read the pictures") from None


async def _comes(view: StreamView) -> bool:
    """Wait for the next picture of a stream. Return False when the stream has ended."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(arrived.set)

    view.notify_once(notify)
    try:
        await arrived.wait()
    finally:
        view.cancel_notify(notify)
    return not view.is_over


def _part(content_type: str, data: Buffer) -> bytes:
    head = f"--picture\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n\r\n"
    return b"".join((head.encode(), data, b"\r\n"))


def _drawn(view: StreamView) -> bytes:
    return _part("image/jpeg", view.jpeg())


def _apart(view: StreamView) -> bytes:
    from edge_server.plugins.cameras.streams.stream_view import MAX_SIDE

    found = view.frame()
    if found is None:
        return b""
    frame, jpeg = found
    height, width = frame.picture.pixels.shape[:2]
    stamp = {"sec": frame.header.sec, "nanosec": frame.header.nanosec}
    head = {
        "stamp": stamp,
        "frame_id": frame.header.frame_id,
        "seq": frame.header.seq,
        "width": width,
        "height": height,
        "picture_scale": min(1.0, MAX_SIDE / max(height, width)),
    }
    if frame.seen.overlays:
        head["overlays"] = [overlay._asdict() for overlay in frame.seen.overlays]
    return _part("application/json", to_json(head | results_as_json(frame.seen))) + _part("image/jpeg", jpeg)
