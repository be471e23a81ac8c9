"""Robots' connections with an echo behind them: WebSockets and ZeroMQ's sockets of others, and clients that break the
protocols."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edge_server.errors import InvalidRequest, QueueFull
from edge_server.frontends.http.request_head import parse_head
from edge_server.plugins.policies.connections.listener import MAX_CONNECTIONS, RobotListener
from edge_server.plugins.policies.connections.message_memory import MessageMemory
from edge_server.plugins.policies.connections.message_stream import MessageStream
from edge_server.plugins.policies.connections.websocket import WebSocket, accept_websocket
from edge_server.plugins.policies.connections.zmtp import ZmtpConnection
from tests.kit.eventually import eventually

MAX_BYTES = 3 << 20
OPEN = (
    b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"

Connect = Callable[[RobotListener], socket.socket]


class Echo:
    """Answers each message with itself, on a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.websocket, self.zmtp = (
            self._run(self._listen(serve)) for serve in (self._serve_websocket, self._serve_zmtp)
        )

    async def _listen(self, serve: Any) -> RobotListener:
        self._memory = MessageMemory(64 << 20)
        listener = RobotListener("--echo", "127.0.0.1:0", serve)
        await listener.start()
        return listener

    async def _serve_websocket(self, stream: MessageStream) -> None:
        await stream.write(accept_websocket(parse_head(await stream.read_until(b"\r\n\r\n", 8192))))
        channel = WebSocket(stream, self._memory, MAX_BYTES)
        while (message := await channel.receive()) is not None:
            data = bytes(message.data)
            await channel.send(data.decode() if message.is_text else data)
            message.memory.release()

    async def _serve_zmtp(self, stream: MessageStream) -> None:
        connection = ZmtpConnection(stream, self._memory, MAX_BYTES)
        await connection.shake_hands()
        while True:
            try:
                request = await connection.receive()
            except (InvalidRequest, QueueFull) as error:
                await connection.answer(error.message.encode())
                return
            await connection.answer(bytes(request.data))
            request.memory.release()

    def close(self) -> None:
        for listener in (self.websocket, self.zmtp):
            self._run(listener.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def connect(echo: Echo) -> Iterator[Connect]:
    opened: list[socket.socket] = []

    def connect(listener: RobotListener) -> socket.socket:
        host, _, port = listener.address.rpartition(":")
        opened.append(socket.create_connection((host, int(port)), 30))
        return opened[-1]

    yield connect
    for item in opened:
        item.close()


@pytest.fixture
def robot(echo: Echo, connect: Connect) -> socket.socket:
    """A WebSocket that was opened."""
    found = connect(echo.websocket)
    open_websocket(found)
    return found


def open_websocket(robot: socket.socket) -> None:
    robot.sendall(OPEN)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += robot.recv(1)
    # The key and the answer to it are the example of RFC 6455, section 1.3.
    assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head


def frame(opcode: int, data: bytes = b"", *, is_final: bool = True, mask: bytes = b"\x01\x02\x03\x04") -> bytes:
    first = opcode | 0x80 * is_final
    if len(data) < 126:
        header = bytes((first, 0x80 | len(data)))
    elif len(data) < 1 << 16:
        header = bytes((first, 0xFE)) + len(data).to_bytes(2, "big")
    else:
        header = bytes((first, 0xFF)) + len(data).to_bytes(8, "big")
    key = (mask * (len(data) // 4 + 1))[: len(data)]
    masked = (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(len(data), "big")
    return header + mask + masked


def read(robot: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += robot.recv(size - len(data)) or pytest.fail(f"the connection ended after {data!r}")
    return data


def read_frame(robot: socket.socket) -> tuple[int, bytes]:
    """Return the opcode of a frame that ends a message, and its payload."""
    first, size = read(robot, 2)
    assert first >= 0x80
    if size > 125:
        size = int.from_bytes(read(robot, 2 if size == 126 else 8), "big")
    return first & 15, read(robot, size)


# -- both wires --------------------------------------------------------------------------------------------------------


class Wire:
    """The bytes of a client of one of the wires, whose connection is open."""

    def __init__(self, name: str, echo: Echo, connect: Connect) -> None:
        self.is_websocket = name == "websocket"
        self.socket = connect(echo.websocket if self.is_websocket else echo.zmtp)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.is_websocket:
            open_websocket(self.socket)
        else:
            self.socket.sendall(GREETING + READY)
            read(self.socket, len(GREETING))
            self._read_zmtp()

    def pack(self, data: bytes, size: int | None = None) -> bytes:
        """Return a message, or its begin: with a larger size than that of the data."""
        size = len(data) if size is None else size
        if self.is_websocket:
            return frame(2, data) if size == len(data) else b"\x82\xff" + size.to_bytes(8, "big") + b"\0\0\0\0" + data
        length = bytes((0, size)) if size < 256 else b"\x02" + size.to_bytes(8, "big")
        return b"\x01\x00" + length + data

    def receive(self) -> bytes:
        if self.is_websocket:
            opcode, data = read_frame(self.socket)
            assert opcode == 2
            return data
        assert self._read_zmtp() == b""
        return self._read_zmtp()

    def _read_zmtp(self) -> bytes:
        (flags,) = read(self.socket, 1)
        return read(self.socket, int.from_bytes(read(self.socket, 8 if flags & 2 else 1), "big"))


@pytest.fixture(params=["websocket", "zmtp"])
def wire(request: pytest.FixtureRequest, echo: Echo, connect: Connect) -> Wire:
    return Wire(request.param, echo, connect)


@pytest.mark.parametrize("size", [0, 1, 3, 125, 126, 255, 256, 65_535, 65_536, 70_001, (1 << 20) + 2, MAX_BYTES])
def test_messages_of_any_size_come_back(wire: Wire, size: int) -> None:
    data = os.urandom(size)
    wire.socket.sendall(wire.pack(data))
    assert wire.receive() == data


def test_messages_that_arrive_byte_by_byte_are_read(wire: Wire) -> None:
    for byte in wire.pack(b"slowly" * 30):
        wire.socket.sendall(bytes((byte,)))
    assert wire.receive() == b"slowly" * 30


def test_many_small_messages_in_a_row_come_back_in_order(wire: Wire) -> None:
    messages = [str(number).encode() for number in range(3000)]
    wire.socket.sendall(b"".join(map(wire.pack, messages)))
    assert [wire.receive() for _ in messages] == messages


def test_memory_is_taken_for_a_payload_before_it_is_received_and_given_back(echo: Echo, wire: Wire) -> None:
    wire.socket.sendall(wire.pack(b"", MAX_BYTES))
    assert eventually(lambda: [message.size for message in echo._memory._messages] == [MAX_BYTES])
    wire.socket.sendall(bytes(MAX_BYTES))
    assert wire.receive() == bytes(MAX_BYTES)
    # The next message, which is waited for, may be among them.
    assert eventually(lambda: not any(message.size for message in echo._memory._messages))


def test_a_client_that_leaves_within_a_message_keeps_no_memory(
    echo: Echo, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    wire.socket.sendall(wire.pack(b"half", 1 << 20))
    assert eventually(lambda: echo._memory._messages)
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.socket.close()
    assert eventually(lambda: not echo._memory._messages)
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["websocket", "zmtp"])
def test_a_burst_of_connections_takes_the_places_of_older_ones(echo: Echo, connect: Connect, name: str) -> None:
    listener = getattr(echo, name)
    opened = [connect(listener) for _ in range(3 * MAX_CONNECTIONS)]
    opened[-1].sendall(OPEN if name == "websocket" else GREETING)
    assert read(opened[-1], 10) in (b"HTTP/1.1 1", GREETING[:10])
    # What it had sent before it knew of a newer one.
    while opened[0].recv(4096):
        pass
    assert len(listener.connections) <= MAX_CONNECTIONS
    listener.check_room()


# -- WebSocket ---------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_message_are_joined_and_control_frames_may_stand_between_them(robot: socket.socket) -> None:
    parts = [frame(2, b"one", is_final=False), frame(9, b"are you there"), frame(0, b"", is_final=False), frame(10)]
    robot.sendall(b"".join([*parts, frame(0, b"two"), frame(1, b"text")]))
    assert [read_frame(robot) for _ in range(3)] == [(10, b"are you there"), (2, b"onetwo"), (1, b"text")]


def test_a_close_is_answered(robot: socket.socket) -> None:
    robot.sendall(frame(8, b"\x03\xe8bye"))
    assert read_frame(robot) == (8, b"\x03\xe8")
    assert robot.recv(1) == b""


TOO_LARGE = (1009, f"expected a message of at most {MAX_BYTES} bytes".encode())
OUT_OF_TURN = (1002, b"a frame is not the one that has to follow")


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (b"\x82\x01x", 1002, b"incorrect masking"),
        (b"\xc2\x81\0\0\0\0x", 1002, b"reserved bits must be 0"),
        (frame(3), 1002, b"invalid opcode"),
        (frame(11), 1002, b"invalid opcode"),
        (frame(0, b"x"), *OUT_OF_TURN),
        (frame(2, b"x", is_final=False) + frame(2, b"y"), *OUT_OF_TURN),
        (frame(9, b"x", is_final=False), 1002, b"fragmented control frame"),
        (frame(9, b"x" * 126), 1002, b"control frame too long"),
        (frame(9, b"x" * MAX_BYTES), 1002, b"control frame too long"),
        (frame(8, b"\x03"), 1002, b"close frame too short"),
        (frame(8, b"\x03\xed"), 1002, b"invalid status code"),
        (frame(8, b"\x03\xe8\xff"), 1007, b"expected the reason of a close in UTF-8"),
        (b"\x82\xff" + (1 << 63).to_bytes(8, "big") + b"\0\0\0\0", *TOO_LARGE),
        (b"\x82\xff" + (MAX_BYTES + 1).to_bytes(8, "big") + b"\0\0\0\0", *TOO_LARGE),
        (frame(2, b"x" * MAX_BYTES, is_final=False) + frame(10, b"x" * 125) + frame(0, b"x"), *TOO_LARGE),
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_and_gone(
    echo: Echo, robot: socket.socket, data: bytes, code: int, reason: bytes
) -> None:
    robot.sendall(data)
    assert read_frame(robot) == (8, code.to_bytes(2, "big") + reason)
    assert robot.recv(1) == b""
    assert not echo._memory._messages


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"GET", b"POST"),
        (b"Upgrade: websocket", b"Upgrade: h2c"),
        (b"Connection: Upgrade", b"Connection: close"),
        (b"Connection: Upgrade", b"Connection: " + b"a," * 4000 + b"Upgrade"),
        (b"Version: 13", b"Version: 8"),
        (b"dGhlIHNhbXBsZSBub25jZQ==", base64.b64encode(b"short")),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"?"),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"\xff"),
    ],
)
def test_a_request_that_opens_no_websocket_is_refused(old: bytes, new: bytes) -> None:
    with pytest.raises(InvalidRequest, match="expected GET with the headers Upgrade: websocket, Connection: Upgrade, "):
        accept_websocket(parse_head(OPEN.replace(old, new)))


def test_a_connection_whose_client_is_gone_ends_without_a_traceback(
    echo: Echo, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    is_served, is_gone = threading.Event(), threading.Event()

    async def serve(stream: MessageStream) -> None:
        await stream.read(1)
        is_served.set()
        is_gone.wait(30)  # The loop stands: it does not hear of the end of the connection.

    listener = echo._run(echo._listen(serve))
    client = connect(listener)
    client.sendall(b"x")
    assert is_served.wait(30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    is_gone.set()
    echo._run(listener.stop())
    assert caplog.messages == []


# -- ZeroMQ ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["REQ", "DEALER"])
@pytest.mark.parametrize("size", [0, 256, MAX_BYTES])
def test_sockets_of_zeromqs_library_get_their_messages_back(echo: Echo, kind: str, size: int) -> None:
    zmq = pytest.importorskip("zmq", reason="needs pyzmq, of the extra test")
    data = os.urandom(size)
    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 30_000)
        client.setsockopt(zmq.HEARTBEAT_IVL, 10)
        client.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        client.connect(f"tcp://{echo.zmtp.address}")
        for _ in range(2):
            client.send(data)
            assert client.recv() == data
        client.send(b"x" * (MAX_BYTES + 1))
        assert client.recv() == f"expected a message of at most {MAX_BYTES} bytes, given {MAX_BYTES + 1}".encode()


def test_a_message_of_many_parts_is_refused_at_its_first_one_and_takes_no_memory(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    zmq = pytest.importorskip("zmq", reason="needs pyzmq, of the extra test")
    begun = []
    begin = echo._memory.begin
    monkeypatch.setattr(echo._memory, "begin", lambda refuse: begun.append(1) or begin(refuse))
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 30_000)
        client.connect(f"tcp://{echo.zmtp.address}")
        part = bytes(1 << 20)
        for _ in range(50):
            client.send(part, zmq.SNDMORE)
        client.send(part)
        assert client.recv() == b"expected a message of one part"
    assert begun == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        GREETING.replace(b"\x7f\x03", b"\x7f\x01"),
        GREETING.replace(b"NULL", b"PLAI"),
        GREETING + READY.replace(b"REQ", b"SUB"),
        GREETING + b"\x00" + READY[1:],
        GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"),
        GREETING + READY + b"\x01\x03abc",
        GREETING + READY + b"\x01\x00\x01\x00",
        GREETING + READY + b"\x08\x00",
        GREETING + READY + b"\x06" + (1 << 40).to_bytes(8, "big"),
        GREETING + READY + b"\x02" + (1 << 63).to_bytes(8, "big"),
    ],
)
def test_what_is_no_request_over_zeromq_ends_its_connection(echo: Echo, connect: Connect, data: bytes) -> None:
    client = connect(echo.zmtp)
    client.sendall(data)
    client.shutdown(socket.SHUT_WR)
    received = b""
    while piece := client.recv(4096):
        received += piece
    assert received.startswith(GREETING)
    assert not echo._memory._messages
