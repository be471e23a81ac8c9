"""Bound on the messages of all robots: small ones always get memory, large ones wait in turn, slow ones are refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from edge_server.errors import QueueFull
from edge_server.plugins.policies.connections import message_memory
from edge_server.plugins.policies.connections.message_memory import HeldMessage, MessageMemory

MB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_memory, "_MAX_RECEIVE_S", 0.05)
    monkeypatch.setattr(message_memory, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(message_memory, "READING_BYTES", 0)


def with_memory(test: Callable[[MessageMemory], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop, with a memory of 64 MB."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(MessageMemory(64 * MB)), 30))

    return run


async def used(memory: MessageMemory, size: int) -> HeldMessage:
    message = memory.begin(pytest.fail)
    await message.grow(size)
    message.is_complete = True
    return message


@with_memory
async def test_small_messages_get_memory_while_large_ones_hold_all(memory: MessageMemory) -> None:
    await used(memory, 32 * MB)
    waiting = asyncio.create_task(used(memory, 32 * MB))
    await asyncio.sleep(0)
    for _ in range(96):
        await used(memory, memory.small_bytes)
    assert not waiting.done()
    waiting.cancel()


@with_memory
async def test_large_messages_wait_for_those_in_use_the_first_one_first(memory: MessageMemory) -> None:
    first = await used(memory, 32 * MB)
    order = []

    async def use(name: str, size: int) -> None:
        message = await used(memory, size)
        order.append(name)
        message.release()

    # The last one would fit before the others, but has to wait for its turn.
    sizes = {"a": 32 * MB, "b": 30 * MB, "c": MB}
    tasks = [asyncio.create_task(use(name, size)) for name, size in sizes.items()]
    await asyncio.sleep(0.05)
    assert order == []
    first.release()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]


@with_memory
async def test_a_message_whose_rest_does_not_come_gives_way_to_one_that_waits(memory: MessageMemory) -> None:
    refused: list[tuple[str, QueueFull]] = []
    slow = memory.begin(lambda error: refused.append(("slow", error)))
    await slow.grow(10 * MB)
    larger = memory.begin(lambda error: refused.append(("larger", error)))
    await larger.grow(20 * MB)
    await used(memory, 16 * MB)
    ((name, error),) = refused
    assert name == "larger"
    assert str(error) == "the messages of all robots hold more than 64 MB (--policy-message-memory-mb)"
    with pytest.raises(QueueFull):
        await larger.grow(30 * MB)


def test_without_memory_a_message_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_memory, "_MAX_WAIT_S", 0.05)

    async def test(memory: MessageMemory) -> None:
        first = await used(memory, 32 * MB)
        with pytest.raises(QueueFull, match="more than 64 MB"):
            await used(memory, 32 * MB)
        first.release()
        first.release()
        await used(memory, 32 * MB)

    with_memory(test)()


@with_memory
async def test_what_is_made_of_a_message_is_counted_with_it_and_refused_at_once(memory: MessageMemory) -> None:
    first, second = await used(memory, 20 * MB), await used(memory, 10 * MB)
    second.charge(memory.small_bytes)
    with pytest.raises(QueueFull, match="more than 64 MB"):
        second.charge(4 * MB)
    first.release()
    second.charge(20 * MB)
    assert second.size == 30 * MB + memory.small_bytes
    with pytest.raises(QueueFull):
        second.charge(4 * MB)


@with_memory
async def test_a_message_in_use_has_memory_for_what_small_ones_are_made_of(memory: MessageMemory) -> None:
    await used(memory, 32 * MB)
    small = await used(memory, 100)
    small.charge(memory.small_bytes - 100)


def memory_of(value: Any) -> int:
    """Return the bytes of a value and of all values in it. Not by tracemalloc: msgpack interns the names in a map, and
    when Python enlarges its table of interned texts, that counts as memory of the map."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return sys.getsizeof(value) + sum(map(memory_of, inner))


@pytest.mark.parametrize("message", [
    {"list": [[]] * 30_000}, {"maps": [{}] * 30_000}, {str(number): number for number in range(30_000)},
    {"text": "a" * 500_000 + "\N{GRINNING FACE}"}, {"other order": np.zeros(100_000, ">f8")},
])  # fmt: skip
def test_the_values_of_a_message_take_no_more_than_is_charged_for_them(message: Any) -> None:
    messages = pytest.importorskip("edge_server.plugins.policies.array_messages")
    data = messages.write_message(message)
    charged: list[int] = []
    found = messages.read_message(data, charged.append)
    assert found.keys() == message.keys()
    assert len(data) // 2 < memory_of(found) < len(data) + sum(charged)
