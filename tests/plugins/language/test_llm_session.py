"""Session of a language model over the scripted engine: batching, cancellation, admission, text, and bad input."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends.custom_metrics import REGISTRY
from edge_server.core.json_tensor import JsonTensor
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import (
    BadSchema,
    ConstraintFailed,
    ContextTooLong,
    EdgeServerError,
    InvalidRequest,
    LoadError,
    QueueFull,
    SessionLost,
)
from edge_server.plugins.language.engines.model_size import LlmSize
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import Sampling, TokenEvent
from edge_server.plugins.language.grammar.openvino_constraint import openvino_grammar
from edge_server.plugins.language.text.session import LlmSession
from edge_server.plugins.language.text.text_request import read_request
from tests.kit.eventually import eventually
from tests.kit.packages.scripted_llm import ScriptedEngine

ANSWERS = {"count": "one two three four five", "greet": "Grüße, wörld!", "long": "x" * 200, "bounds": "[7]",
           "twice": '{"a":1,"a":2}', "enum": '"ö"', "escaped": '"\\u00e4"', "spaced": '{"a" : 1}',
           "zeros": "[0.7500,0.50,0.7]", "exponents": "[1e+30,1E-7,2.5e1,20e-1,-0.0e0]"}  # fmt: skip


class Client:
    """An execution whose responses a test waits for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.responses: list[dict[str, Any]] = []
        self.error: EdgeServerError | None = None
        self.ended = threading.Event()
        self.came = threading.Condition()
        self._is_cancelled = False

    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        self._is_cancelled = True

    def send(self, outputs: Mapping[str, Any], *, is_final: bool = False, parameters: Any = None) -> None:
        with self.came:
            self.responses.append({name: array.ravel()[0] for name, array in outputs.items()})
            self.came.notify_all()
        if is_final:
            self.ended.set()

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        self.error = error
        self.ended.set()

    def finish(self) -> None:
        self.ended.set()

    def reschedule(self) -> None:
        raise AssertionError

    @property
    def text(self) -> str:
        assert self.ended.wait(20)
        if self.error is not None:
            raise self.error
        return b"".join(response["text_output"] for response in self.responses).decode()


def request(prompt: str | None, *, messages: Any = None, stream: bool = True, **sampling: Any) -> Request:
    values: dict[str, Any] = {
        "stream": stream,
        "sampling_parameters": json.dumps({"max_tokens": 1000, **sampling}),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    if prompt is not None:
        values["text_input"] = prompt
    if messages is not None:
        values["messages"] = messages if isinstance(messages, str) else json.dumps(messages)
    return Request("talker", {name: tensor(name, value) for name, value in values.items()})


def tensor(name: str, value: str | bool) -> Tensor:
    if isinstance(value, bool):
        return Tensor(name, DType.BOOL, np.array([value]))
    return Tensor(name, DType.BYTES, np.array([value.encode()], object))


def test_a_parsed_chat_equals_its_text_and_is_not_changed() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat = {"messages": messages, "tools": [tool], "tool_choice": "auto"}
    text, sampling = json.dumps(chat), {"max_tokens": 7, "stop": ["x"]}
    parsed = {item.name: item for item in (JsonTensor("messages", chat), JsonTensor("sampling_parameters", sampling))}
    written = {name: tensor(name, item.array[0].decode()) for name, item in parsed.items()}
    found = read_request(Request("talker", parsed))
    assert found == read_request(Request("talker", written))
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert json.dumps(chat) == text


@pytest.fixture
def thinker(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Return a function that serves a model with this chat template, whose answers have reasoning."""
    answers = {
        "why": "<think>\n4 > 3 </thin \n</think>\n\nBecause. <think>",
        "open": "so it is</think>It is.",
        "cut": "<think>and then",
        "plain": "  <thing>",
        "call two": 'At once.<tool_call>{"name": "go", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "come", "arguments": {}}</tool_call>',
        "call": '<think>call it</think><tool_call>{"name": "go", "arguments": {}}</tool_call>',
        "call far": '<tool_call>{"name": "go", "arguments": {"steps": 2}}</tool_call>\n'
        '<tool_call>{"name": "go", "arguments": {"steps": 12}}</tool_call> Gone.',
        "channels": "<|channel|>analysis<|message|>4 > 3<|end|><|start|>assistant<|channel|>final<|message|>Because.",
        "channel call": "<|channel|>analysis<|message|>Go.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.go <|constrain|>json<|message|>{"a": 1}',
        "thought": '<|channel>thought\nGo.<channel|><|tool_call>call:go{a:<|"|>x<|"|>}<tool_call|>',
        "deep": "<think>Go.</think>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>go<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    }
    opened: list[Served] = []

    def start(template: str, special_texts: Sequence[str] = ()) -> Served:
        path = tmp_path / "script.json"
        script = {"answers": answers, "chat_template": template, "special_texts": special_texts}
        path.write_text(json.dumps(script))
        opened.append(Served(path))
        return opened[-1]

    yield start
    for served in opened:
        served.session.close()


def ask_chat(served: Served, *lines: str, stream: bool = True, sampling: Any = None, **more: Any) -> Client:
    messages = [{"role": "user", "content": line} for line in lines]
    return served.ask(None, messages={"messages": messages, **more}, stream=stream, **(sampling or {}))


def calls_of(client: Client) -> list[tuple[str, str]]:
    """Return name and arguments of each call."""
    found: list[tuple[str, str]] = []
    for delta in (delta for item in client.responses for delta in json.loads(item["tool_calls"])):
        if "id" in delta:
            found.append((delta["function"]["name"], ""))
        name, arguments = found[delta["index"]]
        found[delta["index"]] = name, arguments + delta["function"]["arguments"]
    return found


def parts(client: Client) -> tuple[str, str]:
    """Return reasoning and content."""
    text = client.text
    return b"".join(item.get("reasoning_content", b"") for item in client.responses).decode(), text


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_apart_from_the_content(thinker: Callable[..., Served], stream: bool) -> None:
    served = thinker("</think><tool_call>")
    assert parts(ask_chat(served, "why", stream=stream)) == ("4 > 3 </thin", "Because. <think>")
    assert parts(ask_chat(served, "open", "<think>\n", stream=stream)) == ("so it is", "It is.")
    assert parts(ask_chat(served, "open", stream=stream)) == ("", "so it is</think>It is.")
    assert parts(ask_chat(served, "cut", stream=stream)) == ("and then", "")
    assert parts(ask_chat(served, "plain", stream=stream)) == ("", "  <thing>")
    tool = {"type": "function", "function": {"name": "go"}}
    client = ask_chat(served, "call", tools=[tool], stream=stream)
    assert parts(client) == ("call it", "")
    deltas = [delta for item in client.responses for delta in json.loads(item["tool_calls"])]
    assert deltas[0]["function"]["name"] == "go"


CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|im_end|>"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("special", [CHANNELS, []])
def test_channels_are_reasoning_content_and_calls(
    thinker: Callable[..., Served], stream: bool, special: list[str]
) -> None:
    served = thinker("{{ tools }} <|channel|>analysis", special)
    client = ask_chat(served, "channels", stream=stream)
    assert parts(client) == ("4 > 3", "Because.")
    tool = {"type": "function", "function": {"name": "go"}}
    client = ask_chat(served, "channel call", tools=[tool], stream=stream)
    assert parts(client) == ("Go.", "")
    assert calls_of(client) == [("go", '{"a": 1}')]
    assert client.responses[-1]["finish_reason"] == b"tool_calls"


@pytest.mark.parametrize(
    ("template", "begun", "reasoning", "content"),
    [
        ("</think>", "<think>\nopen", "so it is", "It is."),
        ("</think>", "<think>x</think>\nhello", "", "hello"),
        ("{{ tools }} <|channel|>analysis", "hello", "", "hello"),
    ],
)
def test_an_answer_that_is_continued_goes_on_where_it_was(
    thinker: Callable[..., Served], template: str, begun: str, reasoning: str, content: str
) -> None:
    given = {"add_generation_prompt": False, "continue_final_message": True}
    assert parts(ask_chat(thinker(template), "x", begun, chat_template_kwargs=given)) == (reasoning, content)


def test_constrained_text_of_a_model_with_channels_begins_after_the_head_of_the_content(
    thinker: Callable[..., Served],
) -> None:
    served = thinker("{{ tools }} <|channel|>analysis", CHANNELS)
    asked = request(None, messages=[{"role": "user", "content": "x"}], choice=["plain"])
    found = ask_tokens(served, replace(asked, inputs={**asked.inputs, "tokenize": tensor("tokenize", True)}))
    assert served.engine.decode([found["token_ids"]]) == ["x<|channel|>final<|message|>"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("template", "question", "special"),
    [
        ("<|channel>thought <|tool_call> tools", "thought", ["<|channel>", "<channel|>", "<|tool_call>", '<|"|>']),
        ("</think> <｜tool▁call▁begin｜>", "deep", ["<think>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"]),
    ],
)
def test_marks_that_are_special_tokens_are_found(
    thinker: Callable[..., Served], template: str, question: str, special: list[str], stream: bool
) -> None:
    tool = {"type": "function", "function": {"name": "go"}}
    client = ask_chat(thinker(template, special), question, tools=[tool], stream=stream)
    assert parts(client) == ("Go.", "")
    assert [name for name, _ in calls_of(client)] == ["go"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_whose_template_has_no_tools_is_told_of_them_and_may_call(
    thinker: Callable[..., Served], stream: bool
) -> None:
    served = thinker("{{ messages }}")
    tools = [{"type": "function", "function": {"name": name, "description": "It moves."}} for name in ("go", "come")]
    client = ask_chat(served, "call two", tools=tools, stream=stream)
    assert parts(client) == ("", "At once.")
    calls = [delta["function"] for item in client.responses for delta in json.loads(item["tool_calls"])]
    assert [call["name"] for call in calls if "name" in call] == ["go", "come"]
    assert client.responses[-1]["finish_reason"] == b"tool_calls"
    asked = request(None, messages={"messages": [{"role": "user", "content": "call two"}], "tools": tools})
    found = ask_tokens(served, replace(asked, inputs={**asked.inputs, "tokenize": tensor("tokenize", True)}))
    prompt = bytes(found["token_ids"]).decode()
    assert prompt.endswith("\ncall two")
    assert prompt.count('"description": "It moves."') == 2


@pytest.mark.parametrize("stream", [True, False])
def test_calls_of_a_strict_function_fit_its_schema(thinker: Callable[..., Served], stream: bool) -> None:
    served = thinker("<tool_call>")

    def ask(*stated: Any, **sampling: Any) -> Client:
        parameters = [{"type": "object", "properties": {"steps": {"type": "integer", **limit}}} for limit, _ in stated]
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
            for name, schema, (_, strict) in zip(("come", "go"), parameters, stated, strict=True)
        ]
        return ask_chat(served, "call far", stream=stream, tools=tools, sampling=sampling)

    for client in (ask(({}, True), ({"maximum": 12}, True)), ask(({}, True), ({"maximum": 9}, False))):
        assert client.text == " Gone."
        assert calls_of(client) == [("go", '{"steps": 2}'), ("go", '{"steps": 12}')]
    for sampling in ({}, {"stop": [" Gone"]}):
        failed = ask(({}, False), ({"maximum": 9}, True), **sampling)
        with pytest.raises(ConstraintFailed, match=r"constraint_failed: .* json_schema: the text does not fit from"):
            _ = failed.text
        assert not any(item["finish_reason"] for item in failed.responses)
    assert ask(({}, False), ({"maximum": 9}, True), max_tokens=40).text == ""
    with pytest.raises(BadSchema, match="the keyword 'not' cannot be enforced") as caught:
        _ = ask(({}, False), ({"not": {}}, True)).text
    assert caught.value.place == "tools[1].function.parameters.properties.steps.not"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "come"}}])
def test_a_refused_schema_of_a_tool_is_named_by_its_place(
    thinker: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    """Also if it is the engine that refuses it."""
    monkeypatch.setattr(ScriptedEngine, "write_grammar", staticmethod(openvino_grammar))
    numbers = {"type": "object", "properties": {"step": {"type": "number", "multipleOf": 0.5}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("go", None), ("come", numbers))
    ]
    with pytest.raises(BadSchema, match=r"multipleOf of a fraction: .* llama_cpp") as caught:
        _ = ask_chat(thinker("<tool_call>"), "call", tools=tools, tool_choice=choice).text
    assert caught.value.place == "tools[1].function.parameters.properties.step.multipleOf"


def test_tools_of_a_template_that_does_not_show_how_calls_are_written_are_refused(
    thinker: Callable[..., Served],
) -> None:
    tool = {"type": "function", "function": {"name": "go"}}
    with pytest.raises(InvalidRequest, match="does not show how it calls tools; set the parameter tool_call_parser"):
        _ = ask_chat(thinker("{{ tools }}"), "call", tools=[tool]).text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("line", "begin", "reasoning"),
    [
        ("why", "", "<think>\n4 > 3 </thin \n</think>"),
        ("open", "<think>\n", "so it is</think>"),
        ("open", "", ""),
        ("cut", "", "<think>and then"),
        ("plain", "", ""),
    ],
)
def test_the_tokens_of_reasoning_are_counted_with_its_tags(
    thinker: Callable[..., Served], stream: bool, line: str, begin: str, reasoning: str
) -> None:
    client = ask_chat(thinker("</think>"), line, *([begin] if begin else []), stream=stream)
    assert client.text is not None
    counts = [item["num_reasoning_tokens"] for item in client.responses if "num_reasoning_tokens" in item]
    assert counts == [len(reasoning)]
    plain = ask_chat(thinker("no tags"), line, stream=stream)
    assert plain.text
    assert not any("num_reasoning_tokens" in item for item in plain.responses)


def test_a_streamed_reasoning_arrives_in_pieces(thinker: Callable[..., Served]) -> None:
    client = ask_chat(thinker("</think>"), "why")
    assert parts(client)[0] == "4 > 3 </thin"
    assert sum(bool(item["reasoning_content"]) for item in client.responses) >= 3


def test_text_under_a_schema_or_of_a_prompt_or_of_another_template_is_content(thinker: Callable[..., Served]) -> None:
    served = thinker("</think>")
    for client in (
        ask_chat(served, "cut", sampling={"regex": "<think>.*"}),
        ask_chat(served, "cut", sampling={"choice": ["<think>and then"]}),
        served.ask("cut"),
        ask_chat(thinker("no tags"), "cut"),
    ):
        assert parts(client) == ("", "<think>and then")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"regex": "(?=a)a"}, "regex: cannot be enforced: look-around, including look-ahead and look-behind, is not"),
        ({"regex": "a" * 16_385}, "regex: expected at most 16,384 bytes, got 16,385"),
        ({"grammar": "root ::= other"}, "grammar: expected rules in GBNF: Rule 'other' not found"),
        ({"grammar": "x ::= root\nroot ::= a30\na0 ::= 'x'"}, "grammar: expected rules in GBNF"),
        (
            {"grammar": 'root ::= "b" a30\na0 ::= "x"\n' + "\n".join(f"a{i + 1} ::= a{i} a{i}" for i in range(30))},
            "grammar: a rule has more than 100,000 characters when it is written out",
        ),
        ({"grammar": 'root ::= "a"\n' * 101}, "grammar: expected at most 100 rules, got more"),
        (
            {"json_schema": {"properties": {"a": {"uniqueItems": True}}}},
            "json_schema.properties.a.uniqueItems: the",
        ),
        ({"json_schema": {"not": {"type": "null"}}}, "json_schema.not: the keyword 'not' cannot be enforced"),
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, "the keyword 'not' cannot be enforced"),
        ({"json_schema": {"type": "nosuch"}}, "json_schema: cannot be enforced: Invalid type: nosuch"),
        (
            {"json_schema": {"type": "string", "format": "regex"}},
            "cannot be enforced: Unknown format: regex",
        ),
        ({"json_schema": {"if": {}, "then": {}}}, "json_schema.if: the keyword 'if' cannot be enforced"),
        ({"json_schema": {"dependentRequired": {"a": ["b"]}}}, "the keyword 'dependentRequired' cannot be enforced"),
        ({"json_schema": {"type": "integer", "multipleOf": 999983}}, "json_schema.multipleOf: cannot be enforced"),
        ({"json_schema": {"enum": list(range(2000))}}, "a schema may have at most 1,500 parts"),
        (
            {"json_schema": {"type": "number", "minimum": 2, "maximum": 1}},
            "cannot be enforced: Unsatisfiable schema",
        ),
        ({"grammar": 3}, "sampling parameter grammar: expected rules in GBNF, got '3'"),
        ({"regex": 3}, "sampling parameter regex: expected a regular expression, got '3'"),
        ({"logit_bias": {"1": 5}}, "logit_bias: scripted does not have it"),
        (
            {"logit_bias": {"a": 5}},
            "sampling parameter logit_bias: expected tokens with numbers from -100 to 100, got 'a'",
        ),
        ({"logit_bias": {"1": 101}}, "got '1': '101'"),
        ({"logit_bias": [1]}, "sampling parameter logit_bias: expected an object of at most 1024"),
        ({"logprobs": 2}, "top_logprobs: expected at most 1, got 2: scripted does not tell more"),
        ({"logprobs": 21}, "sampling parameter logprobs: expected 0 to 20, got '21'"),
        ({"choice": "ab"}, "sampling parameter choice: expected a list of texts that are not empty"),
        ({"choice": ["a", ""]}, "sampling parameter choice: expected a list of texts"),
        ({"choice": ["a"], "regex": "a"}, "expected one of the sampling parameters json_schema, choice, regex and"),
        ({"choice": ["a"] * 1001}, "choice: expected at most 1,000 texts, got 1,001"),
        ({"choice": ["a" * 10_000, "b" * 10_000]}, "choice: expected at most 16,384 bytes, got 20,004"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused(
    thinker: Callable[..., Served], sampling: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _ = thinker("").ask("hello", **sampling).text
    assert message in caught.value.message


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("question", "constraint", "sent"),
    [
        ("count", {"regex": "one two five|one two (six|th..e f.*)"}, "one two three four five"),
        ("count", {"grammar": 'root ::= word\nword ::= [a-z]+ (" " word)?'}, "one two three four five"),
        ("count", {"regex": "one two th", "max_tokens": 9}, "one two t"),
        ("count", {"regex": "one two three!", "stop": ["o th"]}, "one tw"),
        ("greet", {"regex": "Gr..e, .*", "max_tokens": 3}, "Gr\ufffd"),
    ],
)
def test_a_text_that_fits_its_grammar_is_sent(
    serve: Callable[..., Served], question: str, constraint: Any, sent: str, stream: bool
) -> None:
    assert serve().ask(question, stream=stream, **constraint).text == sent


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("question", "constraint", "sent", "reason"),
    [
        ("count", {"regex": "one two five"}, "one two ", "regex: the text does not fit from 't' on"),
        ("count", {"regex": "one two three four five six"}, "one two three four fiv", "regex: the text ends too early"),
        ("count", {"grammar": 'root ::= [a-z] root | "!" | "x"'}, "one", "grammar: the text does not fit from ' ' on"),
        ("count", {"choice": ["one", "two"]}, "one", "choice: the text does not fit from ' ' on"),
        ("count", {"json_schema": {}}, "one two three four fiv", "json_schema: no JSON: "),
        ("bounds", {"json_schema": {"minimum": 0, "maximum": 1}}, "[7", "json_schema: the text does not fit from '"),
        ("twice", {"json_schema": {}}, '{"a":1,"a":2', "json_schema: the name 'a' occurs twice in an object"),
        ("enum", {"json_schema": {"enum": ["ä"]}}, '"ö', "json_schema: the text does not fit from 'ö\"' on"),
    ],
)
def test_a_finished_answer_that_does_not_obey_its_constraint_is_an_error_and_is_counted(
    serve: Callable[..., Served], question: str, constraint: Any, sent: str, reason: str, stream: bool
) -> None:
    if question in ("bounds",):
        constraint = {"json_schema": {"type": "array", "items": {"type": "integer", **constraint["json_schema"]}}}
    served = serve()
    client = served.ask(question, stream=stream, **constraint)
    with pytest.raises(ConstraintFailed) as caught:
        _ = client.text
    assert f"constraint_failed: scripted wrote what does not obey the request: {reason}" in caught.value.message
    assert b"".join(item["text_output"] for item in client.responses).decode() == (sent if stream else "")
    assert not any(item["finish_reason"] for item in client.responses)
    (view,) = [view for view in REGISTRY.views() if view.name == "edge_llm_constraint_failures_total"]
    assert sum(sample.value for sample in view.samples if dict(sample.labels)["model"] == "talker") == 1
    assert served.ask("count").text == ANSWERS["count"]


@pytest.mark.parametrize(
    ("question", "schema"),
    [
        ("enum", {"enum": ["ä", "日本", "ö"]}),
        ("escaped", {"enum": ["ä"]}),
        ("spaced", {"type": "object", "properties": {"a": {"const": 1}}}),
        ("spaced", {}),
        ("zeros", {"type": "array", "items": {"type": "number", "minimum": 0.5, "maximum": 0.75}}),
        ("zeros", {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}}),
        ("exponents", {"type": "array", "items": {"enum": [1e30, 1e-7, 25, 2.0, 0]}}),
        ("exponents", {"type": "array", "items": {"type": "number", "minimum": -0.5}}),
    ],
)
def test_json_fits_its_schema_however_it_is_written(serve: Callable[..., Served], question: str, schema: Any) -> None:
    assert serve().ask(question, json_schema=schema).text == ANSWERS[question]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_does_not_cut_json(serve: Callable[..., Served], stream: bool) -> None:
    client = serve().ask("zeros", stream=stream, json_schema={"type": "array"}, stop=[",", "."])
    assert client.text == ANSWERS["zeros"]
    assert client.responses[-1]["finish_reason"] == b"stop"
    assert serve().ask("zeros", stream=stream, stop=[","]).text == "[0.7500"


@pytest.mark.parametrize(
    ("template", "given", "variables"),
    [
        ("{{ enable_thinking }}", {"enable_thinking": False}, "enable_thinking=false"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "enable_thinking=false"),
        ("{{ reasoning_effort }}", {"reasoning_effort": "none"}, 'reasoning_effort="none"'),
        ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, 'reasoning_effort="low"'),
        ("</think>", {"enable_thinking": True}, "hello"),
        ("no tags", {"enable_thinking": False}, "hello"),
        ("no tags", {"reasoning_effort": "none"}, "hello"),
    ],
)
def test_variables_reach_the_chat_template(
    thinker: Callable[..., Served], template: str, given: Any, variables: str
) -> None:
    client = ask_chat(thinker(template), "hello", chat_template_kwargs=given)
    assert client.text.split("\n")[-1] == variables


@pytest.mark.parametrize(
    ("template", "given", "message"),
    [
        ("{{ enable_thinking }}", {"reasoning_effort": "low"}, "no variable 'reasoning_effort'; it has 'enable_thi"),
        ("{{ enable_thinkings }}", {"enable_thinking": True}, "no variable 'enable_thinking'"),
        ("</think>", {"reasoning_effort": "none"}, "no variable 'enable_thinking'"),
        ("enable_thinking", {"reasoning_effort": "none", "enable_thinking": True}, "contradict each other"),
        ("{{ messages }}", {"messages": []}, "got 'messages'"),
        ("", [1], "chat_template_kwargs: expected an object"),
    ],
)
def test_a_variable_that_changes_nothing_is_refused(
    thinker: Callable[..., Served], template: str, given: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _ = ask_chat(thinker(template), "hello", chat_template_kwargs=given).text


@pytest.fixture
def engine_file(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"answers": ANSWERS, "block_tokens": 8}))
    return path


class Served:
    def __init__(self, path: Path, **parameters: str) -> None:
        settings = read_settings("talker", {"num_kv_blocks": "64", **parameters}, LlmSize(1, 0, 0), 8)
        self.engine = ScriptedEngine(path, settings)
        self.session = LlmSession("talker", self.engine, settings, {"model": "talker"})

    def ask(self, *arguments: Any, **named: Any) -> Client:
        client = Client(request(*arguments, **named))
        self.session.execute([client])
        return client


@pytest.fixture
def serve(engine_file: Path) -> Iterator[Callable[..., Served]]:
    opened: list[Served] = []

    def start(**parameters: str) -> Served:
        opened.append(Served(engine_file, **parameters))
        return opened[-1]

    yield start
    for served in opened:
        served.session.close()


def test_concurrent_requests_share_the_steps(serve: Callable[..., Served]) -> None:
    alone = serve()
    for _ in range(8):
        assert alone.ask("count").text == ANSWERS["count"]
    together = serve()
    clients = [Client(request("count")) for _ in range(8)]
    together.session.execute(clients)
    assert [client.text for client in clients] == [ANSWERS["count"]] * 8
    assert alone.engine.steps == 8 * len(ANSWERS["count"])
    assert together.engine.steps < alone.engine.steps


def test_pauses_between_steps_keep_the_allowed_fraction(engine_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings("talker", {}, LlmSize(1, 0, 0), 8)
    pauses: list[float] = []
    monkeypatch.setattr(threading.Condition, "wait_for", record_pauses(threading.Condition.wait_for, pauses))
    session = LlmSession("talker", ScriptedEngine(engine_file, settings), settings, {"model": "talker"}, lambda: 0.25)
    monkeypatch.setattr(session, "_step", lambda take=session._step: (take(), 0.002)[1])
    try:
        client = Client(request("greet"))
        session.execute([client])
        assert client.text == ANSWERS["greet"]
    finally:
        session.close()
    # Three times the 2 ms of each step.
    assert pauses == [pytest.approx(0.006)] * len(ANSWERS["greet"].encode())


def record_pauses(wait_for: Any, pauses: list[float]) -> Any:
    def recorded(self: Any, predicate: Any, timeout: float | None = None) -> Any:
        if timeout is not None and timeout < 1:
            pauses.append(timeout)
        return wait_for(self, predicate, timeout)

    return recorded


def test_a_stream_gets_deltas_and_a_finish_reason(serve: Callable[..., Served]) -> None:
    client = serve().ask("count")
    assert client.text == ANSWERS["count"]
    assert len(client.responses) == len(ANSWERS["count"])
    assert [response["finish_reason"] for response in client.responses] == [b""] * 22 + [b"stop"]
    assert sum(response["num_output_tokens"] for response in client.responses) == 23
    assert client.responses[0]["num_input_tokens"] == 5


def test_the_last_response_has_the_cached_tokens_if_the_engine_reports_them(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    assert not any("num_cached_tokens" in response for response in _ended(served.ask("count")))
    step = served.engine.step
    monkeypatch.setattr(
        served.engine, "step", lambda: [replace(event, cached_tokens=3) if event.finish else event for event in step()]
    )
    responses = _ended(served.ask("count"))
    assert [response.get("num_cached_tokens") for response in responses] == [None] * 22 + [3]


def _ended(client: Client) -> list[dict[str, Any]]:
    assert client.text == ANSWERS["count"]
    return client.responses


def test_without_a_stream_there_is_one_response(serve: Callable[..., Served]) -> None:
    client = serve().ask("count", stream=False, max_tokens=7)
    assert client.text == "one two"
    assert [response["finish_reason"] for response in client.responses] == [b"length"]


def test_a_prompt_is_repeated_unless_it_is_excluded(serve: Callable[..., Served]) -> None:
    asked = request("count", stream=False, max_tokens=7)
    client = Client(replace(asked, inputs={**asked.inputs, "exclude_input_in_output": tensor("", False)}))
    serve().session.execute([client])
    assert client.text == "countone two"


def test_characters_of_several_tokens_are_never_split(serve: Callable[..., Served]) -> None:
    client = serve().ask("greet")
    assert client.text == ANSWERS["greet"]
    assert all("�" not in response["text_output"].decode() for response in client.responses)


def test_a_stop_string_ends_the_text_and_the_sequence(serve: Callable[..., Served]) -> None:
    served = serve()
    client = served.ask("count", stop=["three", "never"])
    assert client.text == "one two "
    assert client.responses[-1]["finish_reason"] == b"stop"
    assert served.ask("greet").text == ANSWERS["greet"]
    assert served.engine.stats().used_blocks == 0


def test_a_client_that_disconnects_frees_its_blocks_and_disturbs_no_other(serve: Callable[..., Served]) -> None:
    served = serve()
    for _ in range(50):
        leaver, neighbour = served.ask("long"), served.ask("count")
        with leaver.came:
            assert leaver.came.wait_for(lambda leaver=leaver: len(leaver.responses) >= 3, 20)
        leaver.cancel()
        assert neighbour.text == ANSWERS["count"]
        assert leaver.ended.wait(20)
    assert served.engine.stats().used_blocks == 0


def test_a_prompt_above_the_cache_size_is_refused_before_it_is_queued(serve: Callable[..., Served]) -> None:
    served = serve(num_kv_blocks="6")
    client = served.ask("a" * 800)
    with pytest.raises(ContextTooLong, match="the prompt is too long: expected less than 48 tokens, got 800"):
        _ = client.text
    assert served.engine.added == []


def test_max_tokens_is_limited_to_the_cache_and_reported(serve: Callable[..., Served]) -> None:
    client = serve(num_kv_blocks="6").ask("long", max_tokens=200)
    assert client.text == "x" * 44
    assert client.responses[-1]["finish_reason"] == b"length"


def test_requests_wait_while_the_cache_is_full_and_all_complete(serve: Callable[..., Served]) -> None:
    served = serve(num_kv_blocks="6")
    clients = [served.ask("long", max_tokens=30) for _ in range(6)]
    assert [client.text for client in clients] == ["x" * 30] * 6
    assert served.engine.stats().used_blocks == 0


@pytest.mark.parametrize("size", [0, 1, 2])
def test_requests_above_the_queue_size_are_refused(serve: Callable[..., Served], size: int) -> None:
    served = serve(num_kv_blocks="27", max_queue_size=str(size))
    permits, step = threading.Semaphore(0), served.engine.step
    served.engine.step = lambda: (permits.acquire(timeout=20), step())[1]  # type: ignore[method-assign]
    # All come while the first step runs. One more finds room, and does not wait.
    first = served.ask("long", max_tokens=200)
    assert eventually(lambda: bool(served.engine.added))
    beside = served.ask("count", max_tokens=3)
    clients = [served.ask("long") for _ in range(8)]
    refused = [client for client in clients if client.error is not None]
    assert refused == clients[size:]
    expected = f"{size} requests wait for room in the KV cache, and max_queue_size is {size}"
    assert all(isinstance(client.error, QueueFull) and expected in str(client.error) for client in refused)
    permits.release(10_000)
    assert [client.text for client in (first, beside, *clients[:size])] == ["x" * 200, "one", *["x" * 200] * size]
    # The blocks of those that have ended are free.
    assert served.ask("long").text == "x" * 200


def test_concurrent_requests_to_an_idle_engine_do_not_wait(serve: Callable[..., Served]) -> None:
    served = serve(max_queue_size="0")
    clients = [Client(request("count", max_tokens=30)) for _ in range(12)]
    served.session.execute(clients)
    assert [client.text for client in clients] == [ANSWERS["count"]] * 12


def test_no_two_schemas_are_compiled_by_one_step_or_by_two_in_a_row(serve: Callable[..., Served]) -> None:
    served = serve(num_kv_blocks="1000", max_num_seqs="16")
    log: list[str] = []
    add, step, release = served.engine.add, served.engine.step, threading.Event()

    def record_add(number: int, prompt: Any, sampling: Any) -> None:
        log.append("schema" if sampling.choice else "plain")
        add(number, prompt, sampling)

    def record_step() -> Any:
        log.append("step")
        assert release.wait(20)
        return step()

    served.engine.add, served.engine.step = record_add, record_step  # type: ignore[method-assign]
    running = served.ask("long")
    assert eventually(lambda: log == ["plain", "step"])
    clients = [served.ask("count", choice=[ANSWERS["count"]]) for _ in range(4)] + [served.ask("greet")]
    release.set()
    assert [client.text for client in clients] == [ANSWERS["count"]] * 4 + [ANSWERS["greet"]]
    assert running.text == ANSWERS["long"]
    first = "".join({"schema": "C", "plain": "p", "step": "."}[item] for item in log)
    assert first.startswith("p.Cp..C..C..C.."), first


def test_waiting_clients_that_disconnect_free_their_slots_at_once(serve: Callable[..., Served]) -> None:
    served = serve(num_kv_blocks="4", max_queue_size="2")
    permits, step = threading.Semaphore(0), served.engine.step
    served.engine.step = lambda: (permits.acquire(timeout=20), step())[1]  # type: ignore[method-assign]
    running = served.ask("count")
    assert eventually(lambda: bool(served.engine.added))
    waiting = [served.ask("long") for _ in range(2)]
    assert isinstance(served.ask("greet").error, QueueFull)
    for client in waiting:
        client.cancel()
    permits.release()  # one step
    # The first of the queue does not fit beside the running one, and the others are behind it.
    assert all(client.ended.wait(5) for client in waiting)
    assert [client.responses for client in waiting] == [[], []]
    assert not running.ended.is_set()
    later = served.ask("greet")
    permits.release(1000)
    assert (running.text, later.text) == (ANSWERS["count"], ANSWERS["greet"])
    assert len(served.engine.added) == 2


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1}, "temperature: expected 0 to 100"),
        ({"top_p": 2}, "top_p"),
        ({"min_p": 1.5}, "min_p: expected 0 to 1"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number"),
        ({"stop": 3}, "stop: expected a text or a list of texts"),
        ({"seed": True}, "seed"),
        ({"seed": -2}, "seed: expected -1 to 9.2"),
        ({"n": 2}, "n: expected 1"),
        ({"ignore_eos": "x"}, "ignore_eos: expected true or false"),
        ({"temprature": 1}, "unknown sampling parameter 'temprature'"),
        ({"guided_choice": ["a"]}, "unknown sampling parameter 'guided_choice'"),
        ({"json_schema": "[1]"}, "expected a JSON object"),
    ],
)
def test_an_invalid_sampling_parameter_is_named(
    serve: Callable[..., Served], sampling: dict[str, Any], message: str
) -> None:
    served = serve()
    client = served.ask("count", **sampling)
    with pytest.raises(InvalidRequest, match=message):
        _ = client.text
    assert served.ask("count").text == ANSWERS["count"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("[", "expected JSON"),
        ([], "at least one message"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "user", "content": 3}], "expected a text as content"),
        ([{"role": "nobody", "content": "x"}], "knows no role 'nobody'"),
    ],
)
def test_invalid_messages_are_named(serve: Callable[..., Served], messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _ = serve().ask(None, messages=messages).text


def test_unsupported_constraint_parameters_are_named(serve: Callable[..., Served]) -> None:
    def ask(**parameters: Any) -> Client:
        client = Client(Request("talker", {"text_input": tensor("text_input", "count")}, parameters=parameters))
        served.session.execute([client])
        return client

    served = serve()
    for name, value, instead in (
        ("stop_words", "two", "; use 'stop'"),
        ("guided_regex", "two", "; use 'regex'"),
        ("guided_grammar", 'root ::= "a"', "; use 'grammar'"),
        ("chat_template_kwargs", '{"enable_thinking": false}', ""),
        ("reasoning_effort", "low", ""),
        ("response_format", "json_object", "; use 'json_schema'"),
        ("repeat_penalty", 1.3, "; use 'repetition_penalty'"),
        ("max_completion_tokens", 3, "; use 'max_tokens'"),
        ("skip_special_tokens", False, ""),
    ):
        with pytest.raises(InvalidRequest) as caught:
            _ = ask(**{name: value}).text
        assert (
            f"unknown sampling parameter '{name}'{instead}; known are choice, frequency_penalty, "
            in caught.value.message
        )
    assert ask(max_tokens=3, bad_words="", repeat_penalty=1, skip_special_tokens=True, customer=7).text == "countone"


def test_the_role_developer_becomes_system_for_templates_without_it(
    serve: Callable[..., Served], engine_file: Path
) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "count"}]
    assert serve().ask(None, messages=messages).text == ANSWERS["count"]
    engine_file.write_text(json.dumps({"answers": ANSWERS, "chat_template": "{% if role == 'developer' %}"}))
    # Other role names are left to the template, which gets them unchanged.
    with pytest.raises(InvalidRequest, match="knows no role 'developer'"):
        _ = serve().ask(None, messages=messages).text


def test_messages_and_a_prompt_exclude_each_other(serve: Callable[..., Served]) -> None:
    served = serve()
    with pytest.raises(InvalidRequest, match="got both"):
        _ = served.ask("count", messages=[{"role": "user", "content": "count"}]).text
    assert served.ask(None, messages=[{"role": "user", "content": "count"}]).text == ANSWERS["count"]


def test_an_engine_that_fails_fails_its_requests_and_refuses_new_ones(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()

    def broken() -> list[TokenEvent]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(served.engine, "step", broken)
    with pytest.raises(SessionLost, match="the device is gone"):
        _ = served.ask("count").text
    with pytest.raises(SessionLost):
        _ = served.ask("count").text


def test_one_invalid_request_of_a_step_fails_alone(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    step = served.engine.step

    def step_with_one_error() -> list[TokenEvent]:
        events = step()
        bad = [number for number in served.engine.added if number % 2 and number in served.engine._left]
        for number in bad:
            served.engine.cancel(number)
        return [event for event in events if event.sequence_id not in bad] + [
            TokenEvent(number, error="bad grammar") for number in bad
        ]

    monkeypatch.setattr(served.engine, "step", step_with_one_error)
    bad, good = served.ask("count", json_schema='{"type": "object"}'), served.ask("count")
    with pytest.raises(InvalidRequest, match="bad grammar"):
        _ = bad.text
    assert good.text == ANSWERS["count"]


def test_closing_fails_open_requests(serve: Callable[..., Served]) -> None:
    served = serve()
    stuck = threading.Event()
    step = served.engine.step
    served.engine.step = lambda: (stuck.wait(20), step())[1]  # type: ignore[method-assign]
    client = served.ask("long")
    closing = threading.Thread(target=served.session.close)
    closing.start()
    stuck.set()
    closing.join(20)
    assert client.ended.wait(20)
    assert isinstance(client.error, SessionLost)


def test_a_closed_model_has_no_metrics_even_while_a_caller_keeps_its_error(engine_file: Path) -> None:
    def families() -> list[str]:
        labels = {"model": "talker"}
        return [view.name for view in REGISTRY.views() if any(sample.labels == labels for sample in view.samples)]

    served = Served(engine_file)
    with pytest.raises(InvalidRequest) as kept:
        _ = served.ask("hello", max_tokens=-1).text
    assert "vllm:prompt_tokens_total" in families()
    served.session.close()
    assert families() == []
    assert kept.value.message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_num_seqs": "0"}, "max_num_seqs must be a whole number from 1"),
        ({"kv_cache_mb": "10", "num_kv_blocks": "4"}, "expected one of them, got both"),
        ({"kv_cache_mb": "10"}, "set num_kv_blocks"),
        ({"prompt_lookup": "true", "draft_model": "a.gguf"}, "prompt_lookup and draft_model: expected one of them"),
        ({"draft_model": "../a.gguf"}, "draft_model: expected a name in the model's folder"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens: expected 1 to 16, with prompt_lookup or"),
        ({"num_speculative_tokens": "17", "prompt_lookup": "true"}, "expected 1 to 16, .*got 17"),
    ],
)
def test_an_invalid_setting_is_named(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_settings("talker", parameters, LlmSize(1, 0, 0), 32)


def test_the_number_of_cache_blocks_follows_from_megabytes() -> None:
    size = LlmSize(1, 8192, 2 * 30 * 3 * 64 * 4)
    assert read_settings("talker", {"kv_cache_mb": "100"}, size, 32).num_kv_blocks == 100_000_000 // (46_080 * 32)
    with pytest.raises(LoadError, match=r"expected at least 1\.5, one block"):
        read_settings("talker", {"kv_cache_mb": "1"}, size, 32)


def test_request_options_override_the_models_defaults(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    served.engine.default_sampling = Sampling(max_tokens=3)
    assert served.ask("count", max_tokens=None).text == "one"
    assert served.ask("count", max_tokens=7).text == "one two"


def ask_tokens(served: Served, asked: Request) -> dict[str, Any]:
    """Return the outputs of the only response. Raises its error."""
    client = Client(asked)
    outputs: list[Mapping[str, Any]] = []
    client.send = lambda found, **more: outputs.append(found)  # type: ignore[method-assign]
    served.session.execute([client])
    if client.error is not None:
        raise client.error
    (found,) = outputs
    return {name: array.tolist() for name, array in found.items()}


def test_tokens_of_a_prompt_and_a_chat_are_told(serve: Callable[..., Served]) -> None:
    """A token of the scripted engine is a byte."""
    served = serve()
    messages = [{"role": "user", "content": "Grüße"}]
    for asked in (request("Grüße"), request(None, messages=messages)):
        only_tokens = replace(asked, inputs={**asked.inputs, "tokenize": tensor("tokenize", True)})
        found = ask_tokens(served, only_tokens)
        assert found == {"token_ids": list("Grüße".encode()), "max_context": [512]}
    assert served.engine.added == []
