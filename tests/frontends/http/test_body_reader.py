"""HTTP request bodies: compression, chunks, sizes and limits."""

from __future__ import annotations

import gzip
import json
import random
import socket
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.errors import InvalidRequest
from edge_server.frontends.http import body_reader as bodies
from edge_server.frontends.http import compression
from edge_server.frontends.http.compression import (
    UnknownEncoding,
    accepted_encoding,
    compress,
    decompress,
    request_encoding,
)

PATH = "/v2/models/float/infer"


def body_of(count: int) -> bytes:
    data = [0.5] * count
    return json.dumps({"inputs": [{"name": "IN", "shape": [count], "datatype": "FP32", "data": data}]}).encode()


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress), ("identity", bytes)],
)
def test_compressed_requests_are_inflated(site, encoding, pack):
    reply = site.post(PATH, pack(body_of(3)), {"Content-Encoding": encoding})
    assert reply.json["outputs"][0]["data"] == [0.5] * 3


def test_the_header_length_counts_inflated_bytes(site):
    text = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","parameters":{"binary_data_size":4}}]}'
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(text))}
    reply = site.post(PATH, gzip.compress(text + b"\0\0\x80\x3f"), headers)
    assert reply.json["outputs"][0]["data"] == [1.0]


def test_other_encodings_are_refused_with_a_list_of_those_that_work(site):
    reply = site.post(PATH, b"x", {"Content-Encoding": "br"})
    assert reply.status == 501
    assert reply.headers["Accept-Encoding"] == "gzip, deflate"
    assert "br" in reply.error


@pytest.mark.parametrize(
    "body",
    [b"", b"no gzip", gzip.compress(body_of(3), mtime=0)[:-9], gzip.compress(body_of(3), mtime=0) + b"tail"],
)
def test_damaged_compressed_bodies_are_refused(site, body):
    assert site.post(PATH, body, {"Content-Encoding": "gzip"}).status == 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("count", [3, 20_000])
def test_answers_are_compressed_as_asked(site, encoding, count):
    reply = site.post(PATH, body_of(count), {"Accept-Encoding": encoding})
    assert reply.headers["Content-Encoding"] == encoding
    plain = gzip.decompress(reply.body) if encoding == "gzip" else zlib.decompress(reply.body)
    assert json.loads(plain)["outputs"][0]["data"] == [0.5] * count
    assert site.post(PATH, body_of(3)).headers["Content-Encoding"] is None


def test_encodings_are_chosen_by_weight():
    table = [
        (None, None),
        ("", None),
        ("identity", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate;q=0.9, gzip;q=0.5", "deflate"),
        ("gzip;q=0", None),
        ("gzip; q=0, deflate", "deflate"),
        ("br, zstd", None),
        ("*", "gzip"),
        ("gzip;q=0, *;q=0.5", "deflate"),
        ("identity;q=1, gzip;q=0.5", None),
        ("gzip;q=nonsense", None),
        ("GZip", "gzip"),
        (",;,=,q", None),
    ]
    assert [(header, accepted_encoding(header)) for header, _ in table] == table


def test_a_bomb_is_stopped_at_the_bound():
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 60_000
    with pytest.raises(InvalidRequest, match="larger than the limit of 1000000 bytes"):
        decompress(bomb, "gzip", 1_000_000)
    assert len(decompress(gzip.compress(bytes(1000)), "gzip", 1000)) == 1000
    with pytest.raises(InvalidRequest, match="larger than"):
        decompress(gzip.compress(bytes(600)) * 2, "gzip", 1000)


def test_gzip_members_in_a_row_are_one_text():
    assert decompress(gzip.compress(b"ab") + gzip.compress(b"cd"), "gzip", 10) == b"abcd"
    with pytest.raises(InvalidRequest, match="follow"):
        decompress(zlib.compress(b"ab") + b"cd", "deflate", 10)


def test_members_without_end_cost_no_more_than_their_bytes(monkeypatch):
    behind: list[int] = []

    class Watched:
        def __init__(self, bits: int) -> None:
            self._stream = zlib.decompressobj(bits)

        def decompress(self, data: Any, most: int) -> bytes:
            return self._stream.decompress(data, most)

        @property
        def eof(self) -> bool:
            return self._stream.eof

        @property
        def unused_data(self) -> bytes:
            behind.append(len(self._stream.unused_data))
            return self._stream.unused_data

    monkeypatch.setattr(compression, "zlib", SimpleNamespace(decompressobj=Watched, error=zlib.error))
    text = gzip.compress(b"") * 3000 + gzip.compress(b"end")
    assert decompress(text, "gzip", 10) == b"end"
    # zlib copies what lies behind a member, so that all of the rest, each time, would make the cost its square.
    assert max(behind) < 16384 < len(text)
    with pytest.raises(InvalidRequest, match="more than 65536 members"):
        decompress(gzip.compress(b"") * 65537, "gzip", 10)


def test_compressed_text_may_end_anywhere_within_the_pieces_it_is_read_in():
    noise = random.Random(1).randbytes(40_000)
    for count in (16_383, 16_384, 16_385, 40_000):
        assert decompress(gzip.compress(noise[:count]) * 2, "gzip", 2 * count) == noise[:count] * 2
        assert decompress(zlib.compress(noise[:count]), "deflate", count) == noise[:count]
        with pytest.raises(InvalidRequest, match="truncated"):
            decompress(zlib.compress(noise[:count])[:-1], "deflate", count)
        with pytest.raises(InvalidRequest, match="larger than"):
            decompress(zlib.compress(noise[:count]), "deflate", count - 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_decompress_again(encoding):
    assert decompress(compress([b"ab", memoryview(b"cd"), b""], encoding), encoding, 4) == b"abcd"


def test_request_encodings_are_known_or_refused():
    assert request_encoding(None) is None
    assert request_encoding(" Gzip ") == "gzip"
    with pytest.raises(UnknownEncoding):
        request_encoding("gzip, deflate")


def test_a_declared_length_beyond_the_limit_is_refused_before_the_body_is_read(open_site):
    site = open_site(max_input_size_bytes=1000)
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n".encode())
        answer = b""
        while b"}" not in answer:
            answer += connection.recv(65536)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"larger than the limit of 1000 bytes" in answer
    assert b"Connection: close" in answer


def test_a_body_at_the_limit_is_served_and_one_beyond_is_not(open_site):
    body = body_of(10)
    assert open_site(max_input_size_bytes=len(body)).post(PATH, body).status == 200
    site = open_site(max_input_size_bytes=len(body) - 1)
    assert site.post(PATH, body).status == 400
    assert site.post(PATH, gzip.compress(body), {"Content-Encoding": "gzip"}).status == 400


def pieces(body: bytes, size: int):
    return (body[start : start + size] for start in range(0, len(body), size))


def test_chunked_bodies_are_read_within_the_limit(open_site):
    site = open_site(max_input_size_bytes=100_000)
    body = body_of(1000)
    assert site.post(PATH, pieces(body, 7), encode_chunked=True).json["outputs"][0]["shape"] == [1000]
    assert site.post(PATH, body_of(99), {"Transfer-Encoding": "chunked"}, encode_chunked=True).status == 200


def raw_exchange(port: int, data: bytes, *, half_close: bool = False) -> bytes:
    """Send everything, then read until the server closes. A client that closes its half counts as one that left."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def test_a_chunked_body_beyond_the_limit_is_refused(open_site):
    site = open_site(max_input_size_bytes=1000)
    answer = raw_exchange(site.port, HEAD + b"400\r\n" + bytes(1024) + b"\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"larger than the limit" in answer


def test_a_body_in_too_many_chunks_is_refused(site, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_CHUNKS", 500)
    answer = raw_exchange(site.port, HEAD + b"1\r\n \r\n" * 600 + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"more than 500 chunks" in answer


@pytest.mark.parametrize("tail", [b"zz\r\n", b"-1\r\n", b"5\r\nabc"])
def test_broken_chunks_end_the_connection_and_not_the_server(site, tail):
    answer = raw_exchange(site.port, HEAD + tail, half_close=True)
    assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0]
    assert site.get("/v2/health/live").status == 200


@pytest.mark.sample(2)
@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\0" * 9000])
def test_bytes_that_are_not_http_end_the_connection_and_not_the_server(site, garbage, caplog):
    raw_exchange(site.port, garbage, half_close=True)
    assert site.get("/v2/health/live").status == 200
    assert caplog.records == [], "a port scan is no error of the server"


def test_expect_100_continue_is_answered(site):
    body = body_of(2)
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
