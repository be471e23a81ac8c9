"""gRPC connections of a load test, against a server made with the library h2 that answers as each test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from edge_server.plugins.tuning.clients.grpc_client import GrpcControl, infer_call
from edge_server.plugins.tuning.clients.grpc_connection import GrpcCall, GrpcLoadConnection, frame_message
from edge_server.protocol import messages

MESSAGE: bytes = messages.ModelInferResponse(model_name="m").SerializeToString()
HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]
Settings = h2.settings.SettingCodes
Answer = Callable[["Server", h2.connection.H2Connection, int, bytes], None]


def answer_well(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.send_headers(stream, HEADERS)
    http2.send_data(stream, frame_message(MESSAGE))
    http2.send_headers(stream, OK, end_stream=True)


class Server:
    """Accepts one connection after another. `answer` is called for each whole request, or each message of a stream."""

    def __init__(self, answer: Answer, settings: dict[Any, int], *, streams: bool) -> None:
        self._answer = answer
        self._settings = settings
        self._streams = streams
        self.connections = 0
        self.bodies: list[bytes] = []
        self.resets = 0
        self.is_closing = False
        """Whether to close the connection after the answer."""

    def serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test closed the listener
            while True:
                wire, _ = listener.accept()
                self.connections += 1
                with wire, contextlib.suppress(ConnectionError):
                    self._serve_one(wire)

    def _serve_one(self, wire: socket.socket) -> None:
        http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        http2.initiate_connection()
        if self._settings:
            http2.update_settings(self._settings)
        bodies: dict[int, bytes] = {}
        self.is_closing = False
        while not self.is_closing:
            if pending := http2.data_to_send():
                wire.sendall(pending)
            data = wire.recv(1 << 16)
            if not data:
                return
            for event in http2.receive_data(data):
                if self.is_closing:
                    break
                if isinstance(event, h2.events.DataReceived):
                    bodies[event.stream_id] = bodies.get(event.stream_id, b"") + event.data
                    http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamReset):
                    self.resets += 1
                stream = getattr(event, "stream_id", 0)
                body = bodies.get(stream, b"")
                is_whole = len(body) >= 5 and len(body) == 5 + int.from_bytes(body[1:5], "big")
                if is_whole and isinstance(event, h2.events.DataReceived if self._streams else h2.events.StreamEnded):
                    self.bodies.append(bodies.pop(stream))
                    self._answer(self, http2, stream, body)
        wire.sendall(http2.data_to_send())


@pytest.fixture
def grpc(ask: Callable[..., Any]) -> Callable[..., Any]:
    """`with grpc(answer, settings, streams=False, is_decoupled=False, workers=1) as (send, server):`"""

    @contextlib.contextmanager
    def run(
        answer: Answer = answer_well,
        settings: dict[Any, int] | None = None,
        *,
        streams: bool = False,
        is_decoupled: bool = False,
        metadata: Any = (),
        timeout_s: float = 30.0,
    ) -> Iterator[Any]:
        call: GrpcCall = infer_call("localhost:1", metadata, streams=streams, is_decoupled=is_decoupled)
        server = Server(answer, settings or {}, streams=streams)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=server.serve, args=(listener,))
            thread.start()
            try:
                make = partial(GrpcLoadConnection, call=call)
                with ask(listener.getsockname()[:2], make, timeout_s) as send:
                    yield send, server
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()

    return run


def request(size: int = 10) -> bytes:
    return frame_message(bytes(number % 251 for number in range(size)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {Settings.INITIAL_WINDOW_SIZE: 1000},
        {Settings.HEADER_TABLE_SIZE: 0},
        {Settings.MAX_FRAME_SIZE: 1 << 20, Settings.INITIAL_WINDOW_SIZE: 1 << 20},
    ],
)
def test_large_requests_arrive_whole_through_small_windows_and_frames(
    grpc: Callable[..., Any], settings: dict[Any, int]
) -> None:
    large = request(200_000)
    with grpc(settings=settings) as (send, server):
        assert send(request()) == [("", "")]
        assert send(large, large, request()) == [("", "")] * 3
    assert sorted(map(len, server.bodies)) == [15, 15, 200_005, 200_005]
    assert all(body in (large, request()) for body in server.bodies)


@pytest.mark.parametrize("size", [5000, 20_000])  # the second is larger than a frame, too
def test_metadata_larger_than_the_table_of_headers_is_sent_with_each_request(
    grpc: Callable[..., Any], size: int
) -> None:
    with grpc(metadata=[("x-key", "v" * size)]) as (send, server):
        assert [send(request()) for _ in range(3)] == [[("", "")]] * 3
    assert server.connections == 1


def test_no_more_streams_are_opened_than_the_server_allows(grpc: Callable[..., Any]) -> None:
    with grpc(settings={Settings.MAX_CONCURRENT_STREAMS: 1}) as (send, server):
        send(request())  # the server's settings have come by then
        # h2 ends the connection of a client that opens more.
        assert send(*[request()] * 4) == [("", "")] * 4
        assert server.connections == 1


def trailers_only(status: str, message: str) -> Answer:
    def answer(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
        http2.send_headers(stream, [*HEADERS, ("grpc-status", status), ("grpc-message", message)], end_stream=True)

    return answer


def without_status(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.send_headers(stream, HEADERS)
    http2.send_data(stream, frame_message(MESSAGE), end_stream=True)


def without_message(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.send_headers(stream, [*HEADERS, *OK], end_stream=True)


def not_of_grpc(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.send_headers(stream, [(":status", "502")])
    http2.send_data(stream, b"<html>", end_stream=True)


def no_response(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.send_headers(stream, HEADERS)
    http2.send_data(stream, frame_message(b"\xff\xff"))
    http2.send_headers(stream, OK, end_stream=True)


def compressed(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.send_headers(stream, HEADERS)
    http2.send_data(stream, b"\1" + frame_message(MESSAGE)[1:])


def reset(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.reset_stream(stream, 11)


def refused(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
    http2.close_connection(11, b"too_many_pings")
    server.is_closing = True


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (trailers_only("8", "try %E2%82%AC later"), "RESOURCE_EXHAUSTED", "try \u20ac later"),
        (trailers_only("99", ""), "UNKNOWN", ""),
        (without_status, "INTERNAL", "ended without a grpc-status"),
        (without_message, "INTERNAL", "no message"),
        (not_of_grpc, "HTTP 502", "not one of gRPC"),
        (no_response, "INVALID ANSWER", "no ModelInferResponse"),
        (compressed, "UNAVAILABLE", "compressed"),
        (reset, "RESOURCE_EXHAUSTED", "ENHANCE_YOUR_CALM"),
        (refused, "UNAVAILABLE", "ENHANCE_YOUR_CALM too_many_pings"),
    ],
)
def test_a_failed_call_is_named_and_the_next_one_succeeds(
    grpc: Callable[..., Any], answer: Answer, reason: str, message: str
) -> None:
    def at_first(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
        (answer if len(server.bodies) == 1 else answer_well)(server, http2, stream, body)

    with grpc(at_first) as (send, _):
        (found,) = send(request())
        assert found[0] == reason
        assert message in found[1]
        assert send(request()) == [("", "")]


@pytest.mark.parametrize("streams", [False, True])
def test_requests_that_a_leaving_server_has_not_read_go_over_a_new_connection(
    grpc: Callable[..., Any], streams: bool
) -> None:
    answered = 0

    def answer(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
        nonlocal answered
        answered += 1
        if streams:
            if stream not in opened.setdefault(server.connections, set()):
                http2.send_headers(stream, HEADERS)
                opened[server.connections].add(stream)
            http2.send_data(stream, frame_message(messages.ModelStreamInferResponse().SerializeToString()))
        else:
            answer_well(server, http2, stream, body)
        if answered == 2:
            http2.close_connection(0, last_stream_id=stream)
            server.is_closing = True

    opened: dict[int, set[int]] = {}
    with grpc(answer, streams=streams) as (send, server):
        assert send(request()) == [("", "")]
        assert send(request(), request(11), request(12)) == [("", "")] * 3
        assert server.connections == 2


def stream_message(*, error: str = "", is_final: bool = False) -> bytes:
    message = messages.ModelStreamInferResponse(error_message=error)
    if is_final:
        message.infer_response.parameters["triton_final_response"].bool_param = True
    return frame_message(message.SerializeToString())


def test_late_responses_of_a_failed_decoupled_request_are_ignored(grpc: Callable[..., Any]) -> None:
    def answer(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
        http2.send_headers(stream, HEADERS)
        if len(server.bodies) == 1:
            # The end of the failed request comes behind its error.
            http2.send_data(stream, stream_message(error="no") + stream_message(is_final=True))
        else:
            http2.send_data(stream, stream_message() + stream_message(error="again"))

    with grpc(answer, streams=True, is_decoupled=True) as (send, _):
        assert send(request()) == [("STREAM_ERROR", "no")]
        assert send(request()) == [("STREAM_ERROR", "again")]
        assert send.count == 2


def test_a_stream_that_never_answers_times_out_and_is_reopened(grpc: Callable[..., Any]) -> None:
    def answer(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
        if len(server.bodies) > 1:
            http2.send_headers(stream, HEADERS)
            http2.send_data(stream, stream_message())

    with grpc(answer, streams=True, timeout_s=0.05) as (send, server):
        assert send(request()) == [("DEADLINE_EXCEEDED", "too late")]
        assert send(request()) == [("", "")]
        assert (server.connections, server.resets) == (1, 1)


@pytest.mark.parametrize("scheme", ["unix:", "unix://"])
def test_queries_go_to_a_unix_socket(tmp_path: Path, scheme: str) -> None:
    def answer(server: Server, http2: h2.connection.H2Connection, stream: int, body: bytes) -> None:
        index = messages.RepositoryIndexResponse()
        index.models.add(name="m")
        http2.send_headers(stream, HEADERS)
        http2.send_data(stream, frame_message(index.SerializeToString()))
        http2.send_headers(stream, OK, end_stream=True)

    path = str(tmp_path / "grpc")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=Server(answer, {}, streams=False).serve, args=(listener,))
        thread.start()
        try:
            assert GrpcControl(f"{scheme}{path}", (), 30.0).model_names() == ["m"]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("hello", "message"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "http1.x server"), (b"SSH-2.0-OpenSSH\r\n", "Expected SETTINGS frame")],
)
def test_a_server_of_another_protocol_is_reported(ask: Callable[..., Any], hello: bytes, message: str) -> None:
    call = infer_call("localhost:1", (), streams=False, is_decoupled=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ask(listener.getsockname()[:2], partial(GrpcLoadConnection, call=call)) as send,
    ):

        def greet() -> None:
            wire, _ = listener.accept()
            with wire:
                wire.sendall(hello)
                wire.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        assert send(request()) == [("UNAVAILABLE", message)]
        thread.join()
