"""Calls that their clients give up, and the frames of a response, over each transport of the installed server.

Both transports are held to gRPC's other rules in tests/frontends/grpc, HTTP/2's are in tests/frontends/http2.
"""

from __future__ import annotations

from typing import Any

import pytest
from grpc import StatusCode
from hyperframe.frame import HeadersFrame, RstStreamFrame

from edge_server.protocol import messages
from tests.e2e.grpc_wire.wire import INFER, STREAM_INFER, numbers, repeat
from tests.kit.eventually import eventually


def failures(target: Any, model: str) -> float:
    """Return how many requests of a model did not succeed, whatever the reason."""
    counters = target.server.read_counters(model)
    return sum(value for name, value in counters.items() if name.startswith("nv_inference_request_failure"))


def pending(target: Any) -> float:
    return float(target.server.read_counters("slow")["nv_inference_pending_request_count"])


@pytest.mark.parametrize("way", ["the client cancels", "a reset", "a broken connection", "the deadline"])
def test_a_waiting_call_that_is_given_up_never_runs(target: Any, way: str) -> None:
    """The deadline is enforced by the server: a client that sends it and then does nothing."""
    server = target.server
    runs, failed = server.statistics("slow")["execution_count"], failures(target, "slow")
    wire, leaving = target.connect(), target.connect()
    # One runs, as the model runs one request at a time, and one waits.
    others = [wire.send_call(numbers("slow")) for _ in range(2)]
    assert eventually(lambda: pending(target) == 1)
    if way == "the client cancels":
        waiting = target.channel().unary_unary(INFER).future(numbers("slow"), timeout=60)
        assert eventually(lambda: pending(target) == 2)
        waiting.cancel()
    elif way == "the deadline":
        answer = leaving.finish(leaving.send_call(numbers("slow"), metadata=[("grpc-timeout", "100m")]))
        assert answer.status is StatusCode.DEADLINE_EXCEEDED or answer.reset == 8, answer
    else:
        stream = leaving.send_call(numbers("slow"))
        assert eventually(lambda: pending(target) == 2)
        if way == "a reset":
            leaving.send(RstStreamFrame(stream, 8))
            target.assert_right(leaving.call("ModelInfer", numbers()))
        else:
            leaving.close()
    assert eventually(lambda: failures(target, "slow") == failed + 1), server.read_counters("slow")
    assert [wire.finish(stream).status for stream in others] == [StatusCode.OK] * 2
    assert server.statistics("slow")["execution_count"] == runs + 2


@pytest.mark.parametrize("way", ["the client cancels", "the deadline"])
def test_the_rest_of_a_stream_that_is_given_up_is_not_made(target: Any, way: str) -> None:
    """A thousand responses, 20 seconds of them."""
    failed, wire = failures(target, "repeat"), target.connect()
    metadata = [("grpc-timeout", "300m")] if way == "the deadline" else []
    stream = wire.send_call(repeat(range(1000), delay_ms=20), path=STREAM_INFER, metadata=metadata, ends=False)
    first = messages.ModelStreamInferResponse.FromString(wire.first_message(stream)).infer_response
    assert first.raw_output_contents[0] == bytes(4)
    if way == "the deadline":
        answer = wire.finish(stream)
        assert answer.status is StatusCode.DEADLINE_EXCEEDED or answer.reset == 8, answer
    else:
        wire.send(RstStreamFrame(stream, 8))
    assert eventually(lambda: failures(target, "repeat") == failed + 1), target.server.read_counters("repeat")


def test_a_response_is_headers_message_and_trailers_and_an_error_is_trailers_only(target: Any) -> None:
    wire = target.connect()
    answer = wire.call("ModelInfer", numbers())
    assert answer.headers[0] == (b":status", b"200")
    assert dict(answer.headers)[b"content-type"] in (b"application/grpc", b"application/grpc+proto")
    assert b"grpc-status" not in dict(answer.headers)
    assert dict(answer.trailers)[b"grpc-status"] == b"0"
    kinds = [frame for frame in wire.frames if isinstance(frame, HeadersFrame)]
    assert ["END_STREAM" in frame.flags for frame in kinds] == [False, True]

    name = "50% of \u263a\n"
    answer = wire.call("ModelInfer", numbers(name))
    assert (answer.status, answer.data) == (StatusCode.NOT_FOUND, b"")
    assert answer.value(b":status") == b"200"
    assert f"'{name}' is not found" in answer.details
    assert all(0x20 <= octet <= 0x7E for octet in answer.value(b"grpc-message")), "percent-encoded"
