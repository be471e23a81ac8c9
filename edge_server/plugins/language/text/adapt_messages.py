"""Adaptation of messages to a chat template: to its roles, its ids of calls, and its name of reasoning."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

_SHORT_ID = 9
"""Letters and digits of an id of a call, for Mistral's templates, which refuse others."""


def replace_developer(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return the messages with the role `system` for `developer`, OpenAI's newer name for it, unless the template has
    this name."""
    if "developer" in template:
        return list(messages)
    return [{**item, "role": "system"} if item["role"] == "developer" else item for item in messages]


def place_reasoning(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return the messages with the reasoning before a call as `thinking`, where the template has this name: gpt-oss."""
    if "message.thinking" not in template:
        return list(messages)
    return [
        {**item, "thinking": item["reasoning_content"]}
        if item.get("tool_calls") and item.get("reasoning_content") and not item["content"]
        else item
        for item in messages
    ]


def shorten_call_ids(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return the messages with other ids of calls, the same for the same id, if the template demands their length."""
    if f"length {_SHORT_ID}" not in template:
        return list(messages)
    found: list[Mapping[str, Any]] = []
    for message in messages:
        item = dict(message)
        if "tool_call_id" in item:
            item["tool_call_id"] = _short_id(item["tool_call_id"])
        if item.get("tool_calls"):
            item["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in item["tool_calls"]]
        found.append(item)
    return found


def _short_id(value: object) -> str:
    text = str(value)
    if len(text) == _SHORT_ID and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID]
