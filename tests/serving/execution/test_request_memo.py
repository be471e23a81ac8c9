"""The cached decisions for a request header: current after every change of the served versions."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request, RequestMemo
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Draining, InvalidRequest, NotReady, UnknownModel

HOLDS = [0.0, math.inf]


def dims(width: int) -> dict[str, Any]:
    return {
        "inputs": (InputSpec("IN", DType.FP32, (width,)),),
        "outputs": (OutputSpec("OUT", DType.FP32, (width,)),),
    }


def asked(core: Any, new_mailbox: Any, memo: RequestMemo, width: int, hold_us: float = math.inf, **more: Any) -> Any:
    mailbox = new_mailbox()
    core.service.submit(core.request(3.0, width=width, memo=memo, **more), mailbox, hold_us=hold_us)
    return mailbox.final()


@pytest.mark.parametrize("hold_us", HOLDS)
def test_a_known_header_is_answered_as_an_unknown_one(core: Any, new_mailbox: Any, hold_us: float) -> None:
    version = core.load(core.spec(**dims(4)))
    memo = RequestMemo()
    for number in range(3):
        response = asked(core, new_mailbox, memo, 4, hold_us, id=str(number))
        assert (response.error, response.request_id) == (None, str(number))
        assert response.outputs[0].array.tolist() == [[3.0] * 4]
    assert core.service.find("m", None).spec is version.spec
    assert version.statistics().success.count == 3


def test_a_reload_that_changes_dims_refuses_the_old_header_and_takes_the_new(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec(**dims(4)))
    old, new = RequestMemo(), RequestMemo()
    assert asked(core, new_mailbox, old, 4).error is None
    with pytest.raises(InvalidRequest, match="unexpected shape for input 'IN'"):
        asked(core, new_mailbox, new, 2)
    version = core.load(core.spec(**dims(2)), mark="b")
    with pytest.raises(InvalidRequest, match="unexpected shape for input 'IN'"):
        asked(core, new_mailbox, old, 4)
    for _ in range(2):
        assert asked(core, new_mailbox, new, 2).error is None
    assert core.service.find("m", None).spec is version.spec


def test_a_header_that_was_refused_is_refused_again(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec(**dims(4)))
    memo, released = RequestMemo(), []
    for count in (1, 2):
        with pytest.raises(InvalidRequest):
            asked(core, new_mailbox, memo, 5, release=lambda: released.append(1))
        assert len(released) == count


def test_what_a_front_end_keeps_goes_with_the_generation(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec())
    memo = RequestMemo()
    asked(core, new_mailbox, memo, 1)
    memo.front_end = kept = object()
    asked(core, new_mailbox, memo, 1)
    assert memo.front_end is kept
    core.load(core.spec("other"))
    asked(core, new_mailbox, memo, 1)
    assert memo.front_end is kept
    core.load(core.spec(), mark="b")
    asked(core, new_mailbox, memo, 1)
    assert memo.front_end is None


def test_a_model_that_is_unloaded_is_not_there_for_a_known_header(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec())
    memo = RequestMemo()
    asked(core, new_mailbox, memo, 1)
    core.service.unload_model("m")
    with pytest.raises((NotReady, UnknownModel)):
        asked(core, new_mailbox, memo, 1)
    with pytest.raises((NotReady, UnknownModel)):
        core.service.find("m", None)


def test_the_newest_version_takes_over_from_a_known_header(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec(), 1)
    newest, first = RequestMemo(), RequestMemo()
    assert asked(core, new_mailbox, newest, 1).version == 1
    assert asked(core, new_mailbox, first, 1, version=1).version == 1
    core.load(core.spec(), 1, 2)
    assert asked(core, new_mailbox, newest, 1).version == 2
    assert asked(core, new_mailbox, first, 1, version=1).version == 1


def test_a_canary_gets_its_share_of_a_known_header(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec(parameters={"canary_share": "0.25"}), 1, 2)
    memo = RequestMemo()
    assert Counter(asked(core, new_mailbox, memo, 1).version for _ in range(40)) == {1: 30, 2: 10}
    named = RequestMemo()
    assert {asked(core, new_mailbox, named, 1, version=2).version for _ in range(5)} == {2}


def test_a_stopping_server_refuses_a_known_header(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec())
    memo = RequestMemo()
    asked(core, new_mailbox, memo, 1)
    core.service.stop_accepting()
    with pytest.raises(Draining, match="stopping"):
        asked(core, new_mailbox, memo, 1)


@pytest.mark.parametrize("hold_us", HOLDS)
def test_outputs_that_are_named_are_answered_in_the_models_order(core: Any, new_mailbox: Any, hold_us: float) -> None:
    names = ("A", "B", "C")
    seen: list[Any] = []

    def run(name: str, inputs: Any) -> Any:
        return {name: np.full((1, 1), place, np.float32) for place, name in enumerate(names)}

    core.script.on_run = run
    plain = core.script.open

    def open_session(job: Any) -> Any:
        session = plain(job)
        run_all = session.run

        def run_named(inputs: Any, outputs: Any) -> Any:
            seen.append(tuple(outputs))
            found = run_all(inputs, outputs)
            return {name: found[name] for name in reversed(outputs)}

        session.run = run_named
        return session

    core.script.open = open_session
    core.load(core.spec(outputs=tuple(OutputSpec(name, DType.FP32, (1,)) for name in names)))
    memo = RequestMemo()
    for _ in range(3):
        response = asked(core, new_mailbox, memo, 1, hold_us, outputs=("C", "A"))
        assert [(tensor.name, float(tensor.array[0, 0])) for tensor in response.outputs] == [("A", 0.0), ("C", 2.0)]
    assert set(seen) == {("A", "C")}
    everything = asked(core, new_mailbox, RequestMemo(), 1, hold_us)
    assert [tensor.name for tensor in everything.outputs] == list(names)


@pytest.mark.parametrize("reloads", [6, pytest.param(20, marks=pytest.mark.full)])
def test_requests_with_one_header_while_its_model_is_reloaded_again_and_again(
    core: Any, new_mailbox: Any, reloads: int
) -> None:
    """Each is answered by a generation that takes its dims, or refused by one that does not."""
    core.load(core.spec(**dims(1)))
    memos, is_over = {1: RequestMemo(), 2: RequestMemo()}, threading.Event()
    wrong: list[Any] = []
    counts: Counter[bool] = Counter()

    def ask(width: int) -> None:
        while not is_over.is_set():
            try:
                response = asked(core, new_mailbox, memos[width], width)
            except InvalidRequest as error:
                counts[False] += 1
                if f"got [1,{width}]" not in error.message:
                    wrong.append(error)
                continue
            counts[True] += 1
            if response.error is not None or response.outputs[0].array.shape != (1, width):
                wrong.append(response)
            if response.spec.inputs[0].dims != (width,):
                wrong.append(response.spec)

    threads = [threading.Thread(target=ask, args=(width,)) for width in (1, 2) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(reloads):
        core.load(core.spec(**dims(1 + number % 2)), mark=f"reload {number}")
    is_over.set()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert counts[True] > 0


def test_the_values_of_shape_tensors_are_no_part_of_a_header(core: Any) -> None:
    spec = core.spec(
        inputs=(InputSpec("IN", DType.FP32, (-1,)), InputSpec("S", DType.INT64, (2,), is_shape_tensor=True))
    )
    check, memo = RequestCheck(spec), RequestMemo()

    def head(sizes: list[int]) -> Any:
        given = {
            "IN": Tensor("IN", DType.FP32, np.zeros((1, 3), np.float32)),
            "S": Tensor("S", DType.INT64, np.array(sizes, np.int64)),
        }
        return check.check_header(Request("m", given, memo=memo))

    one, other, again = head([4, 6]), head([4, 7]), head([4, 6])
    assert one.key != other.key
    assert one.key == again.key
    assert not any(item.is_certain for item in (one, other, again))
