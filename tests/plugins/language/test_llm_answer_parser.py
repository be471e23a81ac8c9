"""Channels of gpt-oss in the text of an answer, in pieces of any size."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.language.text.answer_parser import HARMONY_MARKS, HarmonyParser
from edge_server.plugins.language.text.requested_tools import Tools

TOOLS = Tools([{"type": "function", "function": {"name": name}} for name in ("weather", "look_up")], "auto")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
OTHER = "<|start|>assistant<|channel|>commentary to=functions.nosuch json<|message|>{}"

CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{ANALYSIS}Easy.<|end|>{FINAL}Paris.", "Easy.", "Paris.", []),
    ("<|channel|>final<|message|>Paris <b>.<|return|>", "", "Paris <b>.", []),
    (f'{ANALYSIS}Look.<|end|>{CALL}{{"city": "B<|"}}<|call|>', "Look.", "", [("weather", '{"city": "B<|"}')]),
    (' to=functions.look_up<|channel|>commentary json<|message|>{"a": {}}', "", "", [("look_up", '{"a": {}}')]),
    (f'{ANALYSIS.replace("<|m", " to=functions.look_up code<|m")}{{"a": 1}} ', "", "", [("look_up", '{"a": 1}')]),
    (f"<|channel|>commentary<|message|>I look.<|end|>{CALL}{{}}", "", "I look.", [("weather", "{}")]),
    (f"<|channel|>commentary<|message|>I look.<|end|>{FINAL}So.", "", "I look.\n\nSo.", []),
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b{FINAL}c", "a\n\nb", "c", []),
    (f"{CALL}<|call|>", "", "", [("weather", "{}")]),
    (f"{CALL}soon<|call|>", "", f"{CALL}soon", []),
    (f"{ANALYSIS}a<|end|>{OTHER}<|call|>", "a", OTHER, []),
    ("<|channel|>other<|message|>x", "", "<|channel|>other<|message|>x", []),
    ("<|channel|>final to=user<|message|>x", "", "<|channel|>final to=user<|message|>x", []),
    ("plain <|text", "", "plain <|text", []),
    ("to", "", "to", []),
    ("assist", "", "assist", []),
    ("tomorrow", "", "tomorrow", []),
    ("<|channel|>fin", "", "", []),
    (f"{ANALYSIS}a<|end|><|start|>assis", "a", "", []),
    (f"{ANALYSIS}a <|en", "a <|en", "", []),
    (f"{ANALYSIS}a<|end|><|start|>user<|message|>b", "a", "<|start|>user<|message|>b", []),
    ("<|channel|>" + "x" * 300 + "<|message|>y", "", "<|channel|>" + "x" * 300 + "<|message|>y", []),
    (f'{CALL}{{"city": "Bo', "", "", [("weather", '{"city": "Bo')]),
]


def parse(pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content, and name and arguments of each call."""
    parser = HarmonyParser(TOOLS)
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for place, piece in enumerate(pieces):
        parts = parser.add(piece, is_last=place == len(pieces) - 1)
        reasoning += parts.reasoning
        content += parts.content
        for delta in parts.calls:
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append((delta["function"]["name"], ""))
            name, arguments = calls[delta["index"]]
            calls[delta["index"]] = name, arguments + delta["function"]["arguments"]
    assert parser.call_count == len(calls)
    return reasoning, content, calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_channels_are_told_apart_in_pieces_of_any_size(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert parse(pieces) == (reasoning, content, calls)


WORDS = [
    *HARMONY_MARKS, "assistant", " ", "analysis", "final", "commentary", "to=functions.weather", "to=functions.nosuch",
    ANALYSIS, FINAL, CALL, "json", "{", "}", '{"a": 1}', "text", "<|", "\n", "<", "x" * 190,
]  # fmt: skip


@given(words=st.lists(st.sampled_from(WORDS), max_size=10), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_the_result_is_the_same_wherever_the_text_is_cut(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    whole = parse([text])
    assert parse([text[start:end] for start, end in itertools.pairwise(places)] or [""]) == whole
    for _, arguments in whole[2]:
        assert arguments.startswith("{")


def test_no_piece_of_a_stream_has_a_part_of_a_mark() -> None:
    text = f"{ANALYSIS}a < b<|end|>{FINAL}c <| d<|end|>{CALL}{json.dumps({'a': 'e'})}<|call|>"
    parser = HarmonyParser(TOOLS)
    shown = [parser.add(character) for character in text]
    assert "".join(part.reasoning for part in shown) == "a < b"
    assert "".join(part.content for part in shown) == "c <| d"
