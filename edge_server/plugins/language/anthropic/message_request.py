"""Parser of the requests `messages` and `messages/count_tokens` of Anthropic's API: translates them to OpenAI's chats.

The format is https://docs.anthropic.com/en/api/messages. As in OpenAI's API, members that are not supported are errors
if they might constrain the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from edge_server.frontends.json_text import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import (
    BadMember,
    CompletionRequest,
    check_names,
    decode_base64,
    make_completion_request,
    read_messages,
)
from edge_server.plugins.language.text.requested_template_variables import THINKING
from edge_server.protocol.raw_tensors import Buffer

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
_COUNTED = {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control"}
_SUPPORTED = {*_COUNTED, *_SAME, "stop_sequences"}

_OWN_NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}
"""Member of OpenAI's API -> the name that the client knows."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_DISPLAYS = (None, "summarized", "omitted")
_BUDGET_IGNORED = "thinking.budget_tokens: not enforced; only max_tokens ends the thinking"


class MessageRequest(NamedTuple):
    """One call. `shows_thinking`: what the model thinks is part of its answer."""

    completion: CompletionRequest
    shows_thinking: bool


class _Thinking(NamedTuple):
    """The member `thinking`. `is_enabled` None: the model decides whether it thinks."""

    is_enabled: bool | None = None
    is_shown: bool = False
    has_budget: bool = False


def read_message_request(body: Buffer) -> MessageRequest:
    """Return the call of a body of `messages`. Raises InvalidRequest."""
    members = parse_object(body)
    check_names(members, _SUPPORTED)
    if members.get("max_tokens") is None:
        raise BadMember("max_tokens", "'max_tokens': expected a whole number from 1, got none")
    thinking = _read_thinking(members.get("thinking"))
    call = _chat(members, thinking)
    warnings = (_BUDGET_IGNORED,) if thinking.has_budget else ()
    return MessageRequest(replace(call, warnings=warnings), thinking.is_shown)


def read_count_request(body: Buffer) -> CompletionRequest:
    """Return the chat of a body of `messages/count_tokens`. Raises InvalidRequest."""
    members = parse_object(body)
    check_names(members, _COUNTED)
    return _chat(members, _read_thinking(members.get("thinking")))


def _chat(members: Mapping[str, Any], thinking: _Thinking) -> CompletionRequest:
    choice, has_parallel_calls = _tool_choice(members.get("tool_choice"))
    translated = {
        **{name: members.get(name) for name in _SAME},
        "messages": _messages(members),
        "stop": members.get("stop_sequences"),
        "tools": _tools(members.get("tools")),
        "tool_choice": choice,
        "parallel_tool_calls": has_parallel_calls,
        "response_format": _response_format(members.get("output_config")),
        THINKING: thinking.is_enabled,
    }
    try:
        return make_completion_request(translated, is_chat=True)
    except BadMember as error:
        raise error.renamed(_OWN_NAMES) from None


def _messages(members: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages, system = read_messages(members), members.get("system")
    found = [] if system is None else [{"role": "system", "content": _text(system, "system")}]
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise BadMember("messages", f"'{place}.role': expected user or assistant, got {str(role)[:40]}")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise BadMember("messages", f"'{place}.content': expected a text or a list of blocks")
        found += _user_messages(blocks, place) if role == "user" else [_assistant_message(blocks, place)]
    if found and found[-1]["role"] == "assistant":
        raise BadMember("messages", "'messages': expected a user's message at the end: an answer cannot be continued")
    return found


def _user_messages(blocks: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """Return the results of tools, each as a message, and the text."""
    results = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _content(block.get("content") or "", f"{place}.content[{index}].content"),
        }
        for index, block in enumerate(blocks)
        if block.get("type") == "tool_result"
    ]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    return [*results, {"role": "user", "content": _content(rest, f"{place}.content")}] if rest else results


def _assistant_message(blocks: Sequence[Mapping[str, Any]], place: str) -> dict[str, Any]:
    """Return the text, the calls of tools, and what the model thought, of which chat templates may take a part."""
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        if block.get("type") == "tool_use":
            name, value = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(value, dict):
                raise BadMember("messages", f"'{place}.content[{index}]': expected a name and an object as input")
            calls.append({"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": value}})
        elif block.get("type") == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise BadMember("messages", f"'{place}.content[{index}].thinking': expected a text")
            thoughts.append(thought)
    rest = [block for block in blocks if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    message: dict[str, Any] = {"role": "assistant", "content": _text(rest, f"{place}.content")}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _text(content: object, place: str) -> str:
    """Return the text of a text or of blocks of type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMember(place.partition("[")[0], f"'{place}': expected a text or a list, got {json_type(content)}")
    texts = []
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else None
            raise BadMember(place.partition("[")[0], f"'{place}': expected blocks of type text, got {str(kind)[:40]}")
        texts.append(block["text"])
    return "".join(texts)


def _content(content: object, place: str) -> object:
    """Return a text or blocks of type text and image in OpenAI's form."""
    blocks = content if isinstance(content, list) else []
    if not any(isinstance(block, dict) and block.get("type") == "image" for block in blocks):
        return _text(content, place)
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "image":
            parts.append({"type": "text", "text": _text([block], place)})
            continue
        source = block.get("source")
        kind = source.get("type") if isinstance(source, dict) else None
        value = source.get("data" if kind == "base64" else "url") if isinstance(source, dict) else None
        if kind not in ("base64", "url") or not isinstance(value, str):
            raise BadMember(
                "messages",
                f"'{place}[{index}].source': expected type base64 with data, or type url with url, got type "
                f"{str(kind)[:40]}",
            )
        if kind == "base64":
            parts.append({"type": "image_url", "image_url": decode_base64(value, f"{place}[{index}].source.data")})
        else:
            parts.append({"type": "image_url", "image_url": {"url": value}})
    return parts


def _tools(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    found = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            kind = tool.get("type") if isinstance(tool, dict) else json_type(tool)
            raise BadMember("tools", f"'tools[{index}].type': expected custom or none, got {str(kind)[:40]}")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name)}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: object) -> tuple[object, object]:
    """Return OpenAI's choice, and whether an answer may have several calls; None: as by default."""
    if choice is None:
        return None, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in (*_TOOL_CHOICES, "tool"):
        raise BadMember("tool_choice", f"'tool_choice.type': expected auto, any, tool or none, got {str(kind)[:40]}")
    alone = choice.get("disable_parallel_tool_use") or False
    if not isinstance(alone, bool):
        raise BadMember("tool_choice", "'tool_choice.disable_parallel_tool_use': expected true or false")
    has_parallel_calls = False if alone else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, has_parallel_calls
    return _TOOL_CHOICES[kind], has_parallel_calls


def _response_format(output: object) -> object:
    if output is None:
        return None
    if not isinstance(output, dict) or output.keys() - {"format"}:
        raise BadMember("output_config", "'output_config': expected an object with 'format' only")
    form = output.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise BadMember("output_config", "'output_config.format': expected type json_schema and an object as schema")
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def _read_thinking(thinking: object) -> _Thinking:
    if thinking is None:
        return _Thinking()
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if not isinstance(thinking, dict) or kind not in ("enabled", "adaptive", "disabled"):
        raise BadMember("thinking", f"'thinking.type': expected enabled, adaptive or disabled, got {str(kind)[:40]}")
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if kind == "enabled" and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise BadMember("thinking", f"'thinking.budget_tokens': expected a whole number from 1, got {str(budget)[:40]}")
    if display not in _DISPLAYS:
        raise BadMember("thinking", f"'thinking.display': expected summarized or omitted, got {str(display)[:40]}")
    if kind == "disabled":
        return _Thinking(is_enabled=False)
    is_enabled = True if kind == "enabled" else None
    return _Thinking(is_enabled, is_shown=display != "omitted", has_budget=kind == "enabled")
