"""Calls straight from gRPC's completion queue: one thread reads, and whoever computed an answer sends it.

grpcio's own server gives each call a thread, a condition and a context, and changes threads twice on the way, for each
message of a stream too. This door registers methods with the server's core and drives them with the classes grpcio's
server is itself built of (`grpc._cython.cygrpc`, in this shape since grpcio 1.65). Those are no public interface:
direct_check.py finds out whether they work as they did, and the handlers of the ordinary server stay in place for where
they do not.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc

from edge_server.errors import InvalidRequest, Throttled
from edge_server.frontends.grpc.boundary import Ending, ending, known

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


def offer(server: grpc.Server, paths: Sequence[str]) -> DirectDoor | None:
    """Return a door for the methods at `paths`, or None where this grpcio does not offer what it is made of.

    To be called before the server starts. From then on the methods' calls come to the door only.
    """
    core = getattr(server, "_cy_server", None)
    needed = ("register_completion_queue", "register_method", "request_registered_call")
    if cygrpc is None or core is None or not all(hasattr(core, name) for name in needed):
        return None
    queue = cygrpc.CompletionQueue()
    core.register_completion_queue(queue)
    for path in paths:
        core.register_method(path)
    return DirectDoor(core, queue)


class DirectDoor:
    """Takes the calls of registered methods from a completion queue of its own. `start` once, then `join` once the
    server was told to stop.

    One thread reads: two would only wake each other. A deputy stands by, and takes over when the reader has been in
    one and the same event for long, as in a model that waits for an answer of this very server.
    """

    def __init__(self, core: Any, queue: Any) -> None:
        self._core = core
        self._queue = queue
        self._lock = threading.Lock()
        self._requested = 0
        self._open = 0
        self._max_calls = 0
        self._threads: list[threading.Thread] = []
        self._reader: threading.Thread | None = None
        self._event_count = 0
        self._is_in_event = False

    def start(self, make_calls: Mapping[str, MakeCall], max_calls: int) -> None:
        """Begin to take calls, at most `max_calls` at once, by path; the server must have been started before."""
        self._max_calls = max_calls
        for path, make_call in make_calls.items():
            method = _Method(path, make_call)
            method.on_call = partial(self._on_call, method)
            for _ in range(_REQUESTED_CALLS):
                self._request_call(method)
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

    def _request_call(self, method: _Method) -> None:
        with self._lock:
            self._requested += 1
        self._core.request_registered_call(self._queue, self._queue, method.path, method.on_call)

    def _on_call(self, method: _Method, event: Event) -> None:
        if not event.success:
            with self._lock:
                self._requested -= 1
            return  # the server stops: what was requested comes back empty
        with self._lock:
            self._open += 1
            is_full = self._open > self._max_calls
        try:
            # In the place of the one that came.
            self._core.request_registered_call(self._queue, self._queue, method.path, method.on_call)
        except ValueError:
            # The server was told to stop while this one lay in the queue: no more are asked for.
            with self._lock:
                self._requested -= 1
        call = method.make_call(event, self._on_closed)
        if is_full:
            call.refuse(ending(Throttled(f"{self._max_calls} calls are open, which is as many as are served at once")))
        else:
            call.begin()

    def _on_closed(self) -> None:
        with self._lock:
            self._open -= 1


class _Method:
    """A registered method, and what makes its calls."""

    __slots__ = ("make_call", "on_call", "path")

    def __init__(self, path: str, make_call: MakeCall) -> None:
        self.path = path
        self.make_call = make_call
        self.on_call: Callable[[Event], None] = lambda event: None


class DirectCall(abc.ABC):
    """One call. Of `begin` and `refuse` one is called, once, on the door's thread."""

    __slots__ = ("_closed", "_event")

    def __init__(self, event: Event, closed: Callable[[], None]) -> None:
        self._event = event
        self._closed = closed

    @abc.abstractmethod
    def begin(self) -> None:
        """Take the call up."""

    @abc.abstractmethod
    def refuse(self, done: Ending) -> None:
        """End it before anything of it was read."""

    # As grpc.ServicerContext tells it.

    def invocation_metadata(self) -> Any:
        return self._event.invocation_metadata

    def time_remaining(self) -> float:
        return max(0.0, float(self._event.call_details.deadline) - time.time())

    def _start(self, operations: Sequence[Any], tag: Callable[[Event], None]) -> None:
        self._event.call.start_server_batch(operations, tag)

    def _on_end(self, event: Event) -> None:
        self._closed()


class UnaryCall(DirectCall):
    """One call with a message each way: its message is read on the door's thread, and `end` may be called from any,
    once."""

    __slots__ = ("_watches",)

    def __init__(self, event: Event, closed: Callable[[], None]) -> None:
        super().__init__(event, closed)
        self._watches = False

    @abc.abstractmethod
    def on_message(self, data: bytes) -> None:
        """Take the request as it was received."""

    @abc.abstractmethod
    def on_client_left(self) -> None:
        """Know that nobody waits for the answer any more. Only after `watch`."""

    def begin(self) -> None:
        self._start((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), self._on_message)

    def refuse(self, done: Ending) -> None:
        self.end(done)

    def watch(self) -> None:
        """Learn of the client's leaving before the end of the call. Not needed for calls that end at once."""
        self._watches = True
        self._start((cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS),), self._on_close)

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
        self._start(operations, self._on_end)

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


class StreamSide(Protocol):
    """What takes the events of a stream, all of them on the door's thread."""

    def on_message(self, data: bytes) -> None:
        """Take a request. The next one comes after `StreamCall.receive`."""

    def on_last_message(self) -> None:
        """Know that the client sends no more, or is gone."""

    def on_sent(self) -> None:
        """Know that gRPC has taken what was sent last, or that it never will."""

    def on_client_left(self) -> None:
        """Know that nobody reads any more."""


class StreamCall(DirectCall):
    """One call with any number of messages each way. `receive`, `send` and `finish` may be called from any thread; of
    each of the first two one is under way at a time."""

    __slots__ = ("_has_sent", "_open", "_side")

    def __init__(self, event: Event, closed: Callable[[], None], open_side: Callable[[StreamCall], StreamSide]) -> None:
        super().__init__(event, closed)
        self._open = open_side
        self._side: StreamSide | None = None
        self._has_sent = False

    def begin(self) -> None:
        try:
            self._side = self._open(self)
        except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
            self.refuse(ending(known(error)))
            return
        self._start((cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS),), self._on_close)
        self.receive()

    def refuse(self, done: Ending) -> None:
        self._start((*self._last(done), cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS)), self._on_end)

    def receive(self) -> None:
        """Have the next request read."""
        self._start((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), self._on_message)

    def send(self, message: bytes) -> None:
        operations = (*self._first(), cygrpc.SendMessageOperation(message, _NO_FLAGS))
        self._has_sent = True
        self._start(operations, self._on_sent)

    def finish(self, done: Ending) -> None:
        """Send the status, after which nothing is sent."""
        self._start(self._last(done), self._on_end)

    def _first(self) -> Sequence[Any]:
        return () if self._has_sent else (cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS),)

    def _last(self, done: Ending) -> Sequence[Any]:
        status = cygrpc.SendStatusFromServerOperation(done.trailers, done.code, done.details, _NO_FLAGS)
        return (*self._first(), status)

    def _on_message(self, event: Event) -> None:
        assert self._side is not None
        data = event.batch_operations[0].message() if event.success else None
        if data is None:
            self._side.on_last_message()
        else:
            self._side.on_message(data)

    def _on_sent(self, event: Event) -> None:
        assert self._side is not None
        self._side.on_sent()

    def _on_close(self, event: Event) -> None:
        assert self._side is not None
        if event.batch_operations[0].cancelled():
            self._side.on_client_left()


MakeCall: TypeAlias = Callable[[Event, Callable[[], None]], DirectCall]
"""What makes a call of its event and of what to call when it has ended."""
