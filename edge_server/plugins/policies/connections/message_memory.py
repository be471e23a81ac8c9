"""Memory budget that the messages of all robots share, from receipt to release: a message that would exceed it waits or
is refused.

Half of it is for small messages: each message may always hold `small_bytes`, so a robot that sends little is never
harmed by one that sends much. The other half is for what messages hold beyond that. If it is full, a message waits
until others are used up, the first one first. Meanwhile, one whose rest does not come is refused. What is made of a
message is counted while it is made, and refused at once if there is no memory for it.

A message that is unmasked or read takes its bytes twice, until those that were received are dropped. This is done for
one at a time, on the event loop: the first half has `READING_BYTES` for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from edge_server.errors import QueueFull

MAX_MESSAGE_BYTES = READING_BYTES = 32 << 20

_MAX_MESSAGES = 16 * 3 + 64
"""Messages that may exist at a time: for each of 16 robots of openpi's one that is used, one that waits and one that is
received; and one for each connection of GR00T's."""

_MAX_WAIT_S = 10.0
_MAX_RECEIVE_S = 3.0
"""A message that takes longer to come is refused when another one waits for memory."""

_LOOK_EVERY_S = 0.25


class HeldMessage:
    """What one message holds. Lives on the event loop of its MessageMemory."""

    __slots__ = ("_memory", "_refuse", "is_complete", "is_refused", "since_s", "size")

    def __init__(self, memory: MessageMemory, refuse: Callable[[QueueFull], object]) -> None:
        self.size = 0
        self.since_s = 0.0
        """When it got its first memory (time.monotonic)."""
        self.is_complete = False
        """Whether all of it was received. The receiver sets it."""
        self.is_refused = False
        self._memory = memory
        self._refuse = refuse

    async def grow(self, nbytes: int) -> None:
        """Count bytes that will be received next. May wait; raises QueueFull if there is no memory for them."""
        await self._memory.make_room(self, self.size + nbytes)
        if not self.size:
            self.since_s = time.monotonic()
        self.size += nbytes

    def charge(self, nbytes: int) -> None:
        """Count bytes that are made of the message. Raises QueueFull if there is no memory for them."""
        if not self._memory.has_room(self, self.size + nbytes):
            raise self._memory.refusal()
        self.size += nbytes

    def release(self) -> None:
        """Hold nothing any more. May be called again."""
        self._memory.remove(self)

    def refuse(self) -> None:
        """Give the memory to others: the receiver drops what was received."""
        self.is_refused = True
        self.release()
        self._refuse(self._memory.refusal())


class ReceivedMessage(NamedTuple):
    """Message as a connection gives it. `memory` is to be released once the data is not used any more. `arrived_ns` is
    of time.monotonic_ns."""

    data: memoryview
    memory: HeldMessage
    arrived_ns: int
    is_text: bool = False


class MessageMemory:
    """Memory of `total_bytes` for messages. Not thread-safe: lives on one event loop."""

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: more than twice READING_BYTES."""
        self.total_bytes = total_bytes
        self.small_bytes = (total_bytes // 2 - READING_BYTES) // _MAX_MESSAGES
        self._messages: set[HeldMessage] = set()
        self._waiting: deque[HeldMessage] = deque()
        self._changed = asyncio.Event()

    def begin(self, refuse: Callable[[QueueFull], object]) -> HeldMessage:
        """Return a message that holds nothing yet. `refuse` is called if it must give its memory to others while it is
        received; it drops what was received, and does not raise."""
        message = HeldMessage(self, refuse)
        self._messages.add(message)
        return message

    def remove(self, message: HeldMessage) -> None:
        self._messages.discard(message)
        self._changed.set()

    async def make_room(self, message: HeldMessage, size: int) -> None:
        """Wait until a message may hold `size` bytes. Raises QueueFull."""
        if message.is_refused:
            raise self.refusal()
        if size <= self.small_bytes or (not self._waiting and self.has_room(message, size)):
            return
        until_s = time.monotonic() + _MAX_WAIT_S
        self._waiting.append(message)
        try:
            while self._waiting[0] is not message or not self.has_room(message, size):
                self._refuse_slow()
                if message.is_refused or time.monotonic() > until_s:
                    raise self.refusal()
                self._changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK_EVERY_S)
        finally:
            self._waiting.remove(message)
            self._changed.set()

    def has_room(self, message: HeldMessage, size: int) -> bool:
        """Return whether a message may hold `size` bytes now."""
        if size <= self.small_bytes:
            return True
        sizes = [item.size for item in self._messages if item is not message]
        return sum(max(0, other - self.small_bytes) for other in (size, *sizes)) <= self.total_bytes // 2

    def _refuse_slow(self) -> None:
        """Refuse a message whose rest does not come: of several the one that holds most for longest."""
        now_s = time.monotonic()
        slow = [
            item
            for item in self._messages
            if not item.is_complete and item.size > self.small_bytes and now_s - item.since_s > _MAX_RECEIVE_S
        ]
        if slow:
            max(slow, key=lambda item: item.size * (now_s - item.since_s)).refuse()

    def refusal(self) -> QueueFull:
        return QueueFull(
            f"the messages of all robots hold more than {self.total_bytes >> 20} MB (--policy-message-memory-mb)"
        )
