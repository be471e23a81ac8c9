"""The W3C trace context of a request: `traceparent` and `tracestate` (www.w3.org/TR/trace-context-1)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_PARENT = 256
_MAX_STATE = 512
"""Characters of `tracestate` that are taken; the standard asks for at least as many."""


@dataclass(frozen=True, slots=True)
class RemoteParent:
    """The span that a request is part of. `state` is the text of `tracestate`, "" for none."""

    trace_id: int
    span_id: int
    flags: int = 1
    state: str = ""


def remote_parent(headers: Iterable[tuple[str, str]]) -> RemoteParent | None:
    """Return the parent that headers name, None when they name none, or wrongly: then a trace of its own begins."""
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
    if len(parents) != 1 or len(parents[0]) > _MAX_PARENT:
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
    """Return the header by which a sampled span is handed on."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"
