"""Marks of tool calls in the text of an answer, and parser of a whole call between them, in the forms that are no JSON.

The forms are those of the models' chat templates: GLM 4.5's keys and values, Qwen Coder's functions and parameters, and
Gemma's own notation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

Functions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool, by its name."""

_KEYED = re.compile(r"\s*<arg_key>((?:(?!</arg_key>).)*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_GEMMA_HEAD = re.compile(r"\s*call:([A-Za-z0-9_.-]{1,64})\s*(?=\{)")
_BARE = re.compile(r"[^,:{}\[\]]*")
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")
_INTEGER = re.compile(r"-?\d{1,300}")
_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d*)?(?:[eE][+-]?\d{1,4})?")
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 32
"""Of values in values, and of schemas in schemas."""


class CallMarks(NamedTuple):
    """Texts around a call. `block_start` and `block_end` stand around a list of calls, where a model writes them.
    `separator` follows the name, `quote` stands around the texts of Gemma's notation."""

    start: str
    end: str
    block_start: str = ""
    block_end: str = ""
    separator: str = ""
    quote: str = ""


HERMES = CallMarks("<tool_call>", "</tool_call>")
DEEPSEEK = CallMarks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁sep｜>",
)
DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>([^<\n]{1,64})\n\s*```json\s*|([^<\n]{1,64})<｜tool▁sep｜>\s*(?:```json\s*)?)(?=\{)"
)
"""A call up to its arguments: V3 and R1 write the first form, V3.1 the second."""
GEMMA4 = CallMarks("<|tool_call>", "<tool_call|>", quote='<|"|>')
FUNCTION_GEMMA = CallMarks("<start_function_call>", "<end_function_call>", quote="<escape>")


def tagged_call(text: str, functions: Functions) -> tuple[str, str] | None:
    """Return name and arguments of `<function=NAME><parameter=KEY>VALUE</parameter></function>`; None if it is no call
    of one of the tools. A value is text, or JSON where the tool's schema says that it is no text."""
    before, _, rest = text.partition("<function=")
    name, closed, body = rest.partition(">")
    if before.strip() or not closed or name not in functions:
        return None
    arguments: dict[str, Any] = {}
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed_value(value, key, functions[name])
    return name, json.dumps(arguments, ensure_ascii=False)


def keyed_call(text: str, functions: Functions) -> tuple[str, str] | None:
    """Return name and arguments of `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`; None if it is no call of
    one of the tools. Values as in `tagged_call`."""
    head = text.partition("<arg_key>")[0]
    name = head.strip()
    if name not in functions:
        return None
    arguments: dict[str, Any] = {}
    place = len(head)
    while (found := _KEYED.match(text, place)) is not None:
        key = found[1].strip()
        arguments[key] = _typed_value(found[2], key, functions[name])
        place = found.end()
    return None if text[place:].strip() else (name, json.dumps(arguments, ensure_ascii=False))


def gemma_calls(text: str, functions: Functions, quote: str) -> list[tuple[str, str]]:
    """Return name and arguments of each call of `call:NAME{KEY:VALUE,...}`; none if it is no such text, or one is no
    call of the tools. Texts stand between `quote`."""
    reader = _GemmaReader(text, quote)
    calls = []
    try:
        while (head := _GEMMA_HEAD.match(text, reader.place)) is not None:
            if head[1] not in functions:
                return []
            reader.place = head.end()
            calls.append((head[1], json.dumps(reader.read_value(0), ensure_ascii=False)))
    except ValueError:
        return []
    return [] if text[reader.place :].strip() else calls


class _GemmaReader:
    """Reads values of Gemma's notation, which is JSON without quotes around keys, and with its own around texts.
    Raises ValueError for what is none."""

    def __init__(self, text: str, quote: str) -> None:
        self.place = 0
        self._text = text
        self._quote = quote

    def read_value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        self._skip_space()
        if self._take("{"):
            return dict(self._read_items("}", depth))
        if self._take("["):
            return [value for _, value in self._read_items("]", depth)]
        if self._take(self._quote):
            return self._read_quoted()
        if self._text.startswith('"', self.place):
            value, self.place = json.JSONDecoder().raw_decode(self._text, self.place)
            return value
        found = _BARE_VALUE.match(self._text, self.place)
        assert found is not None
        self.place = found.end()
        return _bare_value(found[0].strip())

    def _read_items(self, end: str, depth: int) -> list[tuple[str, Any]]:
        """Read the items of an object or a list up to its end; those of a list have no keys."""
        items: list[tuple[str, Any]] = []
        self._skip_space()
        if self._take(end):
            return items
        while True:
            key = self._read_key() if end == "}" else ""
            items.append((key, self.read_value(depth + 1)))
            self._skip_space()
            if self._take(end):
                return items
            if not self._take(","):
                raise ValueError("expected a comma")

    def _read_key(self) -> str:
        self._skip_space()
        if self._take(self._quote):
            key = self._read_quoted()
        else:
            found = _BARE.match(self._text, self.place)
            assert found is not None
            key = found[0].strip().strip('"')
            self.place = found.end()
        self._skip_space()
        if not key or not self._take(":"):
            raise ValueError("expected a key")
        return key

    def _read_quoted(self) -> str:
        end = self._text.index(self._quote, self.place)
        text = self._text[self.place : end]
        self.place = end + len(self._quote)
        return text

    def _take(self, mark: str) -> bool:
        if not self._text.startswith(mark, self.place):
            return False
        self.place += len(mark)
        return True

    def _skip_space(self) -> None:
        while self.place < len(self._text) and self._text[self.place].isspace():
            self.place += 1


def _bare_value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def _typed_value(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument: its text, or what it is as JSON where its schema says that it is no text."""
    properties = schema.get("properties")
    types = _types(properties.get(key), 0) if isinstance(properties, Mapping) else frozenset()
    if not types or ("string" in types and not (text == "null" and "null" in types)):
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _types(schema: object, depth: int) -> frozenset[str]:
    """Return the types that a schema names, none if it does not tell."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    stated = schema.get("type")
    found = {stated} if isinstance(stated, str) else set()
    if isinstance(stated, list):
        found |= {item for item in stated if isinstance(item, str)}
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        for part in parts if isinstance(parts, list) else ():
            found |= _types(part, depth + 1)
    return frozenset(found)
