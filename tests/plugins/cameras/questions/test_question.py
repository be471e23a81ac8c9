"""Tables of questions in the sources file: what they mean, and what is refused with its reason."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from edge_server.config import ConfigError
from edge_server.plugins.cameras.questions.question import MAX_QUESTIONS, QuestionEntry, parse_questions
from edge_server.plugins.cameras.source_and_sink_settings import check_required_zones, read_entries
from edge_server.plugins.cameras.zones.sources_file_edit import edit_zones
from edge_server.plugins.cameras.zones.zone_settings import ZoneEntry

SOURCE = """
[[sources]]
name = "door"
url = "demo"
model = "faces"
"""
ZONE = """
[[sources.zones]]
name = "yard"
"""
QUESTION = """
[[sources.questions]]
name = "visitor"
model = "vlm"
prompt = "Who is this {label}?"
"""


def read(tmp_path: Path, text: str):
    path = tmp_path / "cameras.toml"
    path.write_text(text)
    return read_entries(str(path))


def test_the_file_gives_a_source_questions(tmp_path: Path) -> None:
    more = 'classes = ["person"]\nrequired_zones = ["yard"]\ninterval_s = 60\ncrop = true\nmax_tokens = 40\n'
    short = QUESTION.replace("visitor", "short")
    sources, sinks = read(tmp_path, SOURCE + ZONE + QUESTION + more + short)
    long = QuestionEntry("visitor", "vlm", "Who is this {label}?", ("person",), ("yard",), 60.0, True, 40)
    assert sources["door"].questions == (long, QuestionEntry("short", "vlm", "Who is this {label}?"))
    check_required_zones(sources, sinks)


def test_a_prompt_names_camera_label_and_zone_and_may_hold_json() -> None:
    prompt = 'A {label} at {zone}, {camera}: answer with {"people": 1, "why": {}} {}'
    (question,) = parse_questions([{"name": "q", "model": "vlm", "prompt": prompt}])
    filled = question.filled_prompt("door", "{zone}", "yard")
    assert filled == 'A {zone} at yard, door: answer with {"people": 1, "why": {}} {}'


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("prompt = 1", "prompt: expected a text of 1 to 8000 characters"),
        ("prompt = ' '", "prompt: expected a text of 1 to 8000 characters"),
        (f"prompt = '{'x' * 8001}'", "prompt: expected a text of 1 to 8000 characters"),
        (
            "prompt = 'Who is {lable}?'",
            "prompt: unknown placeholder {lable}, did you mean 'label'?, expected {camera}, {label}, {zone}",
        ),
        ("model = ''", "model: expected the name of a model"),
        ("interval_s = -1", "interval_s: expected a number from 0 to 86400"),
        ("crop = 1", "crop: expected true or false"),
        ("max_tokens = 0", "max_tokens: expected a whole number from 1 to 4096"),
        ("max_tokens = true", "max_tokens: expected a whole number from 1 to 4096"),
        ("required_zones = 'yard'", "required_zones: expected an array of names"),
        ("required_zones = [1]", "required_zones: expected 1 to 64 letters"),
        ("classes = 'person'", "classes: expected an array of names of classes"),
        ("promt = 'x'", "unknown key promt, did you mean 'prompt'?"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, lines: str, reason: str) -> None:
    key = lines.split(" ")[0]
    text = "".join(line for line in QUESTION.splitlines(keepends=True) if not line.startswith(f"{key} "))
    expected = f"source 'door': questions: question 'visitor': {reason}"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read(tmp_path, SOURCE + text + lines)


def test_missing_keys_equal_names_and_too_many_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="question 1: needs name and model and prompt"):
        parse_questions([{}])
    one = {"name": "q", "model": "vlm", "prompt": "?"}
    with pytest.raises(ValueError, match="two questions have the name 'q'"):
        parse_questions([one, one])
    with pytest.raises(ValueError, match=f"expected at most {MAX_QUESTIONS} questions, given 17"):
        parse_questions([{**one, "name": f"q{number}"} for number in range(17)])


def test_a_zone_that_the_source_does_not_have_is_named(tmp_path: Path) -> None:
    sources, sinks = read(tmp_path, SOURCE + ZONE + QUESTION + 'required_zones = ["yrad"]')
    expected = (
        "source 'door': question 'visitor': the source has no zone 'yrad', did you mean 'yard'?; "
        "add it to the source, or change the question's required_zones"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_required_zones(sources, sinks)


def test_a_question_beside_the_sources_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("questions stand below their source: [[sources.questions]]")):
        read(tmp_path, "[[questions]]\nname = 'x'")


def test_zones_that_are_changed_over_http_leave_the_questions_of_the_file(tmp_path: Path) -> None:
    text = SOURCE + "# Who comes.\n" + QUESTION + ZONE
    edited = edit_zones(text, "door", (ZoneEntry("lawn"),), ())
    before, after = read(tmp_path, text)[0]["door"], read(tmp_path, edited)[0]["door"]
    assert (after.questions, after.zones) == (before.questions, (ZoneEntry("lawn"),))
    assert "# Who comes.\n" in edited


def test_the_documentation_has_each_key_of_a_question() -> None:
    page = (Path(__file__).parents[4] / "docs" / "camera-results.md").read_text()
    _, _, table = page.partition("| Key of a question | Meaning |")
    table, _, _ = table.partition("\n\n")
    for key in fields(QuestionEntry):
        assert f"`{key.name}`" in "".join(row.split("|")[1] for row in table.splitlines() if row), key.name
