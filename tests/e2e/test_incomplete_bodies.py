"""Many huge HTTP bodies that never end, on the installed server: memory is bounded, other clients are served."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import Any

import numpy as np
import tritonclient.http

from tests.kit.infer_input import infer_input
from tests.kit.models import identity_config
from tests.kit.server import serve

MIB = 1 << 20


def half_sent(server: Any, size: int) -> socket.socket:
    """Return a connection on which half of a body of `size` bytes was sent."""
    host, _, port = server.http.partition(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    text = json.dumps({"inputs": []}).encode()
    head = f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {size}\r\n\r\n"
    client.sendall(f"POST /v2/models/same/infer HTTP/1.1\r\nHost: localhost\r\n{head}".encode() + text)
    client.sendall(bytes(size // 2))
    return client


def test_memory_stays_bounded_and_complete_requests_are_served(repository: Any) -> None:
    repository.add("same", identity_config("FP32"))
    values = np.arange(250_000, dtype=np.float32).reshape(1, -1)
    given = infer_input(tritonclient.http, "INPUT0", values)
    small = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [7]}]}
    with (
        serve(repository.path, f"--http-max-body-bytes-in-flight={64 * MIB}") as server,
        contextlib.ExitStack() as opened,
        tritonclient.http.InferenceServerClient(server.http, network_timeout=120) as honest,
    ):
        assert (honest.infer("same", [given]).as_numpy("OUTPUT0") == values).all()
        before = server.resident_bytes()
        for _ in range(24):
            opened.enter_context(half_sent(server, 36 * MIB))
            assert (honest.infer("same", [given]).as_numpy("OUTPUT0") == values).all()
            assert server.infer("same", small)[0] == 200
        # 432 MiB were sent. What glibc keeps for the next requests comes on top of the bound.
        assert server.resident_bytes() - before < 200 * MIB
        numbers = dict(re.findall(r"^(edge_http_bod\w+) (\d+)$", server.read_metrics(), re.MULTILINE))
        # Of 24 halves of 18 MiB three fit; some bytes may not have been read yet.
        assert int(numbers["edge_http_bodies_refused_total"]) >= 15
        assert int(numbers["edge_http_body_bytes"]) <= 64 * MIB
        assert "request bodies on their way held more than 67108864 bytes" in server.log()
