"""Choice of the requests to trace: by rate, by count, and by the W3C trace context that a request brings.

The trace context is `traceparent` and `tracestate` of www.w3.org/TR/trace-context-1.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import NamedTuple

from edge_server.core.trace_settings import TraceSettings

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE = 512
"""Longest `tracestate` accepted, in characters; the standard asks for at least this length."""


class TraceSampler:
    """Trace settings in effect and the counts of their traces. A change of the settings makes a new sampler."""

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.left = settings.count
        """Number of requests that may still be traced, -1 for no limit."""
        self.open = 0
        """Traces that have begun and are not collected yet."""
        self.is_replaced = False
        self._seen = 0
        self._lock = threading.Lock()

    def sample(self, *, is_forced: bool = False) -> bool:
        """Count a request and return whether to trace it. A forced one counts neither for rate nor for count."""
        if not self.settings.is_on:
            return False
        with self._lock:
            if is_forced:
                self.open += 1
                return True
            self._seen += 1
            if not self.left or not self.settings.rate or self._seen % self.settings.rate:
                return False
            if self.left > 0:
                self.left -= 1
            self.open += 1
            return True

    def mark_replaced(self) -> None:
        """Note that other settings are in effect from now on."""
        with self._lock:
            self.is_replaced = True

    def count_collected(self) -> bool:
        """Count one trace as collected. Return whether it was the last one of this sampler."""
        with self._lock:
            self.open -= 1
            return not self.open and (self.is_replaced or not self.left)


class RemoteParent(NamedTuple):
    """The caller's span, of which the request is a part. `state` is the text of `tracestate`, "" for none."""

    trace_id: int
    span_id: int
    flags: int = 1
    state: str = ""


def remote_parent(headers: Iterable[tuple[str, str]]) -> RemoteParent | None:
    """Return the parent span named by the headers, or None when there is none or it is not valid."""
    parents: list[str] = []
    states: list[str] = []
    for name, value in headers:
        if not isinstance(value, str):
            continue
        lower = name.lower()
        if lower == "traceparent":
            parents.append(value.strip())
        elif lower == "tracestate":
            states.append(value.strip())
    if len(parents) != 1:
        return None
    match = _PARENT.fullmatch(parents[0])
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    state = ",".join(filter(None, states))
    is_usable = len(state) <= _MAX_STATE and state.isascii() and state.isprintable()
    return RemoteParent(trace_id, span_id, int(match[4], 16), state if is_usable else "")


def traceparent(trace_id: int, span_id: int) -> str:
    """Return the `traceparent` header of a sampled span."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"
