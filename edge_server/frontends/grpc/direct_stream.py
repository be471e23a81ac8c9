"""ModelStreamInfer at the direct door: no thread is the stream's own. Requests are read and submitted on the door's
thread, responses encoded and sent on the thread that computed them, or on the door's when the one before was sent."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from edge_server.core.message import Parameter
from edge_server.errors import EdgeServerError
from edge_server.frontends.grpc.access import Restriction
from edge_server.frontends.grpc.boundary import Ending, ending, known
from edge_server.frontends.grpc.direct import Event, StreamCall
from edge_server.frontends.grpc.exchange import Answer, End, InferStream, stopping
from edge_server.frontends.grpc.infer import forwarded_metadata
from edge_server.frontends.grpc.open_streams import OpenStreams
from edge_server.frontends.grpc.read import InferReader
from edge_server.service import READING_THREAD_HOLD_US

if TYPE_CHECKING:
    from edge_server.service import InferenceService


class DirectStreams:
    """What every stream needs: the service, how messages are read, who may call, how many at once."""

    def __init__(
        self,
        service: InferenceService,
        reader: InferReader,
        header_pattern: re.Pattern[str] | None,
        restriction: Restriction | None,
        opened: OpenStreams,
    ) -> None:
        self.service = service
        self.reader = reader
        self.opened = opened
        self._header_pattern = header_pattern
        self._restriction = restriction

    def call(self, event: Event, closed: Callable[[], None]) -> StreamCall:
        return StreamCall(event, closed, self._open)

    def _open(self, call: StreamCall) -> DirectStream:
        if self._restriction is not None:
            self._restriction.check(call)
        headers = forwarded_metadata(call, self._header_pattern)
        self.opened.enter()
        stream = DirectStream(call, self, headers)
        self.opened.add(stream)
        return stream


class DirectStream(InferStream):
    """One call from first to last message."""

    def __init__(self, call: StreamCall, streams: DirectStreams, forwarded: Mapping[str, Parameter]) -> None:
        super().__init__(streams.service, streams.reader, call, forwarded)
        self._call = call
        self._streams = streams
        self._outbox: deque[Answer | End] = deque()
        self._turn = threading.Lock()
        """Guards what follows; never held while calling out."""
        self._is_sending = False
        self._reader_waits = False

    def stop(self) -> None:
        """End the call as soon as nothing is outstanding, because the server is about to stop."""
        with self._lock:
            self._is_stopping = True
            if self._open_count:
                return
        self.end(stopping())

    # -- the door's thread

    def on_message(self, data: bytes) -> None:
        self._accepted += 1
        self._accepted_bytes += len(data)
        try:
            self._submit(data)
        except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
            self.end(known(error))
            return
        # Said before looking: who makes room counts first and looks at this flag after.
        self._reader_waits = True
        self._made_room()

    def on_last_message(self) -> None:
        self._close_input()

    def on_client_left(self) -> None:
        self.end()

    def on_sent(self) -> None:
        with self._turn:
            self._is_sending = False
        self._flush()

    # -- any thread

    def _hold_us(self, model: str, is_ordered: bool) -> float:
        return READING_THREAD_HOLD_US

    def _made_room(self) -> None:
        if not self._reader_waits:
            return
        with self._turn:
            if not self._reader_waits or self._is_ended or self._is_full():
                return
            self._reader_waits = False
        self._call.receive()

    def _put(self, item: Answer | End) -> None:
        self._outbox.append(item)

    def _empty_outbox(self) -> None:
        with self._turn:
            left = list(self._outbox)
            self._outbox.clear()
        for item in left:
            if isinstance(item, tuple):
                item[0].close()

    def _flush(self) -> None:
        while True:
            with self._turn:
                if self._is_sending or not self._outbox:
                    return
                # From here to the end of what is sent, this is the one thread that sends.
                self._is_sending = True
                item = self._outbox.popleft()
            if self._send(item):
                return
            with self._turn:
                self._is_sending = False

    def _send(self, item: Answer | End) -> bool:
        """Send the item; False when there is nothing in it for the client. After an end nothing more is ever sent."""
        if isinstance(item, End):
            self._finish(item.error)
            return True
        try:
            message = self._message(*item)
        except EdgeServerError as error:
            self._finish(error)
            return True
        if message is None:
            return False
        self._call.send(message)
        return True

    def _finish(self, error: EdgeServerError | None) -> None:
        self._streams.opened.remove(self)
        self._streams.opened.leave()
        self._call.finish(Ending() if error is None else ending(known(error)))
