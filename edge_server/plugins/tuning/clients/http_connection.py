"""HTTP/1.1 connection of a load test: sends one worker's encoded requests, and reads the responses."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from edge_server.plugins.tuning.clients.client_interface import TextTimes
from edge_server.plugins.tuning.clients.connection import CHECKED_EVERY, LoadConnection, LoadWorker
from edge_server.plugins.tuning.clients.http_client import check_http_answer, error_text

_MAX_HEAD_BYTES = 1 << 16
_MAX_LINE_BYTES = 4096
_MAX_KEPT_HEADS = 64
_MAX_ERROR_BYTES = 1 << 16

_is_chunk_size = re.compile(rb"[0-9A-Fa-f]{1,15}").fullmatch


class ResponseHead(NamedTuple):
    """`length`: of the body, -1 for one in chunks. `json_bytes`: of its JSON before binary data, else -1."""

    status: int
    length: int
    keeps_alive: bool
    json_bytes: int


def _parse_head(data: bytes) -> ResponseHead:
    """Raises ValueError unless it is a head of HTTP/1.1 that says where the body ends."""
    lines = data.decode("latin-1").split("\r\n")
    status = re.fullmatch(r"HTTP/1\.[01] (\d{3})(?: .*)?", lines[0])
    headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
    length = headers.get("content-length", "")
    in_chunks = headers.get("transfer-encoding", "").lower() == "chunked"
    if status is None or not (in_chunks or (length.isascii() and length.isdigit() and len(length) < 16)):
        raise ValueError("expected an answer of HTTP/1.1 with a Content-Length or in chunks")
    json_bytes = headers.get("inference-header-content-length", "")
    return ResponseHead(
        int(status[1]),
        -1 if in_chunks else int(length),
        headers.get("connection", "").lower() != "close",
        int(json_bytes) if json_bytes.isascii() and json_bytes.isdigit() and len(json_bytes) < 16 else -1,
    )


class ResponseChunkDecoder:
    """Decoder of one body in chunks, RFC 9112 section 7.1."""

    def __init__(self) -> None:
        self.is_complete = False
        self._rest = b""
        self._left = 0
        self._ends_chunk = self._is_last = False

    def decode(self, data: bytes) -> bytes:
        """Return the content of the next part of the body. Raises ValueError."""
        data, pieces, position = self._rest + data, [], 0
        while not self.is_complete:
            if self._left:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._ends_chunk = True
            end = data.find(b"\r\n", position)
            if end < 0:
                if len(data) - position > _MAX_LINE_BYTES:
                    raise ValueError("a line between the chunks of the answer is too long")
                break
            line, position = data[position:end], end + 2
            if self._ends_chunk:
                self._ends_chunk = False
                if line:
                    raise ValueError("a chunk of the answer is longer than its size")
            elif self._is_last:
                self.is_complete = not line  # otherwise a trailer
            else:
                size = line.partition(b";")[0].strip()
                if not _is_chunk_size(size):
                    raise ValueError("a chunk of the answer has no size")
                self._left = int(size, 16)
                self._is_last = not self._left
        self._rest = data[position:]
        return b"".join(pieces)


class HttpLoadConnection(LoadConnection):
    """Connection for one worker, which is kept alive. Drops the bodies of successes but for those that are checked."""

    _worker: LoadWorker | None = None
    _head: ResponseHead | None = None
    _rest = b""
    """Beginning of a head."""
    _left = 0
    """Missing bytes of a body with a length."""
    _chunks: ResponseChunkDecoder | None = None
    _body: bytearray | None = None
    """Body of an error, or of a success that is checked; None: it is dropped."""
    _answer_count = 0

    def cancel(self, worker: LoadWorker, message: str) -> None:
        self.close()
        self._fail_requests(self.timeout_reason, message)

    def _encode(self, worker: LoadWorker, request: bytes) -> None:
        self._worker = worker
        self._output.append(request)

    def _fail_requests(self, reason: str, message: str) -> None:
        worker, self._worker, self._head, self._rest = self._worker, None, None, b""
        if worker is not None:
            self._on_answer(worker, time.perf_counter(), reason, message, None)

    def _receive(self, data: bytes, now: float) -> None:
        if self._worker is None:
            raise ValueError("the server sent an answer to no request")
        if self._head is None:
            if self._rest:
                data = self._rest + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > _MAX_HEAD_BYTES:
                    raise ValueError("the head of the answer is too long")
                self._rest = data
                return
            self._rest = b""
            self._begin_body(self._known_head(data[:end]))
            data = data[end:]
        if self._chunks is not None:
            data = self._chunks.decode(data)
            is_complete = self._chunks.is_complete
        else:
            self._left -= len(data)
            is_complete = self._left == 0
            if self._left < 0:
                raise ValueError("the answer is longer than its Content-Length")
        if data:
            self._take_body(data, now)
        if is_complete:
            self._end_body(now)

    def _known_head(self, data: bytes) -> ResponseHead:
        """Return the decoded head. Most responses begin with the same bytes."""
        heads = self._loop.response_heads
        head = heads.get(data)
        if head is None:
            head = _parse_head(data)
            if len(heads) >= _MAX_KEPT_HEADS:
                heads.clear()
            heads[data] = head
        return head

    def _begin_body(self, head: ResponseHead) -> None:
        self._head = head
        self._left = head.length
        self._chunks = ResponseChunkDecoder() if head.length < 0 else None
        is_checked = self._answer_count % CHECKED_EVERY == 0
        self._body = bytearray() if head.status != 200 or is_checked else None

    def _take_body(self, data: bytes, now: float) -> None:
        head, body = self._head, self._body
        if head is not None and body is not None and (head.status == 200 or len(body) < _MAX_ERROR_BYTES):
            body += data

    def _end_body(self, now: float) -> None:
        worker, head = self._worker, self._head
        assert worker is not None
        assert head is not None
        self._worker = self._head = None
        if not head.keeps_alive:
            self.close()
        self._answer_count += 1
        self._on_answer(worker, now, *self._result(head))

    def _result(self, head: ResponseHead) -> tuple[str, str, TextTimes | None]:
        """Return why the request failed, "" if it did not, a message, and the times of text."""
        body = None if self._body is None else bytes(self._body)
        if head.status != 200:
            return f"HTTP {head.status}", error_text(body or b""), None
        try:
            if body is not None:
                check_http_answer(body, head.json_bytes)
        except (ValueError, TypeError, AttributeError) as error:
            return "INVALID ANSWER", str(error), None
        return "", "", None
