"""Cache of decoded beginnings of requests, found by their bytes: equal heads of HTTP, HTTP/2, gRPC and JSON are decoded
once; bounded in memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

MAX_ENTRIES = 2048
"""Enough for clients that ask a thousand models in turn, each with one or two kinds of request. With a smaller number
each would push out the next one's entry before it is used again."""

MAX_KEY_BYTES = 2048
"""Longest bytes that a front end looks up. Longer ones are decoded each time."""

MAX_BYTES = 4 << 20
"""Memory of one cache: a client that never repeats itself fills no more."""

_ENTRY_BYTES = 1824
_ITEM_BYTES = 256
"""Memory of an entry, and of each decoded item (a header field, a tensor), beside its octets: objects of Python, here
and in the layer above."""


class DecodeCache(dict[Key, Value]):
    """Bounded in entries and in the memory of keys and decoded values. The oldest entries make room for a new one.

    A lookup is `get`, as of any dict. One thread at a time may call `add` and `clear`; others may look up meanwhile.
    """

    __slots__ = ("_sizes", "max_bytes", "max_entries", "used_bytes")

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._sizes: dict[Key, int] = {}

    def add(self, key: Key, value: Value, *, octets: int, items: int) -> None:
        """Keep a value, unless it alone is larger than the cache.

        `octets`: those of the key, and of what was decoded from it. `items`: how many objects were decoded.
        """
        size = octets + _ITEM_BYTES * items + _ENTRY_BYTES
        if size > self.max_bytes:
            return
        if key in self:
            self._remove(key)
        while len(self) >= self.max_entries or self.used_bytes + size > self.max_bytes:
            self._remove(next(iter(self)))
        self[key] = value
        self._sizes[key] = size
        self.used_bytes += size

    def _remove(self, key: Key) -> None:
        del self[key]
        self.used_bytes -= self._sizes.pop(key)

    def clear(self) -> None:
        super().clear()
        self._sizes.clear()
        self.used_bytes = 0
