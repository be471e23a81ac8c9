"""The Python packages of ollama and Anthropic, and OpenAI's for responses, against this server: they run unchanged, as
do the calls of Home Assistant's integration for ollama.

The models are a scripted one, and tests/data/tiny_llm with OpenVINO GenAI.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder
from tests.kit.server import serve

TINY = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
CALL = '{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}}'
ANSWERS = {
    "hello": "Hello! How can I help you?",
    "weather": f"I look.\n<tool_call>\n{CALL}\n</tool_call>",
    "4": "Cold.",
}
THOUGHT = "<think>\n4 > 3\n</think>\n\nBecause."
JAPAN = "what is the capital of Japan?"
TOKYO = "The capital of Japan is Tokyo."

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("openvino_genai", "ollama", "anthropic", "openai")),
        reason="needs openvino-genai, ollama, anthropic and openai, of the extra test-all",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    scripts = {
        "talker": {"answers": ANSWERS, "chat_template": "<tool_call>"},
        "thinker": {"answers": {"why": THOUGHT}, "chat_template": "{{ enable_thinking }}</think>"},
    }
    for name, script in scripts.items():
        model_folder(models / name, 'backend: "scripted_llm"', {"1/script.json": json.dumps(script)})
    model_folder(models / "tiny", 'backend: "openvino_genai"', {"1/model.gguf": TINY.read_bytes()})
    with serve(models) as running:
        yield running


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    import ollama

    with ollama.Client(host=server.url("")) as opened:
        yield opened


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


GREEDY = {"temperature": 0}


def test_a_chat_is_answered_whole_and_streamed(client: Any) -> None:
    answer = client.chat("tiny", user(JAPAN), options={**GREEDY, "num_ctx": 512})
    assert (answer.message.role, answer.message.content) == ("assistant", TOKYO)
    assert (answer.done, answer.done_reason) == (True, "stop")
    parts = list(client.chat("tiny:latest", user(JAPAN), options=GREEDY, stream=True, think=False, keep_alive="5m"))
    assert "".join(part.message.content for part in parts) == TOKYO
    assert len(parts) > 5
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.prompt_eval_count, last.eval_count) == (answer.prompt_eval_count, answer.eval_count)
    assert 0 < last.prompt_eval_duration < last.total_duration
    cut = client.chat("tiny", user(JAPAN), options={**GREEDY, "num_predict": 3})
    assert (cut.eval_count, cut.done_reason) == (3, "length")


def test_a_prompt_is_a_chat_unless_it_is_raw(client: Any) -> None:
    assert client.generate("tiny", JAPAN, options=GREEDY).response == TOKYO
    assert "".join(part.response for part in client.generate("tiny", JAPAN, options=GREEDY, stream=True)) == TOKYO
    prompt = f"<|im_start|>user\n{JAPAN}<|im_end|>\n<|im_start|>assistant\n"
    assert client.generate("tiny", prompt, raw=True, options=GREEDY).response == TOKYO


def test_a_schema_is_followed(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["size"],
        "additionalProperties": False,
    }
    for seed in range(3):
        answer = client.generate("tiny", "say hello", format=schema, options={"seed": seed})
        assert json.loads(answer.response)["size"] in range(10)


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"4 degrees in {city}"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_function_is_called_and_its_result_is_answered(client: Any, is_stream: bool) -> None:
    messages: list[Any] = user("weather")
    answer = client.chat("talker", messages, tools=[weather], stream=is_stream)
    parts = list(answer) if is_stream else [answer]
    assert "".join(part.message.content for part in parts) == "I look."
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Bern", "days": [1, 2]})
    messages += [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_name": "weather"},
    ]
    assert client.chat("talker", messages, tools=[weather]).message.content == "Cold."


def test_models_are_listed_shown_unloaded_and_loaded(client: Any) -> None:
    def loaded() -> dict[str, Any]:
        return {item.model: item for item in client.ps().models}

    assert client.generate("tiny").done_reason == "load"
    assert sorted(loaded()) == ["talker:latest", "thinker:latest", "tiny:latest"]
    assert loaded()["tiny:latest"].size > 100_000_000
    (tiny,) = [item for item in client.list().models if item.model == "tiny:latest"]
    assert (tiny.details.format, len(tiny.digest)) == ("gguf", 64)
    assert tiny.modified_at is not None
    assert client.show("tiny").capabilities == ["completion", "tools"]
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    assert eventually(lambda: "tiny:latest" not in loaded())
    assert "tiny:latest" in [item.model for item in client.list().models]
    assert client.chat("tiny", []).done_reason == "load"
    assert "tiny:latest" in loaded()


def test_errors_have_their_status_and_message(client: Any) -> None:
    import ollama

    for ask, status, said in (
        (lambda: client.chat("nosuch", user("hello")), 404, "'nosuch' is not found"),
        (lambda: client.chat("tiny", user("x" * 3000)), 400, "the prompt is too long: expected less than 512 tokens"),
        (lambda: list(client.chat("tiny", user("x" * 3000), stream=True)), 400, "less than 512 tokens"),
        (lambda: client.chat("tiny", user("hello"), think=True), 400, "no variable 'enable_thinking'"),
        (lambda: client.embed("tiny", "hello"), 400, "model 'tiny' gives no embeddings"),
        (lambda: client.pull("tiny"), 404, "unknown path: POST /api/pull"),
    ):
        with pytest.raises(ollama.ResponseError, match=said) as caught:
            ask()
        assert caught.value.status_code == status


def test_the_calls_of_home_assistants_integration_are_answered(server: Any) -> None:
    """With the arguments of its `async_setup_entry` and `_async_handle_chat_log`."""
    import ollama

    async def converse() -> tuple[set[str], list[dict[str, Any]]]:
        async with ollama.AsyncClient(host=server.url(""), headers=None) as client:
            names = {model["model"] for model in (await client.list()).get("models", [])}
            tool = {"name": "weather", "parameters": {"type": "object", "properties": {}}, "description": "Weather"}
            stream = await client.chat(
                model="talker:latest",
                messages=[
                    ollama.Message(role="system", content="You control a home."),
                    ollama.Message(role="user", content="weather", images=None),
                ],
                tools=[{"type": "function", "function": tool}],
                stream=True,
                keep_alive=-1,
                options={"num_ctx": 8192},
                think=False,
                format=None,
            )
            return names, [response["message"] async for response in stream]

    names, messages = asyncio.run(converse())
    assert "talker:latest" in names
    assert "".join(message.get("content") or "" for message in messages) == "I look."
    (call,) = [call for message in messages for call in message.get("tool_calls") or ()]
    assert call["function"]["arguments"] == {"city": "Bern", "days": [1, 2]}


@pytest.fixture
def anthropic_client(server: Any) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url(""), api_key="none", max_retries=0) as opened:
        yield opened


def test_anthropics_client_gets_messages_whole_and_streamed(anthropic_client: Any) -> None:
    call = {"model": "tiny", "max_tokens": 50, "messages": user(JAPAN), "extra_body": {"temperature": 0}}
    answer = anthropic_client.messages.create(**call)
    assert [block.text for block in answer.content] == [TOKYO]
    assert answer.stop_reason == "end_turn"
    with anthropic_client.messages.stream(**call) as stream:
        assert len(list(stream.text_stream)) > 5
        streamed = stream.get_final_message()
    assert [block.text for block in streamed.content] == [TOKYO]
    assert streamed.usage.output_tokens == answer.usage.output_tokens
    assert streamed.usage.input_tokens == answer.usage.input_tokens
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=user(JAPAN))
    assert counted.input_tokens == answer.usage.input_tokens
    cut = anthropic_client.messages.create(**{**call, "max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def test_anthropics_client_calls_a_tool_and_sends_its_result(anthropic_client: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"name": "weather", "description": "Weather of a city", "input_schema": schema}]
    messages: list[Any] = user("weather")
    call = {"model": "talker", "max_tokens": 200, "tools": tools}
    with anthropic_client.messages.stream(**call, messages=messages) as stream:
        answer = stream.get_final_message()
    text, use = answer.content
    assert (text.text, use.name, use.input) == ("I look.", "weather", {"city": "Bern", "days": [1, 2]})
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "4"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert anthropic_client.messages.create(**call, messages=messages).content[0].text == "Cold."


def test_anthropics_client_gets_thinking_and_sends_it_back(anthropic_client: Any) -> None:
    messages: list[Any] = user("why")
    call = {"model": "thinker", "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = anthropic_client.messages.create(**call, messages=messages)
    thought, text = answer.content
    assert (thought.thinking, text.text) == ("4 > 3", "Because.")
    assert answer.usage.output_tokens_details.thinking_tokens == len("<think>\n4 > 3\n</think>")
    with anthropic_client.messages.stream(**call, messages=messages) as stream:
        deltas = [event.thinking for event in stream if event.type == "thinking"]
        streamed = stream.get_final_message()
    assert ("".join(deltas), len(deltas) > 2) == ("4 > 3", True)
    assert streamed.content[0] == thought
    messages += [{"role": "assistant", "content": streamed.content}, *user("why")]
    assert anthropic_client.messages.create(**call, messages=messages).content[1].text == "Because."
    # The script repeats what it does not know: the prompt, of which the template's variables are a part.
    disabled = {**call, "thinking": {"type": "disabled"}}
    (text,) = anthropic_client.messages.create(**disabled, messages=user("x")).content
    assert text.text == "enable_thinking=false"


def test_anthropics_client_raises_its_own_errors(anthropic_client: Any) -> None:
    import anthropic

    call = {"model": "tiny", "max_tokens": 50, "messages": user("hello")}
    with pytest.raises(anthropic.NotFoundError, match="'nosuch' is not found"):
        anthropic_client.messages.create(**{**call, "model": "nosuch"})
    with pytest.raises(anthropic.BadRequestError, match="no variable 'enable_thinking'"):
        anthropic_client.messages.create(**call, thinking={"type": "enabled", "budget_tokens": 1024})
    with (
        pytest.raises(anthropic.BadRequestError, match="less than 512 tokens"),
        anthropic_client.messages.stream(**{**call, "messages": user("x" * 3000)}),
    ):
        pass


@pytest.fixture
def openai_client(server: Any) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=server.url("/v1"), api_key="none", max_retries=0) as opened:
        yield opened


def test_openais_client_gets_chats_and_is_told_what_is_not_supported(openai_client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="unknown path: POST /v1/images/generations") as unknown:
        openai_client.images.generate(model="talker", prompt="hello")
    assert unknown.value.code == "unknown_url"
    messages = [{"role": "developer", "content": "be brief"}, *user("hello")]
    ask = partial(openai_client.chat.completions.create, model="talker", messages=messages)
    with pytest.raises(openai.BadRequestError, match="'verbosity' is not supported; supported are") as bad:
        ask(verbosity="low")
    assert bad.value.param == "verbosity"
    (choice,) = ask(logprobs=True, top_logprobs=1, user="me", store=False, max_tokens=2).choices
    assert (choice.message.content, choice.finish_reason) == ("He", "length")
    assert [item.top_logprobs[0].token for item in choice.logprobs.content] == ["H", "e"]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    deltas = [chunk.choices[0].delta for chunk in ask(messages=user("weather"), tools=[tool], stream=True)]
    parts = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert [part.name for part in parts] == ["weather"] + [None] * (len(parts) - 1)
    assert json.loads("".join(part.arguments for part in parts)) == {"city": "Bern", "days": [1, 2]}


def test_openais_client_gets_reasoning_apart_and_switches_it(openai_client: Any) -> None:
    import openai

    ask = partial(openai_client.chat.completions.create, model="thinker")
    answer = ask(messages=user("why"))
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("4 > 3", "Because.")
    *chunks, last = ask(messages=user("why"), stream=True, stream_options={"include_usage": True})
    for usage in (answer.usage, last.usage):
        assert usage.completion_tokens_details.reasoning_tokens == len("<think>\n4 > 3\n</think>")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "4 > 3"
    assert "".join(delta.content or "" for delta in deltas) == "Because."
    # The script repeats what it does not know: the prompt, of which the template's variables are a part.
    for more in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        assert ask(messages=user("x"), **more).choices[0].message.content == "enable_thinking=false"
    with pytest.raises(openai.BadRequestError, match="no variable 'reasoning_effort'; it has 'enable_thinking'"):
        ask(messages=user("why"), reasoning_effort="high")


def check_types(*items: Any) -> None:
    """Fail for what is not of the package's own types: its client does not check what it reads."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    event = TypeAdapter(ResponseStreamEvent)
    for item in items:
        (Response.model_validate if item.__class__.__name__ == "Response" else event.validate_python)(item.to_dict())


def test_openais_client_gets_responses_whole_streamed_and_stored(openai_client: Any) -> None:
    import openai

    responses = openai_client.responses
    call = {"model": "tiny", "input": JAPAN, "temperature": 0}
    answer = responses.create(**call)
    assert (answer.output_text, answer.status, answer.usage.output_tokens_details.reasoning_tokens) == (
        TOKYO, "completed", 0
    )  # fmt: skip
    raw = list(responses.create(**call, stream=True))
    check_types(answer, *raw)
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert raw[-1].response.output_text == TOKYO
    with responses.stream(**call) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert ("".join(deltas), streamed.output_text, len(deltas) > 5) == (TOKYO, TOKYO, True)
    assert streamed.usage == answer.usage
    assert responses.retrieve(answer.id) == answer
    longer = responses.create(model="talker", previous_response_id=answer.id, input="hello")
    items = list(responses.input_items.list(longer.id, order="asc", limit=2))
    assert [(item.role, item.content[0].text) for item in items[-2:]] == [("assistant", TOKYO), ("user", "hello")]
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        responses.cancel(answer.id)
    again = responses.create(model="talker", previous_response_id=answer.id, input="hello", include=[])
    assert (again.output_text, again.previous_response_id) == (ANSWERS["hello"], answer.id)
    responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="is stored"):
        responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        responses.create(model="tiny", input="x", previous_response_id=answer.id)
    assert unknown.value.code == "previous_response_not_found"
    cut = responses.create(**call, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    check_types(again, cut)
    talked = [{"role": role, "content": "x" * 300} for role in ("user", "assistant")] * 5
    short = responses.create(**{**call, "input": [*talked, *user(JAPAN)]}, truncation="auto")
    assert (short.truncation, short.usage.input_tokens < 512) == ("auto", True)


def test_openais_client_parses_a_response_into_a_class(openai_client: Any) -> None:
    from pydantic import BaseModel

    class Size(BaseModel):
        size: int

    answer = openai_client.responses.parse(model="tiny", input="say hello", text_format=Size, max_output_tokens=100)
    assert isinstance(answer.output_parsed, Size)
    with openai_client.responses.stream(model="tiny", input="hi", text_format=Size, max_output_tokens=100) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Size)


@pytest.mark.parametrize("summary", [None, "auto"])
def test_openais_client_gets_reasoning_as_an_item_and_sends_it_back(openai_client: Any, summary: str | None) -> None:
    call = {"model": "thinker", "reasoning": {"summary": summary}, "store": False}
    answer = openai_client.responses.create(**call, input="why")
    thought, message = answer.output
    (part,) = thought.summary if summary else thought.content
    assert (part.text, message.content[0].text) == ("4 > 3", "Because.")
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>\n4 > 3\n</think>")
    events = list(openai_client.responses.create(**call, input="why", stream=True))
    kind = "reasoning_summary_text" if summary else "reasoning_text"
    assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == "4 > 3"
    check_types(answer, *events)
    back = openai_client.responses.create(**call, input=[*user("why"), *answer.output, *user("why")])
    assert back.output_text == "Because."


def test_openais_client_calls_a_tool_and_sends_its_result(openai_client: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "name": "weather", "description": "Weather", "parameters": schema, "strict": False}
    call = {"model": "talker", "tools": [tool]}
    answer = openai_client.responses.create(**call, input="weather")
    text, use = answer.output
    assert (text.content[0].text, use.name) == ("I look.", "weather")
    assert json.loads(use.arguments) == {"city": "Bern", "days": [1, 2]}
    with openai_client.responses.stream(**call, input="weather") as stream:
        events = list(stream)
        assert json.loads(stream.get_final_response().output[1].arguments) == json.loads(use.arguments)
    assert any(event.type == "response.function_call_arguments.delta" for event in events)
    check_types(answer, *openai_client.responses.create(**call, input="weather", stream=True))
    result = {"type": "function_call_output", "call_id": use.call_id, "output": "4"}
    stored = openai_client.responses.create(**call, previous_response_id=answer.id, input=[result])
    assert stored.output_text == "Cold."
    sent_back = openai_client.responses.create(**call, input=[*user("weather"), *answer.output, result])
    assert sent_back.output_text == "Cold."


def test_openais_client_raises_what_a_response_refuses(openai_client: Any) -> None:
    import openai

    for more, status, said in (
        ({"model": "nosuch"}, 404, "'nosuch' is not found"),
        ({"input": "x" * 3000}, 400, "less than 512 tokens"),
        ({"tools": [{"type": "web_search"}]}, 400, "expected function, got web_search"),
        ({"background": True}, 400, "'background': expected false"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError, match=said) as refused:
                openai_client.responses.create(**{"model": "tiny", "input": "hello", "stream": stream, **more})
            assert refused.value.status_code == status
