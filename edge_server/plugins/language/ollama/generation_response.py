"""Encoder of the responses to `chat` and `generate` of ollama's API, whole or as lines of a stream, and of errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from edge_server.errors import BadSchema, EdgeServerError
from edge_server.frontends.json_text import to_json
from edge_server.plugins.language.ollama.generation_request import GenerationRequest
from edge_server.plugins.language.openai.completion_request import CompletionRequest
from edge_server.plugins.language.openai.completion_response import (
    EVENT_STREAM_HEADERS,
    CompletionChoice,
    CompletionEncoder,
    client_place,
    logprob_object,
    parse_calls,
    warnings_member,
)


class OllamaEncoder(CompletionEncoder):
    """Encoder of one choice.

    A call of a tool is sent when it is complete, because its arguments are an object.
    """

    stream_headers = MappingProxyType({**EVENT_STREAM_HEADERS, "Content-Type": "application/x-ndjson"})

    def __init__(self, request: GenerationRequest, call: CompletionRequest) -> None:
        self._request = request
        self._call = call
        self._begin_ns = time.monotonic_ns()
        self._first_text_ns = 0
        self._sent_calls = 0

    def idle_piece(self) -> bytes:
        return line(self._part("", is_done=False))

    def pieces(self, choice: CompletionChoice) -> list[bytes]:
        self._first_text_ns = self._first_text_ns or time.monotonic_ns()
        is_done = choice.finish_reason is not None
        complete = choice.tool_calls if is_done else choice.tool_calls[:-1]
        calls, text = parse_calls(complete[self._sent_calls :])
        self._sent_calls = len(complete)
        content = choice.delta + text
        found = []
        if content or calls or choice.delta_reasoning or choice.delta_logprobs:
            part = self._part(content, calls, choice.delta_logprobs, choice.delta_reasoning, is_done=False)
            found.append(part)
        if is_done:
            found.append(self._end(choice, self._part("", is_done=True)))
        return [line(item) for item in found]

    def body(self, choices: Sequence[CompletionChoice]) -> object:
        (choice,) = choices
        calls, text = parse_calls(choice.tool_calls)
        part = self._part(choice.text + text, calls, choice.logprobs, choice.reasoning, is_done=True)
        return self._end(choice, part)

    def _part(
        self,
        content: str,
        calls: Sequence[tuple[Mapping[str, Any], Any]] = (),
        logprobs: Sequence[Mapping[str, Any]] = (),
        thinking: str = "",
        *,
        is_done: bool,
    ) -> dict[str, Any]:
        part = {**opening(self._request, content), "done": is_done}
        if thinking:
            part.get("message", part)["thinking"] = thinking
        if calls:
            part["message"]["tool_calls"] = [
                {"id": call["id"], "function": {"name": call["function"]["name"], "arguments": value}}
                for call, value in calls
            ]
        if logprobs:
            part["logprobs"] = [self._logprob(item) for item in logprobs]
        return part

    def _logprob(self, item: Mapping[str, Any]) -> dict[str, Any]:
        found = logprob_object(item, self._call.top_logprobs)
        return found if found["top_logprobs"] else {name: found[name] for name in ("token", "logprob", "bytes")}

    def _end(self, choice: CompletionChoice, part: dict[str, Any]) -> dict[str, Any]:
        """Return the last object: `part` with counts and durations in nanoseconds.

        The time of the prompt is known in a stream only. Else `eval_duration` includes it.
        """
        now_ns = time.monotonic_ns()
        first_ns = self._first_text_ns or self._begin_ns
        return {
            **part,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": now_ns - self._begin_ns,
            "prompt_eval_count": choice.input_tokens,
            "prompt_eval_duration": first_ns - self._begin_ns,
            "eval_count": choice.output_tokens,
            "eval_duration": now_ns - first_ns,
            **warnings_member(self._call.warnings),
        }


def opening(request: GenerationRequest, content: str) -> dict[str, Any]:
    """Return the members with which each object of an answer begins."""
    created = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    answer: dict[str, Any] = {"model": request.model, "created_at": created}
    if request.is_chat:
        return {**answer, "message": {"role": "assistant", "content": content}}
    return {**answer, "response": content}


def line(value: object) -> bytes:
    """Return a line of a stream."""
    return to_json(value) + b"\n"


def error_object(error: EdgeServerError) -> dict[str, str]:
    """Return an error in ollama's form."""
    if isinstance(error, BadSchema):
        return {"error": f"{client_place(error.place, 'format')}: {error.problem}"}
    return {"error": error.message}


def unknown_path(method: str, path: str) -> str:
    """Return the error for a path of ollama's API that this server does not have."""
    return (
        f"unknown path: {method} {path[:80]}; of ollama's API this server has /api/chat, /api/generate, /api/embed, "
        "/api/tags, /api/ps, /api/show and /api/version"
    )
