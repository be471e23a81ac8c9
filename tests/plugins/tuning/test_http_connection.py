"""HTTP/1.1 connections of a load test, over sockets to a server that sends given bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from edge_server.plugins.tuning.clients.chat_client import ChatConnection
from edge_server.plugins.tuning.clients.http_connection import HttpLoadConnection, ResponseChunkDecoder

ANSWER = b'{"outputs":[]}'
REQUEST = b"POST / HTTP/1.1\r\n\r\n"


def response(body: bytes = ANSWER, *lines: str, status: str = "200 OK") -> bytes:
    headers = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body)}", *lines))
    return f"HTTP/1.1 {status}\r\n{headers}\r\n".encode() + body


def in_chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: a\r\n\r\n"


@contextlib.contextmanager
def scripted_server(*connections: Sequence[Sequence[bytes]]) -> Iterator[tuple[str, int]]:
    """A server whose next connection sends the next list's parts after each request, and is then closed."""

    def serve() -> None:
        for answers in connections:
            wire, _ = listener.accept()
            with wire:
                for parts in answers:
                    data = b""
                    while not data.endswith(REQUEST):
                        data += wire.recv(1000)
                    for part in parts:
                        wire.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[:2]
        thread.join()


@pytest.mark.parametrize(
    "parts",
    [
        [response()],
        [bytes((octet,)) for octet in response()],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + in_chunks(ANSWER[:3], ANSWER[3:])],
        [response(ANSWER + bytes(7), f"Inference-Header-Content-Length: {len(ANSWER)}")],
    ],
    ids=["whole", "bytes", "chunks", "binary"],
)  # fmt: skip
def test_responses_are_read_however_they_are_cut(ask: Callable[..., Any], parts: list[bytes]) -> None:
    expected = ("", "")
    if len(parts[0]) > len(response()) and parts[0].endswith(bytes(7)):
        expected = ("INVALID ANSWER", "the outputs have 0 bytes, the answer holds 7")
    with scripted_server([parts, parts]) as address, ask(address, HttpLoadConnection) as send:
        assert send(REQUEST) == [expected]
        # The next one is checked for its size alone.
        assert send(REQUEST) == [("", "")]


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (response(b"<html>"), "INVALID ANSWER", "Expecting value"),
        (response(b"{}"), "INVALID ANSWER", "no 'outputs'"),
        (response(b'{"error":"too busy"}', status="503 no"), "HTTP 503", "too busy"),
        (response(b'{"error":{"message":"of a chat"}}', status="429 no"), "HTTP 429", "of a chat"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "CONNECTION", "Content-Length or in chunks"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\n", "CONNECTION", "no size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", "CONNECTION", "longer than its size"),
        (response() + b"more", "CONNECTION", "longer than its Content-Length"),
        (response()[:-1], "CONNECTION", "the server closed the connection"),
        (b"SSH-2.0\r\n\r\n", "CONNECTION", "expected an answer of HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nx: " + bytes(70_000), "CONNECTION", "the head of the answer is too long"),
    ],
)
def test_a_failed_request_is_named_and_the_next_one_opens_a_connection(
    ask: Callable[..., Any], answer: bytes, reason: str, message: str
) -> None:
    with scripted_server([[answer]], [[response()]]) as address, ask(address, HttpLoadConnection) as send:
        (found,) = send(REQUEST)
        assert found[0] == reason
        assert message in found[1]
        outcome = send(REQUEST)
        if outcome[0][0] == "CONNECTION":  # that the server closed the connection was read only now
            outcome = send(REQUEST)
        assert outcome == [("", "")]


def test_a_connection_that_the_server_wants_to_close_is_not_used_again(ask: Callable[..., Any]) -> None:
    closing = [[response(ANSWER, "Connection: close")]]
    with scripted_server(closing, closing, closing) as address, ask(address, HttpLoadConnection) as send:
        assert [send(REQUEST) for _ in range(3)] == [[("", "")]] * 3


def test_chats_give_the_time_and_number_of_tokens_also_with_a_content_length(ask: Callable[..., Any]) -> None:
    events = (
        b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n',
        b"data: [DONE]\n\n",
    )
    failed = b'data: {"error": {"message": "no memory"}}\n\n'
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answers = [
        [response(b"".join(events))],
        [chunked, in_chunks(*events)],
        [chunked, in_chunks(failed)],
        [chunked, in_chunks(b"data: []\n")],
    ]
    with scripted_server(answers) as address, ask(address, ChatConnection) as send:
        assert send(REQUEST) == send(REQUEST) == [("", "")]
        assert [text.tokens for text in send.texts] == [3, 3]
        assert all(start_s < text.first_s == text.last_s for start_s, text in zip(send.starts, send.texts, strict=True))
        assert send(REQUEST) == [("STREAM", "no memory")]
        (found,) = send(REQUEST)
        assert "an event of the answer is not understood" in found[1]


def test_a_decoder_of_chunks_reads_any_cut() -> None:
    whole = in_chunks(b"ab", b"cde" * 9) + b"next"
    for cut in range(len(whole)):
        decoder = ResponseChunkDecoder()
        content = decoder.decode(whole[:cut])
        if not decoder.is_complete:
            content += decoder.decode(whole[cut:])
        assert content == b"ab" + b"cde" * 9
        assert decoder.is_complete
