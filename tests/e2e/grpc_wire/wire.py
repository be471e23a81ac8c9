"""A client of raw HTTP/2 frames, which may also be invalid, and what tests ask of a server by it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
import hpack
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from edge_server.protocol import messages
from tests.kit.eventually import eventually

SERVICE = "/inference.GRPCInferenceService/"
INFER, STREAM_INFER = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATIENCE_S = 60.0
BLOCKED_S = 1.0
"""How long a server may read nothing before a flooding client gives up."""

LARGEST_WINDOW = 2**31 - 1
NO_WINDOW_S = 0.2
"""How long a client of large messages waits for flow-control window before it assumes that it gets none."""

SETTLING_S = 0.1
SETTLED_SHARE = 0.5
"""Share of one processor that a server without work stays below. A loop that spins takes all of it."""


@dataclass
class Answer:
    """The response on one stream. `reset` is the error code of RST_STREAM."""

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    data: bytes = field(default=b"", repr=False)
    trailers: list[tuple[bytes, bytes]] = field(default_factory=list)
    reset: int | None = None
    is_ended: bool = False

    def value(self, name: bytes) -> bytes | None:
        """Return a header or trailer, the last one of that name."""
        return dict([*self.headers, *self.trailers]).get(name)

    @property
    def status(self) -> grpc.StatusCode | None:
        """The gRPC status, None where none was sent."""
        text = self.value(b"grpc-status")
        return None if text is None else next(code for code in grpc.StatusCode if code.value[0] == int(text))

    @property
    def details(self) -> str:
        return unquote_to_bytes(self.value(b"grpc-message") or b"").decode()


class Wire:
    """One connection, frame by frame. Reads from the socket only in `read` and its callers.

    `settings` go into the first SETTINGS frame; by default the receive windows are as large as possible, so that the
    server never waits for this client.
    """

    def __init__(self, address: str, *, settings: dict[int, int] | None = None, greets: bool = True) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()
        self.answers: dict[int, Answer] = {}
        self.frames: list[Frame] = []
        self.goaways: list[GoAwayFrame] = []
        self._initial_window = 65_535
        self._unread = b""
        self._next_stream = 1
        self._window = 65_535
        self._windows: dict[int, int] = {}
        if greets:
            wide = {SettingsFrame.INITIAL_WINDOW_SIZE: LARGEST_WINDOW} if settings is None else settings
            update = WindowUpdateFrame(0, window_increment=LARGEST_WINDOW - 65_535) if settings is None else b""
            self.send(PREFACE, SettingsFrame(0, settings=wide), update)

    def close(self) -> None:
        self.socket.close()

    # -- sending

    def send(self, *parts: Frame | bytes) -> None:
        self.socket.sendall(b"".join(part if isinstance(part, bytes) else part.serialize() for part in parts))

    def send_if_open(self, *parts: Frame | bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.send(*parts)

    def new_stream(self) -> int:
        self._next_stream += 2
        return self._next_stream - 2

    def head(
        self, stream: int, path: str = INFER, *more: tuple[str | bytes, str | bytes], ends: bool = False
    ) -> HeadersFrame:
        """Return the HEADERS frame of a call."""
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
                  ("te", "trailers"), ("content-type", "application/grpc"), *more]  # fmt: skip
        flags = ["END_HEADERS", "END_STREAM"] if ends else ["END_HEADERS"]
        self.answers[stream] = Answer()
        return HeadersFrame(stream, self.encoder.encode(fields), flags=flags)

    def send_data(self, stream: int, data: bytes, *, ends: bool = True) -> None:
        """Send bytes as the server's windows allow."""
        while data:
            data = data[self._send_part(stream, data) :]
        if ends:
            self.send(DataFrame(stream, flags=["END_STREAM"]))

    def push(self, stream: int, data: bytes) -> int:
        """Send data as the windows allow until the server gives no more of them, or ends call or connection.

        Returns how many bytes were sent. Unlike `flood` it keeps the rules, so that nothing but lack of room stops it.
        """
        position = 0
        self.socket.settimeout(NO_WINDOW_S)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while position < len(data) and not self.answers[stream].is_ended:
                position += self._send_part(stream, data[position : position + 16_384])
        self.socket.settimeout(PATIENCE_S)
        return position

    def _send_part(self, stream: int, data: bytes) -> int:
        """Send a frame of data once there is a window for it; return how many bytes."""
        self._windows.setdefault(stream, self._initial_window)
        while (room := min(self._window, self._windows[stream], 16_384)) <= 0:
            if self.read() is None:
                raise ConnectionError("the server has closed the connection")
        self.send(DataFrame(stream, data[:room]))
        self._window -= len(data[:room])
        self._windows[stream] -= len(data[:room])
        return len(data[:room])

    def flood(self, data: bytes) -> bool:
        """Send bytes without reading anything until the server takes no more. Returns whether it took them all."""
        self.socket.settimeout(BLOCKED_S)
        try:
            self.socket.sendall(data)
        except (TimeoutError, ConnectionError):
            return False
        finally:
            self.socket.settimeout(PATIENCE_S)
        return True

    def send_call(
        self, body: bytes, *, path: str = INFER, metadata: Sequence[tuple[Any, Any]] = (), flag: int = 0,
        ends: bool = True,
    ) -> int:  # fmt: skip
        """Begin a call with a message and return its stream. `flag` 1: the message is compressed."""
        stream = self.new_stream()
        self.send(self.head(stream, path, *metadata))
        self.send_data(stream, framed(body, flag), ends=ends)
        return stream

    def call(self, method: str, body: bytes, metadata: Sequence[tuple[Any, Any]] = ()) -> Answer:
        """Make a whole call with a message and return what came back."""
        path = method if method.startswith("/") else SERVICE + method
        return self.finish(self.send_call(body, path=path, metadata=metadata))

    # -- reading

    def read(self) -> Frame | None:
        """Return the next frame, None at the end of the connection. SETTINGS and PING are answered."""
        while (frame := self._parse()) is None:
            try:
                received = self.socket.recv(1 << 20)
            except ConnectionError:
                received = b""
            if not received:
                return None
            self._unread += received
        self._take(frame)
        self.frames.append(frame)
        return frame

    def finish(self, stream: int) -> Answer:
        """Read until the stream or the connection has ended, and return what came on it."""
        answer = self.answers[stream]
        while not answer.is_ended:
            if self.read() is None:
                answer.is_ended = True
        return answer

    def first_message(self, stream: int) -> bytes:
        """Read until the next message of the stream is complete, and return it."""
        answer = self.answers[stream]
        while len(answer.data) < 5 or len(answer.data) < 5 + struct.unpack_from(">BI", answer.data)[1]:
            assert not answer.is_ended, answer
            assert self.read() is not None, "the connection ended"
        length = struct.unpack_from(">BI", answer.data)[1]
        message, answer.data = answer.data[5 : 5 + length], answer.data[5 + length :]
        return message

    def ping(self) -> None:
        """Wait until the server has read everything that was sent so far."""
        self.send(PingFrame(0, b"ordered!"))
        while not any(isinstance(frame, PingFrame) and "ACK" in frame.flags for frame in self.frames):
            assert self.read() is not None, "the connection ended"
        self.frames.clear()

    def rest(self) -> None:
        """Read until the server closes the connection."""
        while self.read() is not None:
            pass

    def _parse(self) -> Frame | None:
        if len(self._unread) < 9:
            return None
        frame, length = Frame.parse_frame_header(memoryview(self._unread[:9]))
        if len(self._unread) < 9 + length:
            return None
        frame.parse_body(memoryview(self._unread[9 : 9 + length]))
        self._unread = self._unread[9 + length :]
        return frame

    def _take(self, frame: Frame) -> None:
        answer = self.answers.setdefault(frame.stream_id, Answer()) if frame.stream_id else Answer()
        if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            window = frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._initial_window)
            self._windows = {key: room + window - self._initial_window for key, room in self._windows.items()}
            self._initial_window = window
            self.send_if_open(SettingsFrame(0, flags=["ACK"]))
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            self.send_if_open(PingFrame(0, frame.opaque_data, flags=["ACK"]))
        elif isinstance(frame, WindowUpdateFrame) and frame.stream_id:
            room = self._windows.get(frame.stream_id, self._initial_window)
            self._windows[frame.stream_id] = room + frame.window_increment
        elif isinstance(frame, WindowUpdateFrame):
            self._window += frame.window_increment
        elif isinstance(frame, HeadersFrame):
            assert "END_HEADERS" in frame.flags, "the answers of these tests fit into one frame"
            found = self.decoder.decode(frame.data, raw=True)
            (answer.trailers if answer.headers else answer.headers).extend(found)
        elif isinstance(frame, DataFrame):
            answer.data += frame.data
        elif isinstance(frame, RstStreamFrame):
            answer.reset, answer.is_ended = frame.error_code, True
        elif isinstance(frame, GoAwayFrame):
            self.goaways.append(frame)
            for stream, open_answer in self.answers.items():
                open_answer.is_ended |= stream > frame.last_stream_id
        answer.is_ended |= "END_STREAM" in frame.flags


def framed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


def counting(count: int) -> bytes:
    """Return the bytes 0, 1, ... 255, 0, ..."""
    return (bytes(range(256)) * (count // 256 + 1))[:count]


def numbers(model: str = "same", count: int = 2, **fields: Any) -> bytes:
    """Return a ModelInferRequest of `count` bytes 0, 1, ... as input INPUT0."""
    message = messages.ModelInferRequest(model_name=model, **fields)
    message.inputs.add(name="INPUT0", datatype="UINT8", shape=[1, count])
    message.raw_input_contents.append(counting(count))
    return bytes(message.SerializeToString())


def repeat(values: Sequence[int], delay_ms: int = 0) -> bytes:
    """Return a ModelInferRequest to `repeat`, which sends a response for each value."""
    message = messages.ModelInferRequest(model_name="repeat")
    tensors = {"IN": (values, "INT32", "<i"), "DELAY": ([delay_ms] * len(values), "UINT32", "<I"),
               "WAIT": ([0], "UINT32", "<I")}  # fmt: skip
    for name, (content, datatype, layout) in tensors.items():
        message.inputs.add(name=name, datatype=datatype, shape=[len(content)])
        message.raw_input_contents.append(b"".join(struct.pack(layout, value) for value in content))
    return bytes(message.SerializeToString())


class Target:
    """A running server, and what tests hold it to."""

    def __init__(self, server: Any, transport: str) -> None:
        self.server = server
        self.address: str = server.grpc
        self.transport = transport
        self._stack = contextlib.ExitStack()

    def connect(self, **options: Any) -> Wire:
        """Open a raw connection, which is closed at the end of the test."""
        wire = Wire(self.address, **options)
        self._stack.callback(wire.close)
        return wire

    def channel(self) -> grpc.Channel:
        """Open a channel of grpcio with a connection of its own, which is closed at the end of the test."""
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        channel = grpc.insecure_channel(self.address, [*unlimited, ("grpc.use_local_subchannel_pool", 1)])
        return self._stack.enter_context(channel)

    def close(self) -> None:
        self._stack.close()

    def assert_serves(self) -> None:
        """Ask on a connection of its own, and have the right answer."""
        with contextlib.closing(Wire(self.address)) as wire:
            self.assert_right(wire.call("ModelInfer", numbers()))
        assert self.server.process.poll() is None

    @staticmethod
    def assert_right(answer: Answer, count: int = 2) -> None:
        """Assert that a response is correct for `numbers(count=count)`."""
        assert (answer.status, answer.details) == (grpc.StatusCode.OK, ""), answer
        _, length = struct.unpack_from(">BI", answer.data)
        assert length == len(answer.data) - 5, "one whole message"
        response = messages.ModelInferResponse.FromString(answer.data[5:])
        assert (response.model_name, response.raw_output_contents[0]) == ("same", counting(count))
        assert answer.reset in (None, 0)

    @contextlib.contextmanager
    def holds(self, *, memory_bytes: int, processor_s: float) -> Iterator[None]:
        """Assert that the server uses no more than this meanwhile, with memory as its peak, and is idle afterwards."""
        (Path(f"/proc/{self.server.process.pid}") / "clear_refs").write_text("5")  # sets the peak back
        before, used = self._peak_bytes(), self._processor_s()
        yield
        self.assert_serves()
        grown, spent = self._peak_bytes() - before, self._processor_s() - used
        assert grown <= memory_bytes, f"the server's memory grew by {grown >> 20} MiB"
        assert spent <= processor_s, f"the server used its processor for {spent:.1f} s"
        assert eventually(self._is_idle, PATIENCE_S), "the server is busy with nothing to do"

    def _peak_bytes(self) -> int:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10

    def _processor_s(self) -> float:
        fields = Path(f"/proc/{self.server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _is_idle(self) -> bool:
        """Whether the state of its clients costs the server no processor time."""
        used, begun = self._processor_s(), time.monotonic()
        time.sleep(SETTLING_S)
        return self._processor_s() - used < SETTLED_SHARE * (time.monotonic() - begun)
