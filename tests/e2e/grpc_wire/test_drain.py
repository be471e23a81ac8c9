"""The stop of a server as its gRPC clients see it: GOAWAY comes in time, and they lose no call.

RFC 9113, section 6.8: a first GOAWAY names the highest possible stream id and asks the client to leave; its running
calls, and those opened before it knew, are answered; the last GOAWAY names the last answered stream.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hyperframe.frame import DataFrame, GoAwayFrame

from edge_server.protocol import messages
from tests.kit.eventually import eventually
from tests.kit.server import serve

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
HIGHEST = 2**31 - 1


@pytest.fixture
def start(
    wire_models: Path, transport: str, transport_flags: tuple[str, ...], make_target: Any
) -> Iterator[Callable[..., Any]]:
    """`start(*flags)`: a server of the test's own that may be stopped."""
    if transport == "grpcio":
        pytest.skip("grpcio's server has no GOAWAY that announces the end")
    with contextlib.ExitStack() as opened:

        def start_one(*flags: str) -> Any:
            server = opened.enter_context(serve(wire_models, *transport_flags, *flags))
            return opened.enter_context(contextlib.closing(make_target(server, transport)))

        yield start_one


def open_stream(target: Any, wire: Any) -> int:
    """Open a stream on which one request was answered."""
    stream = int(wire.new_stream())
    wire.send(wire.head(stream, STREAM_INFER), DataFrame(stream, target.framed(target.numbers(id="first"))))
    answered(wire, stream, "first")
    return stream


def answered(wire: Any, stream: int, request_id: str) -> None:
    response = messages.ModelStreamInferResponse.FromString(wire.first_message(stream))
    assert (response.error_message, response.infer_response.id) == ("", request_id)


def next_goaway(wire: Any) -> GoAwayFrame:
    seen = len(wire.goaways)
    while len(wire.goaways) == seen:
        assert wire.read() is not None, "the connection ended without a GOAWAY"
    return wire.goaways[-1]


def test_during_the_drain_delay_clients_get_goaway_and_all_calls_are_answered(start: Any) -> None:
    target = start("--drain-delay-secs=600")
    idle, busy, streaming = target.connect(), target.connect(), target.connect()
    idle.ping()
    slow = busy.new_stream()
    busy.send(busy.head(slow))
    busy.send_data(slow, target.framed(target.numbers("slow")))
    busy.ping()
    stream = open_stream(target, streaming)
    target.server.process.send_signal(signal.SIGTERM)
    for wire in (idle, busy, streaming):
        encode_goaway = next_goaway(wire)
        assert (encode_goaway.last_stream_id, encode_goaway.error_code) == (HIGHEST, 0)
    # Running calls, new calls on connections that got GOAWAY, and calls on new connections.
    assert busy.finish(slow).status is grpc.StatusCode.OK
    streaming.send(DataFrame(stream, target.framed(target.numbers(id="second"))))
    answered(streaming, stream, "second")
    for wire in (idle, busy, streaming, target.connect()):
        for _ in range(3):
            target.assert_right(wire.call("ModelInfer", target.numbers()))
    for wire in (idle, busy, streaming):
        wire.ping()
        assert len(wire.goaways) == 1, "it is told once"
    health = target.connect().call("/grpc.health.v1.Health/Check", b"")
    assert health.messages == [b"\x08\x02"]
    assert target.server.stop() == 128 + signal.SIGTERM


def test_after_the_drain_delay_running_calls_are_answered_and_the_others_refused(start: Any) -> None:
    target = start("--drain-delay-secs=0.3")
    busy, streaming, half_sent = target.connect(), target.connect(), target.connect()
    stream = open_stream(target, streaming)
    waiting = half_sent.new_stream()
    half_sent.send(half_sent.head(waiting), DataFrame(waiting, target.framed(target.numbers())[:20]))
    half_sent.ping()
    target.server.process.send_signal(signal.SIGTERM)
    assert next_goaway(busy).last_stream_id == HIGHEST
    # Three of a quarter of a second each, one after another: the last of them runs beyond the delay.
    calls = [busy.new_stream() for _ in range(3)]
    for call in calls:
        busy.send(busy.head(call))
        busy.send_data(call, target.framed(target.numbers("slow")))
    assert [busy.finish(call).status for call in calls] == [grpc.StatusCode.OK] * 3
    busy.rest()
    assert [encode_goaway.last_stream_id for encode_goaway in busy.goaways] == [HIGHEST, calls[-1]]
    assert streaming.finish(stream).status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
    half_sent.finish(waiting)
    assert target.server.process.wait(30) == 0
    assert "Traceback" not in target.server.log()


def test_without_a_drain_delay_running_calls_are_answered(start: Any) -> None:
    target = start()
    wire = target.connect()
    call = wire.new_stream()
    wire.send(wire.head(call))
    wire.send_data(call, target.framed(target.numbers("slow")))
    wire.ping()
    target.server.process.send_signal(signal.SIGTERM)
    assert wire.finish(call).status is grpc.StatusCode.OK
    wire.rest()
    assert wire.goaways[-1].last_stream_id == call
    assert target.server.process.wait(30) == 0


def test_silent_and_hostile_clients_do_not_delay_the_stop(start: Any) -> None:
    target = start("--exit-timeout-secs=1")
    _silent = [target.connect(greets=False) for _ in range(5)]
    half_greeted = target.connect(greets=False)
    half_greeted.send(b"PRI * HT")
    reads_nothing = target.connect(settings={4: 0})
    call = reads_nothing.new_stream()
    reads_nothing.send(reads_nothing.head(call))
    reads_nothing.send_data(call, target.framed(target.numbers(count=60_000)))
    reads_nothing.ping()
    assert target.server.stop() == 0
    assert "Traceback" not in target.server.log()


@pytest.mark.parametrize("shape", ["one address", pytest.param("two addresses", marks=pytest.mark.full)])
def test_a_sending_client_loses_no_call_when_one_of_two_servers_stops(
    start: Any, free_ports: Callable[[int], list[int]], shape: str
) -> None:
    """grpcio's own client as it comes: no retry policy, no waiting for a connection. Both servers are ready before."""
    if shape == "one address":
        ports = free_ports(1) * 2
        address, options = f"127.0.0.1:{ports[0]}", []
    else:
        ports = free_ports(2)
        address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        options = [("grpc.lb_policy_name", "round_robin")]
    first, second = (start(f"--grpc-port={port}", "--drain-delay-secs=0.5", "--reuse-grpc-port") for port in ports)
    is_over = threading.Event()
    failures: list[grpc.RpcError] = []
    counts = [0] * 8

    def send(number: int) -> None:
        # A quarter of them has a long call running nearly always.
        request = first.numbers("slow" if number % 4 == 0 else "same")
        with grpc.insecure_channel(address, [*options, ("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer = channel.unary_unary(INFER)
            while not is_over.is_set():
                try:
                    infer(request, timeout=60)
                except grpc.RpcError as error:
                    failures.append(error)
                counts[number] += 1

    def all_have_sent(more: int) -> Callable[[], bool]:
        wanted = [count + more for count in counts]
        return lambda: all(count >= least for count, least in zip(counts, wanted, strict=True))

    senders = [threading.Thread(target=send, args=(number,)) for number in range(len(counts))]
    for sender in senders:
        sender.start()
    try:
        assert eventually(all_have_sent(2))
        assert first.server.stop() == 0
        assert eventually(all_have_sent(2))
    finally:
        is_over.set()
        for sender in senders:
            sender.join()
    assert failures == []
    second.assert_serves()
