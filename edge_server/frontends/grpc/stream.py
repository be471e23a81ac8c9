"""ModelStreamInfer on grpcio's ordinary server: requests and responses interleaved on one call.

grpcio lends a call one thread, which sends what `StreamInfer.responses` yields. As long as every request is answered
by the time that it is submitted (a small model, run on that very thread), that thread also reads, and the stream costs
no further switch. Otherwise a second thread reads, the first one sends, and `pace` says where requests run.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import grpc

from edge_server.core.message import Parameter
from edge_server.frontends.grpc.boundary import known
from edge_server.frontends.grpc.exchange import Answer, End, InferStream, stopping
from edge_server.frontends.grpc.pace import Pace
from edge_server.frontends.grpc.read import InferReader

if TYPE_CHECKING:
    from edge_server.service import InferenceService


class _Alone:
    """Tells the sending thread that the reading one has left: it reads from now on."""


class StreamInfer(InferStream):
    """One call from first to last message."""

    def __init__(
        self,
        service: InferenceService,
        reader: InferReader,
        context: grpc.ServicerContext,
        forwarded: Mapping[str, Parameter],
    ) -> None:
        super().__init__(service, reader, context, forwarded)
        self._call = context
        self._pace = Pace()
        self._runs_here = False
        self._outbox: SimpleQueue[Answer | End | _Alone] = SimpleQueue()
        self._has_room = threading.Condition()
        self._reader_waits = False
        self._is_resting = False

    def responses(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the serialized responses to `requests`. Raises EdgeServerError when its status is to end the call."""
        if not self._call.add_callback(self.end):
            self.end()
        while True:
            end = yield from self._answer_alone(requests)
            if end is None:
                reader = threading.Thread(target=self._read, args=(requests,), name="grpc-stream", daemon=True)
                reader.start()
                end = yield from self._send_all()
            if end is not None:
                break
        if end.error is not None:
            raise end.error

    def stop(self) -> None:
        """End the call as soon as nothing is outstanding, because the server is about to stop."""
        with self._lock:
            self._is_stopping = True
            if self._open_count or self._is_ended:
                return
            is_resting = self._is_resting
        if is_resting:
            # The only thread waits within grpcio for the next request and cannot say why it leaves.
            self._call.cancel()
        else:
            self._outbox.put(End(stopping()))

    # -- the outbox

    def _put(self, item: Answer | End) -> None:
        self._outbox.put(item)

    def _empty_outbox(self) -> None:
        try:
            while True:
                item = self._outbox.get_nowait()
                if isinstance(item, tuple):
                    item[0].close()
        except Empty:
            return

    # -- the thread that sends; it also reads while it is alone

    def _answer_alone(self, requests: Iterator[bytes]) -> Generator[bytes, None, End | None]:
        """Read, submit and send until a request is not answered at once; None then, else how the call ends."""
        while (end := self._rest()) is None:
            data = next(requests, None)
            self._is_resting = False
            if data is None:
                self._close_input()
                return (yield from self._send_all())
            self._accept(data)
            while not self._outbox.empty():
                item = self._outbox.get()
                if isinstance(item, End):
                    return item
                if isinstance(item, tuple) and (message := self._message(*item)) is not None:
                    yield message
            if self._accepted != self._finished or not self._pace.is_quick:
                return None
        return end

    def _rest(self) -> End | None:
        """Say that this thread is going to wait for a request; how the call ends when there is no use in that."""
        with self._lock:
            if self._is_stopping:
                return End(stopping())
            self._is_resting = True
            return None

    def _send_all(self) -> Generator[bytes, None, End | None]:
        """Send what another thread submits, until that thread leaves (None) or the call ends."""
        while True:
            item = self._outbox.get()
            if isinstance(item, End):
                return item
            if isinstance(item, _Alone):
                return None
            if (message := self._message(*item)) is not None:
                yield message

    # -- the thread that reads

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                if not self._wait_for_room():
                    return
                self._accept(data)
                if self._pace.may_be_alone:
                    self._outbox.put(_Alone())
                    return
            self._close_input()
        except grpc.RpcError:
            # The client left; grpcio calls `end`.
            return
        except Exception as error:  # noqa: BLE001 - the end of a thread: `known` logs and maps
            self.end(known(error))

    def _wait_for_room(self) -> bool:
        """Wait until the request at hand may be taken up; False when the call has ended meanwhile."""
        if self._is_full():
            with self._has_room:
                # Set before looking again: the sending thread counts first and looks at this flag after.
                self._reader_waits = True
                while self._is_full() and not self._is_ended:
                    self._has_room.wait()
                self._reader_waits = False
        return not self._is_ended

    def _made_room(self) -> None:
        if self._reader_waits:
            with self._has_room:
                self._has_room.notify_all()

    def _accept(self, data: bytes) -> None:
        self._runs_here = self._pace.may_run(self._accepted == self._finished)
        self._accepted += 1
        self._accepted_bytes += len(data)
        started = time.perf_counter()
        is_done = self._submit(data)
        self._pace.answered(time.perf_counter() - started if is_done else None)

    def _hold_us(self, model: str, is_ordered: bool) -> float:
        return math.inf if self._runs_here else 0.0

    def _flush(self) -> None:
        """Nothing to do: a thread waits for the outbox."""
