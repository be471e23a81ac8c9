"""Encoder of the responses to `chat/completions` and `completions` of OpenAI's API: whole texts, chunks of streams, and
errors."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from edge_server.core.request_response import Response
from edge_server.errors import BadSchema, ConstraintFailed, ContextTooLong, EdgeServerError, ErrorCode, NotFound
from edge_server.frontends.json_text import to_json
from edge_server.plugins.language.openai.completion_request import BadMember, CompletionRequest

EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}

ERROR_TYPES = {
    ErrorCode.INVALID_ARG: "invalid_request_error",
    ErrorCode.NOT_FOUND: "invalid_request_error",
    ErrorCode.UNSUPPORTED: "invalid_request_error",
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.PERMISSION_DENIED: "permission_error",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_error",
}


class ErrorFormat(NamedTuple):
    """How an API tells an error: as the JSON body of a response, and as the last piece of a stream."""

    body: Callable[[EdgeServerError], object]
    event: Callable[[EdgeServerError], bytes]


class CompletionEncoder(ABC):
    """Encoder of the answer to one CompletionRequest. A piece of a stream is never empty."""

    stream_headers: Mapping[str, str] = EVENT_STREAM_HEADERS

    def idle_piece(self) -> bytes:
        """Return a piece that tells a client nothing."""
        return b": the model is still busy with the prompt\n\n"

    @abstractmethod
    def pieces(self, choice: CompletionChoice) -> list[bytes]:
        """Return the pieces for the last response of a choice."""

    def last_pieces(self, choices: Sequence[CompletionChoice]) -> list[bytes]:
        """Return the end of the stream, behind the pieces of the last response."""
        return []

    @abstractmethod
    def body(self, choices: Sequence[CompletionChoice]) -> object:
        """Return the JSON of the answer to a call that is no stream."""


class UnknownPath(NotFound):
    """No endpoint has a path of OpenAI's API."""

    def __init__(self, method: str, path: str) -> None:
        super().__init__(
            f"unknown path: {method} {path[:80]}; of OpenAI's API this server has /v1/chat/completions, "
            "/v1/completions, /v1/responses, /v1/embeddings, /v1/rerank and /v1/models, of Anthropic's /v1/messages"
        )


@dataclass(slots=True)
class CompletionChoice:
    """One answer as its responses arrive. `delta` and all with such a name are of the last response."""

    index: int
    has_parallel_calls: bool = True
    delta: str = ""
    delta_reasoning: str = ""
    delta_logprobs: list[dict[str, Any]] = field(default_factory=list)
    delta_tool_calls: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    input_tokens: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt that were not computed, None if the model does not tell."""
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    """Of the output tokens, None if the model does not tell."""

    def add(self, response: Response) -> None:
        """Take a response without an error."""
        outputs: dict[str, Any] = {tensor.name: tensor.array.ravel() for tensor in response.outputs}
        texts = [item.decode("utf-8", "replace") for item in outputs.get("text_output", ())]
        self.delta = "".join(texts)
        self.text += self.delta
        parts_of_reasoning = outputs.get("reasoning_content", ())
        self.delta_reasoning = "".join(item.decode("utf-8", "replace") for item in parts_of_reasoning)
        self.reasoning += self.delta_reasoning
        if len(found := outputs.get("num_input_tokens", ())):
            self.input_tokens = int(found[0])
        if len(found := outputs.get("num_cached_tokens", ())):
            self.cached_tokens = int(found[0])
        if len(found := outputs.get("num_reasoning_tokens", ())):
            self.reasoning_tokens = int(found[0])
        self.output_tokens += sum(int(item) for item in outputs.get("num_output_tokens", ()))
        self.delta_logprobs = []
        for item in outputs.get("logprobs", ()):
            self.delta_logprobs += json.loads(item)
        self.logprobs += self.delta_logprobs
        self.delta_tool_calls = []
        for item in outputs.get("tool_calls", ()):
            parts = json.loads(item)
            self.delta_tool_calls += [part for part in parts if self.has_parallel_calls or part["index"] == 0]
        for part in self.delta_tool_calls:
            if part["index"] == len(self.tool_calls):
                call = {"id": part["id"], "type": "function", "function": {"name": part["function"]["name"]}}
                self.tool_calls.append(call)
            function = self.tool_calls[part["index"]]["function"]
            function["arguments"] = function.get("arguments", "") + part["function"].get("arguments", "")
        reason = next((item.decode() for item in outputs.get("finish_reason", ()) if item), None)
        # A model without this output ends for a reason of its own.
        self.finish_reason = reason or ("stop" if response.is_final else None)


class OpenAiEncoder(CompletionEncoder):
    """Encoder of OpenAI's API."""

    def __init__(self, call: CompletionRequest) -> None:
        self._call = call
        count = len(call.prompts) * call.choices if call.is_chat else 0
        delta = {"role": "assistant", "content": ""}
        self._opening = [
            _chunk(call, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(count)
        ]
        """Chunks that are sent with the first text."""

    def pieces(self, choice: CompletionChoice) -> list[bytes]:
        found, self._opening = self._opening + _chunks(self._call, choice), []
        return [event(chunk) for chunk in found]

    def last_pieces(self, choices: Sequence[CompletionChoice]) -> list[bytes]:
        call = self._call
        last = [event({**_chunk(call, []), "usage": usage(call, choices)})] if call.includes_usage else []
        return [*last, b"data: [DONE]\n\n"]

    def body(self, choices: Sequence[CompletionChoice]) -> object:
        call = self._call
        kind = "chat.completion" if call.is_chat else "text_completion"
        answer = {**_head(call, kind), "choices": [_whole(call, choice) for choice in choices]}
        return {**answer, "usage": usage(call, choices), **warnings_member(call.warnings)}


def event(value: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"


def typed_event(value: Mapping[str, Any]) -> bytes:
    """Return an event of a stream whose events have the names of their members `type`."""
    return f"event: {value['type']}\ndata: ".encode() + to_json(value) + b"\n\n"


def _chunks(call: CompletionRequest, choice: CompletionChoice) -> list[dict[str, Any]]:
    """Return the chunks for the last response of a choice: its text, then its end."""
    found = []
    logprobs = _logprobs(call, choice.delta_logprobs, len(choice.text) - len(choice.delta))
    if call.is_chat:
        for name, text in (("reasoning_content", choice.delta_reasoning), ("content", choice.delta)):
            if text:
                delta: dict[str, Any] = {name: text}
                found.append({"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None})
                logprobs = None  # of all tokens of this response
        for part in choice.delta_tool_calls:
            delta = {"tool_calls": [part]}
            found.append({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})
        if choice.finish_reason:
            found.append({"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason})
    elif choice.delta or choice.finish_reason:
        end = choice.finish_reason
        found.append({"index": choice.index, "text": choice.delta, "logprobs": logprobs, "finish_reason": end})
    events = [_chunk(call, [item]) for item in found]
    if choice.finish_reason:
        events[-1].update(warnings_member(call.warnings))
    return events


def usage(call: CompletionRequest, choices: Sequence[CompletionChoice]) -> dict[str, Any]:
    """Return the token counts of a call. A prompt with several answers counts once."""
    prompt = sum(choice.input_tokens for choice in choices[:: call.choices])
    completion = sum(choice.output_tokens for choice in choices)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    cached = [choice.cached_tokens for choice in choices[:: call.choices] if choice.cached_tokens is not None]
    if cached:
        found["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    reasoning = [choice.reasoning_tokens for choice in choices if choice.reasoning_tokens is not None]
    if reasoning:
        found["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return found


def error_object(error: EdgeServerError) -> dict[str, Any]:
    """Return an error in OpenAI's form. Its client shows message, param and code."""
    code = param = None
    message, kind = error.message, ERROR_TYPES.get(error.code, "server_error")
    if isinstance(error, BadMember):
        param = error.param
    elif isinstance(error, BadSchema):
        place = client_place(error.place, "response_format.json_schema.schema")
        param, message = re.split(r"[.\[]", place)[0], f"{place}: {error.problem}"
    elif isinstance(error, ContextTooLong):
        code = "context_length_exceeded"
    elif isinstance(error, ConstraintFailed):
        code = kind = "constraint_failed"
    elif isinstance(error, UnknownPath):
        code = "unknown_url"
    elif error.code is ErrorCode.NOT_FOUND:
        code = "model_not_found"
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
        }
    }


OPENAI_ERRORS = ErrorFormat(error_object, lambda error: event(error_object(error)))


def warnings_member(warnings: Sequence[str]) -> dict[str, list[str]]:
    """Return the member `warnings`; no member without warnings."""
    return {"warnings": list(warnings)} if warnings else {}


def client_place(place: str, schema: str, parameters: str = ".function.parameters") -> str:
    """Return the place of a part of a schema as the clients of an API know it: `schema` is its name for the schema of
    the answer, `parameters` that for the schema of a tool, behind the tool."""
    # The model knows the schema of the answer as a sampling parameter.
    return re.sub(
        r"^json_schema\b|^(tools\[[0-9]+\])\.function\.parameters\b",
        lambda found: f"{found[1]}{parameters}" if found[1] else schema,
        place,
    )


def parse_calls(calls: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[Mapping[str, Any], Any]], str]:
    """Return the calls of an answer, each with its arguments as a value, and the text of those that were cut short."""
    found, text = [], ""
    for call in calls:
        name, arguments = call["function"]["name"], call["function"].get("arguments", "")
        try:
            found.append((call, json.loads(arguments or "{}")))
        except (ValueError, RecursionError):
            text += f'{{"name": "{name}", "arguments": {arguments}'
    return found, text


def _head(call: CompletionRequest, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if call.is_chat else "cmpl"
    return {"id": f"{prefix}-{call.id}", "object": kind, "created": call.created, "model": call.model}


def _chunk(call: CompletionRequest, choices: list[dict[str, Any]]) -> dict[str, Any]:
    chunk = {**_head(call, "chat.completion.chunk" if call.is_chat else "text_completion"), "choices": choices}
    return {**chunk, "usage": None} if call.includes_usage else chunk


def _whole(call: CompletionRequest, choice: CompletionChoice) -> dict[str, Any]:
    end = {"logprobs": _logprobs(call, choice.logprobs, 0), "finish_reason": choice.finish_reason}
    if call.is_chat:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message.update(content=choice.text or None, tool_calls=choice.tool_calls)
        return {"index": choice.index, "message": message, **end}
    return {"index": choice.index, "text": choice.text, **end}


def _logprobs(call: CompletionRequest, items: Sequence[dict[str, Any]], offset: int) -> dict[str, Any] | None:
    """Return the tokens with their logarithms. `offset` is the place of the first one in the choice's text.

    If only the chosen token is known, it is the one among the most likely, as the first one in vLLM.
    """
    if not call.has_logprobs:
        return None
    if not call.is_chat:
        sizes = [len(item["token"]) for item in items]
        return {
            "tokens": [item["token"] for item in items],
            "token_logprobs": [item["logprob"] for item in items],
            "top_logprobs": [{**dict(item.get("top_logprobs", ())), item["token"]: item["logprob"]} for item in items]
            if call.top_logprobs
            else None,
            "text_offset": list(accumulate(sizes[:-1], initial=offset)) if items else [],
        }
    return {"content": [logprob_object(item, call.top_logprobs) for item in items], "refusal": None}


def logprob_object(item: Mapping[str, Any], top_logprobs: int) -> dict[str, Any]:
    """Return a token of a model's output `logprobs` in the form of a chat."""
    chosen = item["token"], item["logprob"]
    found = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode())}
        for token, logprob in (chosen, *item.get("top_logprobs", [chosen]))
    ]
    return {**found[0], "top_logprobs": found[1 : 1 + top_logprobs]}
