"""Writer of grammars in xgrammar's EBNF, which is llama.cpp's GBNF too, and in regular expressions of Rust.

Where no rule leads to itself, the rules are those of the deterministic automaton: in no place can two alternatives
begin with the same character. xgrammar (of OpenVINO GenAI 2026.4) takes other texts too where they can, in its own
conversion of patterns as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge_server.plugins.language.text.pattern_automaton import (
    Alternatives,
    Characters,
    Node,
    Ranges,
    Reference,
    Repetition,
    Series,
    build_automaton,
)
from edge_server.plugins.language.text.text_grammar import TextGrammar, has_reference

_LONG_CLASS = 40
"""Characters of a class from which on it has a rule of its own."""
_LENGTHS = (0x7F, 0x7FF, 0xFFFF)
"""Last characters of one, two and three bytes of UTF-8."""
_CONTROLS = {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def write_gbnf(grammar: TextGrammar) -> str:
    """Return the grammar in GBNF."""
    writer = GbnfWriter({name: f"r{index}" if index else "root" for index, name in enumerate(grammar.rules)})
    if grammar.automaton is not None:
        writer.add_automaton(grammar.automaton.edges, grammar.automaton.accepting, "root")
    else:
        for name, node in grammar.rules.items():
            writer.add_rule(name, node)
    return "".join(writer.lines)


def write_rust_pattern(node: Node) -> str:
    """Return a regular expression in the syntax of Rust's crate regex for a node without references."""
    if isinstance(node, Characters):
        points = "".join(
            f"\\x{{{first:x}}}" if first == last else f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in node.ranges
        )
        return f"[{points}]"
    if isinstance(node, Series):
        return "".join(f"(?:{write_rust_pattern(item)})" for item in node.items)
    if isinstance(node, Alternatives):
        return "|".join(map(write_rust_pattern, node.items))
    assert isinstance(node, Repetition)
    return f"(?:{write_rust_pattern(node.item)}){{{node.least},{'' if node.most is None else node.most}}}"


class GbnfWriter:
    """Writes rules, each a line. Rules of characters have names of `c` and a number, others begin with given names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names` are those of the rules in the written grammar."""
        self.lines: list[str] = []
        self._names = names
        self._classes: dict[str, str] = {}
        """Long class of characters -> name of its rule."""

    def add_rule(self, name: str, node: Node) -> None:
        text = self._expression(node)
        self.lines.append(f"{self._names[name]} ::= {text}\n")

    def add_automaton(self, all_edges: Sequence[Mapping[int, Ranges]], accepting: Sequence[bool], name: str) -> None:
        """Add the rules of an automaton. The first has the name, those of the other states begin with it."""
        entered = [0] * len(all_edges)
        """Rules that name a state."""
        for edges in all_edges:
            for target in edges:
                entered[target] += 1
        entered[0] += 1
        left, seen = [0], {0}
        while left:
            state = left.pop()
            alternatives = []
            loop = ""
            for target, ranges in all_edges[state].items():
                if target == state:
                    loop = f"{self._class(ranges)}* "
                    continue
                parts = [self._class(ranges)]
                # States that only this one leads to, and that lead to one, need no rule.
                while entered[target] == 1 and not accepting[target] and len(all_edges[target]) == 1:
                    ((following, ranges),) = all_edges[target].items()
                    if following == target:
                        break
                    parts.append(self._class(ranges))
                    target = following
                if all_edges[target]:
                    parts.append(f"{name}s{target}" if target else name)
                    if target not in seen:
                        seen.add(target)
                        left.append(target)
                alternatives.append(" ".join(parts))
            if accepting[state]:
                alternatives.append('""')
            rule = f"{name}s{state}" if state else name
            self.lines.append(f"{rule} ::= {loop}({' | '.join(alternatives)})\n")

    def _expression(self, node: Node) -> str:
        if isinstance(node, Reference):
            return self._names[node.name]
        if not has_reference(node):
            name = f"a{len(self.lines)}"
            automaton = build_automaton(node)
            self.add_automaton(automaton.edges, automaton.accepting, name)
            return name
        if isinstance(node, Repetition):
            limits = f"{{{node.least},{'' if node.most is None else node.most}}}"
            return f"({self._expression(node.item)}){limits}"
        assert isinstance(node, Series | Alternatives)
        # Neighbours without references become one automaton.
        items = _joined(node.items) if isinstance(node, Series) else node.items
        sign = " " if isinstance(node, Series) else " | "
        return f"({sign.join(map(self._expression, items))})"

    def _class(self, ranges: Ranges) -> str:
        """Return the terminal for one of these characters, or the name of its rule."""
        text = _character_class(ranges)
        if len(text) <= _LONG_CLASS:
            return text
        if text not in self._classes:
            self._classes[text] = f"c{len(self._classes)}"
            self.lines.append(f"{self._classes[text]} ::= {text}\n")
        return self._classes[text]


def _joined(items: Sequence[Node]) -> Sequence[Node]:
    found: list[Node] = []
    for item in items:
        if found and not has_reference(item) and not has_reference(found[-1]):
            found[-1] = Series((found[-1], item))
        else:
            found.append(item)
    return found


def _character_class(ranges: Ranges) -> str:
    """Return the terminal for one of these characters.

    It is never a negated class: in those both libraries take bytes that are no character, and xgrammar fails on some
    characters beyond ASCII.
    """
    points = (
        _character(first) if first == last else f"{_character(first)}-{_character(last)}"
        for whole in ranges
        for first, last in _split(*whole)
    )
    return f"[{''.join(points)}]"


def _split(first: int, last: int) -> list[tuple[int, int]]:
    """Return the range as ranges of characters whose UTF-8 differs in one byte, and has all values of those after it.

    xgrammar takes wrong bytes, and too many characters, for a range that is not of this form.
    """
    for end in _LENGTHS:
        if first <= end < last:
            return [*_split(first, end), *_split(end + 1, last)]
    if last > 0x7F:
        for bits in (6, 12, 18):
            low = (1 << bits) - 1
            if first & ~low != last & ~low:
                if first & low:
                    return [*_split(first, first | low), *_split((first | low) + 1, last)]
                if last & low != low:
                    return [*_split(first, (last & ~low) - 1), *_split(last & ~low, last)]
    return [(first, last)]


def _character(point: int) -> str:
    if point in _CONTROLS:
        return _CONTROLS[point]
    if point < 0x20 or point == 0x7F or chr(point) in "[]^-\\":
        return f"\\u{point:04x}"  # xgrammar reads more than two digits after \\x
    return chr(point)
