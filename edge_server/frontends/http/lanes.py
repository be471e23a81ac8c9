"""The two ways that a connection has for a request: the short one of plain inferences, and aiohttp's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aiohttp import web

from edge_server.frontends.http.body import Body
from edge_server.frontends.http.head import InferTarget
from edge_server.frontends.http.wire import SERVER


class Call(Protocol):
    """An inference under way."""

    def cancel(self) -> None:
        """Take it back; it answers nothing any more."""


class FastInference(Protocol):
    """Answers plain inferences."""

    def is_open(self) -> bool:
        """Return whether it answers now; what it does not, aiohttp's handler does."""

    def begin(self, target: InferTarget, body: Body, answer: Callable[[list[bytes | memoryview], bool], None]) -> Call:
        """Start one. `answer` takes the bytes of the whole answer once, perhaps before this returns, and whether the
        connection may be used further; it is called on the loop's thread and never after `Call.cancel`."""


class NoFastInference:
    """Leaves every request to aiohttp."""

    def is_open(self) -> bool:
        return False

    def begin(self, target: InferTarget, body: Body, answer: Callable[[list[bytes | memoryview], bool], None]) -> Call:
        raise AssertionError("it is not open")


class OrdinaryHandler(web.RequestHandler):
    """aiohttp's handler, which tells when it has answered."""

    __slots__ = ("answered", "has_begun", "is_answering")

    answered: Callable[[bool, bool], None]
    """Takes whether the connection lives on, and whether all of the request had come."""

    is_answering: bool
    """Whether a request is under way."""

    has_begun: bool
    """Whether one has begun since its connection last looked."""

    @property
    def waiting_count(self) -> int:
        """How many requests have been read and are not begun."""
        return len(self._messages)

    @property
    def is_reading_paused(self) -> bool:
        """Whether aiohttp itself wants no more bytes for now, and will ask for them."""
        return self._reading_paused

    async def finish_response(self, request: Any, resp: Any, start_time: Any) -> Any:
        if not resp.prepared:
            resp.headers["Server"] = SERVER
        result = await super().finish_response(request, resp, start_time)
        self.is_answering = False
        self.answered(bool(resp.keep_alive), request.content.is_eof())
        return result
