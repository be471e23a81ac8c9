"""Finished answers of both engines to JSON schemas, over each API."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit.json_schemas import EVERYDAY, KEYWORDS, RANDOM, find_problem
from tests.kit.server import serve

_TINY = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
_SCHEMAS = [*EVERYDAY, *KEYWORDS, *RANDOM]
_MESSAGES = [{"role": "user", "content": "give me json"}]
_SAMPLING: dict[str, Any] = {"max_tokens": 120, "temperature": 3.0, "seed": 7}


@pytest.fixture(scope="module", params=["llama_cpp", "openvino_genai"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip("xllamacpp" if name == "llama_cpp" else name, reason="needs test-all")
    return name


@pytest.fixture(scope="module")
def server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    (models / "tiny/1").mkdir(parents=True)
    # With a template that has tools and does not write them, and a context in which a library has room to write them.
    data = _TINY.read_bytes()
    (plain,) = re.findall(rb"\{% for m in messages %\}.*\{% endif %\}", data, re.DOTALL)
    short = re.sub(rb" (?=[%}]\}|\+)|(?<=[%{+]) ", b"", plain)
    with_tools = b"{%if tools%}{%endif%}" + short
    assert len(with_tools) <= len(plain)
    data = data.replace(plain, with_tools.ljust(len(plain)))
    context = b"llama.context_length" + bytes([4, 0, 0, 0])
    assert data.count(context) == 1
    data = data.replace(context + (512).to_bytes(4, "little"), context + (4096).to_bytes(4, "little"))
    (models / "tiny/1/model.gguf").write_bytes(data)
    (models / "tiny/config.pbtxt").write_text(
        f'backend: "{engine}" parameters {{ key: "tool_call_parser" value {{ string_value: "hermes" }} }}'
        'parameters { key: "threads" value { string_value: "1" } }'
    )
    with serve(models) as running:
        yield running


def _chat(server: Any, **more: Any) -> tuple[int, Any]:
    found: tuple[int, Any] = server.ask(
        "/v1/chat/completions", {"model": "tiny", "messages": _MESSAGES, **_SAMPLING, **more}
    )
    return found


def _format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _called(choice: Any) -> tuple[Any, bool]:
    calls = choice["message"].get("tool_calls") or [{"function": {"arguments": ""}}]
    return calls[0]["function"]["arguments"], choice["finish_reason"] == "tool_calls"


_CHAT: dict[str, Any] = {"model": "tiny", "messages": _MESSAGES, **_SAMPLING}
_TEXT: dict[str, Any] = {"model": "tiny", "prompt": "give me json", **_SAMPLING}
_APIS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], tuple[Any, bool]]]] = {
    "openai_chat": (
        "/v1/chat/completions",
        lambda schema: {**_CHAT, **_format(schema)},
        lambda answer: (
            answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"] == "stop",
        ),
    ),
    "required_tool": (
        "/v1/chat/completions",
        lambda schema: {**_CHAT, "tools": [_tool("act", parameters=schema)], "tool_choice": "required"},
        lambda answer: _called(answer["choices"][0]),
    ),
    "completion": (
        "/v1/completions",
        lambda schema: {**_TEXT, "structured_outputs": {"json": schema}},
        lambda answer: (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"] == "stop"),
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {
            "model": "tiny", "input": "give me json", "max_output_tokens": 120, "temperature": 1.9,
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}},
        },
        lambda answer: (
            (answer["output"][-1]["content"][0]["text"], True) if answer["status"] == "completed" else ("", False)
        ),
    ),
    "anthropic": (
        "/v1/messages",
        lambda schema: {
            "model": "tiny", "messages": _MESSAGES, "max_tokens": 120, "temperature": 1.0,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        lambda answer: ("".join(part["text"] for part in answer["content"]), answer["stop_reason"] == "end_turn"),
    ),
    "ollama": (
        "/api/chat",
        lambda schema: {
            "model": "tiny", "messages": _MESSAGES, "format": schema, "stream": False,
            "options": {"num_predict": 120, "temperature": 3.0, "seed": 7},
        },
        lambda answer: (answer["message"]["content"], answer["done_reason"] == "stop"),
    ),
    "triton": (
        "/v2/models/tiny/generate",
        lambda schema: {
            "text_input": "give me json", "sampling_parameters": json.dumps({**_SAMPLING, "json_schema": schema}),
            "return_finish_reason": True, "exclude_input_in_output": True,
        },
        lambda answer: (answer["text_output"], answer["finish_reason"] == "stop"),
    ),
}  # fmt: skip
"""Name -> path, the body for a schema, and the text of an answer with whether it is finished."""


def _ask(server: Any, api: str, schema: Any) -> tuple[int, Any, Any]:
    path, body, read = _APIS[api]
    status, answer = server.ask(path, body(schema))
    return (status, *read(answer)) if status == 200 else (status, answer, None)


def _openai_stream(server: Any, schema: Any) -> tuple[int, Any, Any]:
    body = {**_CHAT, **_format(schema), "stream": True}
    status, text = server.request("POST", "/v1/chat/completions", json.dumps(body).encode())
    if status != 200:
        return status, json.loads(text), None
    lines = [line.removeprefix("data: ") for line in text.decode().split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if "error" in events[-1]:
        return 500, events[-1], None
    content = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    return status, content, events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("api", [*_APIS, "openai_stream"])
@pytest.mark.parametrize(
    "schemas",
    [
        pytest.param([*EVERYDAY[::3], *KEYWORDS[9::30]], marks=pytest.mark.full, id="some"),
        pytest.param(_SCHEMAS, marks=[pytest.mark.long, pytest.mark.timeout(1800)], id="all"),
    ],
)
def test_every_finished_answer_obeys(server: Any, api: str, schemas: list[Any]) -> None:
    count: Counter[str] = Counter()
    for schema in schemas:
        if not isinstance(schema, dict) or (api == "required_tool" and "properties" not in schema):
            continue  # no request has one
        ask = _openai_stream if api == "openai_stream" else partial(_ask, api=api)
        status, answer, is_finished = ask(server, schema=schema)
        if status == 200:
            count["finished" if is_finished else "cut"] += 1
            assert not is_finished or not find_problem(schema, answer), (schema, answer)
        elif status == 400:
            count["refused"] += 1
        else:
            # The engines' libraries do not remember names that were free.
            assert "constraint_failed" in json.dumps(answer), (schema, status, answer)
            assert "occurs twice" in json.dumps(answer), (schema, answer)
            count["stopped"] += 1
    print(f"{api}: {count}")
    assert count["finished"] > count.total() // 4, count
    assert count["refused"] < count.total() // 2, count


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _tool(name: str, *, description: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, **more}}


def _events(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    status, text = server.request("POST", path, json.dumps(body).encode())
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.decode().splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _streamed_choices(server: Any, **more: Any) -> list[Any]:
    body = {"model": "tiny", "messages": _MESSAGES, **_SAMPLING, **more, "stream": True}
    return [event["choices"][0] for event in _events(server, "/v1/chat/completions", body)]


@pytest.mark.full
class TestReports:
    """Situations in which people reported wrong answers of other servers: project and number stand at each."""

    def test_a_pattern_with_a_needless_escape_is_held_or_refused(self, server: Any) -> None:
        """ggml-org/llama.cpp#19051: free text, with 200."""
        schema = _object(greeting={"type": "string", "pattern": r"^hello there\!$"})
        status, answer, is_finished = _ask(server, "openai_chat", schema)
        assert (status, is_finished) == (200, True), answer
        assert json.loads(answer) == {"greeting": "hello there!"}

    def test_a_grammar_of_another_syntax_is_refused(self, server: Any) -> None:
        """ggml-org/llama.cpp#11544: free text, with 200."""
        status, answer = _chat(server, structured_outputs={"grammar": "answer ::= 'yes' "})
        assert status == 400
        assert "grammar" in answer["error"]["message"]

    def test_the_named_tool_is_called(self, server: Any) -> None:
        """ggml-org/llama.cpp#26535: the name was ignored, and another tool called."""
        tools = [_tool(name, parameters=_object(zone={"enum": ["utc", "cet"]})) for name in ("time_in", "time_now")]
        for name in ("time_in", "time_now"):
            choice = {"type": "function", "function": {"name": name}}
            status, answer = _chat(server, tools=tools, tool_choice=choice)
            assert status == 200, answer
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == name
            assert json.loads(call["function"]["arguments"])["zone"] in ("utc", "cet")

    @pytest.mark.parametrize("more", [{}, {"parameters": _object()}], ids=["none", "empty"])
    def test_a_tool_without_parameters_is_called_with_an_empty_object(self, server: Any, more: dict[str, Any]) -> None:
        """vllm-project/vllm#9693, #21365: no arguments in a stream, or an empty text."""
        tools = [_tool("now", **more)]
        status, answer = _chat(server, tools=tools, tool_choice="required")
        assert status == 200, answer
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {}
        choices = _streamed_choices(server, tools=tools, tool_choice="required")
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert json.loads("".join(call["function"].get("arguments", "") for call in calls)) == {}
        assert choices[-1]["finish_reason"] == "tool_calls"

    def test_a_description_does_not_change_the_grammar_of_a_call(self, server: Any) -> None:
        """ggml-org/llama.cpp#27619: a text of a description ended the grammar."""
        text = 'A path, e.g. "src/**" | `./a`; omit it\nfor the <root> {folder}. IMPORTANT: no "undefined" or \'null\'!'
        schema = _object(pattern={"type": "string", "maxLength": 5, "description": text})
        tool = _tool("glob", description=text, parameters=schema)
        status, answer = _chat(server, tools=[tool], tool_choice="required")
        assert status == 200, answer
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert find_problem(schema, call["function"]["arguments"]) == ""

    def test_a_streamed_call_ends_with_the_reason_tool_calls_and_is_no_content(self, server: Any) -> None:
        """BerriAI/litellm#35663, #34769: it ended with `stop`, or came as content."""
        tools = [_tool("lamp", parameters=_object(on={"type": "boolean"}))]
        choices = _streamed_choices(server, tools=tools, tool_choice="required")
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert not any(choice["delta"].get("content") for choice in choices)

    def test_ollamas_format_is_obeyed_in_a_stream(self, server: Any) -> None:
        """agno-agi/agno#9262, ollama/ollama#14440: the schema held for whole answers alone."""
        schema = _object(confidence={"type": "number", "minimum": 0, "maximum": 1}, state={"enum": ["on", "off"]})
        options = {"num_predict": 120, "temperature": 1.0, "seed": 3}
        body = {"model": "tiny", "messages": _MESSAGES, "format": schema, "options": options}
        *messages, last = _events(server, "/api/chat", body)
        assert last["done_reason"] == "stop"
        assert find_problem(schema, "".join(event["message"]["content"] for event in [*messages, last])) == ""

    def test_a_format_beside_tools_is_obeyed_or_refused(self, server: Any) -> None:
        """ollama/ollama-python#546: with both, one of them was ignored."""
        schema = _object(state={"enum": ["on", "off"]})
        tools = [_tool("lamp", parameters=_object(on={"type": "boolean"}))]
        status, answer = _chat(server, tools=tools, **_format(schema))
        if status == 200:
            assert find_problem(schema, answer["choices"][0]["message"]["content"]) == ""
        else:
            assert status == 400
            assert "response_format" in answer["error"]["message"]

    def test_the_older_names_of_a_choice_are_obeyed(self, server: Any) -> None:
        """vllm-project/vllm#12225: prose came back."""
        status, answer = _chat(server, guided_choice=["positive", "negative"])
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] in ("positive", "negative")

    def test_no_part_of_a_stop_string_is_streamed(self, server: Any) -> None:
        """vllm-project/vllm#3574, #2577: the tokens before the last of a longer stop string were."""
        count = {"messages": [{"role": "user", "content": "count from three"}], "temperature": 0, "max_tokens": 40}
        _, answer = _chat(server, **count)
        whole = answer["choices"][0]["message"]["content"]
        assert " eight nine ten" in whole
        for stop in (" eight nine ten", "x y", " seven"):
            choices = _streamed_choices(server, **count, stop=[stop])
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            _, answer = _chat(server, **count, stop=[stop])
            assert text == answer["choices"][0]["message"]["content"] == whole.partition(stop)[0]

    def test_a_stop_string_beside_tools_loses_no_text(self, server: Any) -> None:
        """vllm-project/vllm#42210: the text before it was not streamed."""
        tools = [_tool("lamp", parameters=_object(on={"type": "boolean"}))]
        more = {"temperature": 0, "max_tokens": 40, "stop": ["e"], "tools": tools}
        choices = _streamed_choices(server, **more)
        _, answer = _chat(server, **more)
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == (answer["choices"][0]["message"]["content"] or "")
        assert choices[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]
