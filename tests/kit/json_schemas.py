"""Some 400 JSON schemas, and a judge of answers to them: the package jsonschema, of the extra test-all."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra test-all")

_PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
_NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}},
    "required": ["v", "next"],
}
_CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat", "default": "cat", "type": "string"}, "lives": {"type": "integer"}},
    "required": ["lives"],
}
_DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog", "default": "dog", "type": "string"}, "breed": {"enum": ["pug", "pün"]}},
    "required": ["kind"],
}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _model(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    """Return a schema as pydantic writes it."""
    return {**_object({"f": {"title": "F", **schema}}, "f", title="Model"), "$defs": definitions}


EVERYDAY: list[dict[str, Any]] = [
    _model({"$ref": "#/$defs/Color"}, Color={"enum": ["red", "grün", "blue"], "title": "Color", "type": "string"}),
    _model({"$ref": "#/$defs/Level"}, Level={"enum": [1, 2, 10], "title": "Level", "type": "integer"}),
    _model({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}),
    _model({"anyOf": [{"maxLength": 5, "type": "string"}, {"type": "null"}], "default": None}),
    _model({"$ref": "#/$defs/Person", "description": "someone"}, Person=_PERSON),
    _model({"allOf": [{"$ref": "#/$defs/Person"}], "default": {"name": "x"}}, Person=_PERSON),
    _model({"items": {"$ref": "#/$defs/Person"}, "type": "array", "maxItems": 3}, Person=_PERSON),
    _model({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 6}, {"type": "boolean"}]}),
    _model(
        {
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        },
        Cat=_CAT,
        Dog=_DOG,
    ),
    _model({"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}, Cat=_CAT, Dog=_DOG),
    _model({"const": "x", "type": "string"}),
    _model({"enum": ["a", "b", 3, None]}),
    _model({"minLength": 1, "maxLength": 20, "type": "string"}),
    _model({"exclusiveMinimum": 0, "maximum": 150, "type": "integer"}),
    _model({"minimum": 18, "type": "integer"}),
    _model({"exclusiveMinimum": 0, "exclusiveMaximum": 1, "type": "number"}),
    _model({"minimum": -90.0, "maximum": 90.0, "type": "number"}),
    _model({"minimum": 0.0, "type": "number"}),
    _model({"multipleOf": 5, "minimum": 0, "maximum": 100, "type": "integer"}),
    _model({"format": "date-time", "type": "string"}),
    _model({"format": "date", "type": "string"}),
    _model({"format": "uuid", "type": "string"}),
    _model({"format": "email", "type": "string"}),
    _model({"format": "uri", "minLength": 1, "type": "string"}),
    _model({"format": "uri", "maxLength": 2083, "minLength": 1, "type": "string"}),
    _object(
        {
            "title": {"type": "string", "minLength": 1, "maxLength": 20},
            "author": {"anyOf": [{"type": "string", "maxLength": 255}, {"type": "null"}]},
            "text": {"type": "string", "maxLength": 1000},
        },
        "title",
    ),
    _model({"format": "password", "type": "string", "writeOnly": True}),
    _model({"pattern": "^[a-z]+-\\d{2}$", "type": "string"}),
    _model({"additionalProperties": {"type": "integer"}, "type": "object"}),
    _model({"additionalProperties": {"$ref": "#/$defs/Person"}, "type": "object"}, Person=_PERSON),
    _model({"items": {"anyOf": [{"type": "integer"}, {"type": "number"}]}, "type": "array", "maxItems": 4}),
    _model(
        {
            "maxItems": 2,
            "minItems": 2,
            "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 4}],
            "type": "array",
        }
    ),
    _model({"items": {}, "type": "array", "maxItems": 2}),
    _model({}),
    _model({"$ref": "#/$defs/N"}, N=_NODE),
    {"$defs": {"N": _NODE}, "$ref": "#/$defs/N"},
    _object({"a": {"type": "integer"}}, "a", additionalProperties=False),
    _object({"a": {"type": "integer"}, "ab": {"type": "null"}}, "a", additionalProperties={"type": "boolean"}),
    _object({"a": {"type": "integer"}, "b": {"type": "null"}}, additionalProperties=True),
]
"""As pydantic writes them: all of them are held."""

KEYWORDS: list[Any] = [
    True,
    {},
    {"title": "Any"},
    {"type": "null"},
    {"type": "boolean"},
    {"type": ["integer", "null"]},
    {"type": ["string", "integer", "null"], "enum": ["a", 1, None, True, 1.5]},
    {"type": "string", "enum": [1, "a", "ä", "日本", "👩‍🚀", '"q"', "back\\slash", "a\tb", "\x7f", "\x1f", "ße"]},
    {"type": "integer", "enum": [1.0, 2, 2.5]},
    {"enum": ["a1x", "a2x", "a10x", "a", ""]},
    {"enum": [[1, 2], {"a": {"b": None}}, 0, False, -1, 1e30, 1e-7]},
    {"const": {"a": [1, 2.5, None, True], "ü": "ß"}},
    {"const": None},
    {"enum": [1, 2, "x"], "const": 2},
    {"enum": ["red", "x"], "minLength": 2},
    {"enum": ["red", "x"], "minimum": 2},
    *({"type": "integer", **limits} for limits in (
        {"minimum": -5, "maximum": 5}, {"minimum": 7, "maximum": 7}, {"exclusiveMinimum": -1, "exclusiveMaximum": 1},
        {"minimum": 98, "maximum": 1203}, {"minimum": -1203, "maximum": -98}, {"maximum": -7}, {"maximum": 0},
        {"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": 0.5, "maximum": 2.5}, {"minimum": 1e3},
        {"multipleOf": 7, "minimum": 1, "maximum": 50}, {"multipleOf": 7}, {"multipleOf": 1},
        {"multipleOf": 7, "exclusiveMaximum": 0}, {"multipleOf": 7, "minimum": -14, "maximum": 0},
        {"multipleOf": 0.5, "minimum": 1, "maximum": 5}, {"minimum": 5, "maximum": 3},
    )),
    *({"type": "number", **limits} for limits in (
        {"minimum": 0.5, "maximum": 0.75}, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"minimum": 0.001},
        {"minimum": -0.75, "maximum": 0.5}, {"minimum": -1.25, "exclusiveMaximum": -0.3}, {"maximum": 99.95},
        {"minimum": 1.5, "maximum": 1.5}, {"exclusiveMinimum": 9.99, "exclusiveMaximum": 10}, {"maximum": -0.1},
        {"exclusiveMinimum": 1.5, "exclusiveMaximum": 1.5}, {"multipleOf": 0.01}, {"minimum": 1e-12, "maximum": 1},
        {"multipleOf": 3, "minimum": 0, "maximum": 9}, {"minimum": 1e20}, {"minimum": 0, "maximum": 123456789012345},
    )),
    *({"type": "string", **limits} for limits in (
        {"minLength": 3}, {"maxLength": 3}, {"minLength": 2, "maxLength": 5}, {"maxLength": 0}, {"maxLength": 500},
        {"minLength": 3, "maxLength": 2}, {"minLength": 2, "pattern": "^x+$"}, {"maxLength": 9, "pattern": "^x{2,4}$"},
    )),
    *({"type": "string", "pattern": pattern} for pattern in (
        "a", "^a", "a$", "^a|b$", "a|b", "^[A-Z]{3}-\\d{4}$", "^(foo|bar)+$", "^[^a-z]{1,4}$", "^\\w+@\\w+\\.com$",
        "^\\S+\\s\\S+$", "^.{3}$", "^[é👩日]{2}$", "^[\\w.-]{1,9}$", '^"\\\\$', "^\\u00e4\\x41\\n$", "^(a?b*){2}$",
        "^[\"\\\\a]{2}$", "^\\D{2}\\W\\S$", "^$", "", "^(?:a|b)??c+?$", "^(?=a)b$", "^\\p{L}+$", "(a)\\1", "^\\bfoo",
        "^\\d\"[ab]+$", "^[A-Z]:\\\\[a-z]+$", "^\n[]\"][\x22]\\w$",
        "^[]a]$", "^((a{1,1000}){1,1000}){1,1000}$", "^(?P<year>\\d{4})$", "^[+-]?\\d+$", "^a{3}{2}$", "^(a{3}){2}$",
    )),
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "regex",
        "json-pointer", "iri", "binary",
    )),
    {"type": "array", "maxItems": 2},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": False},
    {"type": "array", "items": {"type": "null"}, "maxItems": 0},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": {"type": "integer"}},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, False, {"type": "boolean"}]},
    {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "maxItems": 1, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 3, "maxItems": 4},
    {"type": "array", "contains": {"const": 1}, "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    {"type": "object"},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    {"type": "object", "required": ["missing"], "properties": {}},
    {"type": "object", "required": ["missing"], "additionalProperties": {"type": "null"}},
    {"type": "object", "required": ["missing"], "properties": {}, "additionalProperties": False},
    _object({"a": {"type": "integer"}, "b": False}, "a"),
    _object({'a b"c': {"type": "boolean"}, "é": {"type": "null"}, "": {"const": 1}}, "", additionalProperties={}),
    _object({"a": {"type": "null"}, "b": {"type": "null"}}, minProperties=1),
    _object({"a": {"type": "null"}, "b": {"type": "null"}}, "a", minProperties=1, maxProperties=2),
    _object({"a": {"type": "null"}, "b": {"type": "null"}}, maxProperties=1),
    _object({"d": {"type": "boolean"}, "e": {"type": "boolean"}}, "d", dependentRequired={"d": ["e"]}),
    _object({"d": {"type": "boolean"}, "e": {"type": "boolean"}}, dependentRequired={"d": ["e"]}),
    _object({"a": {"type": "null"}}, unevaluatedProperties=False),
    _object({"a": {"type": "null"}}, unevaluatedProperties={"type": "boolean"}),
    {"properties": {"a": {"type": "null"}}, "required": ["a"]},
    {"minimum": 3},
    {"minLength": 3, "maximum": 2},
    {"type": "object", "patternProperties": {"^[a-z]{2}$": {"type": "integer"}}},
    {"type": "object", "patternProperties": {"^\"": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"pattern": "^x"}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    {"type": "object", "then": {"required": ["b"]}},
    {"not": {"type": "string"}},
    {"$dynamicRef": "#x"},
    {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 7}, {"type": "string", "maxLength": 3}]},
    {"anyOf": [{"type": "integer"}, False]},
    {"anyOf": [{"type": "integer", "minimum": 0.5, "maximum": 0.75}, {"type": "integer", "exclusiveMinimum": 2.5}]},
    {"anyOf": [{"type": "integer", "const": 2.5}, {"type": ["integer", "null"], "enum": [2.5, None, "a"]}]},
    {"anyOf": [{"type": "string", "format": "uri", "pattern": "^https", "maxLength": 2083}, {"type": "null"}]},
    _object({"enum": {"type": "integer", "enum": [1, 1.5]}, "default": {"type": "string", "format": "binary"}}, "enum"),
    {"anyOf": [False]},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], **_object({"a": {"type": "null"}, "b": {"type": "null"}})},
    {"anyOf": [{"minimum": 3}, {"maximum": -3}], "type": "integer"},
    {"type": "integer", "minimum": 1, "anyOf": [{"minimum": 3}, {"multipleOf": 2}], "maximum": 9},
    {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
    {"oneOf": [_object({"a": {"type": "null"}}, "a"), _object({"b": {"type": "null"}}, "b")]},
    {"oneOf": [_object({"a": {"type": "null"}}, "a"), _object({"a": {"type": "null"}, "b": {"type": "null"}}, "b")]},
    {"oneOf": [_object({"a": {"type": "null"}}, additionalProperties=False), _object({"b": {"type": "null"}}, "b")]},
    {"oneOf": [_object({"a": {"type": "null"}}, additionalProperties=False), _object({"b": {"type": "null"}})]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
    {"oneOf": [_CAT, _DOG], "type": "object"},
    {"allOf": [_object({"a": {"type": "boolean"}}, "a"), _object({"b": {"type": "null"}}, "b")]},
    {"allOf": [_object({"a": {"type": "number"}}, "a"), _object({"a": {"minimum": 3, "maximum": 9}})]},
    {"allOf": [_object({"a": {"type": "boolean"}}, "a", additionalProperties=False), _object({"b": {}}, "b")]},
    {"allOf": [{"type": ["integer", "string"]}, {"type": ["number", "null"]}], "minimum": 2},
    {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"},
    {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    {"allOf": [{"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"maximum": 4}]},
    {"allOf": [{"type": "integer"}, {"minimum": 0.5, "maximum": 9.5}]},
    {"allOf": [{"type": "integer"}, {"enum": [1, 2.5, 3]}]},
    {"$defs": {"E": {"enum": [1, 2.5]}}, "$ref": "#/$defs/E", "type": "integer"},
    {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"enum": [2.5, 0.5]}]},
    {"$defs": {"O": {"enum": [{"a": 1}]}}, "$ref": "#/$defs/O", "patternProperties": {"^a": {"type": "integer"}}},
    {"enum": [{"a": 1}, {"a": "x"}], "patternProperties": {"^a": {"type": "integer"}}},
    {"allOf": [_object({"a": {"type": "null"}}, additionalProperties=False), {"patternProperties": {"^b": {}}}]},
    {"allOf": [True, {"type": "null"}]},
    {"allOf": [False]},
    {"allOf": []},
    {"$defs": {"I": {"type": "integer"}}, "$ref": "#/$defs/I", "minimum": 3, "maximum": 44},
    {"$defs": {"I": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/I"}, {"minimum": 3}], "maximum": 44},
    {"definitions": {"P": _PERSON}, "$ref": "#/definitions/P"},
    _object({"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}, "b"),
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"$ref": "#"},
    {"$ref": "https://example.com/x.json"},
    {"$ref": "#/$defs/missing"},
    {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], "minimum": 1}}, "$ref": "#/$defs/A"},
    {"enum": []},
    {"type": "any"},
    False,
]  # fmt: skip
"""Each keyword of JSON Schema 2020-12, alone and beside others."""


def _random_schema(chance: random.Random, depth: int = 0) -> Any:
    kinds = ["integer", "number", "string", "enum", "const", "boolean", "format", "pattern", "ref"]
    kinds += (
        [] if depth > 2 else ["object", "object", "array", "anyOf", "oneOf", "allOf", "free"] * (3 if not depth else 1)
    )
    kind = chance.choice(kinds)

    def inner() -> Any:
        return _random_schema(chance, depth + 1)

    if kind in ("integer", "number"):
        low = chance.randint(-300, 300) if kind == "integer" else round(chance.uniform(-30, 30), chance.randint(0, 4))
        high = low + (chance.randint(0, 500) if kind == "integer" else round(chance.uniform(0, 30), 2))
        limits = {
            chance.choice(("minimum", "exclusiveMinimum")): low,
            chance.choice(("maximum", "exclusiveMaximum")): high,
        }
        return {"type": kind, **dict(chance.sample(sorted(limits.items()), chance.randint(0, 2))),
                **({"multipleOf": chance.randint(1, 9)} if chance.random() < 0.2 else {})}  # fmt: skip
    if kind == "string":
        low = chance.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + chance.randint(0, 5)}
    if kind in ("enum", "const"):
        values = chance.sample([1, 2.5, -3, None, True, False, "a", "ab", "abc", "日本", 'q"', "é\n", [1], {"k": 0}], 4)
        types = ["string", ["integer", "null"], "number", ["boolean", "string", "array"]]
        return {**({"enum": values} if kind == "enum" else {"const": values[0]}),
                **({"type": chance.choice(types)} if chance.random() < 0.3 else {})}  # fmt: skip
    if kind == "format":
        return {"type": "string", "format": chance.choice(("date", "uuid", "ipv4", "date-time", "email"))}
    if kind == "pattern":
        parts = chance.choices(["[a-f]", "\\d{2}", "(x|yz)", "é", "[^0-9]", ".", "\\.", "\\w?", '"', "\\\\"], k=3)
        return {"type": "string", "pattern": f"^{''.join(parts)}$"}
    if kind == "ref":
        return {"$ref": f"#/$defs/{chance.choice('ABN')}", **({"maximum": 50} if chance.random() < 0.3 else {})}
    if kind == "array":
        low = chance.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + chance.randint(0, 2),
                **({"prefixItems": [inner() for _ in range(chance.randint(1, 2))]} if chance.random() < 0.4 else {}),
                **({"uniqueItems": True} if chance.random() < 0.1 else {})}  # fmt: skip
    if kind == "free":
        return {"type": "object", "additionalProperties": inner(), "maxProperties": 2}
    if kind in ("anyOf", "oneOf"):
        return {kind: [inner() for _ in range(chance.randint(2, 3))],
                **({"maximum": 20} if chance.random() < 0.2 else {})}  # fmt: skip
    names = chance.sample(["a", "b", "ab", "naïve", "x y", 'q"', "count"], chance.randint(1, 4))
    properties = {name: inner() for name in names}
    schema = _object(properties, *chance.sample(names, chance.randint(0, len(names))))
    if chance.random() < 0.5:
        schema["additionalProperties"] = chance.choice((False, True, {"type": "boolean"}))
    if chance.random() < 0.1:
        schema["dependentRequired"] = {names[0]: [names[-1]]}
    if chance.random() < 0.1:
        schema["required"].append("other")
    return schema if kind == "object" else {"allOf": [schema, _object({"more": inner()}, "more")]}


def _random_root(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    schema: dict[str, Any] = _random_schema(chance)
    return {**schema, "$defs": {"A": {"type": "integer"}, "B": _PERSON, "N": _NODE}}


RANDOM = [_random_root(seed) for seed in range(180)]
_CHECKER = jsonschema.FormatChecker(("date", "uuid", "ipv4", "ipv6", "email"))
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT)?[0-2]\d:[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-][0-2]\d:[0-5]\d)", re.IGNORECASE)


def _judge_pattern(_: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    known = pattern.replace(r"\p{L}", r"[^\W\d_]").replace("{3}{2}", "{6}")
    if r"\p" in pattern and isinstance(value, str):
        # The libraries know letters of a newer Unicode than Python 3.11.
        value = "".join("a" if unicodedata.category(character) == "Cn" else character for character in value)
    if isinstance(value, str) and not re.search(known, value, re.ASCII if known == pattern else re.UNICODE):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _judge_multiple(_: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    if type(value) in (int, float) and Fraction(str(value)) % Fraction(str(divisor)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {divisor}")


_JUDGE = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": _judge_pattern, "multipleOf": _judge_multiple}
)
"""Its own classes of characters are Unicode's, and its fractions are binary."""


def find_problem(schema: Any, text: str) -> str:
    """Return how compact JSON does not fit a schema, "" if it does."""
    # A schema's 1e30 is no integer of Python.
    value = json.loads(text, parse_int=lambda digits: float(digits) if digits.endswith("0" * 20) else int(digits))
    problems = _JUDGE(schema, format_checker=_CHECKER).iter_errors(value)
    for problem in problems:
        return str(problem.message)
    if isinstance(schema, dict) and schema.get("format") in ("time", "date-time") and not _TIME.fullmatch(value):
        return f"no {schema['format']}"
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    outside = re.sub(r'"([^"\\]|\\.)*"', "", text)
    return "" if not re.search(r"\s", outside) else f"white space, not as {compact}"
