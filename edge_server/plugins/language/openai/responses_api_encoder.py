"""Encoder of OpenAI's Responses API: a response as one JSON object or as events of a stream, its errors, and the inputs
of a stored response."""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from edge_server.errors import BadSchema, ConstraintFailed, EdgeServerError, ErrorCode, NotFound
from edge_server.frontends.json_text import to_json
from edge_server.plugins.language.openai.completion_request import BadMember, CompletionRequest
from edge_server.plugins.language.openai.completion_response import (
    CompletionChoice,
    CompletionEncoder,
    ErrorFormat,
    client_place,
    logprob_object,
    parse_calls,
    typed_event,
    usage,
    warnings_member,
)
from edge_server.plugins.language.openai.completion_response import error_object as openai_error_object
from edge_server.plugins.language.openai.responses_api_request import ResponseRequest, UnknownPreviousResponse
from edge_server.plugins.language.openai.responses_api_store import StoredResponse, TextResponseStore

_FAILURE_CODES = {
    ErrorCode.INVALID_ARG: "invalid_prompt",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded",
}

_PARTS = {
    "summary": ("summary", "reasoning_summary_text", "reasoning_summary_part"),
    "reasoning": ("content", "reasoning_text", "content_part"),
    "message": ("content", "output_text", "content_part"),
}
"""What an item has one part of -> the member with the part, and the events of its text and of itself."""

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
"""Of a page of input items."""


class UnknownResponse(NotFound):
    """No response with the id in the path is stored."""


class ResponseEncoder(CompletionEncoder):
    """Encoder of one choice.

    The output is a list of items, one after the other: reasoning, a message, or the call of a tool. A response that has
    ended is added to the store, if the call wants it.
    """

    def __init__(self, request: ResponseRequest, store: TextResponseStore) -> None:
        self._request = request
        self._call = request.completion
        self._store = store
        # The id is all that a client needs to read the response; the call's is also its request's, which logs show.
        self._id = f"resp_{secrets.token_hex(24)}"
        self._output: list[dict[str, Any]] = []
        """Items. The last one is open while `_open` is not None."""
        self._open: str | int | None = None
        """A key of _PARTS, or the index of the open call."""
        self._calls: dict[int, int] = {}
        """Index of a call -> that of its item."""
        self._sequence_number = 0
        self._events: list[bytes] = []
        """Events that are not returned yet."""

    def for_call(self, call: CompletionRequest) -> ResponseEncoder:
        """Return this encoder, for the call as it was admitted."""
        self._call = call
        return self

    def pieces(self, choice: CompletionChoice) -> list[bytes]:
        self._begin_stream()
        self._add(choice.delta_reasoning, choice.delta, choice.delta_logprobs, choice.delta_tool_calls)
        if choice.finish_reason is not None:
            response = self._end(choice)
            self._emit(f"response.{response['status']}", response=response)
        return self._take_events()

    def failed_pieces(self, error: EdgeServerError) -> list[bytes]:
        """Return the end of a stream that an error cuts short."""
        self._begin_stream()
        message = error_object(error)["error"]["message"]
        is_disobedient = isinstance(error, ConstraintFailed)
        code = "constraint_failed" if is_disobedient else _FAILURE_CODES.get(error.code, "server_error")
        failure = {"code": code, "message": message}
        self._emit("response.failed", response=self._response("failed", error=failure))
        return self._take_events()

    def body(self, choices: Sequence[CompletionChoice]) -> object:
        (choice,) = choices
        parts = [{**call, "index": index} for index, call in enumerate(choice.tool_calls)]
        self._add(choice.reasoning, choice.text, choice.logprobs, parts)
        return self._end(choice)

    def _begin_stream(self) -> None:
        if not self._sequence_number:
            for kind in ("created", "in_progress"):
                self._emit(f"response.{kind}", response=self._response("in_progress"))

    def _add(
        self,
        reasoning: str,
        text: str,
        logprobs: Sequence[Mapping[str, Any]],
        calls: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add what the model has written to the items, with its events."""
        if reasoning:
            kind = "summary" if self._request.has_summary else "reasoning"
            if self._open != kind:
                self._begin_part(kind, {"type": f"{kind}_text", "text": ""}, "rs", type="reasoning", summary=[])
            self._add_text(reasoning)
        if text:
            if self._open != "message":
                self._begin_message()
            found = [logprob_object(entry, self._call.top_logprobs) for entry in logprobs]
            self._output[-1]["content"][0]["logprobs"] += found
            self._add_text(text, logprobs=found)
        for call in calls:
            number, function = call["index"], call["function"]
            if number not in self._calls:
                name = function["name"]
                self._begin(number, "fc", type="function_call", call_id=call["id"], name=name, arguments="")
                self._calls[number] = len(self._output) - 1
            if arguments := function.get("arguments", ""):
                self._output[self._calls[number]]["arguments"] += arguments
                self._emit_of_item("function_call_arguments.delta", self._calls[number], delta=arguments)

    def _begin(self, kind: str | int, prefix: str, **members: Any) -> None:
        """Open an item, and complete the one before."""
        self._end_item("completed")
        self._open = kind
        self._output.append({"id": f"{prefix}_{uuid.uuid4().hex}", **members, "status": "in_progress"})
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _begin_part(self, kind: str, part: dict[str, Any], prefix: str, **members: Any) -> None:
        """Open an item of one part."""
        self._begin(kind, prefix, **members)
        member, _, event = _PARTS[kind]
        self._output[-1][member] = [part]
        self._emit_of_item(f"{event}.added", **{f"{member}_index": 0}, part=part)

    def _begin_message(self) -> None:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._begin_part("message", part, "msg", type="message", role="assistant", content=[])

    def _add_text(self, text: str, **members: Any) -> None:
        """Add text to the part of the open item."""
        member, event, _ = _PARTS[str(self._open)]
        self._output[-1][member][0]["text"] += text
        self._emit_of_item(f"{event}.delta", **{f"{member}_index": 0}, delta=text, **members)

    def _end_item(self, status: str) -> None:
        """Complete the open item, if there is one."""
        if self._open is None:
            return
        item = self._output[-1]
        if isinstance(self._open, int):
            self._emit_of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            member, text_event, part_event = _PARTS[self._open]
            (part,) = item[member]
            place = {f"{member}_index": 0}
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit_of_item(f"{text_event}.done", **place, **done)
            self._emit_of_item(f"{part_event}.done", **place, part=part)
        item["status"] = status
        self._open = None
        self._emit("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _end(self, choice: CompletionChoice) -> dict[str, Any]:
        """Complete the items, and return the response, which is stored if the call wants it."""
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        if status == "completed" and all(item["type"] == "reasoning" for item in self._output):
            self._begin_message()
        self._end_item(status)
        response = self._response(status, choice)
        if self._request.is_stored:
            chat = [*self._request.messages, _answer(choice)]
            if not self._store.add(self._id, StoredResponse(to_json(response), chat)):
                response["store"] = False
                problem = f"store: not stored, because it takes more than {self._store.max_bytes} bytes with its chat"
                response["warnings"] = [*response.get("warnings", ()), problem]
        return response

    def _response(
        self, status: str, choice: CompletionChoice | None = None, error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self._request.echo,
            "output": self._output,
            "usage": None,
        }
        if choice is not None:
            response.update(completed_at=int(time.time()), usage=_usage(self._call, choice))
        return {**response, **warnings_member(self._call.warnings)}

    def _emit_of_item(self, kind: str, index: int = -1, **members: Any) -> None:
        """Send an event of the last item, or of the one at `index`."""
        place = {"item_id": self._output[index]["id"], "output_index": index % len(self._output)}
        self._emit(f"response.{kind}", **place, **members)

    def _emit(self, kind: str, **members: Any) -> None:
        # The items change later: they are encoded now.
        if self._call.is_stream:
            self._events.append(typed_event({"type": kind, "sequence_number": self._sequence_number, **members}))
        self._sequence_number += 1

    def _take_events(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def error_object(error: EdgeServerError) -> dict[str, Any]:
    """Return an error in OpenAI's form, as the clients of this API know it."""
    if isinstance(error, BadSchema):
        place = client_place(error.place, "text.format.schema", ".parameters")
        error = BadMember(re.split(r"[.\[]", place)[0], f"{place}: {error.problem}")
    found = openai_error_object(error)
    if isinstance(error, UnknownPreviousResponse):
        found["error"]["code"] = "previous_response_not_found"
    elif isinstance(error, UnknownResponse):
        found["error"].update(param="id", code="response_not_found")
    return found


def _error_event(error: EdgeServerError) -> bytes:
    """Return the event for a fault of the server, whose place in the stream is not known."""
    found = error_object(error)["error"]
    members = {name: found[name] for name in ("code", "message", "param")}
    return typed_event({"type": "error", "sequence_number": 0, **members})


RESPONSE_ERRORS = ErrorFormat(error_object, _error_event)


def _usage(call: CompletionRequest, choice: CompletionChoice) -> dict[str, Any]:
    counts = usage(call, [choice])
    return {
        "input_tokens": counts["prompt_tokens"],
        # How many tokens a cache newly keeps is not known; clients need a number.
        "input_tokens_details": {"cached_tokens": choice.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens or 0},
        "total_tokens": counts["total_tokens"],
    }


def _answer(choice: CompletionChoice) -> dict[str, Any]:
    """Return the answer as a message of the chat that continues it, without calls that were cut short."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    calls = [call for call, _ in parse_calls(choice.tool_calls)[0]]
    return {**message, "tool_calls": calls} if calls else message


def input_items(response_id: str, messages: Sequence[Mapping[str, Any]], query: str) -> dict[str, Any]:
    """Return a page of the items of `messages`, a chat without the answer.

    `query` has `order` (desc), `limit` (20) and `after`, the id of the item before the page. Raises BadMember.
    """
    members = {name: values[-1] for name, values in parse_qs(query, max_num_fields=16).items()}
    order, limit, after = members.get("order", "desc"), members.get("limit", str(_DEFAULT_LIMIT)), members.get("after")
    if order not in ("asc", "desc"):
        raise BadMember("order", f"'order': expected asc or desc, got {order[:40]}")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= _MAX_LIMIT):
        raise BadMember("limit", f"'limit': expected a whole number from 1 to {_MAX_LIMIT}, got {limit[:40]}")
    # Items have the same ids in each call: the client asks for what follows one.
    suffix = response_id.removeprefix("resp_")[:24]
    items = [
        {"id": f"{prefix}_{suffix}{index:04d}", **item}
        for index, (prefix, item) in enumerate(item for message in messages for item in _items(message))
    ]
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise BadMember("after", f"'after': the response has no input item '{after[:80]}'")
        items = items[place + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(items) > len(page)}


def _items(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the items of a message with the beginning of their ids."""
    status = {"status": "completed"}
    content = message["content"]
    if message["role"] == "tool":
        yield "fc", {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content, **status}
        return
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield "rs", {"type": "reasoning", "summary": [], "content": [text], **status}
    calls = message.get("tool_calls", ())
    if content or not calls:
        is_answer = message["role"] == "assistant"
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown = [_part(part, is_answer=is_answer) for part in parts]
        yield "msg", {"type": "message", "role": message["role"], "content": shown, **status}
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments", "")
        text_of = arguments if isinstance(arguments, str) else json.dumps(arguments)
        call_item = {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": text_of}
        yield "fc", {**call_item, **status}


def _part(part: Mapping[str, Any], *, is_answer: bool) -> dict[str, Any]:
    if part["type"] == "text":
        if is_answer:
            return {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": part["text"]}
    image = part.get("image_url", {})
    return {
        "type": "input_image",
        "detail": image.get("detail", "auto"),
        "image_url": image.get("url"),
        "file_id": None,
    }
