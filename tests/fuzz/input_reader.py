"""Reader of numbers and bytes from a fuzzer's input. What the input lacks is 0 or empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

_Item = TypeVar("_Item")


class InputReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> int:
        """Number of bytes that are not read yet."""
        return len(self._data) - self._position

    def byte(self) -> int:
        if self._position >= len(self._data):
            return 0
        self._position += 1
        return self._data[self._position - 1]

    def number(self, size: int) -> int:
        """Return a number of `size` bytes, the highest first."""
        return int.from_bytes(self.take(size), "big")

    def choice(self, items: Sequence[_Item]) -> _Item:
        """Return one of up to 256 items."""
        return items[self.byte() % len(items)]

    def take(self, size: int) -> bytes:
        """Return up to `size` bytes."""
        start = self._position
        self._position = min(len(self._data), start + size)
        return self._data[start : self._position]

    def rest(self) -> bytes:
        return self.take(self.left)

    def json(self, words: Sequence[str], depth: int = 4) -> Any:
        """Return a JSON value. Its names and some of its strings are taken from `words`."""
        kind = self.byte()
        if depth and kind < 64:
            return {self.choice(words): self.json(words, depth - 1) for _ in range(kind & 7)}
        if depth and kind < 112:
            return [self.json(words, depth - 1) for _ in range(kind & 7)]
        if kind < 160:
            return self.choice(words)
        if kind < 184:
            return self.byte() - 3
        simple = (None, True, False, 0.5, -1.5, 1e300, 2**63, -(2**63), 2**64, 1 << 70, "", [], {}, float("inf"))
        if kind < 216:
            return simple[kind % len(simple)]
        return self.take(kind & 15).decode("utf-8", "replace")

    def cut(self, data: bytes) -> list[bytes]:
        """Return `data` in pieces: one, or pieces of sizes that the input gives."""
        pieces: list[bytes] = []
        start = 0
        while start < len(data):
            size = self.byte() or len(data)
            pieces.append(data[start : start + size])
            start += size
        return pieces
