"""Check of JSON schemas before they reach an engine: refused schemas, their messages, and accepted schemas."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import BadSchema
from edge_server.plugins.language.text import schema_check
from edge_server.plugins.language.text.pattern_cost import estimate_pattern
from edge_server.plugins.language.text.schema_check import check_schema
from edge_server.plugins.language.text.tool_calls import Tools, schema_place

USUAL: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data/json_schemas.json").read_bytes())
USUAL |= {
    "a choice among 300 entities": {
        "type": "string",
        "enum": [f"sensor.room_{index}_temperature" for index in range(300)],
    },
    "a form of 40 optional fields": {
        "type": "object",
        "properties": {f"field_{index}": {"type": ["string", "number", "object"][index % 3]} for index in range(40)},
    },
    "a record of 150 required fields": {
        "type": "object",
        "properties": {f"field_{index}": {"type": "string", "description": "x" * 100} for index in range(150)},
        "required": [f"field_{index}" for index in range(150)],
        "additionalProperties": False,
    },
}
FOR_SMALL_VOCABULARIES = {"a function that takes a name, a colour, an address and a version"}
VOCABULARY = 49_152
place = partial(schema_place, "json_schema")
BENCH = Path(__file__).parents[2] / "bench"


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"needs {package.replace('_', '-')}, of the extra test-all"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def nested(depth: int, leaf: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        leaf = {"type": "array", "items": leaf}
    return leaf


def doubled(depth: int) -> dict[str, Any]:
    schema = text()
    for _ in range(depth):
        schema = {"anyOf": [schema, schema]}
    return schema


def check(schema: Any, vocabulary: int = VOCABULARY) -> Any:
    return json.loads(check_schema(json.dumps(schema), vocabulary, place)[0])


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("vocabulary", [384, VOCABULARY, 151_936])
def test_schemas_of_common_clients_are_accepted(name: str, vocabulary: int) -> None:
    if vocabulary > VOCABULARY and name in FOR_SMALL_VOCABULARIES:
        with pytest.raises(BadSchema, match="too expensive"):
            check(USUAL[name], vocabulary)
        return
    found = check(USUAL[name], vocabulary)
    loosened = json.loads(json.dumps(USUAL[name]))
    for key in ("minLength", "maxLength", "format"):
        remove(loosened, key)
        remove(found, key)
    assert found == loosened


def remove(value: Any, key: str) -> None:
    if isinstance(value, dict):
        value.pop(key, None)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        remove(item, key)


REFUSED = {
    "nested quantifiers": (
        {"type": "object", "properties": {"x": text(pattern="^((a{1,1000}){1,1000}){1,1000}$")}},
        "json_schema.properties.x.pattern: repetitions multiply to 1,000,000,000; at most 1,000",
    ),
    "ambiguous quantifiers": (text(pattern="^(.{1,8}){1,8}$"), "json_schema.pattern: too expensive"),
    "a chain of what may be left out": (text(pattern="^[a-z]?" + "[a-z]?" * 15 + "$"), "json_schema.pattern: too exp"),
    "a pattern in the keys": (
        {"type": "object", "patternProperties": {"^.{1,200}$": text()}},
        "json_schema.patternProperties.^.{1,200}$: too expensive",
    ),
    "a long pattern": (text(pattern="a" * 2000), "json_schema.pattern: expected a pattern of at most 1,024 characters"),
    "groups inside each other": (
        text(pattern="(" * 50 + "a" + ")" * 50),
        "json_schema.pattern: groups are nested more",
    ),
    "doubled alternatives": (doubled(10), "at most 400 subschemas"),
    "too many alternatives": (
        {"anyOf": [text(), text(enum=list(range(1000)))]},
        "json_schema.anyOf[1].enum: alternatives add up to 1,002 in this schema; at most 1,000",
    ),
    "many literals": (text(enum=["x" * 100 + str(index) for index in range(600)]), "json_schema.enum: too expensive"),
    "too many bytes": (text(description="é" * 40_000), "json_schema: expected a schema of at most 65,536 bytes, got"),
    "too deep": (nested(40, text()), "items: subschemas are nested more than 32 deep"),
    "too many subschemas": ({"prefixItems": [{"title": str(index)} for index in range(500)]}, "at most 400 subschemas"),
    "arrays inside each other": (
        {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1001, "items": text()}},
        "json_schema.items.maxItems: repetitions multiply to 1,001,000; at most 1,000,000",
    ),
    "optional properties": (
        {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(200)}},
        "json_schema.properties: too expensive",
    ),
    "a reference to itself": ({"$ref": "#"}, "json_schema.$ref: the reference leads only to other references"),
    "references in a circle": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "the reference leads only to other references",
    ),
    "a reference elsewhere": (
        {"$ref": "https://example.org/x"},
        "json_schema.$ref: expected a reference into this schema",
    ),
    "a reference to nothing": ({"$ref": "#/$defs/x"}, "json_schema.$ref: this schema has nothing at '#/$defs/x'"),
    "what hides behind a reference": (
        {"$ref": "#/x-hidden/0", "x-hidden": [text(pattern="^.{1,999}$")]},
        "json_schema.x-hidden.0.pattern: too expensive",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_above_a_limit_is_refused_with_the_location(name: str) -> None:
    schema, said = REFUSED[name]
    with pytest.raises(BadSchema) as caught:
        check(schema)
    assert said in caught.value.message
    # It crosses the process boundary of the model.
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.message, copy.place, copy.problem) == (
        caught.value.message,
        caught.value.place,
        caught.value.problem,
    )


@pytest.mark.parametrize("number", [-5, 1e400, 10**400, "x", True, None, [], {}])
@pytest.mark.parametrize(
    "key", ["minItems", "maxLength", "minProperties", "pattern", "enum", "properties", "items", "$ref"]
)
def test_members_of_other_types_are_left_to_the_engine_or_named(key: str, number: Any) -> None:
    if key == "$ref":
        with pytest.raises(BadSchema, match=r"json_schema\.\$ref: expected a reference into this schema"):
            check({"type": "object", key: number})
    else:
        check({"type": "object", key: number})


def test_expensive_length_limits_are_dropped_longest_first() -> None:
    schema = {
        "type": "object",
        "properties": {
            "code": text(minLength=2, maxLength=4),
            "city": text(maxLength=5),
            "essay": text(maxLength=5000),
        },
    }
    found = check(schema)
    assert found["properties"] == {"code": text(minLength=2, maxLength=4), "city": text(maxLength=5), "essay": text()}
    # With three times as many tokens, a state costs three times as much.
    assert check(schema, 3 * VOCABULARY)["properties"]["city"] == text()


def test_only_dropped_limits_are_named() -> None:
    schema = {
        "type": "object",
        "properties": {
            "code": text(maxLength=4),
            "essay": text(minLength=1, maxLength=5000),
            "links": {"type": "array", "items": text(format="uri")},
            "numbers": text(pattern="^[a-z]{1,50}$"),
        },
    }
    found, left_out = check_schema(json.dumps(schema), VOCABULARY, place)
    assert sorted(left_out) == [
        "json_schema.properties.code.maxLength",
        "json_schema.properties.essay.maxLength",
        "json_schema.properties.essay.minLength",
        "json_schema.properties.links.items.format",
    ]
    assert json.loads(found)["properties"]["essay"] == text()
    del schema["properties"]["essay"], schema["properties"]["numbers"]  # type: ignore[attr-defined]
    assert check_schema(json.dumps(schema), VOCABULARY, place) == (json.dumps(schema), [])


def test_parts_that_are_equal_count_once() -> None:
    pattern = "^[a-z]{1,30}$"
    assert check({"type": "object", "properties": {f"p{index}": text(pattern=pattern) for index in range(20)}})
    with pytest.raises(BadSchema, match="too expensive"):
        check(
            {
                "type": "object",
                "properties": {f"p{index}": text(pattern=f"{pattern[:-1]}{index}$") for index in range(20)},
            }
        )


@pytest.mark.parametrize(
    ("choice", "place"),
    [
        ("second", "tools[1].function.parameters.properties.x.pattern"),
        ("required", "tools[1].function.parameters.properties.x.pattern"),
    ],
)
def test_the_location_in_a_tool_is_named_as_the_client_sent_it(choice: str, place: str) -> None:
    bad = {"type": "object", "properties": {"x": text(pattern="^(a{1,100}){1,100}$")}}
    items = [{"function": {"name": "first"}}, {"function": {"name": "second", "parameters": bad}}]
    tools = Tools(items, choice)
    with pytest.raises(BadSchema) as caught:
        check_schema(tools.json_schema(), VOCABULARY, tools.place)
    assert caught.value.place == place


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        ("[0-9]{9}", "[a-z]{9}"),
        ("[a-z]{9}", ".{9}"),
        ("[a-z]{9}", "[a-z ]{9}"),
        ("[a-z]{9}", "[^a-z]{9}"),
        (".{2}", ".{1,9}"),
        ("(a{2}){4}", "(.{1,2}){4}"),
        ("(?:[a-z]+-)*", "(?:.+)*"),
        ("[a-z]*x{9}", ".*x{9}"),
        (".+x{9}", ".*x{9}"),
        ("(?:.*)?x{9}", "(?:.*){2}x{9}"),
        ("([a-z]a*){9}", "([a-z]?a*){9}"),
        ("(a|[a-z]*)x{9}", "(a|b?|.*[a-z]{3,})x{9}"),
        ("[^x]*x{9}", "[^y]*x{9}"),
        ("a|b", "a|.{4}"),
        ("\\d{4}", "\\S{4}"),
        ("[\\d]{4}", "[\\s\\S]{4}"),
        ("a.?", ".?.?.?"),
        ("a{1,2}?", "(a{1,2}?){8}"),
    ],
)
def test_a_more_expensive_pattern_costs_more(cheap: str, dear: str) -> None:
    assert estimate_pattern(cheap).cost < estimate_pattern(dear).cost


@pytest.mark.parametrize("pattern", ["^a(.?)+([0-9]{3}){7}$", "(\\S?)*", "([a-z]?|b){2,}", "(?:x*)+"])
def test_patterns_that_match_empty_text_are_not_repeated_without_a_limit(pattern: str) -> None:
    with pytest.raises(BadSchema, match="repeats without a limit what may be empty") as caught:
        check_schema(json.dumps({"type": "string", "pattern": pattern}), VOCABULARY, place)
    assert caught.value.place == "json_schema.pattern"


@pytest.mark.parametrize(
    "pattern", ["", ")", "(", "[", "[]", "[^", "a{", "a{1", "a{,}", "\\", "[\\", "*", "a**", "(?", "{9}", "a{x}"]
)
def test_invalid_syntax_is_left_to_the_engine(pattern: str) -> None:
    assert estimate_pattern(pattern).cost < schema_check.MAX_COST


def load_search() -> Any:
    spec = importlib.util.spec_from_file_location("schema_compile", BENCH / "schema_compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MAX_COMPILE_MS = 200.0


@pytest.mark.full
@needs("openvino_genai")
def test_accepted_schemas_compile_within_the_limits_of_the_engine() -> None:
    """The schemas of usual clients, and a few seconds of the search: none is refused by the engine or takes seconds."""
    bench = load_search()
    engine = bench.Engine(bench.TINY)
    try:
        for name, schema in USUAL.items():
            first_ms, later_ms, error = engine.compile(check_schema(json.dumps(schema), VOCABULARY, place)[0])
            assert not error, name
            assert max(first_ms, later_ms) < bench.HANG_S * 1e3, name
    finally:
        engine.close()
    for first_ms, later_ms, schema in bench.search(bench.TINY, 4.0, seed=7):
        assert max(first_ms, later_ms) < bench.HANG_S * 1e3, schema


def check_slowest(bench: Any, path: Path, seconds: float) -> None:
    """Search for slow schemas, print them, and check the time that the limits promise."""
    found = bench.search(path, seconds, seed=11)
    for first_ms, later_ms, schema in found:
        print(f"first step {first_ms:.0f} ms, slowest later step {later_ms:.0f} ms: {schema[:400]}")
    assert max(max(first_ms, later_ms) for first_ms, later_ms, _ in found) < MAX_COMPILE_MS


@pytest.mark.long
@pytest.mark.full
@needs("openvino_genai")
@pytest.mark.skipif(
    "EDGE_TEST_LANGUAGE_MODEL" not in os.environ,
    reason="SmolLM2 is not here: tests/e2e/fetch_pipeline_models.sh fetches it",
)
@pytest.mark.timeout(1200)
def test_the_slowest_known_schema_compiles_within_the_time_limit() -> None:
    check_slowest(load_search(), Path(os.environ["EDGE_TEST_LANGUAGE_MODEL"]), 600.0)
