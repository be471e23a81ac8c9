"""Check of a client's JSON schema: rejects one that takes long to compile, because compilation stops all requests of
the engine.

The limits and the costs were measured with OpenVINO GenAI 2026.4, whose grammars are xgrammar's, and a vocabulary of
49,152 tokens: `tests/bench/schema_compile.py` searches for schemas that pass and are slow all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from edge_server.errors import BadSchema
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.text.pattern_automaton import BadPattern
from edge_server.plugins.language.text.pattern_cost import estimate_pattern, grammar_cost, states_cost
from edge_server.plugins.language.text.string_states import FORMATS, string_states
from edge_server.plugins.language.text.text_grammar import TextGrammar, text_grammar

MAX_BYTES = 65_536
"""Of the schema as JSON text."""
MAX_DEPTH = 32
"""Of subschemas inside each other."""
MAX_SUBSCHEMAS = 400
MAX_ALTERNATIVES = 1_000
"""In all anyOf, oneOf, enum and lists of types together."""
MAX_REPETITIONS = 1_000
"""Product of the quantifiers of a pattern that stand inside each other."""
MAX_ITEMS = 1_000_000
"""Product of minItems or maxItems of arrays inside each other."""
MAX_COST = 40.0
"""Sum of all costs. A cost of 1 is about 4 ms of processor time, so that the worst schema takes less than 200 ms."""

_REFERENCE_VOCABULARY = 49_152
"""Tokens of the vocabulary with which the costs were measured. Strings cost in proportion to it."""
_SUBSCHEMA_COST = 0.06
_LITERAL_BYTE_COST = 0.0035
"""Of an enum, a const or the name of a property: each is a path through the grammar."""
_BOUNDED_CHARACTER_COST = 4.0
"""Of each character that minLength or maxLength counts: almost the whole vocabulary fits there."""
_NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_INTEGER_BYTE_COST, _FRACTION_BYTE_COST = 0.02, 0.16
"""Of the text of such limits: the grammar compares the digits one by one."""
_ITEM_COST, _MAX_COUNTED_ITEMS = 0.025, 256
"""Of each of an array's minItems or maxItems; the engine writes out only so many."""
_FORMAT_COSTS = {"email": 7.0, "uri": 10.0, "hostname": 4.0, "ipv6": 4.0}
_FORMAT_COST = 2.0
"""Of other formats."""

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the schema's root to a value."""

_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values are a schema, a list of schemas, and an object of schemas."""


@dataclass(frozen=True, slots=True)
class Subschema:
    """A schema within another, or the whole."""

    path: Path
    value: dict[str, Any]
    depth: int
    items: int
    """Product of the items of the arrays around it."""


@dataclass(slots=True)
class _Costs:
    """Costs of the parts of a schema. Parts that are equal are compiled once."""

    total: float
    largest: float
    where: Path
    seen: set[object]

    def add(self, path: Path, cost: float, key: object = None) -> None:
        if key is not None:
            if key in self.seen:
                return
            self.seen.add(key)
        self.total += cost
        if cost > self.largest:
            self.largest, self.where = cost, path


def check_schema(text: str, vocabulary_size: int, place: Callable[[Path], str]) -> tuple[str, list[str]]:
    """Return the schema that an engine may compile, and the places of the keywords that it lacks.

    It differs from `text`, which is JSON of an object, if length limits or formats of strings would take too long: then
    the dearest of them are left out, until the others fit. `place` names a path in messages. Raises BadSchema.
    """
    if (size := len(text.encode())) > MAX_BYTES:
        raise BadSchema(place(()), f"expected a schema of at most {MAX_BYTES:,} bytes, got {size:,}")
    root = json.loads(text)
    factor = max(1.0, vocabulary_size / _REFERENCE_VOCABULARY)
    costs = _Costs(0.0, 0.0, (), set())
    schemas: list[Subschema] = []
    alternatives = 0
    for count, item in enumerate(walk_schemas(root, place), 1):
        value, path = item.value, item.path
        if count > MAX_SUBSCHEMAS:
            raise BadSchema(place(path), f"a schema may have at most {MAX_SUBSCHEMAS} subschemas, this one has more")
        for key in ("anyOf", "oneOf", "enum", "type"):
            if isinstance(value.get(key), list):
                alternatives += len(value[key])
                if alternatives > MAX_ALTERNATIVES:
                    problem = f"alternatives add up to {alternatives:,} in this schema; at most {MAX_ALTERNATIVES:,}"
                    raise BadSchema(place((*path, key)), problem)
        _add_parts(costs, value, path)
        for where, pattern in _patterns(value, path):
            costs.add(where, _pattern_cost(pattern, place(where)) * factor, pattern)
        schemas.append(item)
    _check_total(costs, place)
    _add_strings(costs, schemas, place, factor)
    left_out = [place(path) for path in _leave_out(schemas, MAX_COST - costs.total, factor)]
    return json.dumps(root) if left_out else text, left_out


def check_choice(texts: Sequence[str], name: str) -> None:
    """Raise BadSchema for texts whose grammar would take too long to compile. `name` is that of their parameter."""
    if len(texts) > MAX_ALTERNATIVES:
        raise BadSchema(name, f"expected at most {MAX_ALTERNATIVES:,} texts, got {len(texts):,}")
    most = int(MAX_COST / _LITERAL_BYTE_COST)
    if (size := sum(len(text.encode("utf-8", "replace")) for text in texts)) > most:
        raise BadSchema(name, f"expected texts of at most {most:,} bytes together, got {size:,}")


def check_grammar(sampling: Sampling, vocabulary_size: int) -> TextGrammar:
    """Return the grammar of a sampling with the constraint `regex` or `grammar`.

    `vocabulary_size` is 0 for an engine that does not compile grammars. Raises BadSchema if it is wrong or too large,
    or would take too long to compile.
    """
    name = sampling.constraint
    try:
        grammar = text_grammar(sampling)
    except BadPattern as error:
        raise BadSchema(name, str(error)) from None
    cost = grammar_cost(grammar) * max(1.0, vocabulary_size / _REFERENCE_VOCABULARY) if vocabulary_size else 0.0
    if cost > MAX_COST:
        raise BadSchema(name, f"too expensive: it costs {cost:.0f}; at most {MAX_COST:.0f} (docs/limits.md)")
    return grammar


def _leave_out(schemas: list[Subschema], room: float, factor: float) -> list[Path]:
    """Remove the dearest length limits and formats, so that the others cost at most `room`. Return their paths."""
    users: dict[tuple[object, ...], list[Subschema]] = {}
    found: dict[tuple[object, ...], float] = {}
    for item in schemas:
        value = item.value
        lengths = (_count(value, "minLength"), _count(value, "maxLength"))
        if max(lengths) and "pattern" not in value:
            key: tuple[object, ...] = ("minLength", "maxLength", *lengths)
            found[key] = max(lengths) * _BOUNDED_CHARACTER_COST
            users.setdefault(key, []).append(item)
        if isinstance(value.get("format"), str):
            key = ("format", "format", value["format"])
            found[key] = _FORMAT_COSTS.get(value["format"], _FORMAT_COST)
            users.setdefault(key, []).append(item)
    left_out: list[Path] = []
    for key, cost in sorted(found.items(), key=lambda item: item[1]):
        room -= cost * factor
        if room >= 0:
            continue
        for item in users[key]:
            for keyword in dict.fromkeys(map(str, key[:2])):
                if item.value.pop(keyword, None) is not None:
                    left_out.append((*item.path, keyword))
    return left_out


def walk_schemas(root: dict[str, Any], place: Callable[[Path], str]) -> Iterator[Subschema]:
    """Yield each subschema once, also those that only a `$ref` reaches. Raises BadSchema for depth, items and refs."""
    left = [Subschema((), root, 0, 1)]
    seen: set[int] = set()
    while left:
        item = left.pop()
        if id(item.value) in seen:
            continue
        seen.add(id(item.value))
        if item.depth > MAX_DEPTH:
            raise BadSchema(place(item.path), f"subschemas are nested more than {MAX_DEPTH} deep")
        yield item
        value, path, depth = item.value, item.path, item.depth + 1
        items = item.items * max(1, _count(value, "minItems"), _count(value, "maxItems"))
        if items > MAX_ITEMS:
            key = "maxItems" if "maxItems" in value else "minItems"
            raise BadSchema(place((*path, key)), f"repetitions multiply to {items:,}; at most {MAX_ITEMS:,}")
        if "$ref" in value:
            left.append(Subschema(*_resolve(root, value, path, place), item.depth, item.items))
        for key in _ONE:
            if isinstance(value.get(key), dict):
                left.append(Subschema((*path, key), value[key], depth, items if "tems" in key else item.items))
        for key in _LISTS:
            if isinstance(value.get(key), list):
                left += [
                    Subschema((*path, key, index), inner, depth, item.items)
                    for index, inner in enumerate(value[key])
                    if isinstance(inner, dict)
                ]
        for key in _MAPS:
            if isinstance(value.get(key), dict):
                nested = 1 if key in ("$defs", "definitions") else item.items
                left += [
                    Subschema((*path, key, name), inner, depth, nested)
                    for name, inner in value[key].items()
                    if isinstance(inner, dict)
                ]


def _resolve(
    root: dict[str, Any], value: dict[str, Any], path: Path, place: Callable[[Path], str]
) -> tuple[Path, dict[str, Any]]:
    """Return path and value of a reference's target. Raises BadSchema if it leads nowhere, or only to itself."""
    where, hops = place((*path, "$ref")), 0
    while "$ref" in value:
        reference = value["$ref"]
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise BadSchema(where, f"expected a reference into this schema (#/...), got {str(reference)[:80]!r}")
        target: Any = root
        parts = [part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/") if part]
        for part in parts:
            if isinstance(target, list):
                target = target[int(part)] if part.isdecimal() and int(part) < len(target) else None
            else:
                target = target.get(part) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise BadSchema(where, f"this schema has nothing at {reference[:80]!r}")
        path, value, hops = tuple(parts), target, hops + 1
        if hops > MAX_DEPTH or len(value) > 1:
            # A target with further members is looked at like any other subschema.
            break
    if hops > MAX_DEPTH:
        raise BadSchema(where, "the reference leads only to other references, and never to a schema")
    return path, value


def _count(value: Mapping[str, Any], key: str) -> int:
    number = value.get(key)
    return int(number) if isinstance(number, int | float) and 0 < number < 1e18 else 0


def _patterns(value: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the patterns of a subschema with their paths."""
    if isinstance(value.get("pattern"), str):
        yield (*path, "pattern"), value["pattern"]
    if isinstance(value.get("patternProperties"), dict):
        for pattern in value["patternProperties"]:
            yield (*path, "patternProperties", pattern), pattern


def _pattern_cost(pattern: str, where: str) -> float:
    """Return the cost of a pattern. Raises BadSchema with `where`."""
    try:
        found = estimate_pattern(pattern)
    except BadPattern as error:
        raise BadSchema(where, str(error)) from None
    if found.repetitions > MAX_REPETITIONS:
        raise BadSchema(where, f"repetitions multiply to {found.repetitions:,}; at most {MAX_REPETITIONS:,}")
    return found.cost


def _add_strings(costs: _Costs, schemas: Sequence[Subschema], place: Callable[[Path], str], factor: float) -> None:
    """Add what the states of strings with a pattern cost more than was estimated: those of the lengths and the format
    beside it, and of patterns with many. Raises BadSchema, before the next one, if the schema is then too expensive."""
    seen: set[str] = set()
    for item in schemas:
        if not isinstance(item.value.get("pattern"), str):
            continue
        names = ("pattern", "minLength", "maxLength", *(["format"] if item.value.get("format") in FORMATS else []))
        parts = {name: item.value[name] for name in names if name in item.value}
        key = json.dumps(parts)
        if key in seen:
            continue
        seen.add(key)
        where = (*item.path, "pattern")
        try:
            cost = states_cost(string_states(parts).edges)
        except BadPattern as error:
            raise BadSchema(place(where), str(error)) from None
        costs.add(where, max(0.0, cost - _pattern_cost(parts["pattern"], place(where))) * factor)
        _check_total(costs, place)


def _check_total(costs: _Costs, place: Callable[[Path], str]) -> None:
    if costs.total > MAX_COST:
        raise BadSchema(
            place(costs.where),
            f"too expensive: it costs {costs.largest:.0f} of the {costs.total:.0f} that this schema costs; at most "
            f"{MAX_COST:.0f} (docs/limits.md)",
        )


def _add_parts(costs: _Costs, value: Mapping[str, Any], path: Path) -> None:
    """Add the costs of a subschema without its patterns and string limits."""
    costs.add(path, _SUBSCHEMA_COST)
    for key in ("enum", "const"):
        if key in value:
            costs.add((*path, key), len(json.dumps(value[key])) * _LITERAL_BYTE_COST)
    for key in _NUMBER_LIMITS:
        if key in value:
            limit = json.dumps(value[key]).removesuffix(".0")
            costs.add(
                (*path, key),
                len(limit) * (_INTEGER_BYTE_COST if limit.lstrip("-").isdecimal() else _FRACTION_BYTE_COST),
            )
    for key in ("minItems", "maxItems"):
        costs.add((*path, key), min(_count(value, key), _MAX_COUNTED_ITEMS) * _ITEM_COST)
    properties, required = value.get("properties"), value.get("required")
    if isinstance(properties, dict):
        needed = {item for item in required if isinstance(item, str)} if isinstance(required, list) else set()
        # Any optional property may be the next: the grammar has an edge for each pair of them, and counts them too if
        # their number is limited.
        optional = len(properties.keys() - needed)
        counted = min(optional, max(_count(value, "minProperties"), _count(value, "maxProperties")))
        cost = sum(len(name) for name in properties) * _LITERAL_BYTE_COST
        costs.add((*path, "properties"), cost + optional * optional / 250 + optional * counted / 12)
