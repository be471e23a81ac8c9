"""More calls at once than a server can take: each is answered, with a result or a refusal."""

from __future__ import annotations

import collections
import threading
from typing import Any

import grpc
import pytest

from edge_server.protocol import messages
from tests.e2e.grpc_wire.wire import INFER, numbers

Code = grpc.StatusCode

# Calls have a deadline, and a machine that other tests keep busy answers thousands of calls late.
pytestmark = pytest.mark.serial


def answers_to(infers: list[Any], request: bytes, count: int) -> collections.Counter[Code]:
    """Make `count` calls at once, in turns over the channels, and count how they ended."""
    ended: collections.Counter[Code] = collections.Counter()
    lock, is_done = threading.Lock(), threading.Event()

    def end(call: Any) -> None:
        with lock:
            ended[call.code()] += 1
            if call.code() is Code.OK:
                assert messages.ModelInferResponse.FromString(call.result()).model_name
            if ended.total() == count:
                is_done.set()

    for number in range(count):
        infers[number % len(infers)].future(request, timeout=100).add_done_callback(end)
    assert is_done.wait(100), ended
    return ended


@pytest.mark.parametrize("connections", [1, pytest.param(40, marks=pytest.mark.full)])
def test_two_thousand_calls_at_once_are_all_answered(target: Any, connections: int) -> None:
    infers = [target.channel().unary_unary(INFER) for _ in range(connections)]
    for infer in infers:
        infer(numbers(), timeout=30)
    ended = answers_to(infers, numbers("batched", count=100), 2_000)
    assert set(ended) <= {Code.OK, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}, ended
    assert ended[Code.OK] > 0
