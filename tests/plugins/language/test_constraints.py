"""What the tiny model writes to some 390 schemas, judged by the package jsonschema, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import BadSchema
from edge_server.plugins.language.engines.model_size import read_gguf
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.grammar.constraint import ConstraintCheck, ConstraintFailure
from edge_server.plugins.language.grammar.openvino_constraint import openvino_grammar
from edge_server.plugins.language.text.tool_calls import schema_place

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra test-all")

_TINY = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
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
_FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4", "ipv6", "email"))
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT)?[0-2]\d:[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-][0-2]\d:[0-5]\d)", re.IGNORECASE)


def _judge_pattern(_: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    known = pattern.replace(r"\p{L}", r"[^\W\d_]").replace("{3}{2}", "{6}")
    if isinstance(value, str) and not re.search(known, value, re.ASCII if known == pattern else re.UNICODE):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _judge_multiple(_: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    if type(value) in (int, float) and Fraction(str(value)) % Fraction(str(divisor)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {divisor}")


_JUDGE = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": _judge_pattern, "multipleOf": _judge_multiple}
)
"""Its own classes of characters are Unicode's, and its fractions are binary."""


def _grammar(schema: Any) -> str:
    place = partial(schema_place, "json_schema")
    return openvino_grammar(Sampling(max_tokens=1, json_schema=json.dumps(schema)), place)


class _Writers:
    """The tiny model on an engine, which writes texts by a grammar at random."""

    def __init__(self, name: str) -> None:
        self.name = name
        about = read_gguf(_TINY)
        settings = read_settings("tiny", {"max_num_seqs": "8", "num_kv_blocks": "256"}, about, 32)
        if name == "openvino_genai":
            from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine

            self.engine: Any = OpenVinoEngine(_TINY, settings)
        else:
            from edge_server.plugins.language.engines.llama_cpp_engine import LlamaCppEngine

            self.engine = LlamaCppEngine(_TINY, settings, 32, about.bytes_per_token)
        self._number = 0

    def check(self, schema: Any) -> ConstraintCheck:
        """Return the check of a text. Raises BadSchema for a schema that the server or this engine refuses."""
        sampling = Sampling(max_tokens=1, json_schema=json.dumps(schema))
        check = ConstraintCheck(sampling, partial(schema_place, "s"))
        self.engine.write_grammar(sampling, partial(schema_place, "s"))
        return check

    def write(self, count: int, **constraint: Any) -> list[str]:
        """Return the finished ones of `count` texts."""
        tokens: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        for index in range(count):
            self._number += 1
            tokens[self._number], texts[self._number] = [], ""
            prompt = self.engine.encode("give me json" if index % 2 else "count from three")
            temperature = (1.0, 3.0, 30.0)[index % 3]  # the last makes all tokens about as likely
            sampling = Sampling(max_tokens=160, temperature=temperature, seed=self._number, **constraint)
            grammar = self.engine.write_grammar(sampling, partial(schema_place, "s"))
            self.engine.add(self._number, prompt, dataclasses.replace(sampling, engine_grammar=grammar))
        finished = []
        while not self.engine.is_idle():
            for event in self.engine.step() or ():
                assert not event.error, (event.error, constraint)
                tokens[event.sequence_id] += event.tokens
                texts[event.sequence_id] += event.text or ""
                if event.finish == "stop":
                    finished.append(event.sequence_id)
        if self.name == "openvino_genai":
            return list(self.engine.decode([tokens[number] for number in finished]))
        return [texts[number] for number in finished]


@pytest.fixture(scope="module")
def writers(request: pytest.FixtureRequest) -> Iterator[_Writers]:
    pytest.importorskip("xllamacpp" if request.param == "llama_cpp" else request.param, reason="needs test-all")
    found = _Writers(request.param)
    yield found
    found.engine.close()


def _problem(schema: Any, text: str) -> str:
    value = json.loads(text)
    problems = _JUDGE(schema, format_checker=_FORMATS).iter_errors(value)
    for problem in problems:
        return str(problem.message)
    if isinstance(schema, dict) and schema.get("format") in ("time", "date-time") and not _TIME.fullmatch(value):
        return f"no {schema['format']}"
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    outside = re.sub(r'"([^"\\]|\\.)*"', "", text)
    return "" if not re.search(r"\s", outside) else f"white space, not as {compact}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("writers", "name", "schemas", "most_refused"),
    [
        ("llama_cpp", "everyday", EVERYDAY, 0),
        ("llama_cpp", "keywords", KEYWORDS, 50),
        ("llama_cpp", "random", RANDOM, 50),
        ("openvino_genai", "everyday", EVERYDAY, 0),
        ("openvino_genai", "keywords", KEYWORDS, 90),
        ("openvino_genai", "random", RANDOM, 80),
    ],
    indirect=["writers"],
)
def test_every_finished_answer_to_a_schema_that_is_not_refused_fits_it(
    writers: _Writers, name: str, schemas: list[Any], most_refused: int
) -> None:
    """And the check of the server takes it: none is a false alarm."""
    wrong: list[Any] = []
    alarms: list[Any] = []
    refused: Counter[str] = Counter()
    unfinished = []
    finished = 0
    for schema in schemas:
        if not isinstance(schema, dict):
            continue  # no request has one
        try:
            check = writers.check(schema)
        except BadSchema as error:
            refused[error.problem.split(":")[0][:60]] += 1
            continue
        texts = writers.write(4, json_schema=json.dumps(schema))
        finished += len(texts)
        if not texts:
            unfinished.append(schema)
        for text in texts:
            check = writers.check(schema)
            if problem := _problem(schema, text):
                wrong.append((schema, text, problem))
            try:
                check.add(text)
                check.finish()
            except ConstraintFailure as failure:
                # The libraries do not remember names that were free.
                if "occurs twice" not in str(failure):
                    alarms.append((schema, text, str(failure)))
    print(
        f"{name}: {len(schemas)} schemas, {finished} finished, {len(unfinished)} without, refused {refused}, {alarms}"
    )
    assert wrong == []
    assert alarms == []
    assert len(unfinished) <= len(schemas) // 10, unfinished
    assert refused.total() <= most_refused, refused


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"not": {}}}}, "json_schema.properties.a.not"),
        ({"type": "array", "contains": {}}, "json_schema.contains"),
        ({"anyOf": [{}, {"type": "string", "maxLength": 500}]}, "json_schema.anyOf[1].maxLength"),
        ({"type": "string", "pattern": "(?=a)"}, "json_schema.pattern"),
    ],
)
def test_a_keyword_that_the_engine_cannot_hold_is_named_with_the_other_engine(schema: Any, place: str) -> None:
    with pytest.raises(BadSchema, match="llama_cpp") as caught:
        _grammar(schema)
    assert caught.value.place == place


@pytest.mark.full
@pytest.mark.parametrize("writers", ["openvino_genai"], indirect=True)
def test_texts_fit_their_choice_and_their_pattern(writers: _Writers) -> None:
    choice = ["ä", "日本", "👩‍🚀", "room_1_on", "room_10_on", "room_100_on"]
    assert set(writers.write(12, choice=choice)) <= set(choice)
    for pattern in ("(日本|ä|👩)", "[^a-zß]{1,5}", "[A-Z]{2}-\\d+", ".\\s\\S"):
        assert all(re.fullmatch(pattern, text) for text in writers.write(9, regex=pattern))
