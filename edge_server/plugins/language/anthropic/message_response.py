"""Encoder of the responses to `messages` of Anthropic's API, whole or as events of a stream, and of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.errors import BadSchema, ConstraintFailed, EdgeServerError, ErrorCode
from edge_server.plugins.language.openai.completion_request import CompletionRequest
from edge_server.plugins.language.openai.completion_response import (
    ERROR_TYPES,
    CompletionChoice,
    CompletionEncoder,
    ErrorFormat,
    client_place,
    parse_calls,
    typed_event,
    usage,
    warnings_member,
)

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

_ERROR_TYPES = {
    **ERROR_TYPES, ErrorCode.NOT_FOUND: "not_found_error", ErrorCode.UNAVAILABLE: "overloaded_error",
}  # fmt: skip

_SIGNATURE = "unsigned"
"""Of a block of thinking. Clients leave out blocks without one, and send them back; it is not checked."""


class MessageEncoder(CompletionEncoder):
    """Encoder of one choice.

    The content of a streamed message comes in blocks, one after the other: thinking, a text, or the call of a tool.
    """

    def __init__(self, call: CompletionRequest, *, shows_thinking: bool = False) -> None:
        self._call = call
        self._shows_thinking = shows_thinking
        self._has_begun = False
        self._blocks = 0
        """Blocks that have begun. The last one is open while `_open` is not None."""
        self._open: str | int | None = None
        """"thinking", "text", or the index of the open call."""

    def idle_piece(self) -> bytes:
        return typed_event({"type": "ping"})

    def pieces(self, choice: CompletionChoice) -> list[bytes]:
        events: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            events.append({"type": "message_start", "message": self._message([], None, [choice], {"output_tokens": 0})})
        if choice.delta_reasoning and self._shows_thinking:
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": choice.delta_reasoning}))
        if choice.delta:
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": choice.delta}))
        for part in choice.delta_tool_calls:
            if part["index"] != self._open:
                events += self._begin(part["index"], _tool_use(choice.tool_calls[part["index"]], {}))
            if arguments := part["function"].get("arguments", ""):
                events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        if choice.finish_reason is not None:
            events += self._end_block()
            end = {"stop_reason": _STOP_REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}
            counts = _output_counts(choice)
            events.append(
                {"type": "message_delta", "delta": end, "usage": counts, **warnings_member(self._call.warnings)}
            )
            events.append({"type": "message_stop"})
        return [typed_event(item) for item in events]

    def body(self, choices: Sequence[CompletionChoice]) -> object:
        (choice,) = choices
        calls, rest = parse_calls(choice.tool_calls)
        text = choice.text + rest
        content = [{"type": "text", "text": text}] if text else []
        content += [_tool_use(call, value) for call, value in calls]
        if choice.reasoning and self._shows_thinking:
            content.insert(0, {"type": "thinking", "thinking": choice.reasoning, "signature": _SIGNATURE})
        stop_reason = _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
        message = self._message(content, stop_reason, choices, _output_counts(choice))
        return {**message, **warnings_member(self._call.warnings)}

    def _message(
        self,
        content: Sequence[Mapping[str, Any]],
        stop_reason: str | None,
        choices: Sequence[CompletionChoice],
        output_counts: Mapping[str, Any],
    ) -> dict[str, Any]:
        counts = {"input_tokens": usage(self._call, choices)["prompt_tokens"], **output_counts}
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": counts,
        }

    def _begin(self, kind: str | int, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events that open a block, unless it is open, and close the one before."""
        if kind == self._open:
            return []
        events = self._end_block()
        self._open = kind
        self._blocks += 1
        return [*events, {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}]

    def _end_block(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        signature = [self._delta({"type": "signature_delta", "signature": _SIGNATURE})]
        events = signature if self._open == "thinking" else []
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._blocks - 1}]

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}


def error_object(error: EdgeServerError) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    message = error.message
    if isinstance(error, BadSchema):
        place = client_place(error.place, "output_config.format.schema", ".input_schema")
        message = f"{place}: {error.problem}"
    kind = "constraint_failed" if isinstance(error, ConstraintFailed) else _ERROR_TYPES.get(error.code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC_ERRORS = ErrorFormat(error_object, lambda error: typed_event(error_object(error)))


def _output_counts(choice: CompletionChoice) -> dict[str, Any]:
    counts: dict[str, Any] = {"output_tokens": choice.output_tokens}
    if choice.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": choice.reasoning_tokens}
    return counts


def _tool_use(call: Mapping[str, Any], value: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value}
