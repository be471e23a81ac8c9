"""Bound on the messages of all robots: small ones always get memory, large ones wait in turn, slow ones are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from edge_server.errors import QueueFull
from edge_server.plugins.policies.connections import message_memory
from edge_server.plugins.policies.connections.message_memory import HeldMessage, MessageMemory

MB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_memory, "_MAX_RECEIVE_S", 0.05)
    monkeypatch.setattr(message_memory, "_LOOK_EVERY_S", 0.01)


def run(test: Callable[[MessageMemory], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(test(MessageMemory(64 * MB)), 30)

    asyncio.run(within())


async def used(memory: MessageMemory, size: int) -> HeldMessage:
    message = memory.begin(pytest.fail)
    await message.grow(size)
    message.is_complete = True
    return message


def test_small_messages_get_memory_while_large_ones_hold_all() -> None:
    async def test(memory: MessageMemory) -> None:
        await used(memory, 32 * MB)
        waiting = asyncio.create_task(used(memory, 32 * MB))
        await asyncio.sleep(0)
        for _ in range(96):
            await used(memory, memory.small_bytes)
        assert not waiting.done()
        waiting.cancel()

    run(test)


def test_large_messages_wait_for_those_in_use_the_first_one_first() -> None:
    async def test(memory: MessageMemory) -> None:
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

    run(test)


def test_a_message_whose_rest_does_not_come_gives_way_to_one_that_waits() -> None:
    async def test(memory: MessageMemory) -> None:
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

    run(test)


def test_without_memory_a_message_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_memory, "_MAX_WAIT_S", 0.05)

    async def test(memory: MessageMemory) -> None:
        first = await used(memory, 32 * MB)
        with pytest.raises(QueueFull, match="more than 64 MB"):
            await used(memory, 32 * MB)
        first.release()
        first.release()
        await used(memory, 32 * MB)

    run(test)
