"""Parser of the requests of OpenAI's Responses API: translates them to chat completion requests.

The format is https://platform.openai.com/docs/api-reference/responses. As in chats, members that are not supported are
errors if they might constrain the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from edge_server.frontends.json_text import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import (
    BadMember,
    CompletionRequest,
    check_names,
    make_completion_request,
    read_boolean,
    read_object,
    read_text,
)
from edge_server.plugins.language.openai.responses_api_store import StoredResponse, memory_bytes
from edge_server.plugins.language.text.requested_template_variables import EFFORT, THINKING
from edge_server.protocol.raw_tensors import Buffer

_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_logprobs", "keep_alive",
    # Of chats, which the API does not have.
    "top_k", "min_p", "min_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos", "stop", "logit_bias", "chat_template_kwargs", THINKING,
)  # fmt: skip
_SUPPORTED = {
    *_SAME, "input", "instructions", "previous_response_id", "store", "metadata", "max_output_tokens", "text", "tools",
    "tool_choice", "reasoning", "include", "truncation", "background", "stream_options",
}  # fmt: skip

_NO_EFFECT = ("max_tool_calls", "prompt_cache_options")
"""Members that are ignored beside those of chats: this server runs no tools."""

_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    EFFORT: "reasoning.effort",
}
"""Member of a chat -> the name that the client knows."""

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""The second has no effect: the reasoning comes as plain text, which a client can send back."""

_REASONING_DEFAULTS = {"context": "auto", "mode": "standard"}

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
"""Pairs of `metadata`, and characters of a key and a value; OpenAI's limits."""

_INSTRUCTING = ("system", "developer")
_ROLES = ("user", "assistant", *_INSTRUCTING)


class UnknownPreviousResponse(BadMember):
    """No response with the id `previous_response_id` is stored."""


class ResponseRequest(NamedTuple):
    """One call."""

    completion: CompletionRequest
    echo: Mapping[str, Any]
    """Members that the response repeats."""
    messages: Sequence[Mapping[str, Any]]
    """The chat up to the answer, without instructions: those of a call do not hold for the next."""
    is_stored: bool
    has_summary: bool
    """Whether reasoning comes as its summary."""
    may_shorten: bool
    """Whether the beginning of a chat that is too long may be left out."""

    def without_oldest_turns(self) -> ResponseRequest | None:
        """Return the call without the oldest turns, which take an eighth of the chat's memory; None if only the last
        turn is left.

        A turn begins with a message of the user. Instructions and messages of the system stay.
        """
        messages = self.messages
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        old = [index for index in range(users[-1] if users else 0) if messages[index]["role"] not in _INSTRUCTING]
        if not old:
            return None
        sizes = {index: memory_bytes(messages[index]) for index in old}
        left_out: set[int] = set()
        size, enough = 0, sum(sizes.values()) / 8
        for begin, end in pairwise([0, *users]):
            turn = [index for index in range(begin, end) if index in sizes]
            left_out.update(turn)
            size += sum(sizes[index] for index in turn)
            if size >= enough:
                break
        (chat,) = self.completion.prompts
        whole = chat["messages"] if isinstance(chat, dict) else list(chat)
        kept, images, pictures = [], [], iter(self.completion.images)
        for index, message in enumerate(whole, len(messages) - len(whole)):  # below 0: instructions
            parts = () if isinstance(message["content"], str) else message["content"]
            own = list(islice(pictures, sum(part["type"] == "image" for part in parts)))
            if index not in left_out:
                kept.append(message)
                images += own
        shorter = replace(
            self.completion,
            prompts=({**chat, "messages": kept} if isinstance(chat, dict) else kept,),
            images=tuple(images),
        )
        return self._replace(
            completion=shorter, messages=[message for index, message in enumerate(messages) if index not in left_out]
        )


def read_response_request(body: Buffer, find: Callable[[str], StoredResponse | None]) -> ResponseRequest:
    """Return the call of a body. `find` returns a stored response by its id. Raises InvalidRequest."""
    members = parse_object(body)
    check_names({name: value for name, value in members.items() if name not in _NO_EFFECT}, _SUPPORTED)
    _check_options(members)
    truncation = members.get("truncation")
    is_stored = members.get("store") is None or read_boolean(members, "store")
    instructions = read_text(members, "instructions")
    effort, summary = _reasoning(members)
    include = members.get("include") or []
    includes = include if isinstance(include, list) else [include]
    if wrong := [name for name in includes if name not in _INCLUDABLE]:
        raise BadMember("include", f"'include': expected {' or '.join(_INCLUDABLE)}, got {str(wrong[0])[:80]}")
    has_logprobs = _LOGPROBS in includes or bool(members.get("top_logprobs"))
    response_format, text = _text_format(members)
    tools = members.get("tools")
    if not isinstance(tools, list | None):
        raise BadMember("tools", f"'tools': expected a list, got {json_type(tools)}")
    previous, response_id = None, members.get("previous_response_id")
    if response_id is not None and (previous := find(str(response_id))) is None:
        raise UnknownPreviousResponse(
            "previous_response_id", f"'previous_response_id': no response '{str(response_id)[:80]}' is stored"
        )
    messages = [*(previous.messages if previous is not None else ()), *_messages(members.get("input"))]
    opening = [{"role": "system", "content": instructions}] if instructions else []
    translated = {
        **{name: members.get(name) for name in _SAME},
        "messages": [*opening, *messages],
        "max_completion_tokens": members.get("max_output_tokens"),
        "tools": [_tool(tool, index) for index, tool in enumerate(tools or ())],
        "tool_choice": _tool_choice(members.get("tool_choice")),
        "response_format": response_format,
        "logprobs": has_logprobs,
        EFFORT: effort,
    }
    try:
        completion = make_completion_request(translated, is_chat=True)
    except BadMember as error:
        raise own_error(error) from None
    echo = {
        "instructions": members.get("instructions"),
        "max_output_tokens": members.get("max_output_tokens"),
        "metadata": _metadata(members),
        "model": completion.model,
        "parallel_tool_calls": completion.has_parallel_calls,
        "previous_response_id": members.get("previous_response_id"),
        "reasoning": {"effort": effort, "summary": summary},
        "store": is_stored,
        "temperature": members.get("temperature"),
        "text": text,
        "tool_choice": members.get("tool_choice") or "auto",
        "tools": [
            {name: tool.get(name) for name in ("type", "name", "description", "parameters", "strict")}
            for tool in tools or ()
        ],
        "top_logprobs": completion.top_logprobs,
        "top_p": members.get("top_p"),
        "truncation": truncation or "disabled",
        "user": members.get("user"),
    }
    return ResponseRequest(completion, echo, messages, is_stored, summary is not None, truncation == "auto")


def _check_options(members: Mapping[str, Any]) -> None:
    """Refuse values of options that are not supported."""
    if read_boolean(members, "background"):
        raise BadMember("background", "'background': expected false: a response is made while its client waits")
    truncation = members.get("truncation")
    if truncation not in (None, "disabled", "auto"):
        raise BadMember("truncation", f"'truncation': expected disabled or auto, got {str(truncation)[:40]}")
    # Padding against the guessing of texts by their lengths is not added: `include_obfuscation` has no effect.
    if unknown := read_object(members, "stream_options").keys() - {"include_obfuscation"}:
        raise BadMember("stream_options", f"'stream_options.{min(unknown)[:40]}' is not supported")


def own_error(error: BadMember) -> BadMember:
    """Return the error of a chat with the names that the client knows."""
    if error.param == "messages":
        # The place of a message is not that of an item.
        error = BadMember(error.param, re.sub(r"'messages\[[0-9]+\]", "'messages", error.message, count=1))
    return error.renamed(_OWN_NAMES)


def _metadata(members: Mapping[str, Any]) -> dict[str, str]:
    pairs = read_object(members, "metadata")
    if len(pairs) > _MAX_METADATA or not all(
        len(key) <= _MAX_KEY and isinstance(text, str) and len(text) <= _MAX_VALUE for key, text in pairs.items()
    ):
        raise BadMember(
            "metadata",
            f"'metadata': expected at most {_MAX_METADATA} texts of {_MAX_VALUE} characters with names of {_MAX_KEY}",
        )
    return pairs


def _reasoning(members: Mapping[str, Any]) -> tuple[object, str | None]:
    """Return the effort, and which summary is wanted."""
    reasoning = read_object(members, "reasoning")
    for name, item in reasoning.items():
        if name not in ("effort", "summary", "generate_summary") and item not in (None, _REASONING_DEFAULTS.get(name)):
            raise BadMember("reasoning", f"'reasoning.{name[:40]}' is not supported; supported are effort and summary")
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    if summary not in (None, "auto", "detailed"):
        raise BadMember(
            "reasoning",
            f"'reasoning.summary': expected auto or detailed, got {str(summary)[:40]}: it is the whole reasoning",
        )
    return reasoning.get("effort"), summary


def _text_format(members: Mapping[str, Any]) -> tuple[object, dict[str, Any]]:
    """Return the format of a chat, and the member `text` of the response."""
    text = read_object(members, "text")
    if text.get("verbosity") not in (None, "medium"):
        raise BadMember("text", "'text.verbosity': expected medium: models of this server know no other")
    unknown = next((name for name in text if name not in ("format", "verbosity")), None)
    if unknown is not None:
        raise BadMember("text", f"'text.{unknown[:40]}' is not supported; supported is format")
    form = text.get("format")
    if form is None:
        return None, {"format": {"type": "text"}}
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form, {"format": form}
    if not isinstance(form.get("schema"), dict):
        raise BadMember("text", f"'text.format.schema': expected an object, got {json_type(form.get('schema'))}")
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}, {"format": form}


def _tool(tool: object, index: int) -> dict[str, Any]:
    """Return a tool in the form of a chat."""
    kind = tool.get("type") if isinstance(tool, dict) else json_type(tool)
    if not isinstance(tool, dict) or kind != "function":
        raise BadMember(
            "tools",
            f"'tools[{index}].type': expected function, got {str(kind)[:40]}: this server runs no tools itself",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name)}}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise BadMember(
            "tool_choice",
            f"'tool_choice.type': expected function, got {str(choice.get('type'))[:40]}; or the text auto, none or "
            "required",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _messages(given: object) -> list[dict[str, Any]]:
    """Return the messages of a chat for the items of the input.

    Reasoning belongs to the message or the call after it, and the calls that follow a message of the assistant to it.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise BadMember("input", f"'input': expected a text or a list of items, got {json_type(given)}")
    messages: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(given):
        place = f"input[{index}]"
        kind = (item.get("type") or "message") if isinstance(item, dict) else json_type(item)
        if kind == "reasoning":
            thought += _thought(item, place)
            continue
        if kind == "message":
            message = _message(item, place)
        elif kind == "function_call":
            call_id, name, arguments = (_item_text(item, name, place) for name in ("call_id", "name", "arguments"))
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            if messages and messages[-1]["role"] == "assistant" and not thought:
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            message = _call_output(item, place)
        else:
            raise BadMember(
                "input",
                f"'{place}.type': expected message, function_call, function_call_output or reasoning, got "
                f"{str(kind)[:40]}",
            )
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
        thought = ""
        messages.append(message)
    return messages


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise BadMember("input", f"'{place}.role': expected {', '.join(_ROLES)}, got {str(role)[:40]}")
    content = item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise BadMember("input", f"'{place}.content': expected a text or a list of parts, got {json_type(content)}")
    parts = [_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return {"role": role, "content": "".join(part["text"] for part in parts)}
    return {"role": role, "content": parts}


def _part(part: object, place: str) -> dict[str, Any]:
    """Return a part of a message in the form of a chat."""
    kind = part.get("type") if isinstance(part, dict) else json_type(part)
    if isinstance(part, dict) and kind == "input_image" and isinstance(part.get("image_url"), str):
        image = {name: part[key] for name, key in (("url", "image_url"), ("detail", "detail")) if part.get(key)}
        return {"type": "image_url", "image_url": image}
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(part, dict) or kind not in ("input_text", "output_text", "refusal"):
        expected = "input_text, input_image with an image_url, output_text or refusal"
        raise BadMember("input", f"'{place}.type': expected {expected}, got {str(kind)[:40]}")
    return {"type": "text", "text": _item_text(part, name, place)}


def _item_text(item: Mapping[str, Any], name: str, place: str) -> str:
    """Return a text of an item or a part. Raises BadMember."""
    value = item.get(name)
    if not isinstance(value, str):
        raise BadMember("input", f"'{place}.{name}': expected a text, got {json_type(value)}")
    return value


def _call_output(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    call_id, output = _item_text(item, "call_id", place), item.get("output")
    if isinstance(output, list):
        parts = [_part(part, f"{place}.output[{index}]") for index, part in enumerate(output)]
        picture = next((index for index, part in enumerate(parts) if part["type"] != "text"), None)
        if picture is not None:
            raise BadMember("input", f"'{place}.output[{picture}].type': expected input_text, got input_image")
        output = "".join(part["text"] for part in parts)
    if not isinstance(output, str):
        raise BadMember("input", f"'{place}.output': expected a text or a list of parts, got {json_type(output)}")
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def _thought(item: Mapping[str, Any], place: str) -> str:
    """Return the text of reasoning: its content, else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            raise BadMember("input", f"'{place}.{name}': expected a list of parts with a text")
        if parts:
            return "".join(part["text"] for part in parts)
    return ""
