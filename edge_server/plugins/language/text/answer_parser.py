"""Parsers of an answer's text while it arrives: reasoning, content and calls of tools.

The channels are those of gpt-oss (https://github.com/openai/harmony, docs/format.md): an answer is several messages,
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`. A message to `functions.f`
calls a tool: `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`, or the recipient stands
before the channel.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, Protocol

from edge_server.plugins.language.text.incremental_detokenizer import overlap
from edge_server.plugins.language.text.reasoning import ReasoningParser
from edge_server.plugins.language.text.requested_tools import Tools
from edge_server.plugins.language.text.tool_calls import ObjectScanner, ToolCallDelta, ToolCallParser, first_delta

_MESSAGE = "<|message|>"
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_STARTS)
"""What ends a message, or begins the next one where a model forgets the end."""
HARMONY_MARKS = (*_ENDS, _MESSAGE, "<|constrain|>")
CONTENT_HEAD = "<|channel|>final<|message|>"
"""Head of the message that has the answer."""
_MAX_HEAD = 200
"""Characters of a message's head."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"(?<!\S)to=functions\.([A-Za-z0-9_.-]{1,64})(?![A-Za-z0-9_.-])")


class AnswerParts(NamedTuple):
    """Parts of an answer's new text that are certain."""

    reasoning: str
    content: str
    calls: list[ToolCallDelta]


class AnswerParser(Protocol):
    has_reasoning: bool
    """Whether the model may have written reasoning apart from the content."""
    call_count: int

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""

    def add(self, text: str, *, is_last: bool = False) -> AnswerParts:
        """Add text. Return the parts that are certain. `is_last`: nothing is held back."""


class TaggedAnswerParser(AnswerParser):
    """Parser of an answer that is text with reasoning at its beginning, or with calls, or with both."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self.has_reasoning = reasoning is not None
        self._reasoning = reasoning
        self._calls = calls

    @property
    def call_count(self) -> int:  # type: ignore[override]
        return self._calls.call_count if self._calls is not None else 0

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_reasoning

    def add(self, text: str, *, is_last: bool = False) -> AnswerParts:
        reasoning = ""
        calls: list[ToolCallDelta] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.add(text, is_last=is_last)
        if self._calls is not None:
            text, calls = self._calls.add(text, is_last=is_last)
        return AnswerParts(reasoning, text, calls)


class HarmonyParser(AnswerParser):
    """Parser of an answer in gpt-oss' channels. The prompt ends with `<|start|>assistant`.

    Reasoning is what stands in `analysis`, content what stands in `final`, and in `commentary` without a recipient. Two
    messages of the same kind are apart by an empty line. Text without a head is content, and so is a message to nobody
    that the tools know, with its head. A head that the end of the answer cuts gives nothing.
    """

    has_reasoning = True

    def __init__(self, tools: Tools | None) -> None:
        self.call_count = 0
        self._names = tools.names if tools is not None else frozenset()
        self._buffer = ""
        self._head = ""
        """Of a message that is not certain yet to be a call."""
        self._state: Literal["head", "reasoning", "content", "arguments", "call", "end"] = "head"
        self._function = ""
        self._scanner = ObjectScanner()
        self._is_new = {"reasoning": False, "content": False}
        """Whether the next text of a kind is the first of a message after another one."""
        self._has = {"reasoning": False, "content": False}
        self._parts = AnswerParts("", "", [])

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def add(self, text: str, *, is_last: bool = False) -> AnswerParts:
        self._buffer += text
        self._parts = AnswerParts("", "", [])
        while True:
            before = (self._state, len(self._buffer))
            if self._state == "head":
                self._read_head(is_last)
            else:
                self._read_body(is_last)
            if (self._state, len(self._buffer)) == before:
                return self._parts

    def _read_head(self, is_last: bool) -> None:
        head, mark, rest = self._buffer.partition(_MESSAGE)
        size = len(head) if mark else len(head) - overlap(head, _MESSAGE)
        if size > _MAX_HEAD or not _may_be_head(head, is_whole=bool(mark)):
            self._begin("content", next((len(item) for item in _STARTS if head.startswith(item)), 0))
            return
        if not mark:
            if is_last and head.lstrip().startswith(("<|", "to=")):
                self._buffer = ""
            elif is_last:
                self._begin("content")
            return
        told = head.rpartition("<|start|>")[2]
        channel, function = _CHANNEL.search(told), _FUNCTION.search(told)
        name = channel[1] if channel is not None else ""
        if function is not None and function[1] in self._names:
            self._buffer, self._function, self._head, self._state = rest, function[1], head + mark, "call"
        elif "to=" not in told and name in ("analysis", "final", "commentary"):
            self._buffer = rest
            self._begin("reasoning" if name == "analysis" else "content")
        else:
            self._begin("content", len(head) + len(mark))

    def _begin(self, kind: Literal["reasoning", "content"], head: int = 0) -> None:
        """Begin a message of text, whose first `head` characters are text whatever they are."""
        self._is_new[kind] = self._has[kind]
        self._state = kind
        if head:
            text, self._buffer = self._buffer[:head], self._buffer[head:]
            self._add_text(text)

    def _read_body(self, is_last: bool) -> None:
        end, mark = min(((place, mark) for mark in _ENDS if (place := self._buffer.find(mark)) >= 0), default=(-1, ""))
        keep = 0 if is_last or mark else max(overlap(self._buffer, item) for item in _ENDS)
        text = self._buffer[:end] if mark else self._buffer[: len(self._buffer) - keep]
        is_over = bool(mark) or is_last
        if self._state == "call":
            self._begin_call(text, is_over)
            if self._state == "call":
                return
        if self._state in ("reasoning", "content"):
            self._add_text(text)
        elif self._state == "arguments":
            piece = text[: self._scanner.find_end(text)]
            if piece:
                self._parts.calls.append({"index": self.call_count - 1, "function": {"arguments": piece}})
            if self._scanner.is_complete:
                self._state = "end"
        self._buffer = self._buffer[len(text) :]
        if mark:
            # The beginning of the next message belongs to its head.
            self._buffer = self._buffer if mark in _STARTS else self._buffer[len(mark) :]
            self._state = "head"

    def _begin_call(self, text: str, is_over: bool) -> None:
        """Begin a call if the body of its message is an object; give the message as content if it is not."""
        body = text.lstrip()
        if not body and not is_over:
            return
        if body and not body.startswith("{"):
            self._buffer = self._head + self._buffer
            self._begin("content", len(self._head))
            return
        self._parts.calls.append(first_delta(self.call_count, self._function))
        self.call_count += 1
        self._scanner = ObjectScanner()
        self._state = "arguments"
        if not body:
            self._parts.calls.append({"index": self.call_count - 1, "function": {"arguments": "{}"}})
            self._state = "end"

    def _add_text(self, text: str) -> None:
        kind: Literal["reasoning", "content"] = "reasoning" if self._state == "reasoning" else "content"
        if not text:
            return
        if self._is_new[kind]:
            text = f"\n\n{text}"
        self._is_new[kind], self._has[kind] = False, True
        reasoning, content, calls = self._parts
        if kind == "reasoning":
            self._parts = AnswerParts(reasoning + text, content, calls)
        else:
            self._parts = AnswerParts(reasoning, content + text, calls)


def _may_be_head(text: str, *, is_whole: bool) -> bool:
    """Return whether a text may be the head of a message, or the beginning of one unless `is_whole`."""
    text = text.lstrip()
    for part in ("<|start|>", "assistant"):
        if not is_whole and part.startswith(text):
            return True
        text = text.removeprefix(part)
    text = text.lstrip()
    return any(text.startswith(part) or (not is_whole and part.startswith(text)) for part in ("<|channel|>", "to="))
