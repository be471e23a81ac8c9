"""Tools in chats: checks the tools of a request, and finds the calls in the text of an answer while it arrives."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from edge_server.plugins.language.engines.settings import ToolFormat
from edge_server.plugins.language.text.call_syntax import (
    DEEPSEEK,
    DEEPSEEK_HEAD,
    FUNCTION_GEMMA,
    GEMMA4,
    HERMES,
    CallMarks,
    gemma_calls,
    keyed_call,
    tagged_call,
)
from edge_server.plugins.language.text.incremental_detokenizer import overlap
from edge_server.plugins.language.text.requested_tools import Tools, parameters_schema

ToolCallDelta: TypeAlias = dict[str, Any]
"""Part of a call in the form of OpenAI's streams: `index`, and `id`, `type` and `function.name` in the first part;
`function.arguments` is the next piece of the arguments, which are JSON text."""

_LIST_TAGS = ("[TOOL_CALLS]", "<|tool_call|>", "<|tool_call_start|>", "functools")
"""Before a list of calls."""
_NAMED_CALL = re.compile(r"([A-Za-z0-9_.-]{1,73})(?:\[CALL_ID\][A-Za-z0-9]{9})?(?:\[ARGS\])?\s*(?=\{)")
_MAX_NAMED_HEAD = 100
"""Characters of a call before its arguments."""
_PYTHON_CALLS = re.compile(r"\[\s*[A-Za-z_][A-Za-z0-9_.-]{0,63}\(")
_MAX_PYTHON_CHARACTERS = 16_384
"""Of a list of calls in Python's syntax, which is parsed as a whole."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, in the order in which models are trained to write it."""


_MARKS: Mapping[ToolFormat, Sequence[CallMarks]] = {
    "hermes": (HERMES,),
    # A template of DeepSeek without tools gets them described as Hermes.
    "deepseek_v3": (DEEPSEEK, HERMES),
    "gemma4": (GEMMA4, FUNCTION_GEMMA),
}


def call_marks(form: ToolFormat | None) -> frozenset[str]:
    """Return the texts by which calls in this form are found, some of which a vocabulary may call special tokens."""
    return frozenset(text for marks in (_MARKS.get(form, ()) if form is not None else ()) for text in marks if text)


def has_tools(chat_template: str) -> bool:
    """Return whether the chat template describes tools to the model."""
    return re.search(r"\btools\b", chat_template) is not None


def guess_format(chat_template: str) -> ToolFormat | None:
    """Return how a model with this chat template writes its calls; None if the template does not show it."""
    if "<|channel|>" in chat_template:
        return "openai"
    if DEEPSEEK.start in chat_template:
        return "deepseek_v3"
    if GEMMA4.start in chat_template or FUNCTION_GEMMA.start in chat_template:
        return "gemma4"
    if HERMES.start in chat_template:
        return "hermes"
    if any(mark in chat_template for mark in ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ")):
        return "pythonic"
    if "<|tool_call|>" in chat_template or "[TOOL_CALLS]" in chat_template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in chat_template or '"parameters"' in chat_template else None


def first_delta(index: int, name: str) -> ToolCallDelta:
    """Return the first part of a call."""
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class ToolCallParser:
    """Splits the text of one answer into content and calls. Only calls of the given tools count.

    With `choice` "required" the whole text is a call or a list of calls, with the name of a function its arguments: the
    schema of `Tools` made it so.
    """

    def __init__(self, tools: Tools, form: ToolFormat | None) -> None:
        self.call_count = 0
        self._names = tools.names
        self._functions = {name: parameters_schema(function) for name, function in tools.by_name.items()}
        self._is_list = tools.choice == "required" and tools.allows_several
        self._marks = _MARKS.get(form, ()) if tools.choice == "auto" and form is not None else ()
        self._open_marks: CallMarks | None = None
        self._list_form = form if tools.choice == "auto" and form in ("mistral", "pythonic") else None
        self._opening = ""
        """What stands before a call that is not certain yet. It is content if none follows."""
        self._buffer = ""
        self._content = ""
        self._space = ""
        """White space after the content, which is dropped if a call follows."""
        self._state: Literal["start", "content", "call", "arguments", "after", "block"] = "start"
        self._scanner = ObjectScanner()
        self._deltas: list[ToolCallDelta] = []
        if tools.choice not in ("auto", "required"):
            self._begin_call(tools.choice)

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Add text. Return the content and the parts of calls that are certain. `is_last`: nothing is held back."""
        self._buffer += text
        while True:
            before = (self._state, len(self._buffer))
            self._advance(is_last)
            if (self._state, len(self._buffer)) == before:
                break
        if is_last and not self.call_count:
            self._content, self._space = self._content + self._space, ""
        content, self._content = self._content, ""
        deltas, self._deltas = self._deltas, []
        return content, deltas

    def _advance(self, is_last: bool) -> None:
        """Work off some of the buffer."""
        if self._state in ("start", "content"):
            self._find_call(is_last)
        elif self._state == "call":
            self._read_head(is_last)
        elif self._state == "arguments":
            end = self._scanner.find_end(self._buffer)
            piece, self._buffer = self._buffer[:end], self._buffer[end:]
            if piece:
                self._add_arguments(piece)
            if self._scanner.is_complete:
                self._state = "after"
        elif self._state == "after":
            self._end_call()
        else:
            self._end_block(is_last)

    def _end_call(self) -> None:
        """Drop the rest of a call after its arguments. Another one may follow."""
        if self._open_marks is not None:
            _, end, rest = self._buffer.partition(self._open_marks.end)
            if end:
                self._buffer, self._state = rest, "block"
            return
        self._buffer = self._buffer.lstrip("},] \t\r\n" if self._is_list else "}; \t\r\n")
        if self._buffer:
            self._state = "call" if self._buffer.startswith("{") else "content"
            self._opening = ""
            if self._list_form == "mistral" and not self._is_list:
                self._state = "start"

    def _end_block(self, is_last: bool) -> None:
        """Drop the mark that ends a list of calls, if it is next."""
        assert self._open_marks is not None
        end, text = self._open_marks.block_end, self._buffer.lstrip()
        if end and text.startswith(end):
            self._buffer, self._state = text[len(end) :], "content"
        elif is_last or not end.startswith(text) or not end:
            self._state = "content"

    def _find_call(self, is_last: bool) -> None:
        if self._list_form and self._state == "start":
            self._find_list(is_last)
        elif self._marks:
            self._find_marks(is_last)
        else:
            stripped = self._buffer.lstrip("[ \t\r\n" if self._is_list and not self._list_form else None)
            if self._is_list and not self._list_form:
                self._buffer = stripped
            if self._state == "start" and stripped.startswith("{"):
                self._state, self._opening = "call", ""
            elif stripped or is_last:
                self._state = "content"
                self._add_content(self._buffer)
                self._buffer = ""

    def _find_marks(self, is_last: bool) -> None:
        """Look for the beginning of a call between marks."""
        found = min(
            ((place, marks) for marks in self._marks if (place := self._buffer.find(marks.start)) >= 0), default=None
        )
        if found is None:
            keep = 0 if is_last else max(_count_held(self._buffer, marks) for marks in self._marks)
            self._add_content(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return
        place, marks = found
        before = self._buffer[:place]
        content = before.rstrip()
        if marks.block_start:
            content = content.removesuffix(marks.block_start).rstrip()
        self._add_content(content)
        self._opening = self._space + before[len(content) :] + marks.start
        self._buffer, self._space = self._buffer[place + len(marks.start) :], ""
        self._open_marks, self._state = marks, "call"

    def _find_list(self, is_last: bool) -> None:
        """Look at the beginning of the answer for a list of calls."""
        text = self._buffer.lstrip()
        tag = next((tag for tag in _LIST_TAGS if text.startswith(tag)), "")
        text = text[len(tag) :].lstrip()
        is_open = not text or (text.startswith("[") and not text[1:].strip())
        if self._list_form == "pythonic" and text.startswith("["):
            calls = _python_calls(text, self._names) if is_last else []
            if calls:
                self._buffer = ""
                for name, arguments in calls:
                    self._begin_call(name)
                    self._add_arguments(arguments)
                self._state = "content"
                return
            is_open = is_open or (_PYTHON_CALLS.match(text) is not None and len(text) <= _MAX_PYTHON_CHARACTERS)
        elif text.startswith("[") and text[1:].lstrip().startswith("{"):
            self._opening = self._buffer[: self._buffer.index("{", len(self._buffer) - len(text))]
            self._buffer = self._buffer[len(self._opening) :]
            self._state, self._is_list = "call", True
            return
        elif self._list_form == "mistral" and (named := _NAMED_CALL.match(text)) and (name := self._name(named[1])):
            self._buffer = text[named.end() :]
            self._begin_call(name)
            return
        elif self._list_form == "mistral" and "{" not in text and len(text) < _MAX_NAMED_HEAD:
            is_open = is_open or any(name.startswith(text) or text.startswith(name) for name in self._names)
        is_open = is_open or (not tag and any(item.startswith(text) for item in _LIST_TAGS))
        if not is_open and self._list_form == "pythonic" and text.startswith("["):
            is_open = re.fullmatch(r"\[\s*[A-Za-z_][A-Za-z0-9_.-]{0,63}", text) is not None
        if is_last or not is_open:
            self._state = "content"

    def _name(self, text: str) -> str:
        """Return the name of the tool, which an id may follow; "" if there is no such tool."""
        return next((name for name in (text, text[:-9]) if name in self._names), "")

    def _read_head(self, is_last: bool) -> None:
        marks = self._open_marks
        head = (DEEPSEEK_HEAD if marks is DEEPSEEK else _HEAD).match(self._buffer)
        name = next((item.strip() for item in head.groups() if item), "") if head is not None else ""
        if head is not None and name in self._names:
            self._buffer = self._buffer[head.end() :]
            self._begin_call(name)
            return
        end = self._buffer.find(marks.end) if marks is not None else -1
        text = self._buffer[:end] if end >= 0 else self._buffer
        if self._is_list:
            text = text[: ObjectScanner().find_end(text)]  # without the comma or bracket behind it
        calls = self._whole_calls(text, has_end=end >= 0, is_last=is_last)
        if calls and all(name in self._names for name, _ in calls):
            for name, arguments in calls:
                self._begin_call(name)
                self._add_arguments(arguments)
            self._buffer, self._state = self._buffer[len(text) :], "after"
        elif is_last or end >= 0 or calls:
            # Not a call of one of the tools.
            after = end + len(marks.end) if marks is not None and end >= 0 else len(self._buffer)
            self._add_content(self._opening + self._buffer[:after])
            self._buffer, self._opening, self._state = self._buffer[after:], "", "content"

    def _whole_calls(self, text: str, *, has_end: bool, is_last: bool) -> list[tuple[str, str]]:
        """Return name and arguments of the calls of a text. `has_end`: the mark of their end follows it."""
        marks = self._open_marks
        if marks is not None and marks.quote:
            return gemma_calls(text, self._functions, marks.quote) if has_end or is_last else []
        if marks is DEEPSEEK:
            return []
        found = None
        if marks is HERMES and has_end:
            found = tagged_call(text, self._functions) or keyed_call(text, self._functions)
        found = found or _whole_call(text)
        return [found] if found is not None else []

    def _add_content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._content += self._space + kept
            self._space = ""
        self._space += text[len(kept) :]

    def _begin_call(self, name: str) -> None:
        self._deltas.append(first_delta(self.call_count, name))
        self.call_count += 1
        self._scanner = ObjectScanner()
        self._space = ""
        self._state = "arguments"

    def _add_arguments(self, text: str) -> None:
        self._deltas.append({"index": self.call_count - 1, "function": {"arguments": text}})


def _count_held(text: str, marks: CallMarks) -> int:
    """Return how many characters at the end of a text may be the beginning of a call."""
    held = overlap(text, marks.start)
    if marks.block_start:
        before = text[: len(text) - held].rstrip()
        if before.endswith(marks.block_start):
            return len(text) - len(before) + len(marks.block_start)
        held = max(held, overlap(text, marks.block_start))
    return held


class ObjectScanner:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_in_text = False
        self._is_escaped = False

    def find_end(self, text: str) -> int:
        """Return the index after the object's last character in this piece; the piece's length if it does not end."""
        for place, character in enumerate(text):
            if self._is_in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_in_text = False
            elif character == '"':
                self._is_in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_complete = True
                    return place + 1
        return len(text)


def _whole_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a JSON object that is complete; None if it is not, or is no call."""
    if not text.rstrip().endswith("}"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    name = value.get("name") if isinstance(value, dict) else None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    return (str(name), arguments) if isinstance(arguments, str) else None


def _python_calls(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """Return name and arguments of each call of a whole list in Python's syntax; none if it is no such list, or one is
    no call of these functions."""
    body = text.rstrip()
    tag = body.rfind("<|tool_call_end|>")
    body = body[:tag] if tag >= 0 else body
    if not body.endswith("]") or len(body) > _MAX_PYTHON_CHARACTERS:
        return []
    try:
        parsed = ast.parse(body, mode="eval").body
        if not isinstance(parsed, ast.List):
            return []
        found = []
        for call in parsed.elts:
            if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) not in names:
                return []
            arguments = {item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg is not None}
            found.append((ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return found
