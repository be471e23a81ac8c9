"""Delivery of responses in the order of the requests, for models with `preserve_ordering`."""

from __future__ import annotations

import threading
from collections import deque

from edge_server.core.request_response import Response
from edge_server.serving.execution.ticket import Ticket


class OrderedDelivery:
    """Holds final responses back until every earlier request was answered.

    Cancelled and expired requests are answered through here too, so that no response waits for them. One thread
    delivers at a time; other threads leave their response to it and go on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._is_delivering = False

    def add(self, ticket: Ticket) -> None:
        """Register a request; called in the order of arrival."""
        with self._lock:
            self._queue.append(ticket)

    def send_final(self, ticket: Ticket, response: Response) -> None:
        with self._lock:
            ticket.held = response
            if self._is_delivering:
                return
            self._is_delivering = True
        while True:
            with self._lock:
                ready = self._queue[0].held if self._queue else None
                if ready is None:
                    self._is_delivering = False
                    return
                first = self._queue.popleft()
                first.held = None
            first.send_final(ready)
