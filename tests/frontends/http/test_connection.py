"""HTTP connections as raw bytes, with any input and any split of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edge_server.config import RestrictedGroup
from edge_server.frontends.http import body_reader, request_head
from edge_server.frontends.http import connection as connection_module
from edge_server.frontends.http.client_timeouts import ClosingRefusal
from edge_server.frontends.http.connection import Connections, NoDrainDelay
from edge_server.frontends.http.inference_route import InferTarget
from edge_server.frontends.http.response import HttpResponse
from edge_server.frontends.memory_budget import MemoryBudget

PATH = "/v2/models/float/infer"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def message(body: bytes, *lines: str, path: str = PATH, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = [f"POST {path} HTTP/1.1", "Host: localhost", *lines, f"Content-Length: {size}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def infer(values: list[float], request_id: str = "", **more: Any) -> bytes:
    tensor = {"name": "IN", "shape": [len(values)], "datatype": "FP32", "data": values}
    return message(json.dumps({"id": request_id, "inputs": [tensor]}).encode(), **more)


def binary(values: list[float], request_id: str = "", *lines: str) -> bytes:
    raw = np.array(values, "<f4").tobytes()
    tensor = {"name": "IN", "shape": [len(values)], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    members = {"id": request_id, "parameters": {"binary_data_output": True}, "inputs": [tensor]}
    text = json.dumps(members, separators=(",", ":")).encode()
    return message(text + raw, f"Inference-Header-Content-Length: {len(text)}", *lines)


class Client:
    """A socket, and the answers that come on it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.unread = b""

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> bool:
        data = self.socket.recv(1 << 20)
        self.unread += data
        return bool(data)

    def answer(self) -> tuple[int, str, bytes]:
        """Return status, head and body of the next answer."""
        while b"\r\n\r\n" not in self.unread:
            assert self.receive(), "the connection ended before an answer"
        head, _, rest = self.unread.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        size = int(length[1]) if length else 0
        while len(rest) < size:
            assert self.receive(), "the connection ended within an answer"
            rest = self.unread.partition(b"\r\n\r\n")[2]
        self.unread = rest[size:]
        return int(head.split()[1]), head.decode(), rest[:size]

    def data(self) -> list[float]:
        status, _, body = self.answer()
        assert status == 200, body
        return json.loads(body)["outputs"][0]["data"]

    def error(self) -> tuple[int, str]:
        status, _, body = self.answer()
        return status, json.loads(body)["error"]

    def is_ended(self) -> bool:
        """Wait for the server to close; return whether nothing came before."""
        try:
            return not self.receive()
        except ConnectionResetError:
            return True


@pytest.fixture
def connect() -> Iterator[Callable[[Any], Client]]:
    with contextlib.ExitStack() as opened:
        yield lambda site: opened.enter_context(contextlib.closing(Client(site.port)))


@pytest.fixture
def client(site: Any, connect: Callable[[Any], Client]) -> Client:
    return connect(site)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models of the inferences whose bodies were whole."""
    seen: list[str] = []
    begin = InferTarget.begin

    def noting(self: InferTarget, *rest: Any) -> Any:
        seen.append(self.model)
        return begin(self, *rest)

    monkeypatch.setattr(InferTarget, "begin", noting)
    return seen


@pytest.mark.parametrize(
    "line", ["Accept-Encoding: gzip", "Expect: 100-continue", "Content-Encoding: identity", "Connection: close"]
)
def test_inferences_of_every_kind_take_one_way(site, connect, begun, line):
    client = connect(site)
    data = infer([1.5]).replace(b"Host: localhost", b"Host: localhost\r\n" + line.encode())
    for sent in ((data,), (data[:-1], data[-1:])):
        client = connect(site)
        for part in sent:
            client.send(part)
        assert client.answer()[0] == 200
    assert begun == ["float"] * 2


def test_a_cached_head_is_answered_with_the_same_head_and_body(client):
    unknown = infer([0.5], path="/v2/models/no/infer")
    for made in (infer([1.0, 2.0], "a"), binary([1.0, 2.0], "a"), binary([], "b"), unknown):
        answers = []
        for data in (made, made, made.replace(b"Host: localhost", b"Host: localhost\r\nContent-Encoding: identity")):
            client.send(data)
            status, head, body = client.answer()
            lines = sorted(line for line in head.lower().split("\r\n") if not line.startswith("date:"))
            assert "date: " in head.lower()
            answers.append((status, lines, body))
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("make", [infer, binary])
def test_a_request_may_be_cut_at_every_byte(client, begun, make):
    data = make([1.0, -2.5], "cut")
    for place in range(1, len(data)):
        client.send(data[:place])
        client.send(data[place:])
    for _ in range(1, len(data)):
        status, _, body = client.answer()
        assert status == 200
        assert b'"id":"cut"' in body
    assert len(begun) == len(data) - 1


def test_a_request_may_come_byte_by_byte(client):
    for octet in LIVE + infer([3.0]):
        client.send(bytes([octet]))
    assert client.answer()[0] == 200
    assert client.data() == [3.0]


def test_pipelined_requests_are_answered_in_order_by_any_handler(client):
    count = 150
    sent = b"".join(infer([float(i)]) + (LIVE if i % 3 == 0 else b"") for i in range(count))
    threading.Thread(target=client.send, args=(sent,)).start()
    for i in range(count):
        assert client.data() == [float(i)]
        if i % 3 == 0:
            status, _, body = client.answer()
            assert (status, body) == (200, b'{"live":true}')


def test_http2_with_prior_knowledge_is_refused_with_the_right_port_and_logged_once(client, caplog):
    request_head._log_http2.cache_clear()
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert client.error() == (400, request_head._HTTP2)
    with pytest.raises(ClosingRefusal, match="or gRPC at the gRPC port"):
        request_head.parse_head(b"PRI * HTTP/2.0\r\n\r\n")
    logged = [record.getMessage() for record in caplog.records if "HTTP/2" in record.getMessage()]
    assert logged == [f"{request_head._HTTP2}. This is not logged again"]


def test_a_request_behind_one_in_chunks_is_answered(client):
    chunked = LIVE.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    client.send(infer([1.0]) + chunked + infer([2.0]) + LIVE)
    assert client.data() == [1.0]
    assert client.error() == (405, "Method Not Allowed")
    assert client.data() == [2.0]
    assert client.answer()[0] == 200


def test_a_request_to_an_endpoint_with_a_body_ends_where_its_length_says(client, begun):
    index = message(b'{"ready":true}', path="/v2/repository/index")
    for place in range(1, len(index), 7):
        client.send(index[:place])
        client.send(index[place:] + infer([7.0]))
        assert [entry["name"] for entry in json.loads(client.answer()[2])] == ["add"]
        assert client.data() == [7.0]
    assert len(begun) == len(range(1, len(index), 7))


def test_an_unread_body_is_skipped(client):
    client.send(message(bytes(300_000), path="/v2/nothing/here") + infer([1.0]))
    assert client.error() == (404, "Not Found")
    assert client.data() == [1.0]


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Length: 5\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: -5",
        b"Content-Length: +5",
        b"Content-Length: 0x5",
        b"Content-Length: 5, 5",
        b"Content-Length : 5",
        b"Content-Length: 5\n",
        b"Content-Length: 5\rX: y",
        b" Content-Length: 5",
        b"Content-Length: 5\r\nNo colon",
        b"Content-Length: 5\r\nX: a\0b",
        b"Content-Length: 99999999999999999999999",
        b"X: " + b"y" * 9000 + b"\r\nContent-Length: 5",
        b"\r\n".join(b"X%d: y" % i for i in range(3000)) + b"\r\nContent-Length: 5",
    ],
)
def test_heads_with_two_meanings_are_refused_and_nothing_behind_them_is_served(site, client, begun, line):
    smuggled = infer([6.0])
    client.send(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode() + line + b"\r\n\r\n{}   " + smuggled)
    status, _, _ = client.answer()
    assert status == 400
    assert client.is_ended()
    assert site.service.requests == []
    assert begun == []


def test_a_length_that_is_too_short_leaves_bytes_that_are_no_request(site, client):
    good = infer([1.0])
    client.send(good.replace(b"Content-Length: ", b"Content-Length: 1\r\nX-Was: "))
    status, text = client.error()
    assert status == 400
    assert "failed to parse the request JSON buffer" in text
    assert client.answer()[0] == 400
    assert client.is_ended()
    assert site.service.requests == []


@pytest.mark.parametrize("size", [100, 500_000])
def test_a_client_that_leaves_within_a_body_leaves_nothing_behind(site, client, size):
    client.send(message(bytes(size // 2), length=size))
    client.socket.shutdown(socket.SHUT_WR)
    assert client.is_ended()
    assert site.service.requests == []
    assert site.post(PATH, infer([1.0]).partition(b"\r\n\r\n")[2]).status == 200


def test_a_client_that_leaves_takes_its_request_back(site, client, begun):
    one = {"shape": [1, 4], "datatype": "INT32", "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [{"name": name, **one} for name in ("INPUT0", "INPUT1")]}).encode()
    client.send(message(body, path="/v2/models/never/infer"))
    assert site.service.submitted.wait(20)
    client.close()
    assert site.service.tickets[0].was_cancelled.wait(20)
    assert begun == ["never"]


@pytest.mark.parametrize("count", [1, 60_000, 150_528, 700_000])
def test_large_tensors_go_both_ways_unchanged(client, begun, count):
    values = np.random.default_rng(count).random(count, np.float32)
    client.send(binary(values.tolist(), "big") + LIVE)
    status, head, body = client.answer()
    assert status == 200
    json_size = int(head.lower().partition("inference-header-content-length: ")[2].split()[0])
    assert json.loads(body[:json_size])["id"] == "big"
    assert body[json_size:] == values.tobytes()
    assert client.answer()[0] == 200
    assert len(begun) == 1


def test_a_client_that_does_not_read_is_not_served_further(site, client):
    data = binary([0.5] * 500_000)
    sender = threading.Thread(target=client.send, args=(data * 20,))
    sender.start()
    assert site.service.submitted.wait(20)
    for _ in range(20):
        status, _, body = client.answer()
        assert (status, body[-4:]) == (200, np.float32(0.5).tobytes())
    sender.join()
    assert len(site.service.requests) == 20


def test_refusals_stay_the_same_with_a_cached_head(open_site, begun, connect):
    from edge_server.config import RestrictedGroup

    site = open_site(max_input_size_bytes=1000, restricted=(RestrictedGroup(("inference",), "key", "secret"),))
    client = connect(site)
    client.send(infer([1.0]))
    assert client.error() == (403, "This API is restricted, expecting header 'key'")
    client.send(infer([1.0]).replace(b"Host: localhost", b"Host: localhost\r\nkey: secret"))
    assert client.data() == [1.0]
    assert len(begun) == 1
    client.send(infer([1.0] * 500).replace(b"Host: localhost", b"Host: localhost\r\nkey: secret"))
    status, text = client.error()
    assert status == 400
    assert text.endswith("bytes is larger than the limit of 1000 bytes")
    assert client.is_ended()


def test_forwarded_headers_reach_the_model_with_a_cached_head(open_site, begun, connect):
    site = open_site(header_pattern=re.compile("stamp.*"))
    client = connect(site)
    for value in ("1", "2"):
        client.send(infer([1.0]).replace(b"Host: localhost", f"Host: localhost\r\nstamp-ns: {value}".encode()))
        assert json.loads(client.answer()[2])["parameters"] == {"stamp-ns": value}
    assert len(begun) == 2


@pytest.fixture
def stalling(monkeypatch: pytest.MonkeyPatch, open_site: Any) -> Any:
    """A front end whose clients may stall for a moment only."""
    from edge_server.frontends.http import connection

    monkeypatch.setattr(connection, "STALL_S", 0.2)
    return open_site()


@pytest.mark.parametrize("lines", [(), ("Content-Encoding: gzip",)])
def test_a_body_that_stalls_is_answered_408_and_the_connection_closed(stalling, lines, connect):
    client = connect(stalling)
    client.send(message(bytes(10), *lines, length=400))
    status, head, body = client.answer()
    assert status == 408
    assert "connection: close" in head.lower()
    assert json.loads(body)["error"] == "request body stalled after 10 of 400 bytes: none came for 0.2 s"
    assert client.is_ended()
    assert stalling.service.requests == []


def test_a_head_that_stalls_is_answered_408_but_a_connection_may_be_silent_between_requests(stalling, connect):
    idle, client = connect(stalling), connect(stalling)
    idle.send(infer([1.0]))
    assert idle.data() == [1.0]
    client.send(infer([1.0])[:30])
    assert client.error()[0] == 408
    assert client.is_ended()
    idle.send(infer([2.0]))
    assert idle.data() == [2.0]


def test_a_slow_body_is_waited_for_while_it_moves_also_by_a_server_that_drains(site, connect):
    client = connect(site)
    data = infer([4.0])
    client.send(data[:-5])
    idle = connect(site)
    idle.send(LIVE)
    assert idle.answer()[0] == 200
    stopping = asyncio.run_coroutine_threadsafe(site.frontend.stop(20.0), site.loop)
    assert idle.is_ended()
    client.send(data[-5:-1])
    client.send(data[-1:])
    assert client.data() == [4.0]
    assert client.is_ended()
    stopping.result(20)


def test_a_draining_server_cuts_requests_that_do_not_end(site, connect):
    clients = [connect(site), connect(site)]
    clients[0].send(infer([4.0])[:-1])
    one = {"shape": [1, 4], "datatype": "INT32", "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [{"name": name, **one} for name in ("INPUT0", "INPUT1")]}).encode()
    clients[1].send(message(body, path="/v2/models/never/infer"))
    assert site.service.submitted.wait(20)
    asyncio.run_coroutine_threadsafe(site.frontend.stop(0.1), site.loop).result(20)
    assert all(client.is_ended() for client in clients)
    assert site.service.tickets[0].was_cancelled.wait(20)


CHUNKED = b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v2/models/float/infer", b"/v2/no/such/path"])
def test_a_body_without_end_is_not_read_on_for_long_after_its_refusal(open_site, connect, path):
    client = connect(open_site(max_input_size_bytes=1000))
    client.send(CHUNKED % path)
    mebibyte = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    # The system's own buffers take a few.
    with pytest.raises(ConnectionError):
        client.send(mebibyte * 100)


def test_a_short_rest_behind_a_refusal_is_read_and_the_answer_comes(open_site, connect):
    client = connect(open_site(max_input_size_bytes=1000))
    client.send(CHUNKED % b"/v2/models/float/infer" + b"200000\r\n" + bytes(2 << 20) + b"\r\n0\r\n\r\n")
    assert client.error() == (400, "request body is larger than the limit of 1000 bytes")


def test_early_answers_do_not_add_up_on_a_connection(site, client):
    piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n0\r\n\r\n"
    for _ in range(20):
        client.send(CHUNKED % b"/v2/no/such/path" + piece)
        assert client.error() == (404, "Not Found")


def test_small_chunks_are_parsed_a_little_in_each_turn_of_the_loop(site, client, monkeypatch):
    counts: list[int] = []
    decode = body_reader.ChunkDecoder.decode

    def noting(self, data, start, reader):
        end, goes_on = decode(self, data, start, reader)
        counts.append((end - start) // 6)
        return end, goes_on

    monkeypatch.setattr(body_reader.ChunkDecoder, "decode", noting)
    client.send(CHUNKED % b"/v2/models/float/infer" + b"1\r\nx\r\n" * 200_000)
    assert client.error() == (400, "request body comes in more than 65536 chunks")
    assert max(counts) <= 256


class Unread(asyncio.Transport):
    """A transport whose client reads nothing."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def test_connections_with_many_small_chunks_are_served_in_turn(monkeypatch):
    seen: list[body_reader.ChunkDecoder] = []
    decode = body_reader.ChunkDecoder.decode

    def noting(self, data, start, reader):
        seen.append(self)
        return decode(self, data, start, reader)

    monkeypatch.setattr(body_reader.ChunkDecoder, "decode", noting)
    monkeypatch.setattr(connection_module, "_HELD_TURN_S", -1.0)
    data = CHUNKED % b"/" + b"1\r\nx\r\n" * 1000

    async def serve() -> list[list[body_reader.ChunkDecoder]]:
        server = Connections(lambda head: HttpResponse(b""), MemoryBudget(1, 1), NoDrainDelay())
        for _ in range(3):
            client = server.expect()
            client.connection_made(Unread())
            client.get_buffer(-1)[: len(data)] = data
            client.buffer_updated(len(data))
        turns = []
        for _ in range(20):
            begun = len(seen)
            await asyncio.sleep(0)
            turns.append(seen[begun:])
        return turns

    turns = asyncio.run(serve())
    decoders = seen[:3]
    assert len(set(decoders)) == 3
    assert seen == decoders * 4  # 256 chunks each time
    assert max(map(len, turns)) == 1


def test_a_request_line_without_a_version_is_refused_in_a_version(site, client):
    client.send(b"GET /v2/health/live\r\n\r\n")
    status, head, body = client.answer()
    assert (status, head.split()[0]) == (400, "HTTP/1.1")
    assert "HTTP/1.1" in json.loads(body)["error"]
    assert not client.receive()


def test_a_head_request_is_answered_like_get_without_a_body(client):
    for _ in range(2):
        for path in ("/v2", "/v2/health/ready", "/edge/v1/events?follow=false"):
            client.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            _, expected, _ = client.answer()
            client.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            while b"\r\n\r\n" not in client.unread:
                assert client.receive()
            head, _, client.unread = client.unread.partition(b"\r\n\r\n")
            lines = [line for line in head.decode().split("\r\n") if not line.startswith("Date")]
            assert lines == [line for line in expected.split("\r\n") if not line.startswith("Date")]
            assert client.unread == b""
    client.send(b"HEAD /v2/models/float/infer HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while b"\r\n\r\n" not in client.unread:
        assert client.receive()
    assert client.unread.startswith(b"HTTP/1.1 405 ")


def test_a_head_request_for_a_stream_ends_with_the_head(client):
    client.send(b"HEAD /edge/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while client.unread.count(b"\r\n\r\n") < 2:
        assert client.receive()
    stream, _, live = client.unread.partition(b"\r\n\r\n")
    assert b"text/event-stream" in stream
    assert live.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("target", ["http://localhost/v2", "HTTP://127.0.0.1:8000/v2?", "https://[::1]:1/v2"])
def test_an_absolute_target_is_served(client, target):
    """RFC 9112, 3.2.2: clients with a proxy setting, and proxies, send it."""
    client.send(f"GET {target} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())
    status, _, body = client.answer()
    assert (status, json.loads(body)["name"]) == (200, "triton")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://evil.example/v2", 421), ("http:///v2", 400), ("http://a@localhost/v2", 400), ("http://?x", 400),
        ("ftp://localhost/v2", 404), ("http://localhost", 404),
    ],
)  # fmt: skip
def test_the_host_of_an_absolute_target_is_checked_in_place_of_the_header(client, target, expected):
    client.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert client.answer()[0] == expected


@pytest.mark.parametrize("place", [1, 9, 200])
def test_a_method_that_is_none_is_refused_however_it_is_cut(client, place):
    data = b"post! /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    client.send(data[:place])
    client.send(data[place:])
    assert client.answer()[0] == 400
    assert client.is_ended()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /no HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"nonsense\r\n\r\n",
        infer([1.5]),
        infer([1.5] * 100_000),
    ],
)
def test_no_response_names_versions_of_the_servers_software(site, client, request_bytes):
    client.send(request_bytes)
    _, head, _ = client.answer()
    assert re.findall(r"(?im)^server: *(.*?)\r?$", head) == ["edge-server"]


def test_two_headers_of_the_shared_word_are_refused(open_site, connect):
    client = connect(open_site(restricted=(RestrictedGroup(("metadata",), "key", "secret"),)))
    for second, expected in (("guess", 403), ("secret", 403), ("", 200)):
        line = f"key: {second}\r\n" if second else ""
        client.send(f"GET /v2 HTTP/1.1\r\nHost: localhost\r\nkey: secret\r\n{line}\r\n".encode())
        assert client.answer()[0] == expected


BODY = infer([1.0]).partition(b"\r\n\r\n")[2]


def chunks(*sizes: int, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """Return BODY in chunks of these sizes, the rest in a last one."""
    parts, start = [], 0
    for size in (*sizes, len(BODY) - sum(sizes)):
        parts.append(b"%x%b\r\n%b\r\n" % (size, extension, BODY[start : start + size]))
        start += size
    return b"".join(parts) + b"0" + extension + b"\r\n" + trailer + b"\r\n"


@pytest.mark.parametrize(
    "body",
    [
        chunks(), chunks(1, 2, 3), chunks(1, 2, extension=b";name=value"), chunks(1, extension=b' ; a="b c"'),
        chunks(5, trailer=b"Digest: x\r\nEmpty:\r\n"),
    ],
)  # fmt: skip
def test_chunks_may_be_cut_at_every_byte(client, body):
    data = CHUNKED % PATH.encode() + body
    for place in range(1, len(data)):
        client.send(data[:place])
        client.send(data[place:])
        assert client.data() == [1.0]


def test_chunked_requests_follow_each_other(client):
    client.send((CHUNKED % PATH.encode() + chunks(3)) * 20 + LIVE)
    for _ in range(20):
        assert client.data() == [1.0]
    assert client.answer()[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nabcdeX\r\n0\r\n\r\n",
        b"5\nabcde\r\n0\r\n\r\n",
        b"5\r\nabcde\n0\r\n\r\n",
        b"5 \r\nabcde\r\n0\r\n\r\n",
        b" 5\r\nabcde\r\n0\r\n\r\n",
        b"0x5\r\nabcde\r\n0\r\n\r\n",
        b"+5\r\nabcde\r\n0\r\n\r\n",
        b"-5\r\nabcde\r\n0\r\n\r\n",
        b"\r\nabcde\r\n0\r\n\r\n",
        b"5;a\nb\r\nabcde\r\n0\r\n\r\n",
        b"5;" + b"a" * 2000 + b"\r\nabcde\r\n0\r\n\r\n",
        b"5;" + b"a" * 2000,
        b"fffffffffffffffff\r\nabcde",
        b"5\r\nabcde\r\n0\r\nno colon\r\n\r\n",
        b"5\r\nabcde\r\n0\r\n folded: x\r\n\r\n",
        b"5\r\nabcde\r\n0\r\nA: b\n\r\n\r\n",
        b"5\r\nabcde\r\n0\r\n" + b"A: b\r\n" * 3000,
        b"5\r\nabcde\r\n0\r\nA: " + b"b" * 9000,
    ],
)
def test_chunks_with_two_meanings_are_refused_and_nothing_behind_them_is_served(site, client, body):
    client.send(CHUNKED % PATH.encode() + body + infer([6.0]))
    assert client.answer()[0] == 400
    assert client.is_ended()
    assert site.service.requests == []


@pytest.mark.parametrize(
    "line",
    [
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding:\r\n chunked",
        b"Content-Length: 0\r\nTransfer-Encoding: chunked",
        b"Content-Length: 1_0",
        b"Content-Length: \xc2\xb2",
        b"Content-Length:",
    ],
)
def test_other_framings_are_refused(site, client, line):
    client.send(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode() + line + b"\r\n\r\n" + chunks() + infer([6.0]))
    assert client.answer()[0] == 400
    assert client.is_ended()
    assert site.service.requests == []


def test_chunks_of_http_1_0_are_refused(site, client):
    client.send((CHUNKED % PATH.encode()).replace(b"HTTP/1.1", b"HTTP/1.0") + chunks())
    assert client.answer()[0] == 400
    assert client.is_ended()


def test_a_client_of_http_1_0_is_answered_and_stays_if_it_asks_to(connect, site):
    old = infer([1.0]).replace(b"HTTP/1.1", b"HTTP/1.0")
    client = connect(site)
    for _ in range(3):
        client.send(old.replace(b"Host: localhost", b"Connection: keep-alive"))
        status, head, _ = client.answer()
        assert (status, "\r\nConnection: keep-alive" in head) == (200, True)
    client.send(old)
    status, head, _ = client.answer()
    assert (status, "\r\nConnection: close" in head) == (200, True)
    assert client.is_ended()
    client = connect(site)
    client.send(b'POST /v2/models/repeat/generate_stream HTTP/1.0\r\nContent-Length: 8\r\n\r\n{"IN":2}')
    while client.receive():
        pass
    assert client.unread.count(b"data: ") == 2
    assert b"chunked" not in client.unread


def test_a_refusal_before_the_body_was_asked_for_ends_the_connection(client):
    asking = message(b"", "Expect: 100-continue", path="/v2/no/such", length=10)
    client.send(asking)
    status, head, _ = client.answer()
    assert (status, "\r\nConnection: close" in head) == (404, True)
    assert client.is_ended()


def test_empty_lines_before_a_request_are_passed_over(client):
    client.send(b"\r\n\r\n" + LIVE + b"\r\n" + infer([2.0]) + b"\r")
    client.send(b"\n" + LIVE)
    assert client.answer()[0] == 200
    assert client.data() == [2.0]
    assert client.answer()[0] == 200


def test_the_answer_to_head_has_no_body(client):
    client.send(b"HEAD /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" + LIVE)
    assert client.receive()
    while client.unread.count(b"\r\n\r\n") < 2:
        assert client.receive()
    first, second = client.unread.split(b"\r\n\r\n")[:2]
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 200 ")
