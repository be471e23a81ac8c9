"""Encoder of the items that a stored response was made from: `responses/ID/input_items` of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from edge_server.plugins.language.openai.completion_request import BadMember

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


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
