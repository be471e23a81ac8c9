"""Conversion of a regular expression to an expression of xgrammar's EBNF (https://xgrammar.mlc.ai/docs).

Each text of the result matches the pattern by the rules of ECMA-262, of Python and of Rust: where these differ, as for
\\d, the result has the texts on which they agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_REPETITIONS = 1_000
"""Characters of a part of a pattern that its quantifier counts, of all copies together."""
_MAX_DEPTH = 32
"""Of groups inside each other."""

_LAST = 0x10FFFF
_CLASSES = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPED = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), _SURROGATES)
"""Characters that stand in a JSON string only as escapes."""
_HEXADECIMAL = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
_QUANTIFIER = re.compile(r"([*+?])|\{(\d{1,6})(?:(,)(\d{0,6}))?\}")

Ranges = Sequence[tuple[int, int]]


class BadPattern(ValueError):
    """The pattern has something that this module does not know."""


class Part(NamedTuple):
    """An expression, the fewest and the most characters of its texts, and how many classes it counts. `width` are the
    wide ones among these, and the places where the expression may be passed over."""

    text: str
    least: int
    most: int | None
    size: int
    width: int


_EMPTY = Part('""', 0, 0, 0, 0)


def pattern_grammar(pattern: str, *, is_json: bool) -> Part:
    """Return the expression for the texts that a pattern allows. Raises BadPattern.

    `is_json`: they are contents of JSON strings, and as in JSON schemas the pattern matches a part of them unless it
    has ^ and $. Otherwise it matches all of the text.
    """
    return _Reader(pattern, is_json).read()


def literal(text: str) -> str:
    """Return an expression for a text.

    A character beyond ASCII is a class of its own: xgrammar (of OpenVINO GenAI 2026.4) takes "ße" for U+0DFE.
    """
    parts = re.findall(r"[\x00-\x7e]+|.", text, re.DOTALL)
    return " ".join(json.dumps(part) if part < "\x7f" else character_class([(ord(part), ord(part))]) for part in parts)


def character_class(ranges: Ranges) -> str:
    """Return the class of these characters.

    xgrammar (of OpenVINO GenAI 2026.4) takes bytes that are no UTF-8 for [^"], too, and others for ranges whose UTF-8
    differs in more than one byte and what follows it.
    """
    aligned = [part for low, high in ranges for part in _aligned(low, high)]
    return f"[{''.join(_escape(low) + (f'-{_escape(high)}' if high > low else '') for low, high in aligned)}]"


def _aligned(low: int, high: int) -> list[tuple[int, int]]:
    """Return the range in parts: within each, the UTF-8 of the characters differs in one byte and all that follow."""
    for start in (0x80, 0x800, 0x10000):
        if low < start <= high:
            return [*_aligned(low, start - 1), *_aligned(start, high)]
    for mask in (0x3F, 0xFFF, 0x3FFFF) if low >= 0x80 else ():
        if low | mask != high | mask:
            if low & mask:
                return [*_aligned(low, low | mask), *_aligned((low | mask) + 1, high)]
            if high & mask != mask:
                return [*_aligned(low, (high | mask) - mask - 1), *_aligned((high | mask) - mask, high)]
    return [(low, high)]


def _escape(code: int) -> str:
    return (
        chr(code) if chr(code).isalnum() and code < 0x7F else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


def without(ranges: Ranges, removed: Ranges) -> list[tuple[int, int]]:
    """Return the characters of `ranges` that `removed` has not."""
    left = list(ranges)
    for low, high in removed:
        left = [
            part
            for start, end in left
            for part in ((start, min(end, low - 1)), (max(start, high + 1), end))
            if part[0] <= part[1]
        ]
    return sorted(set(left))


class _Reader:
    def __init__(self, pattern: str, is_json: bool) -> None:
        self._left = pattern
        self._is_json = is_json

    def read(self) -> Part:
        parts = []
        while True:
            # Each alternative of the whole has its own anchors.
            begins = self._take("^")
            part = self._sequence(0)
            ends = self._take("$")
            if self._is_json:
                free = self._repeat(self._characters(((0, _LAST),)), 0, None)
                part = _join([*([] if begins else [free]), part, *([] if ends else [free])])
            parts.append(part)
            if not self._take("|"):
                break
        if self._left:
            raise BadPattern(f"the engine's conversion knows no {self._left[:12]!r} here")
        return _choose(parts)

    def _take(self, text: str) -> bool:
        if self._left.startswith(text):
            self._left = self._left[len(text) :]
            return True
        return False

    def _sequence(self, depth: int) -> Part:
        parts = []
        while self._left and self._left[0] not in "|)$":
            part = self._atom(depth)
            if found := _QUANTIFIER.match(self._left):
                self._left = self._left[found.end() :]
                sign, least, comma, most = found.groups()
                low = int(least) if least else int(sign == "+")
                high = int(most) if most else 1 if sign == "?" else None if sign or comma else low
                if high is not None and high < low:
                    raise BadPattern(f"the quantifier {found[0]!r} has its limits the wrong way round")
                self._take("?")  # a lazy quantifier allows the same texts
                part = self._repeat(part, low, high)
            parts.append(part)
        return _join(parts)

    def _repeat(self, part: Part, least: int, most: int | None) -> Part:
        copies = max(least, most or 0)
        if copies * max(part.size, 1) > MAX_REPETITIONS:
            raise BadPattern(f"its quantifiers count more than {MAX_REPETITIONS:,} characters")
        if most == 0 or part.most == 0:
            return _EMPTY
        total = None if most is None or part.most is None else part.most * most
        text, copies = repeated(part.text, least, most), max(copies, 1)
        return Part(text, part.least * least, total, part.size * copies, part.width * copies + (least == 0))

    def _atom(self, depth: int) -> Part:
        if found := _GROUP.match(self._left):
            if depth > _MAX_DEPTH:
                raise BadPattern(f"groups are nested more than {_MAX_DEPTH} deep")
            self._left = self._left[found.end() :]
            parts = [self._sequence(depth + 1)]
            while self._take("|"):
                parts.append(self._sequence(depth + 1))
            if not self._take(")"):
                raise BadPattern(f"the engine's conversion knows no {self._left[:12]!r} in a group")
            return _choose(parts)._replace(text=f"({_choose(parts).text})")
        if self._left[0] in "(*+?{^":
            raise BadPattern(f"the engine's conversion knows no {self._left[:12]!r} here")
        if self._take("."):
            return self._characters(without(((0, _LAST),), _LINE_ENDS))
        if self._take("["):
            return self._characters(self._class())
        return self._characters(self._character())

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        has_class = False
        while not self._take("]"):
            if not self._left or self._left.startswith(("[:", "[", "&&", "--", "~~")):
                raise BadPattern("the engine's conversion knows no such class")
            found = list(self._character())
            has_class |= len(found) > 1 or found[0][0] != found[0][1]
            if self._left[:1] == "-" and self._left[1:2] not in ("]", ""):
                self._left = self._left[1:]
                last = self._character()
                if len(found) != 1 or len(last) != 1 or found[0][0] != found[0][1] or found[0][0] > last[0][1]:
                    raise BadPattern("a class has a range with the wrong ends")
                found = [(found[0][0], last[0][1])]
            ranges += found
        if is_negated:
            # The dialects differ in what \d has beyond ASCII.
            return without(((0, 0x7F if has_class else _LAST),), ranges)
        return ranges

    def _character(self) -> Ranges:
        """Take a character or an escape."""
        first, self._left = self._left[0], self._left[1:]
        if first != "\\":
            return ((ord(first), ord(first)),)
        if found := _HEXADECIMAL.match(self._left):
            self._left = self._left[found.end() :]
            code = int(found[1] or found[2] or found[3], 16)
            if code <= _LAST:
                return ((code, code),)
        name, self._left = self._left[:1], self._left[1:]
        if name in _CLASSES:
            return _CLASSES[name]
        if name.lower() in _CLASSES:
            return without(((0, 0x7F),), _CLASSES[name.lower()])
        if name in _CONTROLS:
            return ((_CONTROLS[name], _CONTROLS[name]),)
        if not name or name.isalnum():
            raise BadPattern(f"the engine's conversion knows no '\\{name}'")
        return ((ord(name), ord(name)),)

    def _characters(self, ranges: Ranges) -> Part:
        if self._is_json:
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1] != 0x7F:
                return Part(literal(json.dumps(chr(ranges[0][0]), ensure_ascii=False)[1:-1]), 1, 1, 1, 0)
            ranges = without(ranges, _ESCAPED)
        else:
            ranges = without(ranges, (_SURROGATES,))
        if not ranges:
            raise BadPattern("a class has no characters that may stand there")
        count = sum(high - low + 1 for low, high in ranges)
        return Part(character_class(ranges), 1, 1, 1, int(count > _NARROW))


_NARROW = 40
"""Characters of a class that few tokens fit."""


def repeated(text: str, least: int, most: int | None) -> str:
    """Return an expression for so many copies of an atom of the grammar."""
    if most is None and least < 2:
        return text + "*+"[least]
    if (least, most) == (0, 1):
        return text + "?"
    return f"{text}{{{least},{'' if most is None else most}}}"


def _join(parts: Sequence[Part]) -> Part:
    parts = [part for part in parts if part.most != 0]
    if len(parts) < 2:
        return parts[0] if parts else _EMPTY
    most = [part.most for part in parts]
    total = None if None in most else sum(count or 0 for count in most)
    text = " ".join(part.text for part in parts)
    size, width = sum(part.size for part in parts), sum(part.width for part in parts)
    return Part(f"({text})", sum(part.least for part in parts), total, size, width)


def _choose(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    most = [part.most for part in parts]
    total = None if None in most else max(count or 0 for count in most)
    text = " | ".join(part.text for part in parts)
    least = min(part.least for part in parts)
    size, width = sum(part.size for part in parts), sum(part.width for part in parts) + (least == 0)
    return Part(f"({text})", least, total, size, width)
