"""Responses of the serving threads, handed to the event loop, which is woken once for all that wait."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from edge_server.core.request_response import Response

Receiver = Callable[[Response], None]


class LoopDispatch:
    """Takes responses on any thread and hands them to their receivers on the loop, in order of arrival.

    A batch answers many requests within microseconds; waking the loop for each of them would cost a system call each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """To be made on the loop's thread."""
        self._loop = loop
        self.arrived: deque[tuple[Receiver, Response]] = deque()
        self._is_called = False
        self.thread_id = threading.get_ident()

    def deliver(self, receiver: Receiver, response: Response) -> None:
        """Hand over one response; returns at once and never raises, as a sink must. What was computed on the loop's
        own thread is handed over before this returns."""
        if threading.get_ident() == self.thread_id and not self.arrived:
            receiver(response)
            return
        self.arrived.append((receiver, response))
        # No lock: the loop clears the flag before it empties the line. Whoever finds the flag set has appended before
        # that, so is seen; two threads that both find it clear cost one needless call.
        if self._is_called:
            return
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:
            self.arrived.clear()  # the loop is closed: nobody waits there any more

    def _hand_out(self) -> None:
        self._is_called = False
        while self.arrived:
            receiver, response = self.arrived.popleft()
            receiver(response)
