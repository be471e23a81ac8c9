"""Encoder of the responses to `responses` of OpenAI's API: whole, or as events of a stream, and of errors."""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.errors import BadSchema, ConstraintFailed, EdgeServerError, ErrorCode, NotFound
from edge_server.frontends.v2.json_parser import to_json
from edge_server.plugins.language.openai.completion_request import BadMember, CompletionRequest
from edge_server.plugins.language.openai.completion_response import (
    EVENT_STREAM_HEADERS,
    CompletionChoice,
    ErrorFormat,
    logprob_object,
    usage,
)
from edge_server.plugins.language.openai.completion_response import error_object as openai_error_object
from edge_server.plugins.language.openai.response_request import ResponseRequest, UnknownPreviousResponse
from edge_server.plugins.language.openai.response_store import StoredResponse, TextResponseStore

_FAILURE_CODES = {
    ErrorCode.INVALID_ARG: "invalid_prompt",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded",
}


class UnknownResponse(NotFound):
    """No response with the id in the path is stored."""


class ResponseEncoder:
    """CompletionEncoder of the API, of one choice.

    The output is a list of items, one after the other: reasoning, a message, or the call of a tool. A response that has
    ended is added to the store, if the call wants it.
    """

    stream_headers: Mapping[str, str] = EVENT_STREAM_HEADERS

    def __init__(self, request: ResponseRequest, store: TextResponseStore) -> None:
        self._request = request
        self._call = request.completion
        self._store = store
        # The id is all that a client needs to read the response; the call's is also its request's, which logs show.
        self._id = f"resp_{secrets.token_hex(24)}"
        self._output: list[dict[str, Any]] = []
        """Items. The last one is open while `_open` is not None."""
        self._open: str | int | None = None
        """"reasoning", "message", or the index of the open call."""
        self._calls: dict[int, int] = {}
        """Index of a call -> that of its item."""
        self._sequence_number = 0
        self._events: list[bytes] = []
        """Events that are not returned yet."""

    def for_call(self, call: CompletionRequest) -> ResponseEncoder:
        """Return this encoder, for the call as it was admitted."""
        self._call = call
        return self

    def idle_piece(self) -> bytes:
        return b": the model is still busy with the prompt\n\n"

    def pieces(self, choice: CompletionChoice) -> list[bytes]:
        self._begin_stream()
        self._add(choice.delta_reasoning, choice.delta, choice.delta_logprobs, choice.delta_tool_calls)
        if choice.finish_reason is not None:
            response = self._end(choice)
            self._emit(f"response.{response['status']}", response=response)
        return self._take_events()

    def last_pieces(self, choices: Sequence[CompletionChoice]) -> list[bytes]:
        return []

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
            if self._open != "reasoning":
                self._begin_reasoning()
            item = self._output[-1]
            kind = "summary" if self._request.has_summary else "content"
            item[kind][0]["text"] += reasoning
            event = "reasoning_summary_text" if self._request.has_summary else "reasoning_text"
            self._emit_of_item(f"{event}.delta", **{f"{kind}_index": 0}, delta=reasoning)
        if text:
            if self._open != "message":
                self._begin_message()
            (part,) = self._output[-1]["content"]
            found = [logprob_object(entry, self._call.top_logprobs) for entry in logprobs]
            part["text"] += text
            part["logprobs"] += found
            self._emit_of_item("output_text.delta", content_index=0, delta=text, logprobs=found)
        for call in calls:
            if call["index"] not in self._calls:
                self._begin_call(call)
            index = self._calls[call["index"]]
            if arguments := call["function"].get("arguments", ""):
                self._output[index]["arguments"] += arguments
                self._emit_of_item("function_call_arguments.delta", index, delta=arguments)

    def _begin(self, kind: str | int, prefix: str, **members: Any) -> None:
        """Open an item, and complete the one before."""
        self._end_item("completed")
        self._open = kind
        self._output.append({"id": f"{prefix}_{uuid.uuid4().hex}", **members, "status": "in_progress"})
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _begin_reasoning(self) -> None:
        self._begin("reasoning", "rs", type="reasoning", summary=[])
        item = self._output[-1]
        if self._request.has_summary:
            part = {"type": "summary_text", "text": ""}
            item["summary"].append(part)
            self._emit_of_item("reasoning_summary_part.added", summary_index=0, part=part)
        else:
            part = {"type": "reasoning_text", "text": ""}
            item["content"] = [part]
            self._emit_of_item("content_part.added", content_index=0, part=part)

    def _begin_message(self) -> None:
        self._begin("message", "msg", type="message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output[-1]["content"].append(part)
        self._emit_of_item("content_part.added", content_index=0, part=part)

    def _begin_call(self, call: Mapping[str, Any]) -> None:
        name = call["function"]["name"]
        self._begin(call["index"], "fc", type="function_call", call_id=call["id"], name=name, arguments="")
        self._calls[call["index"]] = len(self._output) - 1

    def _end_item(self, status: str) -> None:
        """Complete the open item, if there is one."""
        if self._open is None:
            return
        item = self._output[-1]
        if self._open == "reasoning" and self._request.has_summary:
            (part,) = item["summary"]
            self._emit_of_item("reasoning_summary_text.done", summary_index=0, text=part["text"])
            self._emit_of_item("reasoning_summary_part.done", summary_index=0, part=part)
        elif self._open in ("reasoning", "message"):
            (part,) = item["content"]
            if self._open == "reasoning":
                self._emit_of_item("reasoning_text.done", content_index=0, text=part["text"])
            else:
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                self._emit_of_item("output_text.done", content_index=0, **done)
            self._emit_of_item("content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_of_item("function_call_arguments.done", **done)
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
        return {**response, "warnings": list(self._call.warnings)} if self._call.warnings else response

    def _emit_of_item(self, kind: str, index: int = -1, **members: Any) -> None:
        """Send an event of the last item, or of the one at `index`."""
        place = {"item_id": self._output[index]["id"], "output_index": index % len(self._output)}
        self._emit(f"response.{kind}", **place, **members)

    def _emit(self, kind: str, **members: Any) -> None:
        # The items change later: they are encoded now.
        if self._call.is_stream:
            self._events.append(_event({"type": kind, "sequence_number": self._sequence_number, **members}))
        self._sequence_number += 1

    def _take_events(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def error_object(error: EdgeServerError) -> dict[str, Any]:
    """Return an error in OpenAI's form, as the clients of this API know it."""
    if isinstance(error, BadSchema):
        place = _own_place(error.place)
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
    return _event({"type": "error", "sequence_number": 0, **members})


RESPONSE_ERRORS = ErrorFormat(error_object, _error_event)


def _event(value: Mapping[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: ".encode() + to_json(value) + b"\n\n"


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
    calls = [call for call in choice.tool_calls if _is_json(call["function"].get("arguments", ""))]
    return {**message, "tool_calls": calls} if calls else message


def _is_json(text: str) -> bool:
    try:
        json.loads(text or "{}")
    except (ValueError, RecursionError):
        return False
    return True


def _own_place(text: str) -> str:
    """Return a text that begins with a place of a schema as the clients of this API know it."""
    return re.sub(
        r"^json_schema\b|^(tools\[[0-9]+\])\.function\b",
        lambda found: found[1] or "text.format.schema",
        text,
    )
