"""What constraints that are made to be costly cost: little, whether they are refused or taken."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import BadSchema
from edge_server.plugins.language.engines.token_engine import Place, Sampling
from edge_server.plugins.language.grammar.constraint import ConstraintCheck, llama_cpp_grammar
from edge_server.plugins.language.grammar.openvino_constraint import openvino_grammar

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_CPU_S = 0.5
"""Of one request, ten times what is meant: for slow machines."""
_MAX_GROWTH_BYTES = 64 << 20


def _characters(count: int, first: int = 0x4E00) -> str:
    return "".join(chr(first + 2 * index) for index in range(count))


def _chain(count: int, rule: str) -> str:
    rules = (f"a{index} ::= {rule.format(f'a{index - 1}')}" for index in range(count, 0, -1))
    return "\n".join([f"root ::= a{count}", *rules, 'a0 ::= "x"?'])


def _references(count: int, key: str) -> dict[str, Any]:
    defined: dict[str, Any] = {f"d{index}": {key: [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(count)}
    return {"$defs": {**defined, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _wide(number: int) -> dict[str, Any]:
    pattern = f"^[{_characters(900, 0x4E00 + 2 * number)}]{{1900}}$"
    names = [f"p{index}" for index in range(12)]
    return {"type": "object", "properties": {name: {"type": "string", "pattern": pattern} for name in names}}


_SCHEMAS: dict[str, Any] = {
    "patterns": _wide(0),
    "allOf of references": _references(30, "allOf"),
    "anyOf of references": _references(30, "anyOf"),
    "bounded strings": {"properties": {f"p{index}": {"type": "string", "maxLength": 900} for index in range(400)}},
    "strings of other lengths": {
        "properties": {f"p{index}": {"type": "string", "maxLength": 9_000 + index} for index in range(300)}
    },
    "arrays of other lengths": {
        "properties": {
            f"p{index}": {"type": "array", "items": {"type": "null"}, "maxItems": 600 + index} for index in range(400)
        }
    },
    "product": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": k}}} for k in range(4)]} for i in range(30)]},
    "pattern of an exponential automaton": {"type": "string", "pattern": "(a|b)*a(a|b){200}", "minLength": 100},
    "items": {"type": "array", "prefixItems": [{"type": "string", "minLength": 500}] * 700},
    "multiple": {"type": "integer", "multipleOf": 999_983},
    "properties": {"properties": {f"p{index}": {"type": "null"} for index in range(1_400)}},
}
ATTACKS: dict[str, dict[str, Any]] = {
    **{name: {"json_schema": json.dumps(schema)} for name, schema in _SCHEMAS.items()},
    "depth": {"json_schema": '{"items":' * 400 + "{}" + "}" * 400},
    "class": {"regex": f"[{_characters(1000)}]{{1900}}"},
    "optional characters": {"regex": "".join(f"{letter}?" for letter in _LETTERS * 19)},
    "repeated optional characters": {"regex": "(" + "".join(f"{letter}?" for letter in _LETTERS[:20]) + "){99}"},
    "empty alternatives": {"regex": "(a|)" * 400},
    "braces": {"regex": "a" + "{" * 1000},
    "exponential automaton": {"regex": "(a|b)*a(a|b){11}"},
    "long automaton": {"regex": "(a|b|c|d|e|f|g|h|i|j|k)*a.{900}"},
    "nested quantifiers": {"regex": "(((a{1,99}){1,99}){1,99}){1,99}"},
    "class of a grammar": {"grammar": f"root ::= [{_characters(2500)}]{{1900}}"},
    "optional texts": {"grammar": "root ::= " + " ".join(['"a"?'] * 1500)},
    "alternatives": {"grammar": "root ::= (" + " | ".join(f'"{letter}"' for letter in _LETTERS * 40) + ")*"},
    "doubling rules": {"grammar": _chain(98, "{0} {0}")},
    "doubling alternatives": {"grammar": _chain(90, "{0} ({0} | {0})")},
    "open text": {"grammar": 'root ::= "' + "\\a" * 4000},
    "comment": {"grammar": 'root ::= "a" ' + "#" * 8000},
    "white space": {"grammar": "root ::= x" + " " * 8000 + "!"},
}


def _take(sampling: Sampling, write_grammar: Callable[[Sampling, Place], str]) -> str:
    """Return the grammar; "" if the request is refused."""
    try:
        ConstraintCheck(sampling, str)
        return write_grammar(sampling, str)
    except BadSchema:
        return ""


@pytest.mark.parametrize("name", ATTACKS)
def test_a_constraint_is_taken_or_refused_for_little_processor_time(name: str) -> None:
    sampling = Sampling(1, **ATTACKS[name])
    for write_grammar in (llama_cpp_grammar, openvino_grammar):
        begin_s = time.process_time()
        _take(sampling, write_grammar)
        assert time.process_time() - begin_s < _MAX_CPU_S


def test_no_memory_is_kept_for_constraints() -> None:
    def resident_bytes() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) << 10

    def take(number: int) -> None:
        _take(Sampling(1, json_schema=json.dumps(_wide(number))), openvino_grammar)
        _take(Sampling(1, regex=f"[{_characters(1000, 0x4E00 + 2 * number)}]{{1900}}"), llama_cpp_grammar)

    for number in range(5):
        take(number)
    before = resident_bytes()
    for number in range(40):
        take(number)
    assert resident_bytes() - before < _MAX_GROWTH_BYTES


@pytest.mark.full
@pytest.mark.parametrize("engine", ["llama_cpp", "openvino_genai"])
def test_what_is_taken_costs_the_engine_little(open_engine: Callable[[str], Any], engine: str) -> None:
    opened = open_engine(engine)
    try:
        for number, (name, constraint) in enumerate(ATTACKS.items(), 1):
            sampling = Sampling(8, **constraint)
            grammar = _take(sampling, opened.write_grammar)
            if not grammar:
                continue
            begin_s = time.process_time()
            opened.add(number, opened.encode("count"), dataclasses.replace(sampling, engine_grammar=grammar))
            while not opened.is_idle():
                for event in opened.step() or ():
                    assert not event.error, (name, event.error)
            assert time.process_time() - begin_s < 10 * _MAX_CPU_S, name
    finally:
        opened.close()
