"""Chat client for load tests: sends chats to OpenAI's API, and records when each part of the text arrives.

Works with any server that has `/v1/chat/completions`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.plugins.tuning.clients.client_interface import ModelFacts, ServerCounts, TextTimes
from edge_server.plugins.tuning.clients.http_client import Headers, HttpControl, encode_post
from edge_server.plugins.tuning.clients.http_connection import HttpLoadConnection, ResponseHead

_PATH = "/v1/chat/completions"
_WORDS = (
    "time", "way", "day", "world", "life", "hand", "part", "place", "work", "week", "case", "point", "number", "group",
    "problem", "fact", "water", "room", "month", "study",
)  # fmt: skip
_MAX_LINE_BYTES = 1 << 20
_PROMPTS = 32
"""Different prompts for each worker, so that a prefix cache does not answer them all."""


class ChatControl(HttpControl):
    """Queries of a server of OpenAI's API, which describes no model and has no statistics."""

    def model(self, name: str, version: str) -> ModelFacts:
        return ModelFacts(name, version, (), (), 0, is_decoupled=True)

    def counts(self, name: str, version: str) -> ServerCounts:
        return ServerCounts()


def write_chats(
    url: str, headers: Headers, model: str, prompts: Sequence[str], max_tokens: int, workers: int
) -> list[list[bytes]]:
    """Return the requests that each worker sends in turns. Every worker begins with another prompt."""
    requests = []
    for prompt in prompts:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content_type = ("Content-Type", "application/json")
        requests.append(encode_post(url, _PATH, [*headers, content_type], json.dumps(body).encode()))
    return [[requests[(worker + turn) % len(requests)] for turn in range(len(requests))] for worker in range(workers)]


def generated_prompts(word_count: int, seed: int) -> list[str]:
    """Return prompts of so many words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(_WORDS, k=word_count)) for _ in range(_PROMPTS)]


class ChatConnection(HttpLoadConnection):
    """Connection for one worker's chats, whose responses are streams of server-sent events."""

    _line = b""
    """Beginning of a line."""
    _first_s = _last_s = 0.0
    _tokens = _pieces = 0
    _error: str | None = None

    def _begin_body(self, head: ResponseHead) -> None:
        super()._begin_body(head)
        self._line, self._first_s, self._last_s, self._tokens, self._pieces, self._error = b"", 0.0, 0.0, 0, 0, None

    def _take_body(self, data: bytes, now: float) -> None:
        if self._head is None or self._worker is None or self._head.status != 200:
            super()._take_body(data, now)
            return
        self._worker.since_s = now
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _MAX_LINE_BYTES:
            raise ValueError("a line of the answer is too long")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                try:
                    self._take_event(json.loads(line[6:]), now)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"an event of the answer is not understood: {error}") from None

    def _take_event(self, event: Mapping[str, Any], now: float) -> None:
        if "error" in event:
            self._error = str(event["error"].get("message"))
            return
        deltas = [choice["delta"] for choice in event["choices"]]
        if any(delta.get("content") or delta.get("reasoning_content") for delta in deltas):
            self._last_s = now
            self._first_s = self._first_s or now
            self._pieces += 1
        if event.get("usage"):
            self._tokens = int(event["usage"]["completion_tokens"])

    def _result(self, head: ResponseHead) -> tuple[str, str, TextTimes | None]:
        if head.status != 200:
            return super()._result(head)
        if self._error is not None:
            return "STREAM", self._error, None
        # A server that does not count its tokens mostly sends one a chunk.
        return "", "", TextTimes(self._first_s, self._last_s, self._tokens or self._pieces)
