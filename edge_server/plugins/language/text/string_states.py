"""States of a JSON string that a schema constrains: its pattern, format and lengths together, as text of JSON.

A pattern is one of a whole text, without looking for it inside: such a text fits the schema, too. A format has texts
that every reader of its RFC takes, not all: days up to the 28th in February, no comments in addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from edge_server.plugins.language.text.pattern_automaton import (
    MAX_STATES,
    Alternatives,
    BadPattern,
    Characters,
    Node,
    Ranges,
    Repetition,
    Series,
    build_automaton,
    complement,
    edges_bytes,
    normalize,
)
from edge_server.plugins.language.text.sized_cache import cache_up_to
from edge_server.plugins.language.text.text_grammar import MAX_CACHED_BYTES, read_pattern

MAX_LENGTH = 256
"""Largest minLength and maxLength."""
_MAX_STEPS = 200_000
"""Of the intersection of two constraints."""

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
_TIME = r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_NAME = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P(?:[0-9]{1,4}W|[0-9]{1,4}D|T(?:[0-9]{1,4}H|[0-9]{1,4}M|[0-9]{1,4}S))",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
    "ipv6": "(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "hostname": rf"{_NAME}(?:\.{_NAME})*",
    "email": rf"[A-Za-z0-9]+(?:[._+-][A-Za-z0-9]+)*@{_NAME}(?:\.{_NAME})*",
    "uri": rf"https?://{_NAME}(?:\.{_NAME})*(?::[1-9][0-9]{{0,3}})?(?:/[A-Za-z0-9._~-]*)*",
}
"""Format of a string in JSON Schema -> pattern of texts that have it. Lengths of parts are not counted."""

_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
"""Characters that JSON writes with a backslash. Other control characters are left out."""
_UNESCAPED = complement(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
_ANY = Characters(complement(()))


def plain_pattern(pattern: str) -> Node:
    """Return the syntax tree of a pattern without the characters that JSON writes with a backslash. Raises BadPattern
    if a part of it has no others."""
    return _without_escapes(read_pattern(pattern).rules["root"])


def _without_escapes(node: Node) -> Node:
    if isinstance(node, Characters):
        ranges = _common(node.ranges, _UNESCAPED)
        if not ranges:
            raise BadPattern("it needs a character that JSON writes with a backslash")
        return Characters(ranges)
    if isinstance(node, Repetition):
        return node._replace(item=_without_escapes(node.item))
    assert isinstance(node, Series | Alternatives)
    return node._replace(items=tuple(map(_without_escapes, node.items)))


class StringStates(NamedTuple):
    """Deterministic automaton that begins in state 0, as Automaton. From every state an accepting one can be
    reached."""

    edges: Sequence[Mapping[int, Ranges]]
    accepting: Sequence[bool]


def string_states(schema: Mapping[str, Any]) -> StringStates:
    """Return the states of the text between the quotes of a JSON string. Raises BadPattern.

    `schema` has a `pattern`, a `format` of FORMATS, or both, and perhaps `minLength` and `maxLength`.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    counts = [least] if most is None else [least, most]
    if not all(type(count) is int and 0 <= count <= MAX_LENGTH for count in counts) or counts != sorted(counts):
        raise BadPattern(f"beside it minLength and maxLength are supported from 0 to {MAX_LENGTH}, in order")
    patterns = [schema["pattern"]] if "pattern" in schema else []
    if "format" in schema:
        patterns.append(FORMATS[schema["format"]])
    return _string_states(tuple(patterns), least, most)


def _bytes_of(states: StringStates) -> int:
    return edges_bytes(states.edges)


@cache_up_to(MAX_CACHED_BYTES, _bytes_of)
def _string_states(patterns: tuple[str, ...], least: int, most: int | None) -> StringStates:
    automata = [read_pattern(pattern).automaton for pattern in patterns]
    if (least, most) != (0, None):
        automata.append(build_automaton(Repetition(_ANY, least, most)))
    whole: StringStates | None = None
    for automaton in automata:
        assert automaton is not None
        states = StringStates(automaton.edges, automaton.accepting)
        whole = states if whole is None else _intersect(whole, states)
    assert whole is not None
    return _trim(_write_as_json(whole))


def _intersect(one: StringStates, other: StringStates) -> StringStates:
    """Return the states of the texts that fit both."""
    numbers = {(0, 0): 0}
    left = list(numbers)
    edges: list[dict[int, Ranges]] = []
    steps = 0
    while len(edges) < len(left):
        first, second = left[len(edges)]
        row: dict[int, Ranges] = {}
        for target, ranges in one.edges[first].items():
            for other_target, other_ranges in other.edges[second].items():
                steps += len(ranges) + len(other_ranges)
                common = _common(ranges, other_ranges)
                if common:
                    pair = target, other_target
                    if pair not in numbers:
                        numbers[pair] = len(left)
                        left.append(pair)
                    row[numbers[pair]] = common
        if len(left) > MAX_STATES or steps > _MAX_STEPS:
            raise BadPattern(f"too large together with the length or the format: more than {MAX_STATES:,} states")
        edges.append(row)
    return StringStates(edges, [one.accepting[first] and other.accepting[second] for first, second in left])


def _common(ranges: Ranges, others: Ranges) -> Ranges:
    found = []
    at = other_at = 0
    while at < len(ranges) and other_at < len(others):
        first, last = max(ranges[at][0], others[other_at][0]), min(ranges[at][1], others[other_at][1])
        if first <= last:
            found.append((first, last))
        if ranges[at][1] < others[other_at][1]:
            at += 1
        else:
            other_at += 1
    return tuple(found)


def _write_as_json(states: StringStates) -> StringStates:
    """Return the states of the same texts as JSON writes them, with escapes."""
    edges: list[dict[int, Ranges]] = [{} for _ in states.edges]
    accepting = list(states.accepting)
    for state, row in enumerate(states.edges):
        escaped: dict[int, Ranges] = {}
        for target, ranges in row.items():
            if plain := _common(ranges, _UNESCAPED):
                edges[state][target] = plain
            letters = [ord(letter) for point, letter in _ESCAPES.items() if _has(ranges, point)]
            if letters:
                escaped[target] = normalize((letter, letter) for letter in letters)
        if escaped:
            edges[state][len(edges)] = ((0x5C, 0x5C),)
            edges.append(escaped)
            accepting.append(False)
    return StringStates(edges, accepting)


def _has(ranges: Iterable[tuple[int, int]], point: int) -> bool:
    return any(first <= point <= last for first, last in ranges)


def _trim(states: StringStates) -> StringStates:
    """Return the states without those from which no text ends. Raises BadPattern if no text fits."""
    before: list[list[int]] = [[] for _ in states.edges]
    for state, row in enumerate(states.edges):
        for target in row:
            before[target].append(state)
    left = [state for state, accepting in enumerate(states.accepting) if accepting]
    alive = set(left)
    while left:
        for state in before[left.pop()]:
            if state not in alive:
                alive.add(state)
                left.append(state)
    if 0 not in alive:
        raise BadPattern("no text fits it together with the length and the format")
    return StringStates(
        [{target: ranges for target, ranges in row.items() if target in alive} for row in states.edges],
        states.accepting,
    )
