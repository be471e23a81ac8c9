"""Chat client for load tests: sends chats to OpenAI's API, and records when each part of the text arrives.

Works with any server that has `/v1/chat/completions`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge_server.plugins.tuning.load.client_interface import ModelFacts, SendFailed, ServerCounts, TextTimes
from edge_server.plugins.tuning.load.http_client import Headers, HttpControl, split_url

_PATH = "/v1/chat/completions"
_WORDS = (
    "time", "way", "day", "world", "life", "hand", "part", "place", "work", "week", "case", "point", "number", "group",
    "problem", "fact", "water", "room", "month", "study",
)  # fmt: skip
_PROMPTS = 32
"""Different prompts for each worker, so that a prefix cache does not answer them all."""


class ChatControl(HttpControl):
    """Asks for statistics if the server speaks KServe v2; its model needs no description."""

    def model(self, name: str, version: str) -> ModelFacts:
        return ModelFacts(name, version, (), (), 0, is_decoupled=True)

    def counts(self, name: str, version: str) -> ServerCounts:
        return ServerCounts()


def write_chats(model: str, prompts: Sequence[str], max_tokens: int, workers: int) -> list[list[bytes]]:
    """Return the bodies of the requests that each worker sends in turns. Prompts: every worker begins with another."""
    bodies = []
    for prompt in prompts:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bodies.append(json.dumps(body).encode())
    return [[bodies[(worker + turn) % len(bodies)] for turn in range(len(bodies))] for worker in range(workers)]


def made_up_prompts(word_count: int, seed: int) -> list[str]:
    """Return prompts of so many words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(_WORDS, k=word_count)) for _ in range(_PROMPTS)]


class ChatSender:
    """One worker's connection, kept alive; opened again after it broke."""

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        headers: Headers,
        timeout_s: float,
        tls_context: ssl.SSLContext | None,
    ) -> None:
        self._connection = (
            http.client.HTTPConnection(host, port, timeout=timeout_s)
            if tls_context is None
            else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls_context)
        )
        self._path = prefix + _PATH
        self._headers = {**dict(headers), "Content-Type": "application/json"}
        self._timeout_s = timeout_s
        self._is_closed = False

    def send(self, request: bytes) -> TextTimes:
        """Return when the first text came, and the number of tokens."""
        try:
            return self._send(request)
        except TimeoutError:
            self._connection.close()
            raise SendFailed("TIMEOUT", f"no text within {self._timeout_s:g} s") from None
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            self._connection.close()
            reason = "CANCELLED" if self._is_closed else "CONNECTION"
            raise SendFailed(reason, str(error) or type(error).__name__) from None

    def close(self) -> None:
        self._is_closed = True
        wire = self._connection.sock
        if wire is not None:
            # Ends a read in which another thread waits.
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def disconnect(self) -> None:
        """Close the connection, once no thread uses it any more."""
        self._connection.close()

    def _send(self, request: bytes) -> TextTimes:
        if self._is_closed:
            raise OSError("the measurement has ended")
        self._connection.request("POST", self._path, request, self._headers)
        response = self._connection.getresponse()
        if response.status != 200:
            raise SendFailed(f"HTTP {response.status}", _error_text(response.read()))
        first_s = last_s = 0.0
        tokens = pieces = 0
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event: Mapping[str, Any] = json.loads(line[6:])
            if "error" in event:
                response.read()
                raise SendFailed("STREAM", str(event["error"].get("message")))
            if any(choice["delta"].get("content") for choice in event["choices"]):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                pieces += 1
            if event.get("usage"):
                tokens = int(event["usage"]["completion_tokens"])
        # Ends a response with a Content-Length, so that the connection takes the next request.
        response.read()
        # A server that does not count its tokens mostly sends one a chunk.
        return TextTimes(first_s, last_s, tokens or pieces)


def _error_text(body: bytes) -> str:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return ""


@contextlib.contextmanager
def chat_senders(
    url: str, headers: Headers, timeout_s: float, count: int, tls_context: ssl.SSLContext | None
) -> Iterator[list[ChatSender]]:
    """Yield a sender for each worker, and close them."""
    host, port, prefix = split_url(url)
    senders = [ChatSender(host, port, prefix, headers, timeout_s, tls_context) for _ in range(count)]
    try:
        yield senders
    finally:
        for sender in senders:
            sender.disconnect()
