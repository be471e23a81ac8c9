"""Description of tools in a message, for models whose chat template has no tools: how to call them, in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_PROMPT = """# Functions

You may call functions. Each line between the tags describes one as JSON:
<tools>
{tools}
</tools>

To call a function, write only its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": VALUE}}}}
</tool_call>
Repeat the block to call several. The user then sends the results between <tool_response> tags.
If no function helps, answer in plain text without tags."""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[Mapping[str, Any]]:
    """Return the messages with the tools in the first one, and with earlier calls and their results as text.

    `takes_system`: the chat template takes a message of the system. Otherwise the user's first message has the tools,
    and what the system's messages say.
    """
    found: list[dict[str, Any]] = []
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        found.append({"role": "system", "content": _PROMPT.format(tools=functions)})
    for message in messages:
        item = _plain(message)
        # Templates refuse two messages of the same role in a row: several results, or a question after one.
        if found and found[-1]["role"] == item["role"] and _are_texts(found[-1], item):
            item = {**item, "content": f"{found.pop()['content']}\n\n{item['content']}"}
        found.append(item)
    if not takes_system and len(found) > 1 and found[0]["role"] == "system" and _are_texts(*found[:2]):
        first, second, *rest = found
        found = [{**second, "role": "user", "content": f"{first['content']}\n\n{second['content']}"}, *rest]
    return list(found)


def _are_texts(*messages: Mapping[str, Any]) -> bool:
    return all(isinstance(message["content"], str) for message in messages)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without calls and the role of tools."""
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        blocks = [
            "<tool_call>\n{}\n</tool_call>".format(
                json.dumps({name: call["function"].get(name) for name in ("name", "arguments")}, ensure_ascii=False)
            )
            for call in calls
        ]
        return {"role": message["role"], "content": "\n".join([content, *blocks] if content else blocks)}
    return dict(message)
