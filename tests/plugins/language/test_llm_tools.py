"""Tool calls in the text of an answer, in pieces of any size, and the check of tools."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.grammar.constraint import ConstraintCheck
from edge_server.plugins.language.text.adapt_messages import shorten_call_ids
from edge_server.plugins.language.text.requested_tools import Tools, read_tools
from edge_server.plugins.language.text.tool_calls import ToolCallParser, ToolFormat, call_marks, guess_format
from edge_server.plugins.language.text.tool_prompt import describe_tools


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather"), tool("look_up")]
ONE = '{"name": "weather", "arguments": {"city": "B\\"}{", "n": [1, {"a": 2}]}}'
TWO = '{"arguments": {"word": "x"}, "name": "look_up"}'
TAGGED = "<function=look_up>\n<parameter=word>\nx\n</parameter>\n</function>"
LLAMA = ONE.replace("arguments", "parameters")

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_R1 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "B"}\n```<｜tool▁call▁end｜>'
CALL_V31 = '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"word": "<tool_call>"}<｜tool▁call▁end｜>'

CASES: list[tuple[ToolFormat, str, str, list[str]]] = [
    ("hermes", "just text", "just text", []),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", ["weather"]),
    ("hermes", f"First.\n<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "First.", ["weather", "look_up"]),
    ("hermes", f"<tool_call>{ONE}</tool_call> Done.", " Done.", ["weather"]),
    ("hermes", "a <tool and <tool_cal", "a <tool and <tool_cal", []),
    ("hermes", "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ("hermes", '<tool_call>{"name": "nosuch", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "nosuch", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "weather"', '<tool_call>{"name": "weather"', []),
    ("llama3_json", LLAMA, "", ["weather"]),
    ("llama3_json", f"\n{LLAMA}; {TWO}", "", ["weather", "look_up"]),
    ("llama3_json", f"Text, then {LLAMA}", f"Text, then {LLAMA}", []),
    ("llama3_json", '{"name": "edge", "size": 3}', '{"name": "edge", "size": 3}', []),
    ("hermes", f"Now:\n<tool_call>\n{TAGGED}\n</tool_call>", "Now:", ["look_up"]),
    ("hermes", f"<tool_call>{TAGGED}</tool_call>\n<tool_call>{ONE}</tool_call>", "", ["look_up", "weather"]),
    ("hermes", "<tool_call><function=nosuch></tool_call>", "<tool_call><function=nosuch></tool_call>", []),
    ("hermes", "<tool_call><function=look_up><parameter=a>", "<tool_call><function=look_up><parameter=a>", []),
    ("mistral", f"[{ONE}, {TWO}]", "", ["weather", "look_up"]),
    ("mistral", f" [TOOL_CALLS] [ {TWO}]", "", ["look_up"]),
    ("mistral", f"<|tool_call|>[{ONE}]", "", ["weather"]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"n": {}}[TOOL_CALLS]look_up[ARGS]{}', "", ["weather", "look_up"]),
    ("mistral", 'weather{"n": 1}look_up[CALL_ID]abc456789[ARGS]{}', "", ["weather", "look_up"]),
    ("mistral", 'look_upabc456789{"n": 1} ', "", ["look_up"]),
    ("mistral", "weather is fine", "weather is fine", []),
    ("mistral", "weather", "weather", []),
    ("mistral", "weatherman {a}", "weatherman {a}", []),
    ("mistral", "[1, 2] and [", "[1, 2] and [", []),
    ("mistral", '[{"name": "nosuch"}] [x] ', '[{"name": "nosuch"}] [x] ', []),
    ("mistral", "[TOOL_ is text", "[TOOL_ is text", []),
    ("mistral", f"[{ONE}] and [more]", "and [more]", ["weather"]),
    ("mistral", "[", "[", []),
    ("pythonic", """[weather(city='B"}{', n=[1, {"a": 2}]), look_up(word="x")]""", "", ["weather", "look_up"]),
    ("pythonic", "<|tool_call_start|>[look_up()]<|tool_call_end|>", "", ["look_up"]),
    ("pythonic", "[nosuch()]", "[nosuch()]", []),
    ("pythonic", "[weather(open('x'))]", "[weather(open('x'))]", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
    ("pythonic", "[look_up(word='x'", "[look_up(word='x'", []),
    ("pythonic", "[a, b] is a list", "[a, b] is a list", []),
    ("pythonic", "[" * 300, "[" * 300, []),
    ("llama3_json", '{"type": "function", "name": "weather", "parameters": {}}', "", ["weather"]),
    ("hermes", "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
     "I look.", ["weather"]),
    ("hermes", "<tool_call>look_up</tool_call><tool_call>weather<arg_key>n</arg_key><arg_value>1</arg_value>"
     "</tool_call>", "", ["look_up", "weather"]),
    ("hermes", "<tool_call>weather<arg_key>city<arg_value>Bonn</arg_value></tool_call>",
     "<tool_call>weather<arg_key>city<arg_value>Bonn</arg_value></tool_call>", []),
    ("hermes", "<tool_call>nosuch<arg_key>a</arg_key><arg_value>b</arg_value></tool_call> .",
     "<tool_call>nosuch<arg_key>a</arg_key><arg_value>b</arg_value></tool_call> .", []),
    ("hermes", "<tool_call>weather", "<tool_call>weather", []),
    ("deepseek_v3", f"Now.{BEGIN}{CALL_R1}{CALL_R1}{END}", "Now.", ["weather", "weather"]),
    ("deepseek_v3", f"{BEGIN}{CALL_V31}\n{CALL_R1}{END} Done.", " Done.", ["look_up", "weather"]),
    ("deepseek_v3", CALL_V31, "", ["look_up"]),
    ("deepseek_v3", f"<tool_call>{ONE}</tool_call>", "", ["weather"]),
    ("deepseek_v3", f"a {BEGIN} \n b", f"a {BEGIN} \n b", []),
    ("deepseek_v3", f'{BEGIN}look_up<｜tool▁sep｜>{{"a":1}}{END}', f'{BEGIN}look_up<｜tool▁sep｜>{{"a":1}}{END}', []),
    ("deepseek_v3", f"x {BEGIN} <｜tool▁call▁begin｜>nosuch<｜tool▁sep｜>{{}}<｜tool▁call▁end｜> ",
     f"x {BEGIN} <｜tool▁call▁begin｜>nosuch<｜tool▁sep｜>{{}}<｜tool▁call▁end｜> ", []),
    ("gemma4", 'Look. <|tool_call>call:weather{city:<|"|>B, {"}<|"|>,n:[1,{a:2}]}<tool_call|>', "Look.", ["weather"]),
    ("gemma4", "<|tool_call>call:weather{}call:look_up{a:true}<tool_call|>", "", ["weather", "look_up"]),
    ("gemma4", "<|tool_call>call:weather{}<tool_call|> and <|tool_call>call:look_up{b:1.5}", " and",
     ["weather", "look_up"]),
    ("gemma4", "<start_function_call>call:look_up{word:<escape>x<escape>}<end_function_call>", "", ["look_up"]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>B', '<|tool_call>call:weather{city:<|"|>B', []),
    ("gemma4", "<|tool_call>call:nosuch{}<tool_call|>", "<|tool_call>call:nosuch{}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:weather{a:[}<tool_call|>", "<|tool_call>call:weather{a:[}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:weather{a:" + "[" * 500 + "<tool_call|>",
     "<|tool_call>call:weather{a:" + "[" * 500 + "<tool_call|>", []),
]  # fmt: skip


def parse(parser: ToolCallParser, text: str, size: int) -> tuple[str, list[str], list[str]]:
    """Return content, names and arguments of text in pieces of so many characters."""
    return collect(parser, [text[start : start + size] for start in range(0, len(text), size)])


def collect(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[str], list[str]]:
    """Return content, names and arguments of text in pieces."""
    content, names, arguments = "", [], []
    for place, piece in enumerate(pieces):
        more, deltas = parser.add(piece, is_last=place == len(pieces) - 1)
        content += more
        for delta in deltas:
            if "id" in delta:
                assert delta["index"] == len(names)
                names.append(delta["function"]["name"])
                arguments.append("")
            arguments[delta["index"]] += delta["function"]["arguments"]
    return content, names, arguments


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 1000])
@pytest.mark.parametrize(("form", "text", "content", "names"), CASES)
def test_calls_are_found_in_pieces_of_any_size(
    form: ToolFormat, text: str, content: str, names: list[str], size: int
) -> None:
    found = parse(ToolCallParser(Tools(TOOLS, "auto"), form), text, size)
    assert found[:2] == (content, names)
    for arguments in found[2]:
        assert isinstance(json.loads(arguments), dict)


def test_the_arguments_are_the_models_own_text() -> None:
    _, _, (arguments,) = parse(ToolCallParser(Tools(TOOLS, "auto"), "hermes"), f"<tool_call>{ONE}</tool_call>", 3)
    assert arguments == '{"city": "B\\"}{", "n": [1, {"a": 2}]}'


def test_arguments_between_tags_have_the_types_of_the_schema() -> None:
    types = {"city": "string", "days": "integer", "places": "array", "exact": "boolean", "wrong": "number"}
    weather = tool("weather", {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}})
    values = {
        "city": "12\n<b>",
        "days": "3",
        "places": '["a", {"b": 1}]',
        "exact": "true",
        "wrong": "much",
        "more": "7",
    }
    lines = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=weather>\n{lines}</function>\n</tool_call>"
    _, _, (arguments,) = parse(ToolCallParser(Tools([weather], "auto"), "hermes"), text, 7)
    assert json.loads(arguments) == {
        "city": "12\n<b>", "days": 3, "places": ["a", {"b": 1}], "exact": True, "wrong": "much", "more": "7",
    }  # fmt: skip


def test_values_between_the_marks_of_glm_and_gemma_have_their_types() -> None:
    types: dict[str, Any] = {
        "city": {"type": "string"}, "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "name": {"type": ["string", "null"]}, "nick": {"type": ["string", "null"]}, "n": {"type": "number"},
    }  # fmt: skip
    weather = tool("weather", {"type": "object", "properties": types})
    values = {"city": " 12", "days": "3", "name": "7", "nick": "null", "n": "NaN", "other": "{}"}
    text = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in values.items())
    _, _, (arguments,) = parse(
        ToolCallParser(Tools([weather], "auto"), "hermes"), f"<tool_call>weather\n{text}</tool_call>", 5
    )
    assert json.loads(arguments) == {
        "city": " 12", "days": 3, "name": "7", "nick": None, "n": "NaN", "other": "{}",
    }  # fmt: skip
    text = (
        'call:weather{a:<|"|>1, }<|"|>, b : -1.5 ,c:108.,d:[true,null,<|"|><|"|>],e:{<|"|>3 x<|"|>:{}},f:,g:"q",'
        "h:1e999,i:Bonn}"
    )
    _, _, (arguments,) = parse(ToolCallParser(Tools([weather], "auto"), "gemma4"), f"<|tool_call>{text}<tool_call|>", 5)
    assert json.loads(arguments) == {
        "a": "1, }", "b": -1.5, "c": 108.0, "d": [True, None, ""], "e": {"3 x": {}}, "f": "", "g": "q", "h": "1e999",
        "i": "Bonn",
    }  # fmt: skip


def test_a_truncated_call_returns_its_arguments_so_far() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Be'
    assert parse(ToolCallParser(Tools(TOOLS, "auto"), "hermes"), text, 4) == ("", ["weather"], ['{"city": "Be'])


@pytest.mark.parametrize("form", ["hermes", "llama3_json", None])
def test_a_required_call_is_the_whole_text_and_a_named_call_its_arguments(form: ToolFormat | None) -> None:
    assert parse(ToolCallParser(Tools(TOOLS, "required"), form), ONE, 3)[:2] == ("", ["weather"])
    assert parse(ToolCallParser(Tools(TOOLS, "look_up"), form), '{"word": "x"}', 2) == (
        "", ["look_up"], ['{"word": "x"}'],
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_several_required_calls_are_a_list(size: int) -> None:
    other = '{"name": "look_up", "arguments": {}}'
    parser = ToolCallParser(Tools(TOOLS, "required", allows_several=True), "hermes")
    content, names, arguments = parse(parser, f"[{ONE},{other},\n{ONE}]", size)
    assert (content, names) == ("", ["weather", "look_up", "weather"])
    assert [json.loads(text).get("city") for text in arguments] == ['B"}{', None, 'B"}{']


TAGGED_FORMS: list[ToolFormat] = [form for form in get_args(ToolFormat) if form != "openai"]
WORDS = [
    *(mark for form in TAGGED_FORMS for mark in sorted(call_marks(form))), "[TOOL_CALLS]", "[ARGS]",
    ONE, TWO, TAGGED, LLAMA, CALL_R1, CALL_V31, "weather", "look_up", "call:weather", "{", "}", '{"a": 1}', "{a:1}",
    "[", "]", "[look_up()]",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<", " ", "\n", "text", ";", ",",
]  # fmt: skip


@given(words=st.lists(st.sampled_from(WORDS), max_size=8), cuts=st.lists(st.integers(0, 200), max_size=12),
       form=st.sampled_from(TAGGED_FORMS))  # fmt: skip
def test_the_result_is_the_same_wherever_the_text_is_cut(words: list[str], cuts: list[int], form: ToolFormat) -> None:
    text = "".join(words)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = collect(ToolCallParser(Tools(TOOLS, "auto"), form), [text])
    assert collect(ToolCallParser(Tools(TOOLS, "auto"), form), pieces or [""]) == whole


@given(text=st.text(alphabet='<tool_cal>/{}":,; namergus[]()|', max_size=80), size=st.integers(1, 9))
def test_text_without_a_call_is_never_lost(text: str, size: int) -> None:
    for form in TAGGED_FORMS:
        content, names, _ = parse(ToolCallParser(Tools(TOOLS, "auto"), form), text, size) if text else ("", [], [])
        assert names or content == text


def test_the_schema_of_a_forced_call_names_the_functions() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    items = [tool("weather", city), tool("look_up")]
    assert Tools(items, "auto").json_schema() == ""
    assert json.loads(Tools(items, "weather").json_schema()) == city
    schema = json.loads(Tools(items, "required").json_schema())
    assert [item["properties"]["name"]["const"] for item in schema["anyOf"]] == ["weather", "look_up"]
    several = Tools(items, "required", allows_several=True)
    assert json.loads(several.json_schema()) == {"type": "array", "items": schema, "minItems": 1, "maxItems": 16}
    path = ("items", "anyOf", 1, "properties", "arguments", "properties", "x")
    assert several.place(path) == "tools[1].function.parameters.properties.x"
    assert several.place(path[:2]) == "tools"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("several", [False, True])
def test_references_within_the_parameters_hold_in_the_schema_of_a_forced_call(count: int, several: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/unit"}, "$ref": {"enum": [{"$ref": "#"}]}},
        "required": ["unit", "$ref"],
        "$defs": {"unit": {"enum": ["K"]}},
    }
    tools = Tools([tool(f"f{index}", parameters) for index in range(count)], "required", several)
    call = '{"name":"f0","arguments":{"unit":"K","$ref":{"$ref":"#"}}}'
    check = ConstraintCheck(Sampling(1, json_schema=tools.json_schema()), tools.place)
    check.add(f"[{call}]" if several else call)
    check.finish()


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, "expected a list"),
        ([tool("x")] * 200, None, "at most 128"),
        ([3], None, r"tools\[0\]"),
        ([tool("a b")], None, "letters, digits"),
        ([tool("a", [])], None, "parameters: expected a JSON schema"),
        ([tool("a")], "sometimes", "tool_choice: expected none, auto"),
        ([tool("a")], {"function": {"name": "b"}}, "expected one of a, got 'b'"),
        ([tool("a")], {"function": 3}, "expected one of a"),
        (
            [tool("a")],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice: 'allowed_tools' is not supported; send only these tools in 'tools'",
        ),
        (None, "required", "without tools"),
    ],
)
def test_invalid_tools_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_tools(tools, choice, "request")


def test_tool_choice_none_omits_the_tools() -> None:
    assert read_tools(TOOLS, "none", "request") is None
    assert read_tools(TOOLS, None, "request") == Tools(TOOLS, "auto")


def test_the_chat_template_shows_the_format() -> None:
    assert guess_format("... <tool_call> ...") == "hermes"
    assert guess_format('Respond as {"name": ..., "parameters": ...}') == "llama3_json"
    assert guess_format("[TOOL_CALLS] [") == "mistral"
    assert guess_format("[TOOL_CALLS]name[ARGS]{}") == "mistral"
    assert guess_format("<tools>{{ tools }} [") is None
    assert guess_format("<|tool_call|>") == "mistral"
    assert guess_format("<|tool_call_start|>[") == "pythonic"
    assert guess_format("{{ messages }}") is None
    assert guess_format("<|channel|>analysis") == "openai"
    assert guess_format("<tool_call>{function-name}\n<arg_key>") == "hermes"
    assert guess_format("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>") == "deepseek_v3"
    assert guess_format("<|tool_call>call:") == "gemma4"
    assert guess_format("<start_function_call>call:") == "gemma4"


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


def test_tools_are_described_where_the_template_does_not() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And in Köln?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"},
        {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees"},
        {"role": "user", "content": "Thanks."},
    ]
    system, question, called, results = describe_tools(messages, TOOLS, takes_system=True)
    described = [json.loads(line) for line in system["content"].splitlines() if line.startswith('{"name": "') and
                 "NAME" not in line]  # fmt: skip
    assert described == [item["function"] for item in TOOLS]
    assert system["content"].endswith("Be brief.")
    assert question == messages[1]
    assert parse(ToolCallParser(Tools(TOOLS, "auto"), "hermes"), called["content"], 5) == (
        "I look.", ["weather", "weather"], ['{"city": "Köln"}'] * 2,
    )  # fmt: skip
    assert results == {"role": "user", "content": "<tool_response>\n3 degrees\n</tool_response>\n\n<tool_response>\n"
                       "4 degrees\n</tool_response>\n\nThanks."}  # fmt: skip
    first, *rest = describe_tools(messages, TOOLS, takes_system=False)
    assert first["role"] == "user"
    assert first["content"] == f"{system['content']}\n\nAnd in Köln?"
    assert rest == [called, results]


def test_calls_of_a_chat_without_tools_become_text_too() -> None:
    question, called = describe_tools([{"role": "user", "content": "w"}, {"role": "assistant", "content": "",
                                                                          "tool_calls": [CALL]}], (),
                                      takes_system=True)  # fmt: skip
    assert question["content"] == "w"
    assert called["content"].startswith("<tool_call>\n{")


def test_ids_of_calls_have_the_length_that_the_template_demands() -> None:
    messages = [
        {"role": "user", "content": "w"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "abcdefgh9"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert shorten_call_ids(messages, "no limit") == messages
    template = "raise_exception('Tool call IDs should be alphanumeric strings with length 9!')"
    _, called, result = shorten_call_ids(messages, template)
    ids = [call["id"] for call in called["tool_calls"]]
    assert ids[1] == "abcdefgh9"
    assert (len(ids[0]), ids[0].isalnum()) == (9, True)
    assert result["tool_call_id"] == ids[0]
