"""Conversion of a sequence's tokens to text as they arrive: complete characters only, and nothing from a stop string
on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

_SEGMENT_TOKENS = 64
"""After this many tokens decoding starts anew, so that its cost does not grow with the text."""
_OVERLAP_TOKENS = 8
"""Tokens decoded again in a new segment: a tokenizer may treat the first one differently, as a leading space."""

_INCOMPLETE = "�"


Decode: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""Returns the text of each sequence of tokens."""


class IncrementalDetokenizer:
    """Decodes tokens piece by piece. `is_stopped` is set once a stop string was found.

    `add_tokens` returns what is to be decoded, and `add_text` takes its text, so that one call can decode the tokens of
    several sequences.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self.is_stopped = False
        self._decode = decode
        self._stop = [text for text in stop if text]
        self._tokens: list[int] = []
        """Tokens of the segment."""
        self._decoded = 0
        """Characters of the segment's text that are in `_held` or were returned."""
        self._held = ""
        """Text that may be the beginning of a stop string."""

    def add_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add tokens and return those whose text `add_text` needs."""
        self._tokens += tokens
        return self._tokens

    def add_text(self, text: str, *, is_last: bool = False) -> str:
        """Return the new text that is certain. `is_last`: return everything that was held back."""
        if self.is_stopped:
            return ""
        if is_last or not text.endswith(_INCOMPLETE):
            self._held += text[self._decoded :]
            self._decoded = len(text)
            if len(self._tokens) >= _SEGMENT_TOKENS:
                self._tokens = self._tokens[-_OVERLAP_TOKENS:]
                self._decoded = len(self._decode([self._tokens])[0])
        return self._release(is_last)

    def add_decoded(self, text: str, *, is_last: bool = False) -> str:
        """Add new text, of complete characters, instead of tokens. Return the new text that is certain."""
        if self.is_stopped:
            return ""
        self._held += text
        return self._release(is_last)

    def _release(self, is_last: bool) -> str:
        end = min((place for stop in self._stop if (place := self._held.find(stop)) >= 0), default=-1)
        if end >= 0:
            self.is_stopped = True
            certain, self._held = self._held[:end], ""
            return certain
        keep = 0 if is_last else max((overlap(self._held, stop) for stop in self._stop), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
