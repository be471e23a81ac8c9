"""Encoding of chats as tokens: only the chat template writes special tokens such as `<|im_end|>`; the same text from a
user stays text.

A tokenizer finds special tokens, such as `<|im_end|>`, by their text, wherever it stands. So the prompt of a chat that
has such a text in a message or a tool is encoded in pieces, none of which has the whole text. To know where the
template wrote it, the template gets the chat a second time, with a mark at each place where the prompt is to be cut.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.token_engine import NO_VARIABLES, ChatMessage, TokenEngine
from edge_server.plugins.language.text.requested_template_variables import render_chat

MAX_TYPED = 256
"""Of texts of special tokens in one chat: each takes up to two calls of the tokenizer, of about 0.5 ms."""

_CONTEXTS = ("\n", "x")
"""Texts before a piece while it is encoded, because some tokenizers add a space to the beginning of a text. Each is
joined with the beginning of few pieces, and no piece is joined with both."""


class SpecialTexts:
    """The texts of a model's special tokens, to be found in the texts of users."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Texts of fewer than two characters are left out: they cannot be cut."""
        found = sorted({text for text in texts if len(text) > 1})
        rests: dict[str, list[str]] = {}
        for text in found:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        # The rest is only looked at, because another text may begin inside this one. Without texts it matches nothing.
        parts = [f"{re.escape(first)}(?={'|'.join(items)})" for first, items in rests.items()]
        self._first_characters = re.compile("|".join(parts) or "(?!)")
        self._heads = {text[:size] for text in found for size in range(1, len(text))}
        self._tails = {text[size:] for text in found for size in range(1, len(text))}
        self._sizes = range(1, max(map(len, found), default=1))

    def mark(self, value: Any, mark: str) -> Any:
        """Return a JSON value with `mark` in each text, also of keys, where it is to be cut: after the first character
        of a special token's text, and at an end that could be part of one together with the text of the template.
        """
        if isinstance(value, str):
            text = self._first_characters.sub(lambda found: found[0] + mark, value)
            before = mark if any(value[:size] in self._tails for size in self._sizes) else ""
            after = mark if any(value[-size:] in self._heads for size in self._sizes) else ""
            return before + text + after
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        return [self.mark(item, mark) for item in value] if isinstance(value, list | tuple) else value

    def is_in(self, value: Any) -> bool:
        """Return whether a text of a JSON value, also a key, has the text of a special token."""
        if isinstance(value, str):
            return self._first_characters.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.is_in(item) for pair in value.items() for item in pair)
        return isinstance(value, list | tuple) and any(map(self.is_in, value))


class ChatEncoder:
    """Makes chats tokens, by the chat template and the tokenizer of an engine. May be used from any thread."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine
        self._special_texts = SpecialTexts(engine.special_texts)
        self._contexts = [(text, list(engine.encode(text))) for text in _CONTEXTS]

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Sequence[int]:
        """Return the tokens of the prompt that the model's chat template makes.

        Raises InvalidRequest with the template's message, or if the template changes a special token's text that stands
        in a message or a tool, or what is around it, so that it cannot be told from the template's own.
        """
        prompt = self._render(messages, tools, variables)
        mark = uuid.uuid4().hex  # letters and digits, which no template escapes
        try:
            marked_messages, marked_tools, values = self._special_texts.mark(
                [messages, tools, list(variables.values())], mark
            )
        except RecursionError:
            raise InvalidRequest("messages and tools are nested too deep") from None
        if marked_messages == list(messages) and marked_tools == list(tools) and values == list(variables.values()):
            return self._engine.encode(prompt)
        marked_variables = dict(zip(variables, values, strict=True))
        marked = self._render(marked_messages, marked_tools, marked_variables)
        if marked.replace(mark, "") != prompt:
            raise InvalidRequest(
                "a message or a tool has the text of a special token of the model, and the model's chat template "
                "changes it, so that it would take effect: leave it out"
            )
        first, *pieces = marked.split(mark)
        if len(pieces) > MAX_TYPED:
            raise InvalidRequest(
                f"expected at most {MAX_TYPED} texts of special tokens of the model in messages and tools, got "
                f"{len(pieces)}"
            )
        tokens = list(self._engine.encode(first))
        for piece in pieces:
            tokens += self._encode_continuation(piece)
        return tokens

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        image_tag: str,
    ) -> str:
        """Return the prompt as text, with `image_tag` in place of the parts of messages that stand for pictures.

        Raises InvalidRequest with the template's message, or for a special token's text in a message or a tool: it
        would take effect in a text.
        """
        try:
            has_special = self._special_texts.is_in([messages, tools, list(variables.values())])
        except RecursionError:
            raise InvalidRequest("messages and tools are nested too deep") from None
        if has_special:
            raise InvalidRequest(
                "a message or a tool has the text of a special token or of a picture's tag of the model, which would "
                "take effect in a prompt with pictures: leave it out"
            )
        numbers = itertools.count()
        tagged = [
            message
            if isinstance(message["content"], str)
            else {
                **message,
                "content": "".join(
                    image_tag.format(next(numbers)) if part["type"] == "image" else part["text"]
                    for part in message["content"]
                ),
            }
            for message in messages
        ]
        return self._render(tagged, tools, variables)

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        return render_chat(lambda chat, values: self._engine.chat_prompt(chat, tools, values), messages, variables)

    def _encode_continuation(self, text: str) -> list[int]:
        """Return the tokens of a text that is not the beginning of a prompt."""
        for context, before in self._contexts:
            tokens = list(self._engine.encode(context + text))
            if tokens[: len(before)] == before:
                return tokens[len(before) :]
        raise InvalidRequest(f"the model's tokenizer cannot encode {text[:40]!r} apart from the text before it")
