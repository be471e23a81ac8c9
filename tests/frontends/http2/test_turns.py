"""What one client can make the HTTP/2 server do before others are served, and what of it the server keeps."""

from __future__ import annotations

import itertools
import queue
import select
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from edge_server.frontends.http2 import limits
from edge_server.frontends.http2 import server as http2_server
from edge_server.frontends.http2.stream_interface import NoReceiver
from edge_server.http2.frames import Http2ErrorCode
from edge_server.http2.header_blocks import HeaderMemory, HeaderReader, encode_headers

Serve = Callable[..., Any]

REQUEST = encode_headers([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/echo"), (b":authority", b"x")])
NAMED = 62
"""Index of the newest entry of the dynamic table, RFC 7541 section 2.3.3."""


def entry(name: bytes, value: bytes) -> bytes:
    """Return a literal field that is added to the table."""
    return b"\x40" + encode_headers([(name, value)])[1:]


def named(count: int) -> bytes:
    """Return `count` fields, each the newest entry of the table."""
    return bytes((0x80 | NAMED,)) * count


def calls(count: int) -> bytes:
    """Return whole calls for a new connection."""
    return b"".join(
        HeadersFrame(number, REQUEST, flags=["END_HEADERS"]).serialize()
        + DataFrame(number, b"x", flags=["END_STREAM"]).serialize()
        for number in range(1, 2 * count, 2)
    )


def open_order(server: Any, count: int) -> list[Any]:
    """Return the connections of the next streams, in the order in which the server opened these."""
    return [server.next_stream().stream.writer for _ in range(count)]


class Paused:
    """Keeps the reading thread from reading until the block's end, so that all input of the block is there at once."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def __enter__(self) -> None:
        is_paused, self.gate = threading.Event(), threading.Event()
        self.server.http2.run_soon(lambda: (is_paused.set(), self.gate.wait(self.server.WAIT_S)))
        assert is_paused.wait(self.server.WAIT_S)

    def __exit__(self, *_: object) -> None:
        self.gate.set()


def connect(server: Any, count: int) -> list[Any]:
    clients = [server.connect({4: (1 << 31) - 1}) for _ in range(count)]
    for client in clients:
        client.check_alive()
    return clients


# -- what is remembered


def small_blocks_of_large_lists() -> list[bytes]:
    """Return header blocks of 64 bytes that each name an entry of 3,900 bytes fifteen times."""
    first = REQUEST + entry(b"y", b"v" * 3900)
    return [first, *(REQUEST + named(15) + encode_headers([(b"n", b"%d" % number)]) for number in range(64))]


def decoded_bytes(reader: HeaderReader) -> int:
    blocks = reader.remembered.values()
    return sum(len(name) + len(value) for block in blocks for name, value in block.pairs)


def test_a_connection_remembers_header_lists_up_to_64_kib() -> None:
    reader = HeaderReader(64 << 10)
    for block in small_blocks_of_large_lists():
        reader.read(block)
        assert decoded_bytes(reader) <= 64 << 10


def test_remembered_lists_share_their_values() -> None:
    reader = HeaderReader(64 << 10)
    reader.read(REQUEST + entry(b"y", b"v" * 1000))
    for number in range(9):
        reader.read(REQUEST + named(1) + encode_headers([(b"n", b"%d" % number)]))
    values = [value for found in reader.remembered.values() for name, value in found.pairs if name == b"y"]
    assert len(values) == 9
    assert len(set(map(id, values))) == 1


def test_all_connections_together_remember_up_to_a_total() -> None:
    most = 4 << 20
    memory = HeaderMemory(most)
    readers = [HeaderReader(64 << 10, memory) for _ in range(150)]
    for reader in readers:
        for block in small_blocks_of_large_lists()[:6]:
            reader.read(block)
        assert memory.used_bytes <= most
    assert sum(map(decoded_bytes, readers)) <= most
    for reader in readers:
        reader.close()
    assert (memory.used_bytes, memory.reader_count) == (0, 0)


def test_more_connections_make_each_ones_part_smaller_but_leave_room_for_usual_calls() -> None:
    memory = HeaderMemory()
    first = HeaderReader(64 << 10, memory)
    for number in range(40):
        first.read(REQUEST + encode_headers([(b"n", b"%d" % number)]))
    before = len(first.remembered)
    readers = [HeaderReader(64 << 10, memory) for _ in range(4095)]
    first.forget_excess()
    assert before > 10
    assert not first.remembered
    readers[-1].read(REQUEST)
    assert REQUEST in readers[-1].remembered


def test_a_connection_gives_its_memory_back_at_its_end(serve: Serve) -> None:
    server = serve()
    memory = server.http2.header_memory
    (client,) = connect(server, 1)
    client.send(calls(1))
    assert client.response(1) == b"x"
    assert server.call(lambda: (memory.reader_count, memory.used_bytes > 0)) == (1, True)
    client.close()
    server.next_stream().is_reset.wait(0)
    other = server.connect()
    other.check_alive()
    while server.call(lambda: memory.reader_count) > 1:
        other.check_alive()
    assert server.call(lambda: memory.used_bytes) == 0


# -- what is charged


def too_large(stream_id: int) -> bytes:
    """Return HEADERS whose list is above the announced 64 KiB, but below four times that."""
    return HeadersFrame(stream_id, REQUEST + named(20), flags=["END_HEADERS", "END_STREAM"]).serialize()


def test_header_lists_above_the_limit_are_charged(serve: Serve) -> None:
    client = serve().connect()
    client.send(HeadersFrame(1, REQUEST + entry(b"y", b"v" * 3900), flags=["END_HEADERS", "END_STREAM"]))
    client.send(*(too_large(number) for number in range(3, 203, 2)))
    assert client.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_one_header_list_above_the_limit_is_passed_on_as_too_large(serve: Serve) -> None:
    server = serve()
    client = server.connect()
    client.send(HeadersFrame(1, REQUEST + entry(b"y", b"v" * 3900), flags=["END_HEADERS"]), too_large(3))
    assert not server.next_stream().stream.headers.is_too_large
    assert server.next_stream().stream.headers.is_too_large
    client.check_alive()


@pytest.mark.parametrize(("count", "is_too_large"), [(200, False), (300, True)])
def test_lists_of_too_many_fields_are_too_large(count: int, is_too_large: bool) -> None:
    reader = HeaderReader(64 << 10)
    reader.read(entry(b"a", b""))
    assert reader.read(REQUEST + named(count)).is_too_large == is_too_large


def test_a_block_of_thousands_of_fields_ends_the_connection_before_it_is_decoded(serve: Serve) -> None:
    client = serve().connect()
    client.send(HeadersFrame(1, REQUEST + entry(b"a", b"") + named(2000), flags=["END_HEADERS"]))
    assert client.goaway_code() == Http2ErrorCode.COMPRESSION_ERROR


def windows(*values: int) -> bytes:
    """Return a SETTINGS frame with these initial windows, one after the other."""
    payload = b"".join(b"\0\4" + value.to_bytes(4, "big") for value in values)
    return len(payload).to_bytes(3, "big") + SettingsFrame().serialize()[3:] + payload


def test_only_the_last_initial_window_of_a_frame_is_applied(serve: Serve) -> None:
    server = serve()
    client = server.connect({4: 100})
    client.send(client.headers(1), WindowUpdateFrame(1, 50))
    server.next_stream()
    # The first value alone would make the stream's window too large.
    client.send(windows((1 << 31) - 1, 0, 20), DataFrame(1, b"x" * 100, flags=["END_STREAM"]))
    assert len(client.until(DataFrame).data) == 70
    client.send(windows(0, 50))
    assert len(client.response(1)) == 30


def test_each_initial_window_of_a_frame_is_checked(serve: Serve) -> None:
    client = serve().connect()
    client.send(windows(1 << 31, 100))
    assert client.goaway_code() == Http2ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("streams", [0, 640])
def test_settings_are_charged_by_the_streams_that_they_touch(serve: Serve, streams: int) -> None:
    client = serve(control_rate=100.0).connect()
    client.send(*(client.headers(1 + 2 * number, path="/wait") for number in range(streams)))
    client.send(*(windows(100 + number) for number in range(40)))
    if streams:
        assert client.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM
    else:
        client.check_alive()


@pytest.mark.parametrize("stream_id", [0, 1])
def test_window_updates_that_nothing_has_paid_for_are_charged(serve: Serve, stream_id: int) -> None:
    client = serve(control_rate=20.0).connect()
    client.send(client.headers(1), DataFrame(1, b"x", flags=["END_STREAM"]))
    assert client.response(1) == b"x"
    client.send(*[WindowUpdateFrame(stream_id, 1)] * 100)
    assert client.goaway_code() == Http2ErrorCode.ENHANCE_YOUR_CALM


def test_a_client_that_returns_each_kibibyte_at_once_is_not_charged(serve: Serve) -> None:
    """On the stream, which has ended by then, and on the connection, and before the response."""
    client = serve(control_rate=20.0).connect()
    for number in range(1, 601, 2):
        client.send(client.headers(number), WindowUpdateFrame(number, 1000), WindowUpdateFrame(0, 1000))
        client.send(DataFrame(number, bytes(3000), flags=["END_STREAM"]))
        assert len(client.response(number)) == 3000
        client.send(*(WindowUpdateFrame(stream, 1024) for stream in (0, number) for _ in range(2)))
    client.check_alive()


def test_a_client_that_returns_each_frame_of_a_stream_is_not_charged(serve: Serve) -> None:
    server = serve(control_rate=20.0)
    client = server.connect()
    client.send(client.headers(1, path="/wait"))
    stream = server.next_stream().stream
    for number in range(300):
        stream.send(None if number else server.HEAD, (b"message",))
        size = len(client.until(DataFrame).data)
        # The third: of a client that also enlarges its window, as gRPC's libraries do after their measurements.
        client.send(WindowUpdateFrame(1, size), WindowUpdateFrame(0, size), WindowUpdateFrame(1, 1))
    client.check_alive()


@pytest.mark.parametrize("size", [10, 100_000])
def test_grpcio_is_not_charged_for_its_window_updates(serve: Serve, size: int) -> None:
    import grpc

    server = serve(control_rate=20.0)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        call = channel.unary_unary("/echo")
        for _ in range(100):
            assert call(bytes(size), timeout=server.WAIT_S, wait_for_ready=True) == bytes(size)
    assert len({server.next_stream().stream.writer for _ in range(100)}) == 1


# -- shares of a turn


def test_calls_of_one_connection_do_not_hold_up_those_of_another(serve: Serve) -> None:
    server = serve()
    *greedy, modest = connect(server, 4)
    with Paused(server):
        for client in greedy:
            client.send(calls(500))
        modest.send(calls(1))
    order = open_order(server, 1501)
    connection = next(each for each, count in Counter(order).items() if count == 1)
    assert order.index(connection) <= len(greedy) * limits.TURN_CALLS
    for client in greedy:
        # Nothing more is sent: what was received is handled without another event of the socket.
        assert client.response(999) == b"x"
    assert modest.response(1) == b"x"


def test_connections_with_much_input_take_turns(serve: Serve) -> None:
    server = serve()
    clients = connect(server, 5)
    with Paused(server):
        for client in clients:
            client.send(calls(400))
    ahead: Counter[Any] = Counter()
    for connection in open_order(server, 5 * 400):
        ahead[connection] += 1
        if max(ahead.values()) < 400:
            assert max(ahead.values()) - (min(ahead.values()) if len(ahead) == 5 else 0) <= 2 * limits.TURN_CALLS


def test_large_messages_are_received_in_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_limit = 10_000
    monkeypatch.setattr(limits, "TURN_BYTES", 4 * byte_limit)
    monkeypatch.setattr(limits, "MIN_BYTES_PER_TURN", 1000)
    server = serve()
    message = bytes(range(250)) * 240
    left = dict.fromkeys(range(4), len(message) - byte_limit)
    leads: list[int] = []
    clients = connect(server, 4)
    inputs = []

    def watch(number: int, echo: Any) -> None:
        filled = echo.on_filled

        def on_filled(count: int, is_end: bool) -> None:
            left[number] -= count
            leads.append(max(left.values()) - min(left.values()))
            filled(count, is_end)

        echo.on_filled = on_filled

    for number, client in enumerate(clients):
        frame = DataFrame(1, message, flags=["END_STREAM"]).serialize()
        begun = 9 + byte_limit
        client.send(client.headers(1, path="/target"), frame[:begun])
        echo = server.next_stream()
        watch(number, echo)
        while len(echo.body) < byte_limit:
            server.call(lambda: None)
        # Another call behind the message, part of which may come with the message's end.
        inputs.append(
            frame[begun:] + client.headers(3).serialize() + DataFrame(3, b"x", flags=["END_STREAM"]).serialize()
        )
    with Paused(server):
        for client, data in zip(clients, inputs, strict=True):
            client.send(data)
    for client in clients:
        assert client.response(1) == message
        assert client.response(3) == b"x"
    assert len(leads) > 4 * 4
    assert max(leads) <= 2 * byte_limit


def test_a_client_that_comes_while_others_wait_is_served_before_them(serve: Serve) -> None:
    server = serve()
    *greedy, modest = connect(server, 11)
    order: list[Any] = []
    opened = server.http2.on_stream

    def on_stream(reader: Any, stream: Any) -> Any:
        order.append(stream.writer)
        if len(order) == 800:
            modest.send(calls(1))
        return opened(reader, stream)

    server.http2.on_stream = on_stream
    with Paused(server):
        for client in greedy:
            client.send(calls(400))
    assert modest.response(1) == b"x"
    for client in greedy:
        assert client.response(799) == b"x"
    connection = next(each for each, count in Counter(order).items() if count == 1)
    assert order.index(connection) < 2400


def test_blocks_that_take_long_to_decode_wait_for_small_ones(serve: Serve) -> None:
    server = serve()
    *greedy, modest = connect(server, 6)
    large = REQUEST + entry(b"a", b"") + named(200)
    frames = [HeadersFrame(1, large[:50]), ContinuationFrame(1, large[50:], flags=["END_HEADERS"])]
    with Paused(server):
        for client in greedy:
            client.send(*frames, DataFrame(1, b"x", flags=["END_STREAM"]))
        modest.send(calls(1))
    order = open_order(server, 6)
    assert len(set(order)) == 6
    assert modest.response(1) == b"x"
    for client in greedy:
        assert client.response(1) == b"x"
    by_port = {client.socket.getsockname()[1]: client for client in (*greedy, modest)}
    assert by_port[order[0].peer[1]] is modest


def test_small_frames_are_handled_in_turns_too(serve: Serve) -> None:
    """Frames of one byte of a single call, whose cost is not in calls."""
    server = serve()
    greedy, modest = connect(server, 2)
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    body = DataFrame(1, b"x").serialize() * 6000
    greedy.send(greedy.headers(1))
    echo = server.next_stream()
    taken = echo.on_data

    def on_data(data: memoryview, is_end: bool) -> None:
        threading.Event().wait(0.0001)  # as slow as a message that is handled
        events.put("greedy")
        taken(data, is_end)

    echo.on_data = on_data
    with Paused(server):
        greedy.send(body)
        modest.send(calls(1))
    assert modest.response(1) == b"x"
    assert events.qsize() < 6000
    greedy.send(DataFrame(1, b"", flags=["END_STREAM"]))
    assert len(greedy.response(1)) == 6000


def test_the_only_busy_client_gets_responses_while_its_other_calls_run(serve: Serve) -> None:
    """Otherwise it has nothing to do while they run, and the server nothing while the client reads the responses."""
    server = serve()
    client = server.connect()
    client.send(*(client.headers(number) for number in (1, 3, 5)))
    first, second, third = (server.next_stream() for _ in range(3))
    has_response = threading.Event()
    found: list[bool] = []

    def run_second(data: memoryview, is_end: bool, run: Any = second.on_data) -> None:
        end_s = time.monotonic() + 0.0002
        while time.monotonic() < end_s:
            pass
        run(data, is_end)

    def run_third(data: memoryview, is_end: bool, run: Any = third.on_data) -> None:
        found.append(has_response.wait(server.WAIT_S))
        run(data, is_end)

    second.on_data, third.on_data = run_second, run_third
    client.send(*(DataFrame(number, b"x", flags=["END_STREAM"]) for number in (1, 3, 5)))
    assert client.response(1) == b"x"
    has_response.set()
    assert client.response(5) == b"x"
    assert found == [True]
    assert first.has_ended.is_set()


def test_functions_that_run_in_a_connections_turn_take_turns(serve: Serve) -> None:
    server = serve()
    clients = connect(server, 2)
    for client in clients:
        client.send(client.headers(1, path="/wait"))
    streams = [server.next_stream().stream for _ in clients]
    order: list[int] = []
    is_done = threading.Event()

    def work(index: int) -> None:
        order.append(index)
        threading.Event().wait(0.0005)
        if order.count(index) < 20:
            streams[index].run_in_turn(lambda: work(index))
        is_done.set() if len(order) == 40 else None

    server.call(lambda: (work(0), work(1)))
    assert is_done.wait(server.WAIT_S)
    longest = max(len(list(group)) for _, group in itertools.groupby(order))
    assert longest < 20


def test_what_a_client_sent_before_it_left_is_still_handled(serve: Serve) -> None:
    server = serve()
    (client,) = connect(server, 1)
    client.send(calls(1000))
    client.close()
    assert len(set(open_order(server, 1000))) == 1


# -- window updates that come by themselves


def test_window_updates_that_come_alone_are_noticed(serve: Serve) -> None:
    server = serve(tick_s=60)
    client = server.connect()
    # The streams pay for the window updates.
    client.send(*(client.headers(number) for number in range(1, 40, 2)), WindowUpdateFrame(0, 1))
    echo = server.next_stream()
    (reader,) = server.http2.readers
    polls: queue.SimpleQueue[int] = queue.SimpleQueue()
    usual = reader._poll_after_updates

    def poll(wait_s: float) -> Any:
        polls.put(len(echo.body))
        return usual(wait_s)

    reader._poll_after_updates = poll
    updates = WindowUpdateFrame(1, 1).serialize() + WindowUpdateFrame(0, 1).serialize()
    client.send(updates, DataFrame(1, b"1"), updates)
    client.check_alive()
    client.send(updates)
    assert polls.get(timeout=server.WAIT_S) == 1
    client.send(updates, DataFrame(1, b"2"))
    client.check_alive()
    client.send(updates)
    assert polls.get(timeout=server.WAIT_S) == 2
    assert polls.empty()


def test_the_thread_stays_awake_after_window_updates_if_input_followed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    polled_s: list[float] = []

    class Clock:
        now_s = input_at_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        def poll(self, wait_s: float) -> list[tuple[int, int]]:
            polled_s.append(wait_s)
            self.now_s += 5e-6
            if self.now_s < self.input_at_s <= self.now_s + wait_s:
                self.now_s = self.input_at_s
            return [(7, select.EPOLLIN)] if self.now_s >= self.input_at_s else []

    def polls(delay_s: float) -> set[float]:
        clock.input_at_s = clock.now_s + delay_s
        polled_s.clear()
        assert reader._poll_after_updates(0.5) == ([(7, select.EPOLLIN)] if delay_s < 0.5 else [])
        assert not reader.has_lone_updates
        return set(polled_s)

    clock = Clock()
    monkeypatch.setattr(http2_server, "time", clock)
    reader = http2_server.Http2Reader(lambda thread, stream: NoReceiver(), None, None, 1.0)
    reader._epoll = clock
    assert polls(20e-6) == {0, 0.5}, "nothing is known yet"
    assert polls(20e-6) == {0}
    assert polls(20e-6) == {0}
    assert polls(0.03) == {0, 0.5}
    assert len(polled_s) < 12
    assert polls(0.03) == {0, 0.5}
    assert len(polled_s) == 2, "the last message came late"
    assert polls(20e-6) == {0, 0.5}
    assert polls(20e-6) == {0}
    assert polls(1.0) == {0, 0.5}
    assert polls(20e-6) == {0, 0.5}
