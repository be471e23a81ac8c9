"""Estimate of the time that a token engine needs to compile a regular expression of a JSON schema, so that slow ones
can be refused.

An engine compares each state with the whole vocabulary. A state costs 4 if almost every token fits there, 0.6 for
letters and digits, and less for fewer characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_server.plugins.language.text.pattern_automaton import (
    Alternatives,
    BadPattern,
    Characters,
    Node,
    Ranges,
    Repetition,
    Series,
)
from edge_server.plugins.language.text.text_grammar import TextGrammar

_MAX_CHARACTERS = 1_024
_MAX_GROUPS = 16
"""Groups inside each other."""

_LITERAL, _FEW, _WORD, _WIDE = 0.02, 0.25, 0.6, 4.0
"""Costs of a state by what it accepts: one character, at most 16 characters, at most 64 letters and digits, more."""
_ESCAPES = {"d": _FEW, "w": _WORD, "s": _FEW, "D": _WIDE, "W": _WIDE, "S": _WIDE, "p": _WIDE, "P": _WIDE,
            "b": 0.0, "B": 0.0}  # fmt: skip
_SIZES = {"d": 10, "w": 63}
_MAX_TIMES = 10**9
"""Larger quantifiers count as this: all of them are too large."""
_UNBOUNDED_INSIDE = 8.0
"""Factor for `(x*)*`: the text can be divided in many ways."""


@dataclass(frozen=True, slots=True)
class PatternCost:
    """`repetitions` is the largest product of quantifiers inside each other."""

    cost: float
    repetitions: int = 1
    is_nullable: bool = False
    """It matches the empty text."""
    is_counted: bool = False
    """It has a quantifier with two different limits, so that there are several ways to repeat it."""
    is_unbounded: bool = False
    states: int = 1
    loop: float = 0.0
    """Cost of a character at the end that may repeat, as in `.*`: each state behind it is compared together with it."""
    literal: str = ""
    """The one character that it matches, if it is one."""
    excluded: str = ""
    """Characters of a class `[^...]`: one of them ends its loop."""


def estimate_pattern(pattern: str) -> PatternCost:
    """Return the cost. Syntax that is wrong is not found here: the engine refuses it. Raises BadPattern."""
    if len(pattern) > _MAX_CHARACTERS:
        raise BadPattern(f"expected a pattern of at most {_MAX_CHARACTERS:,} characters, got {len(pattern):,}")
    return _Parser(pattern).alternatives(0)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def alternatives(self, depth: int) -> PatternCost:
        """Read up to the end of the group or of the pattern."""
        if depth > _MAX_GROUPS:
            raise BadPattern(f"groups are nested more than {_MAX_GROUPS} deep")
        found = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            found.append(self._sequence(depth))
        if len(found) == 1:
            return found[0]
        return PatternCost(
            sum(item.cost for item in found) + (len(found) - 1) * _LITERAL,
            max(item.repetitions for item in found),
            any(item.is_nullable for item in found),
            any(item.is_counted for item in found),
            any(item.is_unbounded for item in found),
            sum(item.states for item in found),
            max(item.loop for item in found),
        )

    def _sequence(self, depth: int) -> PatternCost:
        cost = run_cost = 0.0
        run = 0
        """Neighbours that may each be left out: every one of them can be followed by each of the others."""
        repetitions, is_nullable, is_counted, is_unbounded = 1, True, False, False
        states, loop, excluded = 0, 0.0, ""
        while self._peek() not in ("", "|", ")"):
            item = self._repeated(self._atom(depth))
            if item is None:
                continue
            repetitions = max(repetitions, item.repetitions)
            is_counted |= item.is_counted
            is_unbounded |= item.is_unbounded
            states += item.states
            if item.literal and item.literal in excluded:
                loop = 0.0
            item_cost = max(item.cost, loop * item.states)
            if item.loop >= loop:
                loop, excluded = item.loop, item.excluded
            if item.is_nullable:
                run_cost += item_cost
                run += not item.is_unbounded or item.is_counted
                continue
            is_nullable = False
            cost += item_cost + run_cost * max(1, run)
            run_cost, run = 0.0, 0
        cost += run_cost * max(1, run)
        return PatternCost(cost, repetitions, is_nullable, is_counted, is_unbounded, states, loop, "", excluded)

    def _repeated(self, body: PatternCost | None) -> PatternCost | None:
        """Apply the quantifiers that follow."""
        may_be_empty = body is not None and body.is_nullable
        while body is not None and (limits := self._quantifier()) is not None:
            least, most = limits
            if most is None and may_be_empty:
                raise BadPattern("it repeats without a limit what may be empty, as in (a?)*: expected (a)*")
            times = min(max(least, most or 1), _MAX_TIMES)
            # What may be empty can be divided among its repetitions in many ways.
            cost = body.cost * times * (times if may_be_empty and most != 1 else 1)
            if body.is_counted and (most is None or most > 1):
                cost = max(cost, body.cost * body.cost * times)
            if body.is_unbounded and most != 1:
                cost *= _UNBOUNDED_INSIDE if most is None else 1.5
            body = PatternCost(
                cost,
                body.repetitions * times,
                body.is_nullable or least == 0,
                body.is_counted or (most is not None and most != least),
                body.is_unbounded or most is None,
                body.states * times,
                # The engine compiles `+` as a rule of its own, which does not meet the states behind it.
                body.cost if body.states == 1 and most is None and least != 1 else body.loop if least and most else 0.0,
                body.literal if least else "",
                body.excluded,
            )
        return body

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Read a quantifier: its limits, None for no upper limit."""
        character = self._peek()
        if character in ("*", "+", "?"):
            self._at += 1
            limits: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        elif character == "{" and (end := self._text.find("}", self._at)) > 0:
            least, comma, most = self._text[self._at + 1 : end].partition(",")
            if not (least.isdecimal() or (comma and not least)) or not (most.isdecimal() or not most):
                return None
            self._at = end + 1
            limits = int(least or 0), (int(most) if most else None if comma else int(least))
        else:
            return None
        if self._peek() == "?":  # lazy, which changes nothing
            self._at += 1
        return limits

    def _atom(self, depth: int) -> PatternCost | None:
        """Read one atom; None for an anchor."""
        character = self._next()
        if character in "^$":
            return None
        if character == "(":
            if self._text.startswith("?:", self._at):
                self._at += 2
            inside = self.alternatives(depth + 1)
            self._next()
            return inside
        if character == "[":
            begin = self._at
            cost = self._read_class()
            is_negated = self._text.startswith("^", begin)
            return PatternCost(cost, excluded=self._text[begin + 1 : self._at - 1] if is_negated else "")
        if character == "\\":
            character = self._next()
            return PatternCost(_ESCAPES.get(character, _LITERAL), literal="" if character in _ESCAPES else character)
        if character == ".":
            return PatternCost(_WIDE)
        return PatternCost(_LITERAL if character.isascii() else _FEW, literal=character)

    def _read_class(self) -> float:
        """Read a class of characters up to its end, and return its cost."""
        if self._peek() == "^":
            self._skip_class()
            return _WIDE
        size = 0
        begin = self._at
        while (character := self._peek()) and (character != "]" or self._at == begin):
            self._at += 1
            first = character
            if character == "\\":
                first = self._next()
                if first in _ESCAPES:
                    size += _SIZES.get(first, 6 if first == "s" else 1_000)
                    continue
                if first in "ux":
                    size += 1_000
                    continue
            last = first
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                last = self._next()
                if last == "\\":
                    last = self._next()
            if first <= " " <= last or not last.isascii():
                size += 1_000
            size += max(1, ord(last or first) - ord(first) + 1)
        self._next()
        return _FEW if size <= 16 else _WORD if size <= 66 else _WIDE

    def _skip_class(self) -> None:
        self._at += 1
        begin = self._at
        while (character := self._next()) and (character != "]" or self._at == begin + 1):
            if character == "\\":
                self._next()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        character = self._peek()
        self._at += 1
        return character


def grammar_cost(grammar: TextGrammar) -> float:
    """Return the cost of the states that an engine compiles for a grammar."""
    if grammar.automaton is not None:
        return states_cost(grammar.automaton.edges)
    return sum(map(_written_cost, grammar.rules.values()))


def states_cost(edges: Sequence[Mapping[int, Ranges]]) -> float:
    """Return the cost of the states of a deterministic automaton."""
    return sum(map(_state_cost, edges))


def _state_cost(edges: Mapping[int, Ranges]) -> float:
    """Return the cost of a state of a deterministic automaton, by the number of characters that it reads. Measured, it
    is less than that of a state of the engine's own conversion of a pattern."""
    size = sum(last - first + 1 for ranges in edges.values() for first, last in ranges)
    return _LITERAL if size <= 1 else 0.1 if size <= 16 else 0.4 if size <= 66 else 1.5


def _written_cost(node: Node) -> float:
    """Return the cost of a node whose repetitions are written out. Each of its characters is a state at most."""
    if isinstance(node, Characters):
        return _state_cost({0: node.ranges})
    if isinstance(node, Series | Alternatives):
        return sum(map(_written_cost, node.items))
    if isinstance(node, Repetition):
        return _written_cost(node.item) * max(node.least, node.most or 1)
    return _LITERAL
