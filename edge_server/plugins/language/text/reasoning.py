"""Streaming parser of reasoning: splits an answer, while its text arrives, into the reasoning between two tags at its
beginning (such as `<think>` and `</think>`) and the content after them.

The tags `<think>` and `</think>` are those of DeepSeek R1, Qwen3, GLM and the models trained like them, the others
those of Gemma 4. Some chat templates end with the first tag: then the answer begins with reasoning, and without the
tag.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from edge_server.plugins.language.text.incremental_detokenizer import overlap


class ReasoningTags(NamedTuple):
    open: str
    close: str


_THINK = ReasoningTags("<think>", "</think>")
_GEMMA = ReasoningTags("<|channel>thought", "<channel|>")
_CHANNEL = "<|channel|>analysis"
"""Of gpt-oss, whose answers `answer_parser` splits."""


def find_reasoning_tags(chat_template: str) -> ReasoningTags | None:
    """Return the tags between which a model with this chat template writes its reasoning, None if it shows none."""
    if _GEMMA.open in chat_template:
        return _GEMMA
    return _THINK if _THINK.close in chat_template else None


def has_reasoning(chat_template: str) -> bool:
    """Return whether the chat template shows that the model writes its reasoning apart."""
    return find_reasoning_tags(chat_template) is not None or _CHANNEL in chat_template


class ReasoningParser:
    """Splits the text of one answer. White space around both parts is left out.

    `is_open`: the prompt ends with the first tag.
    """

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        self._tags = tags
        self._state: Literal["start", "reasoning", "end", "content"] = "reasoning" if is_open else "start"
        self._buffer = ""
        self._has_text = False
        """Whether some reasoning was returned."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._state == "reasoning"

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Add text. Return the reasoning and the content that are certain. `is_last`: nothing is held back."""
        self._buffer += text
        reasoning = ""
        if self._state == "start":
            begin = self._buffer.lstrip()
            if begin.startswith(self._tags.open):
                self._buffer, self._state = begin[len(self._tags.open) :], "reasoning"
            elif is_last or not self._tags.open.startswith(begin):
                self._state = "content"
        if self._state == "reasoning":
            reasoning = self._take_reasoning(is_last)
        if self._state == "end":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "content"
        content = ""
        if self._state == "content":
            content, self._buffer = self._buffer, ""
        return reasoning, content

    def _take_reasoning(self, is_last: bool) -> str:
        """Return the reasoning at the beginning of the buffer without the white space that may be its end."""
        if not self._has_text:
            self._buffer = self._buffer.lstrip()
        before, tag, after = self._buffer.partition(self._tags.close)
        if tag:
            self._buffer, self._state = after, "end"
            return before.rstrip()
        keep = 0 if is_last else overlap(before, self._tags.close)
        found = before[: len(before) - keep].rstrip()
        self._buffer = "" if is_last else before[len(found) :]
        self._has_text = self._has_text or bool(found)
        return found
