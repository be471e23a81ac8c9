"""Compact JSON under a schema: the grammar, and the output of each library with it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.language.engines.compact_grammar import compact_grammar
from edge_server.plugins.language.engines.model_size import read_gguf
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.text.grammar_check import GrammarCheck
from edge_server.plugins.language.text.text_grammar import read_grammar

TINY = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
QUESTION = "Describe Anna, 31, who lives in Rome, as JSON."
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 8},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
KNOWN: dict[str, dict[str, Any]] = {
    "an object": PERSON,
    "optional properties": {**PERSON, "required": ["city"]},
    "no required property": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}},
    "further properties": {**PERSON, "additionalProperties": {"type": ["number", "null"]}},
    "any object": {"type": "object"},
    "arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"enum": ['a"\\\n', 2, None, {"x": [1]}]}, "maxItems": 1},
        "minItems": 2,
        "maxItems": 3,
    },
    "an empty array": {"type": "array", "maxItems": 0},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 3, "maxItems": 3},
    "names that begin alike": {
        "type": "object",
        "properties": {f"p{index}": {"type": "boolean"} for index in (1, 10, 100, 11)},
        "required": ["p100"],
    },
    "texts that begin alike": {"enum": [f"sensor.room_{index}_temperature" for index in range(120)]},
    "a reference to itself": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "a tool that must be called": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": PERSON},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name in ("find", "forget")
        ]
    },
}
UNKNOWN: dict[str, Any] = {
    "a pattern for names": {"type": "object", "patternProperties": {"^a$": {"type": "string"}}},
    "an unknown format": {"type": "string", "format": "regex"},
    "an unknown type": {"type": "nosuch"},
    "a list of items": {"type": "array", "prefixItems": [{"type": "integer"}]},
    "allOf": {"allOf": [{"type": "integer"}]},
    "a reference without an end": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    "a required property that is not described": {"type": "object", "properties": {}, "required": ["x"]},
    "a limit of an integer that is far from the other": {"type": "integer", "minimum": 0, "maximum": 10**9},
    "a fraction as the limit of an integer": {"type": "integer", "minimum": 0.5, "maximum": 2},
    "limits that exclude each other": {"type": "string", "minLength": 3, "maxLength": 2},
    "a keyword of another type": {"type": "integer", "maxLength": 3},
    "texts that begin alike fifty times": {"enum": ["a" * count for count in range(60)]},
    "no schema": {"type": "array", "items": [{"type": "integer"}]},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_schema_with_an_unknown_keyword_is_left_to_the_library(name: str) -> None:
    assert compact_grammar(json.dumps(UNKNOWN[name])) == ""


@pytest.mark.parametrize("name", KNOWN)
def test_the_grammar_defines_each_rule_that_it_uses_once(name: str) -> None:
    grammar = compact_grammar(json.dumps(KNOWN[name]))
    rules = [line.partition(" ::= ") for line in grammar.splitlines() if line]
    defined = [rule[0] for rule in rules]
    assert len(defined) == len(set(defined))
    for _, _, text in rules:
        bare = re.sub(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', " ", text)
        assert set(re.findall(r"[a-z]\w*", bare)) <= set(defined)


def test_many_optional_properties_take_a_few_rules_each() -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(400)}}
    assert len(compact_grammar(json.dumps(schema))) < 400 * 120


def ask_openvino(path: Path, schema: dict[str, Any], seeds: range) -> list[tuple[str, int, str | None]]:
    """Return the text, the number of tokens and the reason of the end of each answer."""
    from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine

    engine = ENGINES.get(path)
    if engine is None:
        settings = read_settings("tiny", {"num_kv_blocks": "256", "threads": "1"}, read_gguf(path), 32)
        engine = ENGINES[path] = OpenVinoEngine(path, settings)
    prompt = engine.encode(engine.chat_prompt([{"role": "user", "content": QUESTION}], ()))
    found = []
    for seed in seeds:
        temperature = 0.8 if seed else 0.0
        number = NUMBERS.pop()
        engine.add(number, prompt, Sampling(100, seed=seed, temperature=temperature, json_schema=json.dumps(schema)))
        tokens: list[int] = []
        finish = None
        while not engine.is_idle():
            for event in engine.step():
                assert not event.error
                tokens += event.tokens
                finish = event.finish or finish
        found.append((engine.decode([tokens])[0], len(tokens), finish))
    return found


ENGINES: dict[Path, Any] = {}
NUMBERS = list(range(1000, 0, -1))


def space_outside_texts(text: str) -> str:
    return "".join(re.findall(r"\s", re.sub(r'"(?:[^"\\]|\\.)*("|$)', "", text)))


@pytest.mark.full
@pytest.mark.parametrize("name", KNOWN)
def test_openvino_writes_json_of_the_schema_without_white_space(name: str) -> None:
    pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra test-all")
    answers = ask_openvino(TINY, KNOWN[name], range(4))
    for text, _, finish in answers:
        assert space_outside_texts(text) == ""
        if finish == "stop":
            jsonschema.validate(json.loads(text), KNOWN[name])
    assert "stop" in [finish for _, _, finish in answers] or name == "any object"


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.skipif("EDGE_TEST_LANGUAGE_MODEL" not in os.environ, reason="needs EDGE_TEST_LANGUAGE_MODEL of "
                    "tests/e2e/fetch_pipeline_models.sh")  # fmt: skip
def test_a_real_model_writes_no_white_space_and_needs_fewer_tokens() -> None:
    pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
    schema = json.loads(json.dumps(PERSON).replace("city", "tags"))
    schema["properties"]["tags"] = {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3}
    ((text, count, finish),) = ask_openvino(Path(os.environ["EDGE_TEST_LANGUAGE_MODEL"]), schema, range(1))
    assert finish == "stop"
    assert set(json.loads(text)) == {"name", "age", "tags"}
    assert space_outside_texts(text) == ""
    # The library's own grammar takes 43.
    assert count <= 35


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        ((0.0, 100.0), ["0", "0.5", "99.999", "100"], ["100.1", "-0.1", "101", "1e1", "00"]),
        ((-1, 1), ["-1", "-0.25", "0", "0.75", "1"], ["-1.5", "1.5", "2", "-2"]),
        ((-5, -2), ["-5", "-4.5", "-2", "-2.5"], ["-5.5", "-1", "0", "2", "-1.9"]),
        ((3, 3), ["3"], ["3.1", "2"]),
    ],
)
def test_numbers_between_two_limits_have_decimals(
    limits: tuple[float, float], inside: list[str], outside: list[str]
) -> None:
    grammar = compact_grammar(json.dumps({"type": "number", "minimum": limits[0], "maximum": limits[1]}))
    for text in (*inside, *outside):
        check = GrammarCheck(read_grammar(grammar))
        assert (check.add(text) and check.is_complete) == (text in inside), text


PAIR = [{"type": "integer"}, {"type": "boolean"}]


def test_a_tuple_has_its_items_in_order() -> None:
    schema = {"type": "array", "prefixItems": PAIR, "minItems": 2}
    for more in ({"maxItems": 2}, {"items": False}):
        for text, fits in (("[1,true]", True), ("[1]", False), ("[true,1]", False), ("[1,true,2]", False)):
            check = GrammarCheck(read_grammar(compact_grammar(json.dumps({**schema, **more}))))
            assert (check.add(text) and check.is_complete) == fits, text
    for open_ended in (schema, {**schema, "maxItems": 3}, {"type": "array", "prefixItems": PAIR, "maxItems": 2}):
        assert compact_grammar(json.dumps(open_ended)) == ""
