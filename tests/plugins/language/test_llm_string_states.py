"""Strings of JSON schemas with a pattern, a format and lengths: their states, and what each engine writes."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import BadSchema
from edge_server.plugins.language.engines.compact_grammar import compact_grammar
from edge_server.plugins.language.text.pattern_automaton import BadPattern
from edge_server.plugins.language.text.schema_check import check_schema
from edge_server.plugins.language.text.string_states import FORMATS, StringStates, string_states
from edge_server.plugins.language.text.tool_calls import schema_place

PATTERNS = [
    "^[a-c]{2,4}$", "a|b+", '^"\\\\n?[^x]*$', "^(ab|a)*c?$", "^[^a]{1,2}$", "^.{0,3}$", "\\d+[.]\\d",
    "^[\\n\\t\"\\\\]+$",
]  # fmt: skip
LENGTHS: list[dict[str, int]] = [{}, {"minLength": 2}, {"maxLength": 3}, {"minLength": 1, "maxLength": 3}]


def accepts(states: StringStates, text: str) -> bool:
    state = 0
    for character in text:
        found = [
            target
            for target, ranges in states.edges[state].items()
            if any(first <= ord(character) <= last for first, last in ranges)
        ]
        assert len(found) < 2
        if not found:
            return False
        state = found[0]
    return states.accepting[state]


@given(text=st.text(alphabet='abc1.x"\\\n\té', max_size=6), pattern=st.sampled_from(PATTERNS),
       lengths=st.sampled_from(LENGTHS))  # fmt: skip
def test_the_states_accept_what_matches_the_pattern_and_the_lengths(
    text: str, pattern: str, lengths: dict[str, int]
) -> None:
    states = string_states({"pattern": pattern, **lengths})
    fits = re.fullmatch(pattern, text) is not None
    fits = fits and lengths.get("minLength", 0) <= len(text) <= lengths.get("maxLength", 100)
    # The end of a pattern is not before a line break at the end.
    fits = fits and not (pattern.endswith("$") and re.fullmatch(pattern[:-1], text) is None)
    assert accepts(states, json.dumps(text, ensure_ascii=False)[1:-1]) == fits


def walk(states: StringStates, source: random.Random) -> str:
    """Return a text that the states accept."""
    text, state = "", 0
    while not states.accepting[state] or (states.edges[state] and source.random() < 0.7):
        target, ranges = source.choice(list(states.edges[state].items()))
        text += chr(source.randint(*source.choice(ranges)))
        state = target
    return text


CHECKS: Mapping[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(text.replace("Z", "+00:00")),
    "date-time": lambda text: datetime.datetime.fromisoformat(text.replace("Z", "+00:00")),
    "duration": lambda text: re.fullmatch(r"P(?:\d+W|\d+D|T\d+[HMS])", text).group(),  # type: ignore[union-attr]
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "hostname": lambda text: [bytes(part, "idna") for part in text.split(".")] if len(text) < 60 else None,
    "email": lambda text: text.index("@"),
    "uri": lambda text: urlsplit(text).port,
}


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_format_are_read_by_the_parsers_of_python(name: str) -> None:
    source, states = random.Random(3), string_states({"format": name})
    for _ in range(300):
        text = walk(states, source)
        if not text.startswith("0000"):  # a year that Python does not have
            CHECKS[name](json.loads(f'"{text}"'))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"pattern": "(?=a)"}, "only '(?:' and '(?P<name>' are supported"),
        ({"pattern": "^a$", "minLength": 2}, "no text fits it together with the length and the format"),
        ({"pattern": "^a+$", "maxLength": 1_000}, "from 0 to 256"),
        ({"pattern": "^a+$", "format": "date"}, "no text fits"),
        ({"pattern": "^[\x01]$"}, "no text fits"),
    ],
)
def test_a_pattern_that_cannot_be_held_is_refused_with_its_place(schema: dict[str, Any], message: str) -> None:
    whole = {"type": "object", "properties": {"x": {"type": "string", **schema}}}
    with pytest.raises(BadSchema) as caught:
        check_schema(json.dumps(whole), 49_152, lambda path: schema_place("json_schema", path))
    assert caught.value.place == "json_schema.properties.x.pattern"
    assert message in caught.value.problem
    with pytest.raises(BadPattern):
        string_states(schema)


def test_equal_strings_share_their_rules() -> None:
    part = {"type": "string", "pattern": "^[a-z]+$"}
    schema = {"type": "object", "properties": {"a": part, "b": part, "c": {"type": "string", "format": "date"}}}
    grammar = compact_grammar(json.dumps(schema))
    assert grammar.count("\np0 ::=") == grammar.count("\np1 ::=") == 1
    assert "\np2 ::=" not in grammar


STRINGS: list[dict[str, Any]] = [
    *({"pattern": pattern} for pattern in ("^[A-Z]{3}-[0-9]{4}$", "room_(1|10|2)_on", "^(\\+49|0)[1-9]\\d{2,5}$")),
    *({"pattern": pattern} for pattern in ('^"[^"]{1,3}"$', "^[^\\s]{2}\\s?x$", "^(a|ab)(c|bcd)$", "^[ä-ü]{2}$")),
    {"pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    {"pattern": "^20", "maxLength": 10},
    {"pattern": "^2.*$", "format": "date"},
    *({"format": name} for name in FORMATS),
]


@pytest.mark.full
@pytest.mark.parametrize("name", ["openvino_genai", "llama_cpp"])
def test_each_engine_writes_only_strings_that_fit(open_engine: Callable[[str], Any], name: str) -> None:
    engine = open_engine(name)
    prompt = engine.encode(engine.chat_prompt([{"role": "user", "content": "say hello"}], ()))
    complete = 0
    for number, (schema, _) in enumerate([(schema, turn) for schema in STRINGS for turn in range(4)], 1):
        written = write(engine, prompt, number, schema)
        if written is None:
            continue
        complete += 1
        value = json.loads(written)["x"]
        if "pattern" in schema:
            assert re.search(schema["pattern"], value), (schema, value)
        assert schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1_000), (schema, value)
        if "format" in schema and not value.startswith("0000"):
            CHECKS[schema["format"]](value)
    print(f"{name}: {complete} complete of {4 * len(STRINGS)}")
    assert complete > 2 * len(STRINGS)
    engine.close()


def write(engine: Any, prompt: Any, number: int, schema: dict[str, Any]) -> str | None:
    """Return the text that an engine writes, None if it is not complete."""
    from edge_server.plugins.language.engines.token_engine import Sampling

    whole = {"type": "object", "properties": {"x": {"type": "string", **schema}}, "required": ["x"],
             "additionalProperties": False}  # fmt: skip
    engine.add(number, prompt, Sampling(90, temperature=3.0, seed=number, json_schema=json.dumps(whole)))
    tokens: list[int] = []
    text, error, finish = "", "", None
    while not engine.is_idle():
        for event in engine.step() or ():
            tokens += event.tokens
            text += event.text or ""
            error, finish = event.error or error, event.finish or finish
    text = text or engine.decode([tokens])[0]
    return text if finish == "stop" and not error and "\ufffd" not in text else None
