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
from tests.e2e.grpc_wire.wire import INFER, STREAM_INFER, Target, framed, numbers
from tests.kit.eventually import eventually
from tests.kit.server import serve

HIGHEST = 2**31 - 1


@pytest.fixture
def start(wire_models: Path) -> Iterator[Callable[..., Target]]:
    """`start(*flags)`: a server of the test's own that may be stopped."""
    with contextlib.ExitStack() as opened:

        def start_one(*flags: str) -> Target:
            server = opened.enter_context(serve(wire_models, *flags))
            return opened.enter_context(contextlib.closing(Target(server, "http2")))

        yield start_one


def assert_answered(wire: Any, stream: int, request_id: str) -> None:
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
    slow = busy.send_call(numbers("slow"))
    busy.ping()
    stream = streaming.send_call(numbers(id="first"), path=STREAM_INFER, ends=False)
    assert_answered(streaming, stream, "first")
    target.server.process.send_signal(signal.SIGTERM)
    for wire in (idle, busy, streaming):
        goaway = next_goaway(wire)
        assert (goaway.last_stream_id, goaway.error_code) == (HIGHEST, 0)
    # Running calls, new calls on connections that got GOAWAY, and calls on new connections.
    assert busy.finish(slow).status is grpc.StatusCode.OK
    streaming.send(DataFrame(stream, framed(numbers(id="second"))))
    assert_answered(streaming, stream, "second")
    for wire in (idle, busy, streaming, target.connect()):
        for _ in range(3):
            target.assert_right(wire.call("ModelInfer", numbers()))
    for wire in (idle, busy, streaming):
        wire.ping()
        assert len(wire.goaways) == 1, "it is told once"
    assert target.server.stop() == 128 + signal.SIGTERM


def test_after_the_drain_delay_running_calls_are_answered_and_no_client_delays_the_end(start: Any) -> None:
    target = start("--drain-delay-secs=0.3", "--exit-timeout-secs=5")
    busy, streaming, half_sent = target.connect(), target.connect(), target.connect()
    stream = streaming.send_call(numbers(id="first"), path=STREAM_INFER, ends=False)
    assert_answered(streaming, stream, "first")
    waiting = half_sent.new_stream()
    half_sent.send(half_sent.head(waiting), DataFrame(waiting, framed(numbers())[:20]))
    half_sent.ping()
    _silent = [target.connect(greets=False) for _ in range(5)]
    target.connect(greets=False).send(b"PRI * HT")
    reads_nothing = target.connect(settings={4: 0})
    reads_nothing.send_call(numbers(count=60_000))
    reads_nothing.ping()
    target.server.process.send_signal(signal.SIGTERM)
    assert next_goaway(busy).last_stream_id == HIGHEST
    # Three of a quarter of a second each, one after another: the last of them runs beyond the delay.
    calls = [busy.send_call(numbers("slow")) for _ in range(3)]
    assert [busy.finish(call).status for call in calls] == [grpc.StatusCode.OK] * 3
    busy.rest()
    assert [goaway.last_stream_id for goaway in busy.goaways] == [HIGHEST, calls[-1]]
    assert streaming.finish(stream).status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
    half_sent.finish(waiting)
    assert target.server.process.wait(30) == 0
    assert "answering for 0.3 s more" in target.server.log()
    assert "Traceback" not in target.server.log()


@pytest.mark.parametrize("shape", ["one address", pytest.param("two addresses", marks=pytest.mark.full)])
def test_a_sending_client_loses_no_call_when_one_of_two_servers_stops(
    start: Any, free_ports: Callable[[int], list[int]], shape: str
) -> None:
    """grpcio's own client as it comes: no retry policy, no waiting for a connection. Both servers are ready before."""
    ports, options = free_ports(1) * 2, [("grpc.use_local_subchannel_pool", 1)]
    if shape == "two addresses":
        ports = free_ports(2)
        options.append(("grpc.lb_policy_name", "round_robin"))
    address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in sorted(set(ports)))
    first, second = (start(f"--grpc-port={port}", "--drain-delay-secs=0.5", "--reuse-grpc-port") for port in ports)
    is_over = threading.Event()
    failures: list[grpc.RpcError] = []
    counts = [0] * 8

    def send(number: int) -> None:
        # A quarter of them has a long call running nearly always.
        request = numbers("slow" if number % 4 == 0 else "same")
        with grpc.insecure_channel(address, options) as channel:
            infer = channel.unary_unary(INFER)
            while not is_over.is_set():
                try:
                    infer(request, timeout=60)
                except grpc.RpcError as error:
                    failures.append(error)
                counts[number] += 1

    def all_send_twice() -> bool:
        wanted = [count + 2 for count in counts]
        return eventually(lambda: all(count >= least for count, least in zip(counts, wanted, strict=True)))

    senders = [threading.Thread(target=send, args=(number,)) for number in range(len(counts))]
    for sender in senders:
        sender.start()
    try:
        assert all_send_twice()
        assert first.server.stop() == 0
        assert all_send_twice()
    finally:
        is_over.set()
        for sender in senders:
            sender.join()
    assert failures == []
    second.assert_serves()
