"""Clients that attack the server, and how long clients beside them wait: median and 99th percentile of their calls
over gRPC, and 99th percentile over HTTP.

    python tests/bench/attacks.py [--seconds 5] [--tree OTHER_SOURCE_TREE] [--server COMMAND] [NAME ...]

Each attack runs against a server of its own, from a process of its own, and ends by itself. To add one, write a
function that takes a `Target` and decorate it with `attack`; it runs until `Target.is_over` and returns what it sent,
which is printed. `attack` also takes flags of the server, in which `{port}` is the port `Target.port`. The attacks on
constrained text need the extra `llm`, the one on a robot's port `policies`, the one by cameras `vision`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import selectors
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import harness

MODEL = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
"""
POLICY = """
backend: "identity"
max_batch_size: 4
input { name: "state" data_type: TYPE_FP32 dims: [ 1, 14 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 1, 14 ] }
parameters { key: "policy_action_key" value { string_value: "action" } }
"""
LANGUAGE_MODEL = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
DETECTOR = Path(__file__).parents[2] / "model_repository/face_detection_yunet"
SERVICE = "/inference.GRPCInferenceService/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
END_STREAM, END_HEADERS = 1, 4
PAUSE_S = 0.005
MAX_WAIT_S = 20.0
"""Pause between two calls of the client beside, and how long it waits for one."""

Sent = dict[str, int]


class Target:
    """The attacked server, as its attacker sees it: addresses "host:port", the port of the flags, and the end of the
    attack."""

    def __init__(self, http: str, grpc_address: str, seconds: float, port: int = 0) -> None:
        self.http = http
        self.grpc = grpc_address
        self.port = port
        self._end_s = time.monotonic() + seconds

    def is_over(self) -> bool:
        return time.monotonic() >= self._end_s

    def connect_http1(self) -> socket.socket:
        host, _, port = self.http.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def connect(self, hello: bytes = b"") -> socket.socket:
        """Return an HTTP/2 connection on which nothing waits for this client to read."""
        host, _, port = self.grpc.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=30)
        # The largest windows, so that the server never waits for this client.
        settings = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1))
        sock.sendall(PREFACE + settings + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)) + hello)
        return sock


Attack = Callable[[Target], Sent]
ATTACKS: dict[str, Attack] = {}
FLAGS: dict[str, tuple[str, ...]] = {}


def attack(*flags: str) -> Callable[[Attack], Attack]:
    def add(function: Attack) -> Attack:
        ATTACKS[function.__name__] = function
        FLAGS[function.__name__] = flags
        return function

    return add


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literals(*fields: tuple[bytes, bytes]) -> bytes:
    """Return a header block, or a part of one, that neither uses nor changes the table. Short fields only."""
    return b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in fields)


def request_block(method: str) -> bytes:
    path = (SERVICE + method).encode()
    return literals(
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"), (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )  # fmt: skip


def headers(stream: int, block: bytes, *, ends: bool = False) -> bytes:
    return frame(HEADERS, END_HEADERS | (END_STREAM if ends else 0), stream, block)


def calls(method: str, message: bytes = b"") -> Iterator[bytes]:
    """Yield one whole call after the other, for a new connection."""
    block, body = request_block(method), struct.pack(">BI", 0, len(message)) + message
    for stream in range(1, 1 << 31, 2):
        yield headers(stream, block) + frame(DATA, END_STREAM, stream, body)


def joined(parts: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yield the parts, `size` of them at once."""
    while data := b"".join(itertools.islice(parts, size)):
        yield data


def press(
    target: Target, count: int, make: Callable[[], Iterator[bytes]], connect: Callable[[], socket.socket] | None = None
) -> Sent:
    """Keep `count` connections open that each send what `make()` yields, as fast as the server takes it, and read what
    comes. A connection that has sent all stays open; one that the server ends is replaced by a new one."""
    connect = connect or target.connect
    sent = {"connections": 0, "bytes": 0}
    waiting: dict[socket.socket, tuple[memoryview, Iterator[bytes]]] = {}
    with selectors.DefaultSelector() as selector:
        while not target.is_over():
            while len(waiting) < count and not target.is_over():
                sock = connect()
                sock.setblocking(False)
                waiting[sock] = memoryview(b""), make()
                selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
                sent["connections"] += 1
            for key, events in selector.select(0.1):
                sock = key.fileobj  # type: ignore[assignment]
                try:
                    if events & selectors.EVENT_READ and not sock.recv(1 << 18):
                        raise ConnectionError
                    if events & selectors.EVENT_WRITE:
                        data, more = waiting[sock]
                        data = data or memoryview(next(more, b""))
                        if not data:
                            selector.modify(sock, selectors.EVENT_READ)
                            continue
                        done = sock.send(data)
                        sent["bytes"] += done
                        waiting[sock] = data[done:], more
                except BlockingIOError:
                    pass
                except ConnectionError:
                    selector.unregister(sock)
                    del waiting[sock]
                    sock.close()
    return sent


# -- attacks on HTTP/2


def remembered_lists() -> Iterator[bytes]:
    """Yield 64 header blocks that each name an entry of 4 kB in the table fifteen times."""
    base = request_block("ServerLive")
    entry = b"\x40\x01y\x7f" + bytes((0x80 | (3900 - 127) & 127, (3900 - 127) >> 7)) + b"v" * 3900
    yield headers(1, base + entry, ends=True)
    for number in range(64):
        yield headers(3 + 2 * number, base + b"\xbe" * 15 + literals((b"n", b"%d" % number)), ends=True)


@attack()
def header_lists_of_50_idle_connections(target: Target) -> Sent:
    """Less than a megabyte in all, of which the server once kept two hundred."""
    return press(target, 50, remembered_lists)


@attack()
def header_lists_of_200_connections(target: Target) -> Sent:
    def endless() -> Iterator[bytes]:
        yield from remembered_lists()
        base = request_block("ServerLive") + b"\xbe" * 15
        for stream in range(131, 1 << 31, 2):
            yield headers(stream, base + literals((b"n", b"%d" % stream)), ends=True)

    return press(target, 200, endless)


@attack()
def calls_of_200_connections_at_once(target: Target) -> Sent:
    """13,000 calls of ServerLive, 65 on each connection, and the next as many when all are answered."""
    held = [target.connect() for _ in range(200)]
    made = joined(calls("ServerLive"), 65)
    sent = {"calls": 0}
    while not target.is_over():
        data = next(made)
        for sock in held:
            sock.sendall(data)
        sent["calls"] += 65 * len(held)
        last = (1 + 2 * (sent["calls"] // len(held) - 1)).to_bytes(4, "big")
        for sock in held:
            read = b""
            # The trailers of the last call: HEADERS that end its stream.
            while bytes((HEADERS, END_HEADERS | END_STREAM)) + last not in read:
                read = read[-32:] + sock.recv(1 << 18)
    return sent


@attack()
def endless_calls_of_200_connections(target: Target) -> Sent:
    return press(target, 200, lambda: joined(calls("ServerLive"), 20))


@attack()
def endless_requests_of_200_connections(target: Target) -> Sent:
    return press(target, 200, lambda: joined(calls("ModelInfer", infer_request()), 20))


def long_lists(fields: int) -> Iterator[bytes]:
    """Yield requests with many empty fields in few bytes. Each adds an entry to the table, so that none can be
    remembered."""
    block = b"\x40\x00\x00" + request_block("ServerLive") + b"\xbe" * fields
    return (headers(stream, block, ends=True) for stream in range(1, 1 << 31, 2))


@attack()
def header_lists_of_240_fields_of_200_connections(target: Target) -> Sent:
    """As many as a client may send."""
    return press(target, 200, lambda: long_lists(240))


@attack()
def header_lists_of_1000_fields_of_200_connections(target: Target) -> Sent:
    """Too large, but not so large that the connection must end."""
    return press(target, 200, lambda: long_lists(1000))


@attack()
def header_lists_of_1900_fields_of_200_connections(target: Target) -> Sent:
    return press(target, 200, lambda: long_lists(1900))


@attack()
def messages_of_200_streams_of_10_connections(target: Target) -> Sent:
    """Small requests on 20 streams of each of ten connections."""
    message = infer_request()
    body = (struct.pack(">BI", 0, len(message)) + message) * 100
    streams = range(1, 41, 2)

    def endless() -> Iterator[bytes]:
        yield b"".join(headers(stream, request_block("ModelStreamInfer")) for stream in streams)
        # At most the window of a stream.
        for _ in range((4 << 20) // len(body)):
            yield from (frame(DATA, 0, stream, body) for stream in streams)

    return press(target, 10, endless)


@attack()
def messages_of_1_mib_of_200_connections(target: Target) -> Sent:
    """Each in one DATA frame, which the server receives directly into the message's memory."""
    return press(target, 200, lambda: calls("ModelInfer", infer_request(1 << 20)))


def infer_request(size: int = 64) -> bytes:
    """Return a request with a tensor of `size` bytes: 64 are right, others are refused."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name="small", raw_input_contents=[bytes(size)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[16])
    return bytes(request.SerializeToString())


@attack()
def data_frames_of_one_byte_of_200_connections(target: Target) -> Sent:
    def endless() -> Iterator[bytes]:
        yield headers(1, request_block("ModelInfer")) + frame(DATA, 0, 1, struct.pack(">BI", 0, 1 << 20))
        for _ in range(2000):
            yield frame(DATA, 0, 1, b"x") * 500

    return press(target, 200, endless)


def in_bursts(target: Target, opening: bytes, burst: bytes, pause_s: float) -> int:
    """Send bursts on one connection until the server ends it, and return how many it took.

    SETTINGS follows each burst; its acknowledgement shows that the burst was read.
    """
    count = 0
    sock = target.connect(opening)
    with sock, contextlib.suppress(ConnectionError):
        while not target.is_over():
            sock.sendall(burst + frame(SETTINGS, 0, 0))
            read = b""
            while frame(SETTINGS, 1, 0) not in read:
                data = sock.recv(1 << 18)
                if not data:
                    return count
                read = read[-16:] + data
            count += 1
            time.sleep(pause_s)
    return count


@attack()
def settings_that_move_1000_windows(target: Target) -> Sent:
    """64 initial windows in each frame, 900 frames a second."""
    block = request_block("ServerLive")
    opened = b"".join(headers(stream, block) for stream in range(1, 2001, 2))
    values = [struct.pack(">HI", 4, 1000 + number % 2) for number in range(64)]
    burst = (frame(SETTINGS, 0, 0, b"".join(values)) + frame(SETTINGS, 0, 0, b"".join(values[::-1]))) * 22
    taken = 0
    while not target.is_over():
        taken += in_bursts(target, opened, burst, 0.05)
    return {"frames taken": 44 * taken}


def window_updates(target: Target, stream: int) -> Sent:
    """Send WINDOW_UPDATE of 1, on one connection; the result is the number of accepted ones."""
    burst = frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", 1)) * 500
    taken = in_bursts(target, next(calls("ServerLive")), burst, 0)
    while not target.is_over():
        time.sleep(0.1)
    return {"frames taken": 500 * taken}


@attack()
def window_updates_of_the_connection(target: Target) -> Sent:
    return window_updates(target, 0)


@attack()
def window_updates_of_a_closed_stream(target: Target) -> Sent:
    return window_updates(target, 1)


# -- attacks on HTTP/1.1


@attack()
def http_requests_of_200_connections(target: Target) -> Sent:
    """Requests that do not wait for the responses to those before."""
    head = (
        b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[16],"parameters":{"binary_data_size":64}}],'
        b'"parameters":{"binary_data_output":true}}'
    )
    lines = (
        b"POST /v2/models/small/infer HTTP/1.1", b"Host: %b" % target.http.encode(),
        b"Inference-Header-Content-Length: %d" % len(head), b"Content-Length: %d" % (len(head) + 64), b"", head,
    )  # fmt: skip
    return press(target, 200, lambda: itertools.repeat(20 * (b"\r\n".join(lines) + bytes(64))), target.connect_http1)


@attack()
def http_heads_of_200_connections(target: Target) -> Sent:
    """Heads of 6 kB that are all different, so that none can be remembered."""

    def endless() -> Iterator[bytes]:
        fields = b"".join(b"X-%d: %b\r\n" % (number, b"v" * 100) for number in range(55))
        start = b"GET /v2/health/live HTTP/1.1\r\nHost: %b\r\n" % target.http.encode() + fields
        return (b"%bN: %d\r\n\r\n" % (start, number) for number in itertools.count())

    return press(target, 200, endless, target.connect_http1)


@attack()
def http_chunks_of_one_byte_of_200_connections(target: Target) -> Sent:
    head = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = head % target.http.encode() + b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n"
    return press(target, 200, lambda: itertools.repeat(body), target.connect_http1)


# -- attacks on robots' ports and constrained text, and by cameras


def zmtp(data: bytes, kind: int) -> bytes:
    """Return a frame of ZMTP 3.0: flags, length, data."""
    return struct.pack(">BQ", kind | 2, len(data)) + data


@attack("--policy-groot=127.0.0.1:{port}")
def heads_of_arrays_at_a_robots_port_of_50_connections(target: Target) -> Sent:
    """Heads of NumPy arrays of 219 bytes, which once took a regular expression for ever."""
    shape = b"1" * 108
    array = b"\x93NUMPY\x01\0v\0{'descr': '<f4', 'fortran_order': False, 'shape': (" + shape + b"x"
    member = b"\x82\xb1__ndarray_class__\xc3\xa6as_npy\xc5" + struct.pack(">H", len(array)) + array
    message = b"\x82\xa8endpoint\xa4ping\xa4data" + member
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = zmtp(b"\x05READY\x0bSocket-Type\0\0\0\x03REQ", 4)
    request = zmtp(b"", 1) + zmtp(message, 0)
    return press(
        target, 50, lambda: itertools.chain([greeting + ready], itertools.repeat(request)),
        lambda: socket.create_connection(("127.0.0.1", target.port), timeout=30),
    )  # fmt: skip


@attack("--policy-openpi=127.0.0.1:{port}")
def frames_of_one_byte_at_a_robots_port_of_14_connections(target: Target) -> Sent:
    head = (
        b"GET /policy HTTP/1.1", b"Host: x", b"Upgrade: websocket", b"Connection: Upgrade",
        b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"", b"",
    )  # fmt: skip
    # A first frame, then continuations: each is masked with zeros.
    parts = itertools.chain([b"\r\n".join(head), b"\x02\x81\0\0\0\0x"], itertools.repeat(b"\0\x81\0\0\0\0x" * 1000))
    found = list(itertools.islice(parts, 3))
    return press(
        target, 14, lambda: itertools.chain(found, itertools.repeat(found[-1])),
        lambda: socket.create_connection(("127.0.0.1", target.port), timeout=30),
    )  # fmt: skip


@attack()
def patterns_of_constrained_text(target: Target) -> Sent:
    """Two clients that ask for text of patterns whose automata are large, each a new one so that none is remembered."""
    numbers = itertools.count()

    def requests() -> Iterator[bytes]:
        for number in numbers:
            letters = "".join(chr(0x4E00 + 2 * letter + number % 997) for letter in range(900))
            patterns = [
                f"[{letters}]{{1900}}",
                f"([{letters}]|a)*a([{letters[:1]}]|a){{9}}",
                f"([{letters}]|a)*a(.|a){{9}}",
            ]
            yield chat_request(target, guided_regex=patterns[number % len(patterns)])

    return press(target, 2, requests, target.connect_http1)


@attack()
def slow_schemas_of_constrained_text(target: Target) -> Sent:
    """Two clients that send a JSON schema in each chat, beyond the limits or near them, and leave before every other
    answer. Beside them a client asks the same model for text, and fails if it is not answered."""

    def schema(number: int) -> dict[str, Any]:
        # Each is a new one, so that none is remembered.
        kinds: list[dict[str, Any]] = [
            {"type": "string", "pattern": f"^((a{{1,1000}}){{1,1000}}){{1,{1000 + number}}}$"},
            {"type": "string", "pattern": f"^x{number}[a-zA-Z0-9_-]{{1,60}}$"},
            {"anyOf": [{"type": "string", "maxLength": 1000 + number}] * 600},
            {"type": "object", "properties": {f"p{number}_{index}": {"type": "integer"} for index in range(85)}},
        ]
        return kinds[number % len(kinds)]

    numbers = itertools.count()

    def send() -> None:
        while not target.is_over():
            number = next(numbers)
            named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(number)}}
            with target.connect_http1() as sock:
                sock.sendall(chat_request(target, response_format=named))
                if number % 2:
                    sock.recv(1 << 16)

    answers = 0
    with ThreadPoolExecutor(2) as pool:
        attackers = [pool.submit(send) for _ in range(2)]
        while not target.is_over():
            with target.connect_http1() as sock:
                sock.sendall(chat_request(target))
                answer = sock.recv(1 << 16)
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise SystemExit(f"the client beside: {answer!r}")
            answers += 1
    for attacker in attackers:
        attacker.result()
    return {"chats": next(numbers), "answers beside": answers}


def chat_request(target: Target, **members: object) -> bytes:
    """Return a chat of two tokens with the language model."""
    chat = {"model": "language", "messages": [{"role": "user", "content": "say hello"}], "max_tokens": 2, **members}
    body = json.dumps(chat, ensure_ascii=False).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {target.http}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@attack(
    *(
        f"--source=name={name},url=http://127.0.0.1:{{port}}/{name},model=face_detection_yunet"
        for name in ("head", "part", "large")
    ),
    *(
        f"--source=name={name},url=http://127.0.0.1:{{port}}/{name},model=face_detection_yunet"
        for name in ("empty", "bomb")
    ),
    "--source=name=circle,url=rtsp://user:word@127.0.0.1:{port}/circle,model=face_detection_yunet",
)
def hostile_cameras(target: Target) -> Sent:
    """Cameras of the server: two drip, one sends a picture without an end, one endless empty parts, one headers of huge
    pictures, and one redirects in a circle."""
    sent = {"connections": 0}
    multipart = b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=b\r\n\r\n"
    picture = b"--b\r\nContent-Type: image/jpeg\r\n"
    size = struct.pack(">HBHHB", 8 + 3 * 3, 8, 65500, 65500, 3)
    huge = b"\xff\xd8\xff\xc0" + size + b"\x01\x22\0\x02\x11\x01\x03\x11\x01\xff\xd9"
    answers = {
        "head": (b"HTTP/1.1 200 OK\r\n", b"a", 1.0),
        "part": (multipart + picture, b"a", 1.0),
        "large": (multipart + picture + b"\r\n", b"\xff" * 65536, 0.0),
        "empty": (multipart, (picture + b"Content-Length: 0\r\n\r\n\r\n") * 1000, 0.0),
        "bomb": (multipart, picture + b"Content-Length: %d\r\n\r\n%b\r\n" % (len(huge), huge), 0.1),
    }

    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            first = sock.recv(65536).decode()
            name = first.split()[1].rpartition("/")[2] if first else ""
            if name == "circle":
                place = f"rtsp://127.0.0.1:{target.port}/circle"
                while request := sock.recv(65536) if not first else first.encode():
                    first = ""
                    number = next(
                        (line for line in request.split(b"\r\n") if line.lower().startswith(b"cseq")), b"CSeq: 1"
                    )
                    sock.sendall(b"RTSP/1.0 302 Found\r\n%b\r\nLocation: %b\r\n\r\n" % (number, place.encode()))
                return
            begin, repeated, pause_s = answers[name]
            sock.sendall(begin)
            while not target.is_over():
                sock.sendall(repeated)
                time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", target.port)) as listening:
        listening.settimeout(0.2)
        while not target.is_over():
            with contextlib.suppress(TimeoutError):
                sock, _ = listening.accept()
                sent["connections"] += 1
                threading.Thread(target=answer, args=(sock,), daemon=True).start()
    return sent


# -- the clients beside


def call_http(connection: http.client.HTTPConnection) -> float:
    """Return the seconds that a call took, at least MAX_WAIT_S if it was not answered."""
    begun = time.perf_counter()
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        connection.close()
        return max(MAX_WAIT_S, time.perf_counter() - begun)
    return time.perf_counter() - begun


def waits(where: harness.Server, process: subprocess.Popen[str]) -> tuple[list[float], ...]:
    """Call until the attack has ended. Return what calls took in seconds: gRPC over one connection, over new ones, the
    CPU seconds that the server used during each, which do not depend on what else the machine does; and HTTP over one
    connection."""
    took: tuple[list[float], ...] = ([], [], [], [])
    options = [("grpc.use_local_subchannel_pool", 1)]
    http_connection = http.client.HTTPConnection(where.http, timeout=MAX_WAIT_S)
    with grpc.insecure_channel(where.grpc, options) as held, contextlib.closing(http_connection):
        for number in itertools.count():
            is_new = number % 10 == 9
            with grpc.insecure_channel(where.grpc, options) if is_new else contextlib.nullcontext(held) as channel:
                begun, cpu_s = time.perf_counter(), where.cpu_s()
                # A call that is never answered counts as one that took this long.
                with contextlib.suppress(grpc.RpcError):
                    channel.unary_unary(SERVICE + "ServerLive")(b"", timeout=MAX_WAIT_S, wait_for_ready=True)
                took[is_new].append(time.perf_counter() - begun)
                took[2].append(where.cpu_s() - cpu_s)
            took[3].append(call_http(http_connection))
            if process.poll() is not None:
                return took
            time.sleep(PAUSE_S)
    raise AssertionError("the loop has no end")


def measure(name: str, seconds: float, server_options: dict[str, Any]) -> dict[str, Any]:
    """Run an attack, and return what the client beside it saw and what the server used. `server_options` are those of
    `harness.server`."""
    with tempfile.TemporaryDirectory() as folder:
        harness.write_model(Path(folder), "small", MODEL)
        if name.endswith("_of_constrained_text"):
            (Path(folder) / "language/1").mkdir(parents=True)
            shutil.copy(LANGUAGE_MODEL, Path(folder) / "language/1/model.gguf")
            (Path(folder) / "language/config.pbtxt").write_text('backend: "openvino_genai"')
        elif name == hostile_cameras.__name__:
            shutil.copytree(DETECTOR, Path(folder) / DETECTOR.name)
        elif FLAGS[name]:
            harness.write_model(Path(folder), "policy", POLICY)
        port = harness.free_ports(1)[0]
        flags = [flag.format(port=port) for flag in FLAGS[name]]
        with harness.server(Path(folder), "--log-info=false", *flags, **server_options) as server:
            memory, cpu, begun = server.memory_mb()["Rss"], server.cpu_s(), time.monotonic()
            command = [sys.executable, __file__, "--attack", name, server.http, server.grpc, str(port), str(seconds)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                held, new, used, over_http = waits(server, process)
                sent = json.loads(process.stdout.read())
            lasted_s = time.monotonic() - begun
            return {
                "calls": len(held) + len(new),
                "unanswered": sum(took >= MAX_WAIT_S for took in (*held, *new, *over_http)),
                "p50_ms": 1e3 * harness.percentile(held, 0.5),
                "p99_ms": 1e3 * harness.percentile(held, 0.99),
                "max_ms": 1e3 * max(held),
                "new_p99_ms": 1e3 * harness.percentile(new, 0.99),
                "http_p99_ms": 1e3 * harness.percentile(over_http, 0.99),
                "cpu_p99_ms": 1e3 * harness.percentile(used, 0.99),
                "cpu_max_ms": 1e3 * max(used),
                "cores": (server.cpu_s() - cpu) / lasted_s,
                "grown_mb": server.memory_mb()["Rss"] - memory,
                "sent": sent,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack the server, and measure how long a client beside waits.")
    parser.add_argument("names", nargs="*", choices=[*ATTACKS, []], metavar="NAME", help=f"one of {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each attack lasts")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tree", type=Path, help="source tree of the server, to compare with another version")
    which.add_argument(
        "--server", metavar="COMMAND", help="program of the server, such as 'OTHER_PYTHON -m edge_server'"
    )
    parser.add_argument(
        "--attack", nargs=5, metavar="WORD", help="the attacker's process: name, HTTP, gRPC, port, seconds"
    )
    options = parser.parse_args()
    if options.attack:
        name, http, grpc_address, port, seconds = options.attack
        print(json.dumps(ATTACKS[name](Target(http, grpc_address, float(seconds), int(port)))))
        return
    heads = (
        "attack",
        "calls",
        "p50 ms",
        "p99 ms",
        "max ms",
        "new p99 ms",
        "HTTP p99 ms",
        "CPU p99 ms",
        "CPU max ms",
        "cores",
        "grown MB",
        "sent",
    )
    server_options = {"program": shlex.split(options.server)} if options.server else {"tree": options.tree}
    rows: list[Sequence[str]] = []
    failures = 0
    for name in options.names or ATTACKS:
        found = measure(name, options.seconds, server_options)
        unanswered = found.pop("unanswered")
        sent = ", ".join(f"{count} {what}" for what, count in found.pop("sent").items())
        rows.append((name, str(found.pop("calls")), *(f"{value:.1f}" for value in found.values()), sent))
        print(name, rows[-1][1:], file=sys.stderr)
        failures += unanswered
    print(harness.markdown(heads, rows))
    if failures:
        raise SystemExit(f"{failures} calls of the client beside were not answered within {MAX_WAIT_S:.0f} s")


if __name__ == "__main__":
    main()
