"""Bounded in-memory store for OpenAI's Responses API: responses by id, and conversations for `previous_response_id`."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_RESPONSES = 512
MAX_BYTES = 32 << 20
"""Of all responses together."""


class StoredResponse(NamedTuple):
    """`body` is the JSON of the response, `messages` the chat with its answer, without instructions. The
    messages are not changed later: responses that continue each other share them."""

    body: bytes
    messages: Sequence[Mapping[str, Any]]


def memory_bytes(value: object) -> int:
    """Return about how much memory a JSON value takes, with what it shares with others."""
    total, values = 0, [value]
    while values:
        item = values.pop()
        total += sys.getsizeof(item)
        if isinstance(item, Mapping):
            values += (*item.keys(), *item.values())
        elif isinstance(item, list | tuple):
            values += item
    return total


class TextResponseStore:
    """Keeps the newest responses by their ids, up to a number of them and of bytes. May be used from any thread."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._max_responses = max_responses
        self._responses: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        """With the bytes of each."""
        self._byte_count = 0
        self._lock = threading.Lock()

    def add(self, response_id: str, response: StoredResponse) -> bool:
        """Keep a response, and remove the oldest while there are too many. Return False, and do nothing, for one that
        alone is too large."""
        byte_count = memory_bytes(response)
        if byte_count > self.max_bytes:
            return False
        with self._lock:
            self._responses[response_id] = response, byte_count
            self._byte_count += byte_count
            while len(self._responses) > self._max_responses or self._byte_count > self.max_bytes:
                _, (_, oldest) = self._responses.popitem(last=False)
                self._byte_count -= oldest
        return True

    def find(self, response_id: str) -> StoredResponse | None:
        with self._lock:
            found = self._responses.get(response_id)
        return None if found is None else found[0]

    def remove(self, response_id: str) -> bool:
        """Return whether there was one."""
        with self._lock:
            removed = self._responses.pop(response_id, None)
            if removed is not None:
                self._byte_count -= removed[1]
            return removed is not None
