"""The direct door: which grpcio it is offered by, and a reader that is held up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.frontends.grpc import direct, direct_check
from edge_server.frontends.grpc.direct_check import may_be_direct, works

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def direct_door(service: Any) -> Any:
    from tests.frontends_grpc.conftest import Door

    door = Door(service)
    yield door
    door.close()


def test_a_real_call_comes_back_by_the_direct_door_of_the_grpcio_that_is_installed() -> None:
    works.cache_clear()
    assert works()


@pytest.mark.parametrize("missing", ["request_registered_call", "register_method", "register_completion_queue"])
def test_a_grpcio_without_what_the_door_is_made_of_offers_none(missing: str) -> None:
    class Core:
        pass

    class Server:
        _cy_server = Core()

    for name in {"request_registered_call", "register_method", "register_completion_queue"} - {missing}:
        setattr(Core, name, lambda *_: None)
    assert direct.offer(Server(), [MODEL_INFER]) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("release", "asked"), [("1.64.3", False), ("1.65.0", False), ("1.85.9", False), ("2.0", True)])
def test_only_a_release_that_is_not_known_is_asked(monkeypatch: pytest.MonkeyPatch, release: str, asked: bool) -> None:
    calls: list[str] = []
    monkeypatch.setattr(grpc, "__version__", release)
    monkeypatch.setattr(direct_check, "works", lambda: bool(calls.append(release)) or False)
    answer = may_be_direct()
    assert bool(calls) is asked
    assert answer is (release in ("1.65.0", "1.85.9"))


def test_an_interface_that_changed_means_the_ordinary_door(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def __getattr__(self, name: str) -> Any:
            raise TypeError(f"{name} takes other arguments now")

    works.cache_clear()
    monkeypatch.setattr(direct, "cygrpc", Changed())
    assert not works()
    works.cache_clear()


def test_a_stream_takes_no_thread_of_its_own(direct_door: Any, make_request: Any) -> None:
    streams = [direct_door.stream([make_request("held", id=str(number))]) for number in range(20)]
    held = direct_door.service.wait_for_calls(20)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("grpc-stream", "grpc_"))]
    for call in held:
        call.answer(Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4")))
    assert {message.infer_response.id for stream in streams for message in stream} == {str(n) for n in range(20)}


def test_a_reader_that_is_held_up_is_relieved_by_its_deputy_again_and_again(
    direct_door: Any, make_request: Any
) -> None:
    """A model may ask this very server, and wait: whoever reads must not wait for what it should read."""

    def ask_inside(call: Any) -> None:
        depth = call.request.id
        if depth != "0":
            direct_door.call("ModelInfer", make_request("inside", id=str(int(depth) - 1)))
        call.answer(Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4")))

    direct_door.service.behaviours["inside"] = ask_inside
    for _ in range(3):
        answer = direct_door.call("ModelInfer", make_request("inside", id="1"))
        assert answer.id == "1"


def test_a_deputy_that_hangs_after_the_one_it_relieved_came_back_is_relieved_too(
    direct_door: Any, make_request: Any
) -> None:
    """Two in a row: the reader hangs, then its deputy, then the reader comes back and stands by."""
    may_go_on = {name: threading.Event() for name in ("first", "second")}

    def hang(call: Any) -> None:
        if call.request.id in may_go_on:
            may_go_on[call.request.id].wait(60)
        call.answer(Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4")))

    direct_door.service.behaviours["hangs"] = hang
    infer = direct_door.channel().unary_unary(MODEL_INFER)

    def ask(name: str) -> Any:
        return infer.future(make_request("hangs", id=name).SerializeToString(), timeout=60)

    try:
        first = ask("first")
        direct_door.service.wait_for_calls(1)
        second = ask("second")
        direct_door.service.wait_for_calls(2)  # the deputy reads, and hangs now
        may_go_on["first"].set()
        # Sent by the thread that hung, which is the one that could take over from here on.
        assert b"first" in first.result(60)
        third = infer.future(make_request("hangs", id="third").SerializeToString(), timeout=20)
        assert b"third" in third.result(20)
        assert not may_go_on["second"].is_set()
    finally:
        for event in may_go_on.values():
            event.set()
    assert b"second" in second.result(60)


def test_many_clients_at_once_get_their_own_answers(direct_door: Any, make_request: Any) -> None:
    infer = direct_door.channel().unary_unary(MODEL_INFER)

    def ask(number: int) -> bool:
        data = make_request("echo", (float(number),), id=str(number)).SerializeToString()
        answer = infer(data, timeout=60)
        return np.float32(number).tobytes() in answer and str(number).encode() in answer

    with ThreadPoolExecutor(8) as clients:
        assert all(clients.map(ask, range(400)))


def test_a_call_that_is_answered_while_its_client_leaves_does_not_hold_up_the_end(
    service: Any, make_request: Any
) -> None:
    from tests.frontends_grpc.conftest import Door

    door = Door(service)
    infer = door.channel().unary_unary(MODEL_INFER)
    futures = [infer.future(make_request("held").SerializeToString()) for _ in range(20)]
    held = service.wait_for_calls(20)
    both: Callable[[], None] = lambda: [call.answer(Tensor("O", DType.FP32, np.zeros(1, "<f4"))) for call in held]  # noqa: E731
    answering = threading.Thread(target=both)
    answering.start()
    for future in futures:
        future.cancel()
    answering.join()
    door.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("grpc-infer")]


def test_a_call_that_was_read_just_after_the_stop_is_answered_and_does_not_hold_up_the_end(
    direct_door: Any, make_request: Any
) -> None:
    """It lay in the queue when the server was told to stop: no other call can be asked for in its place any more."""
    frontend, core = direct_door.frontend, direct_door.frontend._door._core

    class Stopping:
        def request_registered_call(self, *arguments: Any) -> None:
            frontend._server.stop(60)
            core.request_registered_call(*arguments)

    def answer_now(call: Any) -> None:
        call.answer(Tensor("OUTPUT0", DType.FP32, np.zeros(1, "<f4")))

    direct_door.service.behaviours["late"] = answer_now
    frontend._door._core = Stopping()
    try:
        assert direct_door.call("ModelInfer", make_request("late", id="last"), timeout=45).id == "last"
    finally:
        end = threading.Thread(target=frontend.stop, args=(0,), daemon=True)
        end.start()
        end.join(60)
    assert not end.is_alive()
