"""Grammar of a text that a client asks for: a regular expression, or rules in EBNF.

The rules are in llama.cpp's GBNF (https://github.com/ggml-org/llama.cpp, grammars/README.md), which xgrammar's EBNF
(https://xgrammar.mlc.ai/docs) and so vLLM's `grammar` have too; a rule may go on in the next line. Rules that do not
lead to themselves are put in where they are named, so that most grammars become one automaton.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.text.pattern_automaton import (
    MAX_GROUPS,
    MAX_POSITIONS,
    MAX_RANGES,
    Alternatives,
    Automaton,
    BadPattern,
    Characters,
    Node,
    Reference,
    Repetition,
    Series,
    build_automaton,
    complement,
    edges_bytes,
    normalize,
    parse_pattern,
)
from edge_server.plugins.language.text.sized_cache import cache_up_to

MAX_BYTES = 16_384
"""Of a grammar."""
MAX_RULES = 200
MAX_CACHED_BYTES = 16 << 20
"""Of the patterns read last, and of the grammars."""
MAX_DEPTH = 100
"""Of repetitions, alternatives and series inside each other, once rules are put in where they are named."""

_TOKEN = re.compile(
    r'\s+|\#[^\n]*|(?P<rule>[A-Za-z0-9_-]+)(?:\s*(?P<defines>::=))?|"(?P<text>(?:[^"\\\n]|\\.)*)"'
    r"|\[(?P<class>(?:[^\]\\\n]|\\.)*)\]|\{(?P<counts>[0-9]{0,4},?[0-9]{0,4})\}|(?P<sign>[|()*+?.])"
)
_CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_PLAIN = frozenset('"\\[]-^')
"""Characters that may follow a backslash and then stand for themselves."""


class TextGrammar(NamedTuple):
    """Rules by name: `root`, and those that lead to themselves. `automaton` is None if there are any of the latter."""

    rules: Mapping[str, Node]
    automaton: Automaton | None


def _bytes_of(grammar: TextGrammar) -> int:
    """Return about the memory of a grammar: 300 bytes for each part that its rules may have, and its automaton."""
    size = 300 * MAX_POSITIONS
    if grammar.automaton is not None:
        size += edges_bytes(grammar.automaton.edges) + 64 * sum(map(len, grammar.automaton.table))
    return size


@cache_up_to(MAX_CACHED_BYTES, _bytes_of)
def read_pattern(pattern: str) -> TextGrammar:
    """Return the grammar of a regular expression. Raises BadPattern."""
    root = parse_pattern(pattern)
    return TextGrammar({"root": root}, build_automaton(root))


@cache_up_to(MAX_CACHED_BYTES, _bytes_of)
def read_grammar(text: str) -> TextGrammar:
    """Return the grammar of rules in GBNF. Raises BadPattern."""
    if (size := len(text.encode("utf-8", "replace"))) > MAX_BYTES:
        raise BadPattern(f"expected a grammar of at most {MAX_BYTES:,} bytes, got {size:,}")
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise BadPattern("expected a rule with the name root")
    names = {name: set(_references(node)) for name, node in rules.items()}
    for name, used in names.items():
        if missing := sorted(used - rules.keys()):
            raise BadPattern(f"rule '{name}' names the rule '{missing[0]}', which there is not")
    _check_recursion(rules)
    inlined: dict[str, Node] = {}
    depths: dict[int, int] = {}
    while ready := [name for name, used in names.items() if used <= inlined.keys() and name not in inlined]:
        for name in ready:
            inlined[name] = _inline(rules[name], inlined)
            if _depth(inlined[name], depths) > MAX_DEPTH:
                raise BadPattern(
                    f"rule '{name}' is nested more than {MAX_DEPTH} deep together with those that it names"
                )
    if "root" in inlined:
        return TextGrammar({"root": inlined["root"]}, build_automaton(inlined["root"]))
    reached, left = {"root": _inline(rules["root"], inlined)}, ["root"]
    while left:
        for name in _references(reached[left.pop()]):
            if name not in reached:
                reached[name] = _inline(rules[name], inlined)
                left.append(name)
    if max(_depth(node, depths) for node in reached.values()) > MAX_DEPTH:
        raise BadPattern(f"rules are nested more than {MAX_DEPTH} deep")
    if (size := sum(_written_size(node) for node in reached.values())) > MAX_POSITIONS:
        raise BadPattern(f"too large: its repetitions written out have {size:,} parts; at most {MAX_POSITIONS:,}")
    return TextGrammar(reached, None)


def text_grammar(sampling: Sampling) -> TextGrammar:
    """Return the grammar of a sampling with the constraint `regex` or `grammar`. Raises BadPattern."""
    return read_pattern(sampling.regex) if sampling.regex else read_grammar(sampling.grammar)


def has_reference(node: Node) -> bool:
    """Return whether a rule is named in this node."""
    return next(_references(node), None) is not None


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Series | Alternatives):
        return node.items
    return (node.item,) if isinstance(node, Repetition) else ()


def _references(node: Node) -> Iterator[str]:
    """Yield the names of rules in a node. Each part is looked at once, because inlined rules share theirs."""
    left, seen = [node], {id(node)}
    while left:
        item = left.pop()
        if isinstance(item, Reference):
            yield item.name
        new = [child for child in _children(item) if id(child) not in seen]
        seen.update(map(id, new))
        left += new


def _inline(node: Node, rules: Mapping[str, Node]) -> Node:
    """Return the node with the rules in the place of their names."""
    if isinstance(node, Reference):
        return rules.get(node.name, node)
    if isinstance(node, Repetition):
        return node._replace(item=_inline(node.item, rules))
    if isinstance(node, Series | Alternatives):
        return node._replace(items=tuple(_inline(item, rules) for item in node.items))
    return node


def _depth(node: Node, known: dict[int, int]) -> int:
    if id(node) not in known:
        known[id(node)] = 1 + max((_depth(child, known) for child in _children(node)), default=0)
    return known[id(node)]


def _written_size(node: Node, known: dict[int, int] | None = None) -> int:
    """Return the number of characters and names once all repetitions are written out. A class counts one more for
    each ten of its ranges, as MAX_RANGES does."""
    known = {} if known is None else known
    if id(node) not in known:
        own = 1 + len(node.ranges) * MAX_POSITIONS // MAX_RANGES if isinstance(node, Characters) else 1
        size = own + sum(_written_size(child, known) for child in _children(node))
        times = max(node.least, node.most or 1) if isinstance(node, Repetition) else 1
        known[id(node)] = size * times
    return known[id(node)]


def _check_recursion(rules: Mapping[str, Node]) -> None:
    """Raise BadPattern for rules that name themselves before they have read a character, and for those that no text can
    fit, because they never end."""
    nullable: set[str] = set()
    ending: set[str] = set()
    changed = True
    while changed:
        new_nullable = {name for name, node in rules.items() if _is_nullable(node, nullable)}
        new_ending = {name for name, node in rules.items() if _ends(node, ending)}
        changed = (new_nullable, new_ending) != (nullable, ending)
        nullable, ending = new_nullable, new_ending
    if endless := sorted(rules.keys() - ending):
        raise BadPattern(f"rule '{endless[0]}' has no end: it always leads to itself")
    first = {name: set(_first_references(node, nullable)) for name, node in rules.items()}
    while ready := [name for name, used in first.items() if not used & first.keys()]:
        for name in ready:
            del first[name]
    if first:
        raise BadPattern(f"rule '{min(first)}' leads to itself, or to a rule that does, before it has read a character")


def _is_nullable(node: Node, nullable: set[str]) -> bool:
    if isinstance(node, Reference):
        return node.name in nullable
    if isinstance(node, Repetition):
        return node.least == 0 or _is_nullable(node.item, nullable)
    if isinstance(node, Series | Alternatives):
        return (all if isinstance(node, Series) else any)(_is_nullable(item, nullable) for item in node.items)
    return False


def _ends(node: Node, ending: set[str]) -> bool:
    if isinstance(node, Reference):
        return node.name in ending
    if isinstance(node, Repetition):
        return node.least == 0 or _ends(node.item, ending)
    if isinstance(node, Series | Alternatives):
        return (all if isinstance(node, Series) else any)(_ends(item, ending) for item in node.items)
    return True


def _first_references(node: Node, nullable: set[str]) -> Iterator[str]:
    """Yield the rules that may begin where the node begins."""
    if isinstance(node, Reference):
        yield node.name
    elif isinstance(node, Series):
        for item in node.items:
            yield from _first_references(item, nullable)
            if not _is_nullable(item, nullable):
                return
    else:
        for item in _children(node):
            yield from _first_references(item, nullable)


class _Parser:
    """Parser of GBNF. A rule ends where the next one begins."""

    def __init__(self, text: str) -> None:
        self._tokens: list[re.Match[str]] = []
        self._at = 0
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                line = text.count("\n", 0, place) + 1
                raise BadPattern(f"line {line}: expected the name of a rule, a text, a class or a sign, got "
                                 f"{text[place : place + 20]!r}")  # fmt: skip
            place = found.end()
            if found.lastgroup is not None:
                self._tokens.append(found)

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            name = token["rule"]
            if not token["defines"]:
                raise self._bad("expected a rule, NAME ::= ..., got")
            if name in found:
                raise self._bad("a rule is defined twice:")
            if len(found) >= MAX_RULES:
                raise BadPattern(f"expected at most {MAX_RULES} rules, got more")
            self._at += 1
            found[name] = self._alternatives(0)
        return found

    def _bad(self, problem: str) -> BadPattern:
        if self._at >= len(self._tokens):
            return BadPattern(f"{problem} the end")
        token = self._tokens[self._at]
        line = token.string.count("\n", 0, token.start()) + 1
        return BadPattern(f"line {line}: {problem} {token[0][:40]!r}")

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_GROUPS:
            raise BadPattern(f"groups are nested more than {MAX_GROUPS} deep")
        found = [self._series(depth)]
        while self._sign() == "|":
            self._at += 1
            found.append(self._series(depth))
        return found[0] if len(found) == 1 else Alternatives(tuple(found))

    def _series(self, depth: int) -> Node:
        items: list[Node] = []
        while self._at < len(self._tokens) and self._sign() not in ("|", ")"):
            token = self._tokens[self._at]
            if token["defines"]:
                break
            item = self._item(token, depth)
            repeated = 0
            while (limits := self._limits()) is not None:
                repeated += 1
                if repeated > 1:
                    self._at -= 1
                    raise self._bad("two quantifiers in a row:")
                item = Repetition(item, *limits)
            items.append(item)
        return items[0] if len(items) == 1 else Series(tuple(items))

    def _item(self, token: re.Match[str], depth: int) -> Node:
        if token["rule"] is not None:
            self._at += 1
            return Reference(token["rule"])
        if token["text"] is not None:
            points = [ord(character) for character, _ in self._characters(token["text"])]
            self._at += 1
            return Series(tuple(Characters(((point, point),)) for point in points))
        if token["class"] is not None:
            item = self._class(token["class"])
            self._at += 1
            return item
        sign = self._sign()
        if sign == ".":
            self._at += 1
            return Characters(complement(()))
        if sign != "(":
            raise self._bad("nothing to repeat:" if sign in "*+?" or token["counts"] is not None else "unexpected")
        self._at += 1
        item = self._alternatives(depth + 1)
        if self._sign() != ")":
            raise self._bad("expected ')', got")
        self._at += 1
        return item

    def _sign(self) -> str:
        return (self._tokens[self._at]["sign"] or "") if self._at < len(self._tokens) else ""

    def _limits(self) -> tuple[int, int | None] | None:
        """Read a quantifier."""
        if (sign := self._sign()) and sign in "*+?":
            self._at += 1
            limits: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
            return limits[sign]
        counts = self._tokens[self._at]["counts"] if self._at < len(self._tokens) else None
        if counts is None:
            return None
        least, comma, most = counts.partition(",")
        highest = int(most) if most else None if comma else int(least or 0)
        if not (least or most) or (highest is not None and highest < int(least or 0)):
            raise self._bad("a quantifier without limits in order:")
        self._at += 1
        return int(least or 0), highest

    def _class(self, text: str) -> Node:
        is_negated = text.startswith("^")
        characters = self._characters(text[is_negated:])
        found: list[tuple[int, int]] = []
        place = 0
        while place < len(characters):
            first = last = ord(characters[place][0])
            if characters[place + 1 : place + 2] == [("-", False)] and place + 2 < len(characters):
                last = ord(characters[place + 2][0])
                place += 2
            if last < first:
                raise self._bad("a class has a range in the wrong order:")
            found.append((first, last))
            place += 1
        ranges = normalize(found)
        ranges = complement(ranges) if is_negated else ranges
        if not ranges:
            raise self._bad("no character is in the class")
        return Characters(ranges)

    def _characters(self, text: str) -> list[tuple[str, bool]]:
        """Return the characters of a text, and whether each was escaped."""
        found = []
        for part in _CHARACTER.finditer(text):
            digits = part[1] or part[2] or part[3]
            if digits:
                point = int(digits, 16)
                if not normalize(((point, point),)) or point > 0x10FFFF:
                    raise self._bad(f"{part[0]} is no character:")
                found.append((chr(point), True))
            elif part[4] in _CONTROLS or part[4] in _PLAIN:
                found.append((_CONTROLS.get(part[4], part[4]), True))
            elif part[4] is not None:
                raise self._bad(f"the escape {part[0]} is not known:")
            else:
                found.append((part[5], False))
        if any(0xD800 <= ord(character) <= 0xDFFF for character, _ in found):
            raise self._bad("half of a surrogate pair is no character:")
        return found
