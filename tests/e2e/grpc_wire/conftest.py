"""A server for each gRPC transport, and a client of raw HTTP/2 frames that may also send invalid ones."""

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
import pytest
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
from tests.kit.model_folder import model_folder
from tests.kit.models import REPEAT, identity_config, picture_sum_config
from tests.kit.server import serve

SERVICE = "/inference.GRPCInferenceService/"
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

TRANSPORTS = ("http2", "grpcio")

ECHO_PARAMETERS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([request.parameters()], dtype=object))])
            for request in requests
        ]
"""


CAMERA = picture_sum_config()


@dataclass
class Answer:
    """The response on one stream. `reset` is the error code of RST_STREAM; `is_cut` means that the connection ended
    before the stream did."""

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    data: bytes = field(default=b"", repr=False)
    trailers: list[tuple[bytes, bytes]] = field(default_factory=list)
    reset: int | None = None
    is_cut: bool = False
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

    @property
    def messages(self) -> list[bytes]:
        """The messages as sent, still compressed where they are."""
        found, position = [], 0
        while position < len(self.data):
            _, length = struct.unpack_from(">BI", self.data, position)
            found.append(self.data[position + 5 : position + 5 + length])
            assert len(found[-1]) == length, "a message ends with its stream"
            position += 5 + length
        return found


class Wire:
    """One connection, frame by frame. Reads from the socket only in `read` and its callers.

    `settings` go into the first SETTINGS frame; by default the receive windows are as large as
    possible, so that the server never waits for this client.
    """

    def __init__(
        self, address: str, *, settings: dict[int, int] | None = None, greets: bool = True, buffer_bytes: int = 0
    ) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE_S)
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.connect((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()
        self.answers: dict[int, Answer] = {}
        self.frames: list[Frame] = []
        self.server_settings: dict[int, int] = {}
        self.goaways: list[GoAwayFrame] = []
        self.is_closed = False
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
        self,
        stream: int,
        path: str = SERVICE + "ModelInfer",
        *more: tuple[str | bytes, str | bytes],
        ends: bool = False,
        **changes: str | None,
    ) -> HeadersFrame:
        """Return the HEADERS frame of a call. `changes`: pseudo-headers and `content_type`, None to leave one out."""
        fields: dict[str, str | None] = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers",
            "content-type": "application/grpc",
        }  # fmt: skip
        for name, value in changes.items():
            fields[{"te": "te", "content_type": "content-type"}.get(name, f":{name}")] = value
        block = self.encoder.encode([(name, value) for name, value in fields.items() if value is not None] + [*more])
        flags = ["END_HEADERS", "END_STREAM"] if ends else ["END_HEADERS"]
        self.answers[stream] = Answer()
        return HeadersFrame(stream, block, flags=flags)

    def send_data(self, stream: int, data: bytes, *, ends: bool = True, size: int = 16_384) -> None:
        """Send bytes in frames of at most `size`, as the server's windows allow."""
        self._windows.setdefault(stream, self._initial_window())
        position = 0
        while True:
            while (room := min(self._window, self._windows[stream], size)) <= 0 and position < len(data):
                self.read()
            part = data[position : position + room] if position < len(data) else b""
            position += len(part)
            self._window -= len(part)
            self._windows[stream] -= len(part)
            is_last = position >= len(data)
            self.send(DataFrame(stream, part, flags=["END_STREAM"] if ends and is_last else []))
            if is_last:
                return

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

    def push(self, stream: int, data: bytes) -> int:
        """Send data as the windows allow until the server gives no more of them, or ends call or connection.

        Returns how many bytes were sent. Unlike `flood` it keeps the rules, so that nothing but lack of room stops it.
        """
        self._windows.setdefault(stream, self._initial_window())
        answer, position = self.answers[stream], 0
        self.socket.settimeout(NO_WINDOW_S)
        try:
            while position < len(data) and not answer.is_ended:
                room = min(self._window, self._windows[stream], 16_384)
                if room <= 0:
                    if self.read() is None:
                        break
                    continue
                part = data[position : position + room]
                self.send(DataFrame(stream, part))
                position += len(part)
                self._window -= len(part)
                self._windows[stream] -= len(part)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.socket.settimeout(PATIENCE_S)
        return position

    def call(self, method: str, *bodies: bytes, metadata: Sequence[tuple[Any, Any]] = ()) -> Answer:
        """Make a whole call with messages and return what came back."""
        stream = self.new_stream()
        self.send(self.head(stream, method if method.startswith("/") else SERVICE + method, *metadata))
        self.send_data(stream, b"".join(map(framed, bodies)))
        return self.finish(stream)

    # -- reading

    def read(self) -> Frame | None:
        """Return the next frame, None at the end of the connection. SETTINGS and PING are answered."""
        while True:
            frame = self._parse()
            if frame is not None:
                break
            try:
                received = self.socket.recv(1 << 20)
            except ConnectionError:
                received = b""
            if not received:
                self.is_closed = True
                return None
            self._unread += received
        self._take(frame)
        self.frames.append(frame)
        return frame

    def finish(self, stream: int) -> Answer:
        """Read until the stream has ended and return what came on it."""
        answer = self.answers.setdefault(stream, Answer())
        while not answer.is_ended:
            if self.read() is None:
                answer.is_ended = answer.is_cut = True
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
            before = self._initial_window()
            self.server_settings.update(frame.settings)
            for stream in self._windows:
                self._windows[stream] += self._initial_window() - before
            self.send_if_open(SettingsFrame(0, flags=["ACK"]))
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            self.send_if_open(PingFrame(0, frame.opaque_data, flags=["ACK"]))
        elif isinstance(frame, WindowUpdateFrame):
            if frame.stream_id:
                self._windows.setdefault(frame.stream_id, self._initial_window())
                self._windows[frame.stream_id] += frame.window_increment
            else:
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
                if stream > frame.last_stream_id and not open_answer.is_ended:
                    open_answer.is_ended = open_answer.is_cut = True
        if "END_STREAM" in frame.flags:
            answer.is_ended = True

    def _initial_window(self) -> int:
        return self.server_settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, 65_535)


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
    """A running server, what tests send to it, and what they hold it to."""

    def __init__(self, server: Any, transport: str) -> None:
        self.server = server
        self.address: str = server.grpc
        self.transport = transport
        self._stack = contextlib.ExitStack()

    framed = staticmethod(framed)
    numbers = staticmethod(numbers)
    repeat = staticmethod(repeat)

    def connect(self, **options: Any) -> Wire:
        """Open a raw connection, which is closed at the end of the test."""
        wire = Wire(self.address, **options)
        self._stack.callback(wire.close)
        return wire

    def channel(self, *options: tuple[str, Any]) -> grpc.Channel:
        """Open a channel of grpcio with a connection of its own, which is closed at the end of the test."""
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        channel = grpc.insecure_channel(self.address, [*unlimited, ("grpc.use_local_subchannel_pool", 1), *options])
        return self._stack.enter_context(channel)

    def close(self) -> None:
        self._stack.close()
        self._stack = contextlib.ExitStack()

    def assert_serves(self) -> None:
        """Ask on a connection of its own, and have the right answer."""
        wire = Wire(self.address)
        with contextlib.closing(wire):
            self.assert_right(wire.call("ModelInfer", numbers(id="next")), "next")
        assert self.server.process.poll() is None

    @staticmethod
    def assert_right(answer: Answer, request_id: str = "", count: int = 2) -> None:
        """Assert that a response is correct for `numbers(count=count)`."""
        assert (answer.status, answer.details) == (grpc.StatusCode.OK, ""), answer
        (message,) = answer.messages
        response = messages.ModelInferResponse.FromString(message)
        assert (response.model_name, response.id) == ("same", request_id)
        assert response.raw_output_contents[0] == counting(count)
        assert answer.reset in (None, 0)

    @contextlib.contextmanager
    def holds(self, *, memory_bytes: int, processor_s: float) -> Iterator[None]:
        """Assert that the server uses no more than this meanwhile, with memory as its peak."""
        process = Path(f"/proc/{self.server.process.pid}")
        (process / "clear_refs").write_text("5")  # sets the peak back
        before, used = self.peak_bytes(), self.processor_s()
        yield
        grown, spent = self.peak_bytes() - before, self.processor_s() - used
        assert grown <= memory_bytes, f"the server's memory grew by {grown >> 20} MiB"
        assert spent <= processor_s, f"the server used its processor for {spent:.1f} s"

    def peak_bytes(self) -> int:
        """Return the most memory that the server has had since this was set back."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10

    def processor_s(self) -> float:
        """Return the processor time that the server has used."""
        fields = Path(f"/proc/{self.server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def assert_settles(self) -> None:
        """Assert that the server becomes idle: the state of its clients costs no processor time."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            used, begun = self.processor_s(), time.monotonic()
            time.sleep(SETTLING_S)
            if self.processor_s() - used < SETTLED_SHARE * (time.monotonic() - begun):
                return
            assert time.monotonic() < deadline, "the server is busy with nothing to do"


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.full] if number else []) for number, name in enumerate(TRANSPORTS)],
)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport that this server has; all but the default belong to the full part."""
    return str(request.param)


@pytest.fixture(scope="session")
def transport_flags(transport: str) -> tuple[str, ...]:
    return (f"--grpc-transport={transport}",)


@pytest.fixture(scope="session")
def wire_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that these tests ask for."""
    models = tmp_path_factory.mktemp("wire")

    def add(name: str, config: str, source: str = "") -> None:
        model_folder(models / name, config)
        if source:
            (models / name / "1" / "model.py").write_text(source)

    delayed = 'parameters {{ key: "execute_delay_ms" value {{ string_value: "{}" }} }}'
    add("same", identity_config("UINT8"))
    add("slow", identity_config("UINT8", batch=1, more=delayed.format(250)))
    add("batched", identity_config("UINT8", batch=64, more=delayed.format(20) + "\ndynamic_batching { }"))
    add("repeat", REPEAT)
    add("camera", CAMERA)
    add(
        "parameters",
        'backend: "python"\nmax_batch_size: 0\n'
        'input { name: "INPUT0" data_type: TYPE_UINT8 dims: [-1, -1] }\n'
        'output { name: "OUTPUT0" data_type: TYPE_STRING dims: [1] }',
        ECHO_PARAMETERS,
    )
    return models


@pytest.fixture(scope="session")
def make_target() -> type[Target]:
    """Starts servers of a single test, which has to close them."""
    return Target


@pytest.fixture(scope="session")
def wire_server(wire_models: Path, transport: str, transport_flags: tuple[str, ...]) -> Iterator[Target]:
    """One server for each transport, which no test changes."""
    with serve(wire_models, "--grpc-header-forward-pattern=x-.*", *transport_flags) as server:
        yield Target(server, transport)
        server.stop_cleanly()


@pytest.fixture
def target(wire_server: Target) -> Iterator[Target]:
    """The server of the transport. After the test it must still give right answers."""
    try:
        yield wire_server
        wire_server.assert_serves()
    finally:
        wire_server.close()
