"""Texts of answers with calls of tools and reasoning, in each form that models write. The result must not depend on
where the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from input_reader import InputReader

from edge_server.plugins.language.engines.settings import ToolFormat
from edge_server.plugins.language.text.answer_parser import (
    HARMONY_MARKS,
    AnswerParser,
    HarmonyParser,
    TaggedAnswerParser,
)
from edge_server.plugins.language.text.reasoning import ReasoningParser, find_reasoning_tags
from edge_server.plugins.language.text.requested_tools import Tools
from edge_server.plugins.language.text.tool_calls import ToolCallParser, call_marks

FORMS: Sequence[ToolFormat] = get_args(ToolFormat)
_SCHEMA = {"properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
TOOLS = Tools([{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in ("f", "go")], "auto")
_TAGS = find_reasoning_tags("</think>")
WORDS = (
    *sorted({mark for form in FORMS for mark in call_marks(form)}), *HARMONY_MARKS, "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|tool_call|>", "functools", "<think>", "</think>", "f", "go", "call:f", "call:go", "function",
    "```json", "```",
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", '{"name": "f", "arguments": ', '{"name": "go", "parameters": ', "{", "}", "[", "]", "(", ")", ",",
    ";", ":", '"', "a", "b", "1", "null", " ", "\n", "\\", "[f(a=1)]", "assistant", "analysis", "final", "commentary",
    " to=functions.f", " to=functions.no", " json", "abcdefghi",
)  # fmt: skip


def seeds() -> Iterable[bytes]:
    texts = {
        "hermes": ["<tool_call>", '{"name": "f", "arguments": ', "{", "}", "}", "</tool_call>"],
        "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f", "<｜tool▁sep｜>", "{", "}"],
        "gemma4": ["<|tool_call>", "call:f", "{", "a", ":", '<|"|>', "b", '<|"|>', "}", "<tool_call|>"],
        "mistral": ["[TOOL_CALLS]", "go", "[ARGS]", "{", "}"],
        "pythonic": ["[f(a=1)]"],
        "openai": ["<|channel|>", "commentary", " to=functions.f", "<|message|>", "{", "}", "<|call|>"],
    }
    for form, words in texts.items():
        yield bytes((FORMS.index(form), 1, 4, 9, 0, *(WORDS.index(word) for word in words)))
    glm = ["<tool_call>", "f", "<arg_key>", "b", "</arg_key>", "<arg_value>", "1", "</arg_value>", "</tool_call>"]
    words = ["<think>", "</think>", *glm]
    yield bytes((FORMS.index("hermes") | 0x80, 3, 5, 8, 0, *(WORDS.index(word) for word in words)))


def check(data: bytes) -> None:
    """The first bytes are the form and the lengths of the first pieces, the rest words."""
    take = InputReader(data)
    kind = take.byte()
    form = FORMS[(kind & 0x7F) % len(FORMS)]
    sizes = [take.byte() for _ in range(3)]
    pieces = []
    text = "".join(take.choice(WORDS) for _ in range(min(take.left, 200)))
    rest = text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    whole = _parse(_parser(form, kind), [text])
    assert _parse(_parser(form, kind), [*pieces, rest]) == whole
    assert _parse(_parser(form, kind), [*text, ""]) == whole
    _, content, calls = whole
    if form != "openai" and not kind & 0x80 and not calls:
        assert content == text


def _parser(form: ToolFormat, kind: int) -> AnswerParser:
    if form == "openai":
        return HarmonyParser(TOOLS)
    assert _TAGS is not None
    reasoning = ReasoningParser(_TAGS, is_open=False) if kind & 0x80 else None
    return TaggedAnswerParser(reasoning, ToolCallParser(TOOLS, form))


def _parse(parser: AnswerParser, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content, and name and arguments of each call."""
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for place, piece in enumerate(pieces):
        parts = parser.add(piece, is_last=place == len(pieces) - 1)
        reasoning += parts.reasoning
        content += parts.content
        for delta in parts.calls:
            _add_delta(calls, delta)
    assert parser.call_count == len(calls)
    return reasoning, content, calls


def _add_delta(calls: list[tuple[str, str]], delta: dict[str, Any]) -> None:
    json.dumps(delta)
    if "id" in delta:
        assert delta["index"] == len(calls)
        calls.append((delta["function"]["name"], ""))
    name, arguments = calls[delta["index"]]
    calls[delta["index"]] = name, arguments + delta["function"]["arguments"]
