"""Readers of HTTP request bodies: of known length, without a copy, or chunked (RFC 9112, 7.1)."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from concurrent.futures import Executor
from threading import get_ident
from typing import TypeAlias

import numpy as np

from edge_server.errors import EdgeServerError, Refusal
from edge_server.frontends.http.client_timeouts import ClosingRefusal
from edge_server.frontends.http.compression import decompress
from edge_server.frontends.http.request_head import FIELD_LINE
from edge_server.frontends.memory_budget import MemoryBudget

Body: TypeAlias = bytes | memoryview

ALIGNMENT = 16

MAX_CHUNKS = 65536
"""Maximum number of chunks of a body, as in Triton: a small chunk costs as much as a large one."""

_CHUNKS_AT_ONCE = 256
"""Maximum number of chunks read before other connections are served: a fraction of a millisecond."""

_MAX_SIZE_LINE_BYTES = 1024
_MAX_TRAILER_BYTES = 8190
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_LINE_END = b"\r\n"


class ChunkDecoder:
    """Decoder of a chunked body. Extensions and trailers are checked and ignored."""

    __slots__ = ("_in_trailer", "_left", "_needs_line_end", "_trailer_bytes", "is_complete")

    def __init__(self) -> None:
        self.is_complete = False
        self._left = 0
        """Missing bytes of the current chunk."""
        self._needs_line_end = False
        self._in_trailer = False
        self._trailer_bytes = 0

    def decode(self, data: bytes, start: int, reader: BodyReader | DiscardedBody) -> tuple[int, bool]:
        """Append the chunks in `data`, from `start` on, to `reader`.

        Return the start of the unused rest, and whether to continue with it in the next turn of the event loop. If
        `is_complete`, the rest does not belong to the body. Raises ClosingRefusal.
        """
        view = memoryview(data)
        for _ in range(_CHUNKS_AT_ONCE):
            if self._left:
                piece = view[start : start + self._left]
                self._left -= len(piece)
                start += len(piece)
                self._needs_line_end = True
                reader.append(piece)
                if self._left:
                    return start, False
            end = data.find(_LINE_END, start)
            if self._needs_line_end:
                if not _LINE_END.startswith(data[start : start + 2]):
                    raise ClosingRefusal("a chunk of the request body is longer than its size says")
                if end < 0:
                    return start, False
                self._needs_line_end = False
                start = end + 2
                end = data.find(_LINE_END, start)
            if end < 0:
                if len(data) - start > (_MAX_TRAILER_BYTES if self._in_trailer else _MAX_SIZE_LINE_BYTES):
                    raise ClosingRefusal("a line between the chunks of the request body is too long")
                return start, False
            line, start = data[start:end], end + 2
            if self._in_trailer:
                self._trailer_bytes += len(line)
                if not line:
                    self.is_complete = True
                    return start, False
                if self._trailer_bytes > _MAX_TRAILER_BYTES or FIELD_LINE.fullmatch(line) is None:
                    raise ClosingRefusal("the trailer of the request body cannot be read")
                continue
            match = _SIZE_LINE.fullmatch(line) if len(line) <= _MAX_SIZE_LINE_BYTES else None
            if match is None:
                raise ClosingRefusal("the size of a chunk of the request body cannot be read")
            self._left = int(match[1], 16)
            self._in_trailer = not self._left
            reader.begin_chunk(self._left)
        return start, start < len(data)


class DiscardedBody:
    """Reader for the chunks of a refused request: discards them."""

    def begin_chunk(self, size: int) -> None:
        pass

    def append(self, piece: memoryview) -> None:
        pass


class BodyReader:
    """Reader of one body, which counts in the budget from its first byte until `release`.

    Lives on one event loop and is created on its thread; the budget may refuse it on any thread. `size` is in bytes,
    None for a chunked body. In a body of known size, byte `aligned_at` has an address that is aligned for every number
    type, so that tensors behind a JSON text of that length need no copy. If the body is too long, or the budget refuses
    it, the reader calls `refuse`, releases the received bytes, and drops further bytes.
    """

    __slots__ = (
        "_budget",
        "_chunk_count",
        "_is_settled",
        "_loop",
        "_refusal",
        "_refuse",
        "_thread_id",
        "buffer",
        "filled",
        "received",
        "size",
    )

    def __init__(
        self,
        size: int | None,
        budget: MemoryBudget,
        loop: asyncio.AbstractEventLoop | None,
        refuse: Callable[[EdgeServerError], object],
        *,
        aligned_at: int = 0,
    ) -> None:
        """Raises Refusal when there is no memory for `size` bytes."""
        self.size = size
        self.received = 0
        """Bytes in `buffer`."""
        self.filled = 0
        """Bytes that the budget counts."""
        self.buffer: memoryview | bytearray | None = None
        """The only reference to the memory while the body is received, so that a refused body is freed at once."""
        self._budget = budget
        self._loop = loop
        self._thread_id = get_ident()
        self._refuse = refuse
        self._refusal: EdgeServerError | None = None
        self._chunk_count = 0
        self._is_settled = False
        if size is None:
            self.buffer = bytearray()
        else:
            pad = -aligned_at % ALIGNMENT
            try:
                # Not initialised: pages that receive no bytes use no memory.
                self.buffer = np.empty(size + pad, np.uint8).data[pad:]
            except (MemoryError, ValueError):
                raise Refusal(f"there is no memory for a request body of {size} bytes") from None
        budget.enter(self)

    def begin_chunk(self, size: int) -> None:
        """Note that a chunk of `size` bytes follows; refuse a body that is too long or has too many chunks."""
        limit = self._budget.each
        self._chunk_count += 1
        if self.buffer is None:
            return
        if self.received + size > limit:
            self._refuse_now(ClosingRefusal(f"request body is larger than the limit of {limit} bytes"))
        elif self._chunk_count > MAX_CHUNKS:
            self._refuse_now(ClosingRefusal(f"request body comes in more than {MAX_CHUNKS} chunks"))

    def append(self, piece: memoryview) -> None:
        """Append the next bytes; without effect after a refusal."""
        buffer, start = self.buffer, self.received
        if buffer is None:
            return
        if isinstance(buffer, bytearray):
            buffer += piece
        else:
            buffer[start : start + len(piece)] = piece
        del buffer
        self.count(len(piece))

    def count(self, nbytes: int) -> None:
        """Count bytes received into `buffer`. The budget may refuse this body or another one for them."""
        self.received += nbytes
        self._budget.grow(self, nbytes)

    def finish(self) -> Body:
        """Return the complete body. It still counts in the budget, but the budget no longer refuses it."""
        buffer = self.buffer
        assert buffer is not None
        self._is_settled = True
        self._budget.settle(self)
        return memoryview(buffer).toreadonly() if buffer else b""

    async def decompress(self, body: Body, encoding: str, workers: Executor | None) -> bytes:
        """Return the decompressed body, which also counts in the budget.

        Raises InvalidRequest, and Refusal if the budget refuses the body.
        """
        loop = asyncio.get_running_loop()
        decompressed = await loop.run_in_executor(workers, decompress, body, encoding, self._budget.each)
        self._budget.grow(self, len(decompressed))
        if self._refusal is not None:
            raise self._refusal
        return decompressed

    def release(self) -> None:
        """Leave the budget. May be called again."""
        if self.buffer is not None:
            self.buffer = None
            self._budget.leave(self)

    def refuse(self, refusal: Refusal) -> None:
        """Refuse the body; see memory_budget.Body."""
        if get_ident() == self._thread_id:
            self._refuse_now(refusal)
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its bodies are released
                self._loop.call_soon_threadsafe(self._refuse_on_loop, refusal)

    def _refuse_on_loop(self, refusal: EdgeServerError) -> None:
        # Meanwhile the body may be complete or released.
        if not self._is_settled and self.buffer is not None:
            self._refuse_now(refusal)

    def _refuse_now(self, refusal: EdgeServerError) -> None:
        self.release()
        self._refusal = refusal
        if not self._is_settled:
            self._refuse(refusal)
