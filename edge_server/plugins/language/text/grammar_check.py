"""Check of a text against its grammar, while the text arrives: no other text may leave the server."""

from __future__ import annotations

from edge_server.plugins.language.text.pattern_automaton import (
    Alternatives,
    Characters,
    Node,
    Reference,
    Repetition,
    Series,
)
from edge_server.plugins.language.text.text_grammar import TextGrammar

MAX_STACKS = 500
"""Ways in which the text so far fits the rules, after each of its characters."""


class TooManyWays(ValueError):
    """The text so far fits the rules in more ways than are followed."""


class GrammarCheck:
    """State of one text. `is_complete`: the text so far may end."""

    def __init__(self, grammar: TextGrammar) -> None:
        self._automaton = grammar.automaton
        self._state = 0
        self._stacks = None if self._automaton is not None else _Stacks(grammar)

    @property
    def is_complete(self) -> bool:
        if self._automaton is not None:
            return self._automaton.accepting[self._state]
        assert self._stacks is not None
        return self._stacks.is_complete

    def add(self, text: str) -> bool:
        """Add text. Return whether some text of the grammar goes on like this. Raises TooManyWays."""
        if self._automaton is None:
            assert self._stacks is not None
            return self._stacks.add(text)
        state = self._automaton.advance(self._state, text)
        if state is not None:
            self._state = state
        return state is not None


class _Cell:
    """What is left to read: a node, and then another cell. Equal ones are the same object."""

    __slots__ = ("node", "rest")

    def __init__(self, node: Node, rest: _Cell | None) -> None:
        self.node = node
        self.rest = rest


class _Stacks:
    """All ways in which a text fits rules that lead to themselves, each as a stack of what is left to read.

    No rule begins with itself, so each stack is expanded in a limited number of steps up to a character.
    """

    def __init__(self, grammar: TextGrammar) -> None:
        self._rules = grammar.rules
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._repetitions: dict[tuple[int, int, int | None], Repetition] = {}
        self._tops: dict[int, _Cell] = {}
        """The stacks, by the identity of their first cells, each of which has characters."""
        self.is_complete = False
        self._expand([self._push(self._rules["root"], None)])

    def add(self, text: str) -> bool:
        for character in text:
            point = ord(character)
            following = []
            is_end = False
            for cell in self._tops.values():
                assert isinstance(cell.node, Characters)
                if any(first <= point <= last for first, last in cell.node.ranges):
                    if cell.rest is None:
                        is_end = True
                    else:
                        following.append(cell.rest)
            if not following and not is_end:
                return False
            self._expand(following)
            self.is_complete = self.is_complete or is_end
        return True

    def _push(self, node: Node, rest: _Cell | None) -> _Cell:
        key = id(node), id(rest)
        if key not in self._cells:
            self._cells[key] = _Cell(node, rest)
        return self._cells[key]

    def _expand(self, cells: list[_Cell]) -> None:
        """Replace the stacks by these, each up to a character."""
        self._tops, self.is_complete = {}, False
        left, seen = cells, set(map(id, cells))
        while left:
            cell = left.pop()
            if isinstance(cell.node, Characters):
                self._tops[id(cell)] = cell
            for following in self._alternatives(cell):
                if following is None:
                    self.is_complete = True
                elif id(following) not in seen:
                    seen.add(id(following))
                    left.append(following)
            if len(seen) > 20 * MAX_STACKS or len(self._tops) > MAX_STACKS:
                raise TooManyWays
        if len(self._cells) > 200 * MAX_STACKS:
            raise TooManyWays

    def _alternatives(self, cell: _Cell) -> list[_Cell | None]:
        """Return the cells that can stand in place of this one, with its rest behind each."""
        node, rest = cell.node, cell.rest
        if isinstance(node, Characters):
            return []
        if isinstance(node, Reference):
            return [self._push(self._rules[node.name], rest)]
        if isinstance(node, Alternatives):
            return [self._push(item, rest) for item in node.items]
        if isinstance(node, Series):
            for item in reversed(node.items):
                rest = self._push(item, rest)
            return [rest]
        found: list[_Cell | None] = [rest] if node.least == 0 else []
        if node.most != 0:
            found.append(self._push(node.item, self._push(self._once_less(node), rest)))
        return found

    def _once_less(self, node: Repetition) -> Repetition:
        least, most = max(node.least - 1, 0), None if node.most is None else node.most - 1
        key = id(node.item), least, most
        return self._repetitions.setdefault(key, Repetition(node.item, least, most))
