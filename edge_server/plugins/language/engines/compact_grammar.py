"""Conversion of a JSON schema to a grammar that lets a model write only compact JSON, without white space.

The grammar is in xgrammar's EBNF (https://xgrammar.mlc.ai/docs), llama.cpp's GBNF. Objects have their properties
in the order of the schema, and no others unless it has `additionalProperties`, as in xgrammar's own conversion.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.grammar_text import GbnfWriter
from edge_server.plugins.language.text.pattern_automaton import BadPattern
from edge_server.plugins.language.text.string_states import FORMATS, string_states

_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$id",
                          "$schema", "$comment", "$defs", "definitions", "discriminator"))  # fmt: skip
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum")),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
"""Type -> keywords that this module knows for it."""
_MAX_INTEGERS = 1_000
"""Integers between two limits that are written out."""
_MAX_LIMIT = 1e15
"""Of numbers: larger ones have no decimals."""
_MAX_BRANCHES = 50
"""Of a text of an enum that begins like others."""
_MAX_COUNT = 256
"""Largest minItems, maxItems, minLength and maxLength."""

_BASE = r"""
any ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (member ("," member)*)? "}"
member ::= string ":" any
array ::= "[" (any ("," any)*)? "]"
string ::= "\"" character* "\""
character ::= [^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" hex hex hex hex)
hex ::= [0-9a-fA-F]
natural ::= "0" | positive
positive ::= [1-9] [0-9]*
integer ::= "0" | "-"? positive
fraction ::= ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
number ::= "-"? natural fraction
"""


_PLAIN = r'[^"\\\x00-\x1f]'
"""A character of a string with a limited length: as in xgrammar's conversion, none that JSON escapes."""


class _Unknown(Exception):
    """The schema has a keyword that this module does not know."""


def compact_grammar(schema: str) -> str:
    """Return the grammar for a schema that `check_schema` has admitted; "" if it has keywords unknown here."""
    root = json.loads(schema)
    writer = _Writer(root)
    try:
        rule = writer.value(root, frozenset())
    except _Unknown:
        return ""
    rules = "".join(f"{name} ::= {text}\n" for name, text in {"root": rule, **writer.rules}.items())
    return rules + "".join(writer.strings.lines) + _BASE


def choice_grammar(texts: Sequence[str]) -> str:
    """Return the grammar for one of these texts. Raises InvalidRequest if too many begin like others."""
    try:
        return f"root ::= {_one_of(set(texts))}\n"
    except _Unknown:
        raise InvalidRequest(
            f"choice: a text has more than {_MAX_BRANCHES} places where others that begin like it go on differently"
        ) from None


class _Writer:
    """Writes the rules of one schema. Each method returns the name of a rule or an expression."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.rules: dict[str, str] = {}
        self.strings = GbnfWriter({})
        """Rules of strings with a pattern or a format."""
        self._root = root
        self._string_rules: dict[str, str] = {}
        """Keywords of such a string -> name of its first rule."""
        self._references: dict[str, str] = {}
        """Reference -> name of its rule."""

    def value(self, schema: object, opened: frozenset[str]) -> str:
        """`opened` are the references on the way here without a character between: one of them again has no end."""
        if schema is True:
            return "any"
        if not isinstance(schema, dict):
            raise _Unknown
        keywords = schema.keys() - _ANNOTATIONS
        if not keywords:
            return "any"
        if keywords == {"$ref"}:
            return self._reference(schema["$ref"], opened)
        for key in ("anyOf", "oneOf"):
            if keywords == {key}:
                return self._alternatives([self.value(item, opened) for item in self._items(schema[key])])
        for key in ("const", "enum"):
            if keywords - {"type"} == {key}:
                values = [schema[key]] if key == "const" else self._items(schema[key])
                return _one_of({_json(item) for item in values})
        types = schema.get("type")
        names = [name if isinstance(name, str) else "" for name in (types if isinstance(types, list) else [types])]
        known = {"type"}.union(*(_KEYWORDS.get(name, ()) for name in names))
        if not names or not _KEYWORDS.keys() >= set(names) or not known >= keywords:
            raise _Unknown
        return self._alternatives([getattr(self, f"_{name}")(schema) for name in names])

    @staticmethod
    def _items(value: object) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _Unknown
        return value

    @staticmethod
    def _alternatives(parts: list[str]) -> str:
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"

    def _rule(self, text: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = text
        return name

    def _reference(self, reference: str, opened: frozenset[str]) -> str:
        if reference in opened:
            raise _Unknown
        if reference not in self._references:
            target: Any = self._root
            for part in reference[2:].split("/") if len(reference) > 1 else ():
                part = part.replace("~1", "/").replace("~0", "~")
                target = target[int(part)] if isinstance(target, list) else target[part]
            name = self._references[reference] = self._rule("")
            self.rules[name] = self.value(target, opened | {reference})
        return self._references[reference]

    def _string(self, schema: Mapping[str, Any]) -> str:
        if "pattern" in schema or "format" in schema:
            if not isinstance(schema.get("pattern", ""), str) or schema.get("format", "date") not in FORMATS:
                raise _Unknown
            key = json.dumps([schema.get(name) for name in ("pattern", "format", "minLength", "maxLength")])
            if key not in self._string_rules:
                try:
                    states = string_states(schema)
                except BadPattern:  # of a format: check_schema refuses such patterns
                    raise _Unknown from None
                self._string_rules[key] = f"p{len(self._string_rules)}"
                self.strings.add_automaton(states.edges, states.accepting, self._string_rules[key])
            return f'"\\"" {self._string_rules[key]} "\\""'
        least, most = _counts(schema, "minLength", "maxLength")
        return "string" if (least, most) == (0, None) else f'"\\"" {_repeated(_PLAIN, least, most)} "\\""'

    def _integer(self, schema: Mapping[str, Any]) -> str:
        limits = {key: schema[key] for key in _KEYWORDS["integer"] if key in schema}
        if not limits:
            return "integer"
        if not all(type(limit) is int for limit in limits.values()):
            raise _Unknown
        least = max((limits[key] + add for key, add in (("minimum", 0), ("exclusiveMinimum", 1)) if key in limits),
                    default=None)  # fmt: skip
        most = min((limits[key] - add for key, add in (("maximum", 0), ("exclusiveMaximum", 1)) if key in limits),
                   default=None)  # fmt: skip
        if most is None and least in (0, 1):
            return "positive" if least else "natural"
        if least is None or most is None or not 0 <= most - least < _MAX_INTEGERS:
            raise _Unknown
        return _one_of({str(number) for number in range(least, most + 1)})

    def _number(self, schema: Mapping[str, Any]) -> str:
        if "exclusiveMinimum" in schema:
            raise _Unknown
        limits = [schema.get(key) for key in ("minimum", "maximum")]
        if limits == [None, None]:
            return "number"
        if not all(
            limit is None or (type(limit) in (int, float) and abs(limit) < _MAX_LIMIT and limit == int(limit))
            for limit in limits
        ):
            raise _Unknown
        least, most = (None if limit is None else int(limit) for limit in limits)
        if most is None and least == 0:
            return "natural fraction"
        if least is None or most is None or not 0 <= most - least < _MAX_INTEGERS:
            raise _Unknown
        # Whole parts that may have decimals behind them, and the limits themselves.
        whole = {str(number) for number in range(max(least, 0), most)}
        whole |= {f"-{number}" for number in range(max(-most, 0), -least)}
        ends = {str(least), str(most)} - whole
        parts = [f'{_one_of(whole)} ("." [0-9]+)?'] if whole else []
        return self._alternatives([*parts, *([_one_of(ends)] if ends else [])])

    def _boolean(self, schema: Mapping[str, Any]) -> str:
        return '("true" | "false")'

    def _null(self, schema: Mapping[str, Any]) -> str:
        return '"null"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = _counts(schema, "minItems", "maxItems")
        if "prefixItems" in schema:
            first = self._items(schema["prefixItems"])
            if least != len(first) or (most is None and schema.get("items") is not False) or most not in (None, least):
                raise _Unknown
            items = ' "," '.join(self._rule(self.value(item, frozenset())) for item in first)
            return f'"[" {items} "]"'
        item = self._rule(self.value(schema.get("items", True), frozenset()))
        if most == 0:
            return '"[]"'
        another = f'("," {item})'
        more = f"{item} {_repeated(another, max(least - 1, 0), None if most is None else most - 1)}"
        return f'"[" {more} "]"' if least else f'"[" ({more})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", "properties" not in schema)
        if not isinstance(properties, dict) or not isinstance(required, list) or set(required) - properties.keys():
            raise _Unknown
        other = "" if others is False else f'string ":" {self._rule(self.value(others, frozenset()))}'
        # What may stand from a property on: as the first members of the object, and after others.
        first = self._rule(f'({other} ("," {other})*)?' if other else '""')
        later = self._rule(f'("," {other})*' if other else '""')
        for name, value in reversed(properties.items()):
            member = self._rule(f"{_literal(_json(name) + ':')} {self.value(value, frozenset())}")
            without_first, without_later = ("", "") if name in required else (f" | {first}", f" | {later}")
            first = self._rule(f"{member} {later}{without_first}")
            later = self._rule(f'"," {member} {later}{without_later}')
        return f'"{{" {first} "}}"'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _literal(text: str) -> str:
    """Return terminals for a text; their escapes are those of JSON.

    A character beyond ASCII is a class of its own: xgrammar (of OpenVINO GenAI 2026.4) takes "ße" for U+0DFE.
    """
    parts = re.findall(r"[\x00-\x7f]+|.", text, re.DOTALL) or [""]
    return " ".join(json.dumps(part) if part.isascii() else f"[{part}]" for part in parts)


def _one_of(texts: set[str], depth: int = 0) -> str:
    """Return an expression for these texts, in which no two alternatives begin with the same character.

    xgrammar (of OpenVINO GenAI 2026.4) takes `"a1x" | "a2x" | "a10x"` for more texts than these, in its own conversion
    of `enum` too.
    """
    if depth > _MAX_BRANCHES:
        raise _Unknown
    parts = []
    for first, group in itertools.groupby(sorted(texts), lambda text: text[:1]):
        items = list(group)
        pairs = enumerate(zip(items[0], items[-1], strict=False))
        prefix = items[0][: next((place for place, (one, other) in pairs if one != other), len(items[0]))]
        rests = {item[len(prefix) :] for item in items}
        parts.append(
            _literal(prefix) if not first or rests == {""} else f"{_literal(prefix)} {_one_of(rests, depth + 1)}"
        )
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _counts(schema: Mapping[str, Any], least_key: str, most_key: str) -> tuple[int, int | None]:
    least, most = schema.get(least_key, 0), schema.get(most_key)
    counts = [least] if most is None else [least, most]
    if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts) or counts != sorted(counts):
        raise _Unknown
    return least, most


def _repeated(text: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if most is None and least < 2:
        return text + "*+"[least]
    return f"{text}{{{least},{'' if most is None else most}}}"
