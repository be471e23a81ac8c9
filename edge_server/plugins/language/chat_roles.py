"""Replacement of the chat role `developer` by `system`, for chat templates that do not know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def replace_developer(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return the messages with the role `system` for `developer`, OpenAI's newer name for it, unless the template has
    this name."""
    if "developer" in template:
        return list(messages)
    return [{**item, "role": "system"} if item["role"] == "developer" else item for item in messages]
