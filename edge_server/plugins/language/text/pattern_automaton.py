"""Deterministic automaton of a regular expression: the source of the grammar that an engine obeys, and the check of the
text that it writes.

The syntax is a part of that of Python's `re`: what stays regular, without groups that look around, references and
flags. `\\d`, `\\w`, `\\s`, their capitals and classes with them have the characters that they have in Python both with
and without `re.ASCII`: of those beyond ASCII, `\\S` alone has some.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

MAX_CHARACTERS = 1_024
"""Of a pattern."""
MAX_GROUPS = 16
"""Groups inside each other."""
MAX_POSITIONS = 2_000
"""Characters of a pattern whose counted repetitions are written out."""
MAX_RANGES = 20_000
"""Ranges of the classes of these characters, all together: ten for each. Time and memory grow with them, too."""
MAX_STATES = 2_000
_MAX_STEPS = 200_000
"""Of the construction, the ranges of each edge counted: at most about a second."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points as first and last of each range, sorted, not touching each other."""

_LAST = 0x10FFFF
_NO_CHARACTERS = ((0xD800, 0xDFFF), (0xFFFD, 0xFFFD))
"""Surrogates, and what stands for bytes that are no character."""


def normalize(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same code points, but for those that are no characters, as sorted ranges that do not touch each
    other."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    for low, high in _NO_CHARACTERS:
        parts = [((first, min(last, low - 1)), (max(first, high + 1), last)) for first, last in found]
        found = [part for pair in parts for part in pair if part[0] <= part[1]]
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    found, begin = [], 0
    for first, last in ranges:
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    return normalize([*found, *([(begin, _LAST)] if begin <= _LAST else [])])


_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32))
_UNICODE_SPACE: Ranges = ((9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
                      (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
"""All that `str.isspace` calls so."""
_SETS: Mapping[str, tuple[Ranges, Ranges]] = {
    "d": (_DIGITS, ((0, 47), (58, 0x7F))),
    "w": (_WORD, ((0, 47), (58, 64), (91, 94), (96, 96), (123, 0x7F))),
    "s": (_SPACE, complement(_UNICODE_SPACE)),
}
"""Escape -> its characters, and those of the same letter as a capital."""
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class BadPattern(ValueError):
    """The pattern is wrong, not regular, or too large. The message says which."""


class Characters(NamedTuple):
    """One character of these."""

    ranges: Ranges


class Series(NamedTuple):
    """All items, one after the other."""

    items: tuple[Node, ...]


class Alternatives(NamedTuple):
    """One of the items."""

    items: tuple[Node, ...]


class Repetition(NamedTuple):
    """An item `least` to `most` times; None: without a limit."""

    item: Node
    least: int
    most: int | None


class Reference(NamedTuple):
    """A rule of a grammar."""

    name: str


Node: TypeAlias = "Characters | Series | Alternatives | Repetition | Reference"


def edges_bytes(edges: Sequence[Mapping[int, Ranges]]) -> int:
    """Return about the memory of the edges of an automaton, as measured with CPython 3.11."""
    return sum(400 + 128 * sum(map(len, row.values())) for row in edges)


class Automaton(NamedTuple):
    """Automaton that begins in state 0. From every state an accepting one can be reached."""

    edges: Sequence[dict[int, Ranges]]
    """Of each state: next state -> characters. No character leads to two states."""
    accepting: Sequence[bool]
    starts: Sequence[int]
    """First code point of each run of code points that all edges treat alike."""
    classes: Sequence[int]
    """Class of the code points of each run."""
    table: Sequence[dict[int, int]]
    """Of each state: class -> next state."""

    def advance(self, state: int, text: str) -> int | None:
        """Return the state after a text, None if no accepted text goes on so."""
        for character in text:
            kind = self.classes[bisect_right(self.starts, ord(character)) - 1]
            following = self.table[state].get(kind)
            if following is None:
                return None
            state = following
        return state


def parse_pattern(pattern: str) -> Node:
    """Return the syntax tree. Raises BadPattern."""
    if len(pattern) > MAX_CHARACTERS:
        raise BadPattern(f"expected a pattern of at most {MAX_CHARACTERS:,} characters, got {len(pattern):,}")
    return _Parser(pattern).parse()


def build_automaton(root: Node) -> Automaton:
    """Return the automaton of a syntax tree, by Glushkov's construction: a position for each character that the written
    out pattern has, and a state for each set of positions that may come next. Raises BadPattern."""
    positions = _Positions()
    whole = positions.add(root)
    starts, classes, members = _classify(positions.ranges)
    kinds = sorted(set(classes))
    states: dict[tuple[int, bool], int] = {(whole.first, whole.is_nullable): 0}
    left = list(states)
    edges: list[dict[int, Ranges]] = []
    table: list[dict[int, int]] = []
    targets: dict[int, int] = {}
    """Positions that read the character -> next state."""
    steps = 0
    ranges_of = {kind: _class_ranges(starts, classes, kind) for kind in kinds}
    while len(edges) < len(left):
        following, _ = left[len(edges)]
        row = {}
        found: dict[int, list[tuple[int, int]]] = {}
        steps += len(kinds)
        for kind in kinds:
            matched = following & members[kind]
            if not matched:
                continue
            if matched not in targets:
                steps += matched.bit_count()
                key = positions.after(matched, whole.last)
                if key not in states:
                    states[key] = len(states)
                    left.append(key)
                targets[matched] = states[key]
            row[kind] = targets[matched]
            steps += len(ranges_of[kind])
            found.setdefault(targets[matched], []).extend(ranges_of[kind])
        if len(states) > MAX_STATES or steps > _MAX_STEPS:
            raise BadPattern(f"too large: its automaton has more than {MAX_STATES:,} states or takes too long to make")
        edges.append({target: normalize(parts) for target, parts in found.items()})
        table.append(row)
    return Automaton(edges, [accepting for _, accepting in left], starts, classes, table)


def _classify(sets: Sequence[Ranges]) -> tuple[list[int], list[int], dict[int, int]]:
    """Return starts and classes of the runs of code points that all these sets treat alike, and the positions of each
    class. Class 0 is in no set, if there is such a class."""
    at: dict[int, int] = {}
    """Code point -> positions whose sets begin or end there."""
    for position, ranges in enumerate(sets):
        for first, last in ranges:
            at[first] = at.get(first, 0) ^ (1 << position)
            at[last + 1] = at.get(last + 1, 0) ^ (1 << position)
    starts, classes, known = [0], [], {0: 0}
    mask = at.pop(0, 0)
    for point in (*sorted(at), None):
        classes.append(known.setdefault(mask, len(known)))
        if point is not None:
            starts.append(point)
            mask ^= at[point]
    return starts, classes, {kind: mask for mask, kind in known.items()}


def _class_ranges(starts: Sequence[int], classes: Sequence[int], kind: int) -> list[tuple[int, int]]:
    ends = (*starts[1:], _LAST + 1)
    return [(first, end - 1) for first, end, found in zip(starts, ends, classes, strict=True) if found == kind]


class _Part(NamedTuple):
    """Of the positions of a part of the pattern: those that may be its first and its last, as bits."""

    first: int
    last: int
    is_nullable: bool


_NOTHING = _Part(0, 0, True)


class _Positions:
    def __init__(self) -> None:
        self.ranges: list[Ranges] = []
        self._following: list[int] = []
        self._steps = 0
        self._range_count = 0

    def add(self, node: Node) -> _Part:
        """Add the positions of a node without references. Raises BadPattern if there are too many."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise BadPattern("too large: its automaton takes too long to make")
        if isinstance(node, Characters):
            if len(self.ranges) >= MAX_POSITIONS:
                raise BadPattern(f"too large: its repetitions written out have more than {MAX_POSITIONS:,} characters")
            self._range_count += len(node.ranges)
            if self._range_count > MAX_RANGES:
                raise BadPattern(
                    f"too large: the classes of its repetitions written out have more than {MAX_RANGES:,} ranges"
                )
            self.ranges.append(node.ranges)
            self._following.append(0)
            bit = 1 << len(self.ranges) - 1
            return _Part(bit, bit, False)
        if isinstance(node, Series):
            whole = _NOTHING
            for item in node.items:
                whole = self._join(whole, self.add(item))
            return whole
        if isinstance(node, Alternatives):
            parts = [self.add(item) for item in node.items]
            first = last = 0
            for part in parts:
                first, last = first | part.first, last | part.last
            return _Part(first, last, any(part.is_nullable for part in parts))
        assert isinstance(node, Repetition)
        return self._repeat(node)

    def after(self, positions: int, last: int) -> tuple[int, bool]:
        """Return the positions that may follow these, and whether the pattern may end after one of them."""
        following, left = 0, positions
        while left:
            bit = left & -left
            following |= self._following[bit.bit_length() - 1]
            left ^= bit
        return following, bool(positions & last)

    def _join(self, before: _Part, part: _Part) -> _Part:
        self._connect(before.last, part.first)
        return _Part(
            before.first | part.first if before.is_nullable else before.first,
            before.last | part.last if part.is_nullable else part.last,
            before.is_nullable and part.is_nullable,
        )

    def _connect(self, last: int, first: int) -> None:
        while last:
            bit = last & -last
            self._following[bit.bit_length() - 1] |= first
            last ^= bit

    def _repeat(self, node: Repetition) -> _Part:
        """Write out the counted repetitions: `x{2,4}` as `xx(x(x)?)?`, `x{2,}` as `xx+`."""
        if node.most == 0:
            return _NOTHING
        copies = max(node.least, node.most or 1)
        parts = []
        for _ in range(copies):
            parts.append(self.add(node.item))
            if not parts[-1].first:
                return _NOTHING  # the item has no character
        if node.most is None:
            self._connect(parts[-1].last, parts[-1].first)
        whole = _NOTHING
        for index, part in enumerate(reversed(parts)):
            whole = self._join(part, whole)
            if copies - index > node.least:
                whole = whole._replace(is_nullable=True)
        return whole


class _Member(NamedTuple):
    """What an escape or a member of a class matches: with and without `re.ASCII`, and with one of them at least."""

    certain: Ranges
    possible: Ranges
    point: int | None = None
    """The character, if it is one."""


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> Node:
        node = self._alternatives(0)
        if self._at < len(self._text):
            raise self._bad("unbalanced ')'")
        return node

    def _bad(self, problem: str) -> BadPattern:
        return BadPattern(f"{problem} at character {self._at}")

    def _alternatives(self, depth: int) -> Node:
        """Read up to the end of the group or of the pattern."""
        if depth > MAX_GROUPS:
            raise BadPattern(f"groups are nested more than {MAX_GROUPS} deep")
        found = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            found.append(self._sequence(depth))
        return found[0] if len(found) == 1 else Alternatives(tuple(found))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while not depth and (size := self._anchor("^", "\\A")):
            self._at += size
        while self._peek() not in ("", "|", ")"):
            if size := self._anchor("$", "\\Z"):
                self._at += size
                if depth or self._peek() not in ("", "|", "$"):
                    raise self._bad(
                        "'$' is supported at the end of the pattern only, outside groups, but stands before it"
                    )
                continue
            items.append(self._quantified(self._atom(depth)))
        return items[0] if len(items) == 1 else Series(tuple(items))

    def _anchor(self, *texts: str) -> int:
        return next((len(text) for text in texts if self._text.startswith(text, self._at)), 0)

    def _quantified(self, node: Node) -> Node:
        limits = self._quantifier()
        if limits is None:
            return node
        least, most = limits
        if most is not None and most < least:
            raise self._bad(f"a quantifier has the limits {least} and {most}, in the wrong order,")
        if self._peek() == "?":  # lazy, which changes nothing for a whole text
            self._at += 1
        elif self._peek() == "+":
            raise self._bad("possessive quantifiers are not supported:")
        before = self._at
        if self._quantifier() is not None:
            self._at = before
            raise self._bad("two quantifiers in a row")
        return Repetition(node, least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Read a quantifier: its limits, None for no upper limit."""
        character = self._peek()
        if character in ("*", "+", "?") and character:
            self._at += 1
            limits: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
            return limits[character]
        end = self._text.find("}", self._at)
        if character != "{" or end < 0:
            return None
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        if not all(part.isascii() and (part.isdecimal() or not part) for part in (least, most)):
            return None
        if not least and not comma:
            return None
        if max(len(least), len(most)) > 4:
            raise self._bad("a quantifier has a number of more than four digits")
        self._at = end + 1
        return int(least or 0), (int(most) if most else None if comma else int(least))

    def _atom(self, depth: int) -> Node:
        character = self._peek()
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._class()
        if character in "*+?" or (character == "{" and self._quantifier() is not None):
            raise self._bad("nothing to repeat")
        if character == "^":
            raise self._bad("'^' is supported at the beginning of the pattern only, outside groups:")
        self._at += 1
        if character == "\\":
            return Characters(self._escape().certain)
        if character == ".":
            return Characters(complement(((10, 10),)))
        return Characters(self._one(ord(character)).certain)

    def _group(self, depth: int) -> Node:
        self._at += 1
        if self._peek() == "?":
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif self._text.startswith("?P<", self._at) and (end := self._text.find(">", self._at)) > 0:
                name = self._text[self._at + 3 : end]
                if not name.isidentifier():
                    raise self._bad(f"{name[:40]!r} is no name of a group")
                self._at = end + 1
            else:
                raise self._bad("of the groups that begin with '(?' only '(?:' and '(?P<name>' are supported:")
        node = self._alternatives(depth + 1)
        if self._peek() != ")":
            raise self._bad("a group has no ')'")
        self._at += 1
        return node

    def _characters(self, ranges: Iterable[tuple[int, int]]) -> Characters:
        found = normalize(ranges)
        if not found:
            raise self._bad("no character matches")
        return Characters(found)

    def _escape(self) -> _Member:
        """Read what follows a backslash."""
        character = self._peek()
        self._at += 1
        if character.lower() in _SETS:
            inside, outside = _SETS[character.lower()]
            if character.islower():
                return _Member(inside, complement(outside))
            return _Member(outside, complement(inside))
        if character in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[character]]
            try:
                point = int(digits, 16) if digits.isalnum() and len(digits) == _HEX_DIGITS[character] else -1
            except ValueError:
                point = -1
            if not 0 <= point <= _LAST:
                raise self._bad(f"'\\{character}' needs {_HEX_DIGITS[character]} hexadecimal digits of a character")
            self._at += len(digits)
        elif character in _CONTROLS:
            point = _CONTROLS[character]
        elif not character or (character.isascii() and character.isalnum()):
            raise self._bad(f"'\\{character}' is not supported")
        else:
            point = ord(character)
        return self._one(point)

    def _class(self) -> Characters:
        """Read a class of characters."""
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        begin = self._at
        found: list[tuple[int, int]] = []
        while (character := self._peek()) != "]" or self._at == begin:
            if not character:
                raise self._bad("a class has no ']'")
            member = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                end = self._member()
                if member.point is None or end.point is None or end.point < member.point:
                    raise self._bad("a class has a range without two characters in order")
                found.append((member.point, end.point))
            else:
                found += member.possible if is_negated else member.certain
        self._at += 1
        ranges = normalize(found)
        return self._characters(complement(ranges) if is_negated else ranges)

    def _member(self) -> _Member:
        """Read a character, or an escape, of a class."""
        character = self._peek()
        self._at += 1
        return self._escape() if character == "\\" else self._one(ord(character or "\0"))

    def _one(self, point: int) -> _Member:
        ranges = self._characters(((point, point),)).ranges
        return _Member(ranges, ranges, point)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]
