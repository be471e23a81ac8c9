"""ollama's API: its calls are those of OpenAI's API, and its answers, streams and errors have its form."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from tests.plugins.language.talker import HELLO, SCHEMA, TALKER, TOOL, calls, response, sent, two_words


@pytest.mark.parametrize(
    ("path", "members", "own"),
    [
        ("chat", {"messages": HELLO}, {"messages": HELLO, "stream": True}),
        ("chat", {"messages": HELLO, "stream": False, "keep_alive": "5m"}, {"messages": HELLO}),
        (
            "chat",
            {"messages": HELLO, "stream": False, "think": False},
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("chat", {"messages": HELLO, "think": "low"}, {"messages": HELLO, "stream": True, "reasoning_effort": "low"}),
        (
            "chat",
            {
                "messages": HELLO,
                "stream": False,
                "format": "",
                "options": {"temperature": 0, "num_predict": 9, "seed": 7, "stop": ["x"], "top_k": 5, "top_p": 0.5,
                            "min_p": 0.1, "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25,
                            "num_ctx": 8192, "num_thread": 4, "mirostat": 0, "typical_p": 1, "repeat_last_n": -1},
            },
            {
                "messages": HELLO, "temperature": 0, "max_tokens": 9, "seed": 7, "stop": ["x"], "top_k": 5,
                "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
            },
        ),
        ("chat", {"messages": HELLO, "options": {"num_predict": -1, "seed": -1}}, {"messages": HELLO, "stream": True}),
        (
            "chat",
            {"messages": HELLO, "format": "json"},
            {"messages": HELLO, "stream": True, "response_format": {"type": "json_object"}},
        ),
        (
            "chat",
            {"messages": HELLO, "format": SCHEMA},
            {
                "messages": HELLO, "stream": True,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            },
        ),
        (
            "chat",
            {
                "tools": [TOOL],
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                    {"role": "tool", "content": "4", "tool_name": "f", "images": []},
                ],
            },
            {
                "stream": True,
                "tools": [TOOL],
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant", "content": "",
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
                    },
                    {"role": "tool", "content": "4", "name": "f"},
                ],
            },
        ),
        ("generate", {"prompt": "hello"}, {"messages": HELLO, "stream": True}),
        (
            "generate",
            {"prompt": "hello", "system": "be brief", "stream": False},
            {"messages": [{"role": "system", "content": "be brief"}, *HELLO]},
        ),
        (
            "generate",
            {"prompt": "hello", "raw": True, "options": {"num_predict": 4}},
            {"prompt": "hello", "max_tokens": 4, "stream": True},
        ),
    ],
)  # fmt: skip
def test_a_call_becomes_the_request_that_openais_api_makes(
    talker: Any, path: str, members: dict[str, Any], own: dict[str, Any]
) -> None:
    same = "/v1/completions" if "prompt" in own else "/v1/chat/completions"
    assert sent(talker, f"/api/{path}", members) == sent(talker, same, own)


def test_a_raw_prompt_without_num_predict_may_use_all_the_room(talker: Any) -> None:
    assert sent(talker, "/api/generate", {"prompt": "hello", "raw": True})["sampling_parameters"]["max_tokens"] == 0


def test_a_model_without_a_chat_template_gets_the_prompt(talker: Any) -> None:
    talker.service.models["talker"] = (replace(TALKER, inputs=TALKER.inputs[:1]), two_words)
    assert sent(talker, "/api/generate", {"prompt": "hello"})["text_input"] == b"hello"
    reply = talker.post("/api/generate", {"model": "talker", "prompt": "hello", "system": "be brief"})
    assert (reply.status, reply.error) == (
        400, "'system': expected none with 'raw', or for a model without a chat template"
    )  # fmt: skip


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_stream_has_a_line_for_each_text_and_ends_with_counts(talker: Any, path: str) -> None:
    body = (
        {"model": "talker:latest", "messages": HELLO} if path == "chat" else {"model": "talker:latest", "prompt": "a"}
    )
    reply = talker.post(f"/api/{path}", body)
    assert reply.headers["Content-Type"] == "application/x-ndjson"
    lines = [json.loads(text) for text in reply.body.splitlines()]
    texts = [item["message"]["content"] if path == "chat" else item["response"] for item in lines]
    assert texts == ["two", " words", ""]
    assert [item["done"] for item in lines] == [False, False, True]
    assert {item["model"] for item in lines} == {"talker:latest"}
    last = lines[-1]
    assert last["done_reason"] == "stop"
    assert last["total_duration"] == last["prompt_eval_duration"] + last["eval_duration"]
    assert {"prompt_eval_count", "eval_count", "created_at"} <= last.keys()


def test_a_call_without_a_stream_gets_one_object(talker: Any) -> None:
    reply = talker.post("/api/chat", {"model": "talker", "messages": HELLO, "stream": False})
    assert reply.headers["Content-Type"] == "application/json"
    answer = reply.json
    assert answer["message"] == {"role": "assistant", "content": "two words"}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_the_member_thinking(talker: Any, is_stream: bool) -> None:
    talker.service.models["talker"] = (TALKER, lambda request: [
        response(request, text_output="", reasoning_content="I see"),
        response(request, is_final=True, text_output="two", reasoning_content="", finish_reason="stop"),
    ])  # fmt: skip
    reply = talker.post("/api/chat", {"model": "talker", "messages": HELLO, "stream": is_stream})
    messages = [json.loads(text)["message"] for text in reply.body.splitlines()]
    assert [message["thinking"] for message in messages if "thinking" in message] == ["I see"]
    assert "".join(message["content"] for message in messages) == "two"


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_of_tools_come_whole_with_their_arguments_as_objects(talker: Any, is_stream: bool) -> None:
    talker.service.models["talker"] = (TALKER, calls('{"a": 1}', "", '{"b": '))
    reply = talker.post("/api/chat", {"model": "talker", "messages": HELLO, "tools": [TOOL], "stream": is_stream})
    messages = [json.loads(text)["message"] for text in reply.body.splitlines()]
    found = [call for message in messages for call in message.get("tool_calls", ())]
    assert [(call["id"], call["function"]) for call in found] == [
        ("call_0", {"name": "f", "arguments": {"a": 1}}),
        ("call_1", {"name": "f", "arguments": {}}),
    ]
    # A call that was cut short is text.
    assert "".join(message["content"] for message in messages) == '{"name": "f", "arguments": {"b": '


@pytest.mark.parametrize(
    ("path", "members", "status", "said"),
    [
        ("chat", {"model": "nosuch"}, 404, "'nosuch' is not found; models that serve here: "),
        ("chat", {"model": None}, 400, "'model': expected the name of a model, got null"),
        ("chat", {"messages": "hello"}, 400, "'messages': expected a list of messages, got a string"),
        ("chat", {"messages": [{"content": "a"}]}, 400, "'messages[0].role': expected a text"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]},
            400,
            "'talker' takes no pictures",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a", "images": ["A"]}]},
            400,
            "'messages[0].images[0]': exp",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a", "images": "A"}]},
            400,
            "'messages[0].images': expected",
        ),
        ("generate", {"prompt": "a", "images": ["!"]}, 400, "'images[0]': expected base64"),
        ("generate", {"prompt": "a", "raw": True, "images": ["AAAA"]}, 400, "'images': expected none with 'raw'"),
        ("chat", {"format": "xml"}, 400, "'format': expected json or a JSON schema, got xml"),
        ("chat", {"options": []}, 400, "'options': expected an object, got an array"),
        ("chat", {"options": {"mirostat": 2}}, 400, "'options': 'mirostat' is not supported; supported are freq"),
        ("chat", {"options": {"temprature": 2}}, 400, "'options': 'temprature' is not supported"),
        ("chat", {"options": {"num_predict": "a"}}, 400, "'options.num_predict': expected a whole number from 1"),
        ("chat", {"options": {"seed": 1.5}}, 400, "'options.seed': expected a whole number"),
        ("chat", {"options": {"repeat_last_n": 64}}, 400, "'repeat_last_n' is not supported"),
        ("chat", {"stream": "yes"}, 400, "'stream': expected true or false"),
        ("chat", {"keep_alive": "soon"}, 400, "'keep_alive': expected seconds"),
        ("chat", {"think": "much"}, 400, "'think': expected none, minimal, low"),
        ("chat", {"think": 3}, 400, "'think': expected true or false, got an integer"),
        ("generate", {"prompt": "a", "raw": True, "think": True}, 400, "'think': expected false or none with 'raw'"),
        ("chat", {"prompt": "a"}, 400, "'prompt' is not supported"),
        ("generate", {"prompt": 3}, 400, "'prompt': expected a text, got an integer"),
        ("generate", {"prompt": "a", "raw": 1}, 400, "'raw': expected true or false"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "'system': expected none with 'raw'"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "'suffix' is not supported"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "'context' is not supported"),
        ("embed", {"input": 3}, 400, "'input': expected a text, got an integer"),
        ("embed", {"input": "a", "truncate": 1}, 400, "'truncate': expected true or false, got an integer"),
        ("embeddings", {"prompt": 3}, 400, "'prompt': expected a text, got an integer"),
        ("show", {"model": "add"}, 404, "no model 'add' gives text or embeddings"),
        ("pull", {"model": "talker"}, 404, "unknown path: POST /api/pull; of ollama's API this server has /api/chat"),
    ],
)
def test_an_invalid_call_gets_ollamas_error(
    talker: Any, path: str, members: dict[str, Any], status: int, said: str
) -> None:
    own = {"chat": {"messages": HELLO}}.get(path, {})
    reply = talker.post(f"/api/{path}", {"model": "talker", **own, **members})
    assert reply.status == status
    assert said in reply.error
    assert not talker.service.requests


def test_embeddings_have_ollamas_form(site: Any) -> None:
    def embed(request: Request) -> list[Response]:
        length = float(len(request.inputs["text"].array[0]))
        tensor = Tensor("embedding", DType.FP32, np.array([length, 0.5], np.float32))
        return [Response(request.model, 1, request.id, outputs=(tensor,))]

    inputs, outputs = (InputSpec("text", DType.BYTES, (1,)),), (OutputSpec("embedding", DType.FP32, (2,)),)
    site.service.models["embedder"] = (ModelSpec("embedder", "stub", "", 0, inputs, outputs, instance_groups=()), embed)
    members = {"model": "embedder:latest", "truncate": True, "options": {"num_ctx": 9}}
    reply = site.post("/api/embed", {**members, "input": ["a", "bcd"]})
    assert reply.json["embeddings"] == [[1.0, 0.5], [3.0, 0.5]]
    assert site.post("/api/embeddings", {"model": "embedder", "prompt": "bcd"}).json == {"embedding": [3.0, 0.5]}
    assert site.post("/api/show", {"model": "embedder"}).json["capabilities"] == ["embedding"]


def test_a_model_is_shown_with_what_it_can_do(talker: Any) -> None:
    for members in ({"model": "talker:latest"}, {"name": "talker", "verbose": True}):
        assert talker.post("/api/show", members).json["capabilities"] == ["completion", "tools"]
    assert talker.get("/api/version").json["version"].count(".") == 2


@pytest.mark.parametrize(
    ("is_loaded", "keep_alive", "reason", "set_to"),
    [
        (True, None, "load", []),
        (True, "5m", "load", [300.0]),
        (True, 0, "unload", [0.0]),
        (False, 0, "unload", [0.0]),
    ],
)
def test_a_call_without_content_loads_or_unloads_a_model(
    talker: Any, is_loaded: bool, keep_alive: Any, reason: str, set_to: list[float]
) -> None:
    state = "READY" if is_loaded else "DRAINING"
    talker.service.versions = lambda: [SimpleNamespace(name="talker", state=state)]
    for path, content in (("chat", {"messages": []}), ("generate", {})):
        talker.service.orders.clear()
        reply = talker.post(f"/api/{path}", {"model": "talker", "keep_alive": keep_alive, **content})
        assert (reply.json["done"], reply.json["done_reason"]) == (True, reason)
        assert [seconds for _, seconds in talker.service.keep_alives] == set_to
    assert not talker.service.requests


def test_a_model_that_is_not_loaded_is_loaded_by_a_request_for_one_token(talker: Any) -> None:
    talker.service.versions = list
    assert talker.post("/api/chat", {"model": "talker", "messages": []}).json["done_reason"] == "load"
    (request,) = talker.service.requests
    assert json.loads(request.inputs["sampling_parameters"].array[0])["max_tokens"] == 1
