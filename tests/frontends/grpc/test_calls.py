"""gRPC calls: the threads that answer them, many at once, and clients that disconnect."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import grpc
import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.protocol import messages

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
REFLECTION = "grpc.reflection.v1"


def output() -> Tensor:
    return Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4"))


def test_a_model_that_answers_any_number_of_times_never_runs_on_the_thread_that_reads(
    front_end: Any, make_request: Any
) -> None:
    for _ in range(5):
        list(front_end.stream([make_request("repeat", id="a")]))
    assert [call.hold_us for call in front_end.service.calls] == [0.0] * 5
    list(front_end.stream([make_request("echo", id="a")]))
    assert front_end.service.calls[-1].hold_us > 0


@pytest.mark.parametrize("transport", ["http2"])
def test_a_stream_takes_no_thread_of_its_own(front_end: Any, make_request: Any) -> None:
    before = threading.active_count()
    streams = [front_end.stream([make_request("held", id=str(number))]) for number in range(20)]
    held = front_end.service.wait_for_calls(20)
    # Each stream of grpcio's client has a thread that sends.
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("grpc")]) <= 1
    assert threading.active_count() <= before + 2 * 20 + 1
    for call in held:
        call.answer(output())
    assert {message.infer_response.id for stream in streams for message in stream} == {str(n) for n in range(20)}


def test_a_slow_control_rpc_delays_no_other_call(front_end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    begun = threading.Barrier(4)

    def unload(*_: object, **__: object) -> None:
        begun.wait(20)
        assert may_go_on.wait(20)

    monkeypatch.setattr(front_end.service, "unload_model", unload)
    with ThreadPoolExecutor(3) as clients:
        orders = [clients.submit(front_end.call, "RepositoryModelUnload") for _ in range(3)]
        begun.wait(20)
        assert front_end.call("ServerLive").live
        assert front_end.call("ModelReady").ready is False
        may_go_on.set()
        for order in orders:
            order.result(20)


def test_a_message_that_takes_long_to_read_delays_no_other_call(
    front_end: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    front_end.service.behaviours["named"] = lambda call: (names.append(threading.current_thread().name), call.answer())
    values = np.zeros(100_000, "<f4")
    for typed in (True, False, False):
        request = make_request("named", values)
        if typed:
            del request.raw_input_contents[:]
            request.inputs[0].contents.fp32_contents.extend(values.tolist())
        front_end.call("ModelInfer", request)
        assert len(list(front_end.stream([request, request]))) == 2
    front_end.call("ModelInfer", make_request("named"))
    if names[-1] == "http2":
        assert [name == "http2" for name in names] == [False] * 4 + [True] * 6


def test_many_clients_at_once_get_their_own_answers(front_end: Any, make_request: Any) -> None:
    infer = front_end.channel().unary_unary(MODEL_INFER)

    def ask(number: int) -> bool:
        data = make_request("echo", (float(number),), id=str(number)).SerializeToString()
        answer = infer(data, timeout=60)
        return np.float32(number).tobytes() in answer and str(number).encode() in answer

    with ThreadPoolExecutor(8) as clients:
        assert all(clients.map(ask, range(400)))


def test_a_call_that_is_answered_while_its_client_leaves_does_not_hold_up_the_end(
    open_front_end: Any, make_request: Any
) -> None:
    front_end = open_front_end()
    infer = front_end.channel().unary_unary(MODEL_INFER)
    futures = [infer.future(make_request("held").SerializeToString()) for _ in range(20)]
    held = front_end.service.wait_for_calls(20)
    answering = threading.Thread(target=lambda: [call.answer(output()) for call in held])
    answering.start()
    for future in futures:
        future.cancel()
    answering.join()
    end = threading.Thread(target=front_end.frontend.stop, args=(60,))
    end.start()
    end.join(20)
    assert not end.is_alive()


def test_a_call_that_was_begun_before_the_stop_is_answered(open_front_end: Any, make_request: Any) -> None:
    front_end = open_front_end()

    def stop_and_answer(call: Any) -> None:
        stopping = threading.Thread(target=front_end.frontend.stop, args=(60,))
        stopping.start()
        call.answer(output())

    front_end.service.behaviours["late"] = stop_and_answer
    assert front_end.call("ModelInfer", make_request("late", id="last"), timeout=45).id == "last"


def test_a_stream_on_which_nothing_was_sent_does_not_hold_up_the_end(open_front_end: Any) -> None:
    front_end = open_front_end()
    may_send = threading.Event()
    streams = [front_end.stream(wait_without_sending(may_send), timeout=100) for _ in range(5)]
    front_end.call("ServerLive")
    end = threading.Thread(target=front_end.frontend.stop, args=(60,))
    end.start()
    end.join(20)
    assert not end.is_alive()
    assert {stream.code() for stream in streams} == {grpc.StatusCode.UNAVAILABLE}
    may_send.set()


def wait_without_sending(may_end: threading.Event) -> Iterator[bytes]:
    may_end.wait(60)
    yield from ()


@pytest.mark.parametrize("is_first_sent", [True, False])
def test_a_stream_whose_client_leaves_frees_its_thread(front_end: Any, is_first_sent: bool) -> None:
    """Reflection, whose handler holds nothing and does nothing when the client leaves."""
    method = front_end.channel().stream_stream(f"/{REFLECTION}.ServerReflection/ServerReflectionInfo")
    request = messages.message_class(f"{REFLECTION}.ServerReflectionRequest")(list_services="*").SerializeToString()
    for _ in range(40):
        may_end = threading.Event()
        stream = method(chain([request] if is_first_sent else [], wait_without_sending(may_end)), timeout=20)
        if is_first_sent:
            next(stream)
        else:
            front_end.call("ServerLive")
        stream.cancel()
        may_end.set()
        front_end.call("ServerLive")
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("grpc_")]) < 20
