"""Unary calls straight from gRPC's completion queue: one thread reads, and whoever computed an answer sends it.

grpcio's own server gives each unary call a thread, a condition and a context, and changes threads twice on the way.
This door registers one method with the server's core and drives it with the classes grpcio's server is itself built of
(`grpc._cython.cygrpc`, in this shape since grpcio 1.63). Those are no public interface: direct_check.py finds out
whether they work as they did, and the handler of the ordinary server stays in place for where they do not.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from edge_server.errors import InvalidRequest, Throttled
from edge_server.frontends.grpc.boundary import Ending, ending

try:
    from grpc._cython import cygrpc
except ImportError:  # a grpcio built otherwise: `offer` says so by returning None
    cygrpc = None

_log = logging.getLogger(__name__)

_REQUESTED_CALLS = 16
"""Calls asked of the core ahead of time, so that one that comes need not wait until the thread asks for it."""

_POLL_S = 0.2
"""How long a look into the queue lasts. Nothing waits for it to end: every event ends it at once."""

_PATIENCE_S = 0.25
"""How long the reader may be in one event before its deputy takes over."""

_NO_FLAGS = 0

Event: TypeAlias = Any
"""cygrpc.BaseEvent: its tag is what to call with it."""


def offer(server: grpc.Server, path: str) -> DirectDoor | None:
    """Return a door for the unary method at `path`, or None where this grpcio does not offer what it is made of.

    To be called before the server starts. From then on the method's calls come to the door only.
    """
    core = getattr(server, "_cy_server", None)
    needed = ("register_completion_queue", "register_method", "request_registered_call")
    if cygrpc is None or core is None or not all(hasattr(core, name) for name in needed):
        return None
    queue = cygrpc.CompletionQueue()
    core.register_completion_queue(queue)
    core.register_method(path)
    return DirectDoor(core, queue, path)


class DirectDoor:
    """Takes the calls of one registered method from a completion queue of its own. `start` once, then `join` once the
    server was told to stop.

    One thread reads: two would only wake each other. A deputy stands by, and takes over when the reader has been in
    one and the same event for long, as in a model that waits for an answer of this very server.
    """

    def __init__(self, core: Any, queue: Any, path: str) -> None:
        self._core = core
        self._queue = queue
        self._path = path
        self._lock = threading.Lock()
        self._requested = 0
        self._open = 0
        self._max_calls = 0
        self._make_call: MakeCall | None = None
        self._threads: list[threading.Thread] = []
        self._reader: threading.Thread | None = None
        self._event_count = 0
        self._is_in_event = False

    def start(self, make_call: MakeCall, max_calls: int) -> None:
        """Begin to take calls, at most `max_calls` at once; the server must have been started before."""
        self._make_call = make_call
        self._max_calls = max_calls
        for _ in range(_REQUESTED_CALLS):
            self._request_call()
        self._threads = [
            threading.Thread(target=self._serve, name=f"grpc-infer-{index}", daemon=True) for index in (0, 1)
        ]
        self._reader = self._threads[0]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until every call has ended. The server must have been told to stop."""
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Read, or stand by, until there is nothing left to read."""
        me = threading.current_thread()
        while not self._is_over():
            if self._reader is me:
                self._read(me)
            else:
                self._stand_by(me)

    def _read(self, me: threading.Thread) -> None:
        """Handle events until the deputy has taken over, or the server has stopped."""
        poll, nothing_came = self._queue.poll, cygrpc.CompletionType.queue_timeout
        while self._reader is me:
            event = poll(time.time() + _POLL_S)
            if event.completion_type == nothing_came:
                if self._is_over():
                    return
                continue
            self._event_count += 1
            self._is_in_event = True
            try:
                event.tag(event)
            except Exception:  # noqa: BLE001 - the thread's boundary
                # The thread serves all calls: an error in one of them must not be the end of the others.
                _log.exception("unexpected error in a gRPC call")
            if self._reader is me:
                # Else it tells of the deputy's event by now, and whoever stands by next must learn if that one hangs.
                self._is_in_event = False
            # An event that lives on while the next one is awaited keeps its call alive, which can make gRPC spin.
            del event

    def _stand_by(self, me: threading.Thread) -> None:
        """Take the reader's place if it is still in the event that it was in when this was called."""
        seen = self._event_count
        was_in_event = self._is_in_event
        time.sleep(_PATIENCE_S)
        if was_in_event and self._is_in_event and self._event_count == seen:
            self._reader = me

    def _is_over(self) -> bool:
        with self._lock:
            return self._requested == 0 and self._open == 0

    def _request_call(self) -> None:
        with self._lock:
            self._requested += 1
        self._core.request_registered_call(self._queue, self._queue, self._path, self._on_call)

    def _on_call(self, event: Event) -> None:
        if not event.success:
            with self._lock:
                self._requested -= 1
            return  # the server stops: what was requested comes back empty
        # In the place of the one that came.
        self._core.request_registered_call(self._queue, self._queue, self._path, self._on_call)
        with self._lock:
            self._open += 1
            is_full = self._open > self._max_calls
        assert self._make_call is not None
        call = self._make_call(event, self._on_closed)
        if is_full:
            call.end(ending(Throttled(f"{self._max_calls} calls are open, which is as many as are served at once")))
        else:
            call.receive()

    def _on_closed(self) -> None:
        with self._lock:
            self._open -= 1


class UnaryCall(abc.ABC):
    """One call: its message is read on the door's thread, and `end` may be called from any, once."""

    __slots__ = ("_closed", "_event", "_watches")

    def __init__(self, event: Event, closed: Callable[[], None]) -> None:
        self._event = event
        self._closed = closed
        self._watches = False

    @abc.abstractmethod
    def on_message(self, data: bytes) -> None:
        """Take the request as it was received."""

    @abc.abstractmethod
    def on_client_left(self) -> None:
        """Know that nobody waits for the answer any more. Only after `watch`."""

    # As grpc.ServicerContext tells it.

    def invocation_metadata(self) -> Any:
        return self._event.invocation_metadata

    def time_remaining(self) -> float:
        return max(0.0, float(self._event.call_details.deadline) - time.time())

    def receive(self) -> None:
        self._event.call.start_server_batch((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), self._on_message)

    def watch(self) -> None:
        """Learn of the client's leaving before the end of the call. Not needed for calls that end at once."""
        self._watches = True
        self._event.call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS),), self._on_close)

    def end(self, done: Ending) -> None:
        """Send the message or the error, and the status."""
        operations = [
            cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS),
            cygrpc.SendStatusFromServerOperation(done.trailers, done.code, done.details, _NO_FLAGS),
        ]
        if done.message is not None:
            operations.append(cygrpc.SendMessageOperation(done.message, _NO_FLAGS))
        if not self._watches:
            operations.append(cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS))
        self._event.call.start_server_batch(operations, self._on_end)

    def _on_message(self, event: Event) -> None:
        data = event.batch_operations[0].message() if event.success else None
        if data is None:
            # The client left, or closed without a message: the status is for the books alone.
            self.end(ending(InvalidRequest("the call ended before its message came")))
        else:
            self.on_message(data)

    def _on_close(self, event: Event) -> None:
        if event.batch_operations[0].cancelled():
            self.on_client_left()

    def _on_end(self, event: Event) -> None:
        self._closed()


MakeCall: TypeAlias = Callable[[Event, Callable[[], None]], UnaryCall]
"""What makes a call of its event and of what to call when it has ended."""
