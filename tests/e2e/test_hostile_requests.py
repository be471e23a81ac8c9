"""Invalid requests to a server of many clients: each is refused with the reason, and the valid ones are answered.

What is refused, and how, is tested in tests/core/test_request_check.py, tests/frontends/v2, tests/frontends/http and
tests/frontends/grpc.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

GOOD = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
MODEL = "/v2/models/same_INT32"
HEAD = f"POST {MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n".encode()


def post(body: bytes, **headers: str) -> Callable[[Any], None]:
    def ask(zoo: Any) -> None:
        status, text = zoo.request("POST", f"{MODEL}/infer", body, {k.replace("_", "-"): v for k, v in headers.items()})
        assert status in (400, 413), text
        assert list(json.loads(text)) == ["error"]

    return ask


def send(data: bytes) -> Callable[[Any], None]:
    """Send bytes to the HTTP port and leave."""

    def ask(zoo: Any) -> None:
        host, port = zoo.http.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(data)

    return ask


def call(method: str, data: bytes, *codes: str) -> Callable[[Any], None]:
    def ask(zoo: Any) -> None:
        with grpc.insecure_channel(zoo.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=30)
        assert caught.value.code().name in codes, caught.value.details()
        assert "Exception iterating" not in (caught.value.details() or "")

    return ask


INVALID = [
    post(json.dumps({"inputs": [{**GOOD, "shape": [1, 2**40]}]}).encode()),
    post(b'{"inputs":' + b"[" * 100_000),
    post(gzip.compress(b"\0" * (200 << 20), 1), Content_Encoding="gzip"),
    send(HEAD + b"Content-Length: 5000\r\n\r\n{"),
    send(HEAD + b"Content-Length: many\r\n\r\n"),
    send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    *(
        call(method, data, "INVALID_ARGUMENT", "NOT_FOUND")
        for method in ("ModelInfer", "ModelConfig", "RepositoryIndex", "SystemSharedMemoryRegister")
        for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x3a\x80\x80\x80\x80\x10")
    ),
    call("Nonsense", b"", "UNIMPLEMENTED"),
]


def test_valid_requests_among_invalid_ones_are_all_answered_and_memory_stays_bounded(zoo: Any) -> None:
    before = zoo.resident_bytes()
    with ThreadPoolExecutor(8) as pool:
        hostile = [pool.submit(ask, zoo) for ask in INVALID]
        valid = [pool.submit(zoo.infer, "same_INT32", {"inputs": [GOOD]}) for _ in range(40)]
    for item in hostile:
        item.result()
    assert [answer.result()[1]["outputs"][0]["data"] for answer in valid] == [[1, 2]] * 40
    assert zoo.resident_bytes() - before < 140 << 20
