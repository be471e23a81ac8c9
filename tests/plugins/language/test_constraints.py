"""What the tiny model writes to some 390 schemas, judged by the package jsonschema, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import BadSchema
from edge_server.plugins.language.engines.model_size import read_gguf
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import Sampling, schema_place
from edge_server.plugins.language.grammar.constraint import ConstraintCheck, ConstraintFailure, llama_cpp_grammar
from edge_server.plugins.language.grammar.openvino_constraint import openvino_grammar
from tests.kit.json_schemas import EVERYDAY, KEYWORDS, RANDOM, find_problem

_TINY = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"


def _grammar(schema: Any) -> str:
    place = partial(schema_place, "json_schema")
    return openvino_grammar(Sampling(max_tokens=1, json_schema=json.dumps(schema)), place)


class _Writers:
    """The tiny model on an engine, which writes texts by a grammar at random."""

    def __init__(self, name: str) -> None:
        self.name = name
        about = read_gguf(_TINY)
        settings = read_settings("tiny", {"max_num_seqs": "8", "num_kv_blocks": "256", "threads": "1"}, about, 32)
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
            sampling = Sampling(max_tokens=240, temperature=temperature, seed=self._number, **constraint)
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
            # The library takes a special token for the letters of its name, which no text shows. This model writes one
            # now and then; the check of the answer finds it.
            plain = [
                tokens[number] for number in finished if self.engine._special_tokens.keys().isdisjoint(tokens[number])
            ]
            return list(self.engine.decode(plain))
        return [texts[number] for number in finished]


@pytest.fixture(scope="module")
def writers(request: pytest.FixtureRequest) -> Iterator[_Writers]:
    pytest.importorskip("xllamacpp" if request.param == "llama_cpp" else request.param, reason="needs test-all")
    found = _Writers(request.param)
    yield found
    found.engine.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("writers", "name", "schemas", "most_refused"),
    [
        ("llama_cpp", "everyday", EVERYDAY, 0),
        ("llama_cpp", "keywords", KEYWORDS, 50),
        ("llama_cpp", "random", RANDOM, 50),
        ("openvino_genai", "everyday", EVERYDAY, 0),
        ("openvino_genai", "keywords", KEYWORDS, 90),
        ("openvino_genai", "random", RANDOM, 100),
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
        texts = writers.write(6, json_schema=json.dumps(schema))
        finished += len(texts)
        if not texts:
            unfinished.append(schema)
        for text in texts:
            check = writers.check(schema)
            if problem := find_problem(schema, text):
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
        ({"anyOf": [{}, {"type": "string", "minLength": 500}]}, "json_schema.anyOf[1].minLength"),
        ({"type": "string", "pattern": "(?=a)"}, "json_schema.pattern"),
        ({"items": {"allOf": [{"type": "integer"}, {"minimum": 1}]}}, "json_schema.items.allOf"),
        ({"$defs": {"I": {"type": "integer"}}, "$ref": "#/$defs/I", "minimum": 1}, "json_schema.$ref"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "json_schema.anyOf"),
        ({"oneOf": [{"type": "object"}, {"type": ["object", "null"]}]}, "json_schema.oneOf"),
        ({"properties": {"a": {}}, "minProperties": 1}, "json_schema.minProperties"),
    ],
)
def test_a_keyword_that_the_engine_cannot_hold_is_named_with_the_other_engine(schema: Any, place: str) -> None:
    with pytest.raises(BadSchema, match="llama_cpp") as caught:
        _grammar(schema)
    assert caught.value.place == place


@pytest.mark.parametrize(
    ("schema", "keyword", "place"),
    [
        ({"allOf": [{"type": "integer"}, {"enum": [1, 2.5]}]}, "type", "s"),
        ({"type": "integer", "anyOf": [{"const": 2.5}, {"const": 7}]}, "type", "s"),
        (
            {"$defs": {"E": {"enum": [2.5]}}, "properties": {"a": {"type": "integer", "$ref": "#/$defs/E"}}},
            "type",
            "s.properties.a",
        ),
        ({"enum": [{"a": 1}], "patternProperties": {"^a": {}}}, "patternProperties", "s"),
        (
            {"$defs": {"O": {"const": {"a": 1}}}, "$ref": "#/$defs/O", "patternProperties": {"^b": {}}},
            "patternProperties",
            "s",
        ),
        (
            {"items": {"allOf": [{"additionalProperties": False}, {"patternProperties": {"^b": {}}}]}},
            "patternProperties",
            "s.items",
        ),
    ],
)
def test_what_llama_cpp_cannot_hold_together_is_refused_with_its_keyword(schema: Any, keyword: str, place: str) -> None:
    """llama.cpp writes free text from there on, and the request would end with constraint_failed."""
    with pytest.raises(BadSchema, match=keyword) as caught:
        llama_cpp_grammar(Sampling(max_tokens=1, json_schema=json.dumps(schema)), partial(schema_place, "s"))
    assert caught.value.place == place


def test_alternatives_do_not_meet_in_one_value() -> None:
    schema = {
        "$defs": {"E": {"enum": [0.5, 2.5], "type": "number"}, "O": {"const": {"a": 1}}},
        "properties": {
            "a": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/E"}, {"$ref": "#/$defs/O"}], "default": 1},
            "b": {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        },
    }
    assert llama_cpp_grammar(Sampling(max_tokens=1, json_schema=json.dumps(schema)), partial(schema_place, "s"))


@pytest.mark.full
@pytest.mark.parametrize("writers", ["openvino_genai"], indirect=True)
def test_texts_fit_their_choice_and_their_pattern(writers: _Writers) -> None:
    choice = ["ä", "日本", "👩‍🚀", "room_1_on", "room_10_on", "room_100_on"]
    assert set(writers.write(12, choice=choice)) <= set(choice)
    for pattern in ("(日本|ä|👩)", "[^a-zß]{1,5}", "[A-Z]{2}-\\d+", ".\\s\\S"):
        assert all(re.fullmatch(pattern, text) for text in writers.write(9, regex=pattern))


@pytest.mark.full
@pytest.mark.parametrize("writers", ["openvino_genai"], indirect=True)
@pytest.mark.parametrize(("least", "most"), [(0, 15), (0, 16), (2, 20), (5, 40)])
def test_strings_have_their_lengths(writers: _Writers, least: int, most: int) -> None:
    """They are counted in blocks of 16 characters."""
    text = {"type": "string", "minLength": least, "maxLength": most}
    schema = {"type": "object", "properties": {"a": text, "b": text}, "required": ["a", "b"]}
    texts = writers.write(15, json_schema=json.dumps(schema))
    assert [find_problem(schema, text) for text in texts] == [""] * len(texts)
    assert max(len(json.loads(text)["a"]) for text in texts) == most
