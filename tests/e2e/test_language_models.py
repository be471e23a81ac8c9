"""Language models through a real server: equal text over every protocol, OpenAI's API and errors, a real engine.

The scripted model needs no library. The tests marked `full` serve tests/data/tiny_llm with OpenVINO GenAI and ONNX
Runtime GenAI, and tests/data/tiny_embeddings with OpenVINO GenAI.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import shutil
import signal
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from tests.kit.child_processes import children_of
from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder, parameters
from tests.kit.server import serve
from tests.kit.triton_stream import TritonStream, is_final

TINY = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
ADAPTERS = TINY.parent / "lora"
TINY_EMBEDDINGS = TINY.parents[1] / "tiny_embeddings"
COUNT = (
    "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
CALL = '{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}}'
ANSWERS = {
    "hello": "Hello! How can I help you?",
    "count": COUNT,
    "weather": f"I look.\n<tool_call>\n{CALL}\n</tool_call>",
}
THOUGHT = "<think>\n4 > 3\n</think>\n\nBecause."
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}},
            "required": ["city"],
        },
    },
}

TEMPLATES = {
    "templated": "{% if messages[0].role == 'user' %}{{ messages[0].content + '' }}"
                 "{% else %}{{ raise_exception('the first role must be user') }}{% endif %}",
    "broken_template": "\n{% if %}",
}  # fmt: skip
"""Chat templates of Python models, by the model's name."""

EMBEDDER = """
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            vectors = np.stack([
                np.frombuffer(zlib.crc32(text).to_bytes(4, "little"), np.uint8) / 256 for text in texts.ravel()
            ]).astype(np.float32)
            outputs = [
                pb_utils.Tensor("embedding", vectors if texts.ndim == 2 else vectors[0]),
                pb_utils.Tensor("num_input_tokens", np.array([len(text) for text in texts.ravel()], np.uint32).reshape(
                    texts.shape)),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
"""Model whose embedding is the CRC of the text, as four numbers from 0 to 1, and which counts bytes as tokens."""

real_engine = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("openvino_genai", "openai")),
        reason="needs openvino-genai and openai, of the extra test-all",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    model_folder(
        models / "talker",
        'backend: "scripted_llm"',
        {"1/script.json": json.dumps({"answers": ANSWERS, "chat_template": "<tool_call>"})},
    )
    model_folder(
        models / "thinker",
        'backend: "scripted_llm"',
        {"1/script.json": json.dumps({"answers": {"why": THOUGHT}, "chat_template": "{{ enable_thinking }}</think>"})},
    )
    model_folder(
        models / "plain",
        'backend: "identity" input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] } '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }',
    )
    model_folder(
        models / "caller",
        'backend: "python" model_transaction_policy { decoupled: true } '
        'input { name: "text_input" data_type: TYPE_STRING dims: [1] } '
        'output { name: "text_output" data_type: TYPE_STRING dims: [-1] }',
        {"1/model.py": CALLER},
    )
    for name, template in TEMPLATES.items():
        shutil.copytree(models / "caller", models / name)
        (models / name / "tokenizer").mkdir()
        (models / name / "tokenizer/chat_template.jinja").write_text(template)
        with (models / name / "config.pbtxt").open("a") as file:
            file.write(parameters(chat_tokenizer="tokenizer"))
    for name, rows in (("embedder", 0), ("batched_embedder", 3)):
        model_folder(
            models / name,
            f'backend: "python" max_batch_size: {rows} input {{ name: "text" data_type: TYPE_STRING dims: [1] }} '
            'output { name: "embedding" data_type: TYPE_FP32 dims: [4] } '
            'output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [1] }',
            {"1/model.py": EMBEDDER},
        )
    model_folder(models / "ensemble", ENSEMBLE)
    with serve(models) as running:
        yield running


CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="talker",
                requested_output_names=["text_output"],
                inputs=[
                    pb_utils.Tensor("text_input", pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()),
                    pb_utils.Tensor("stream", np.array([True])),
                    pb_utils.Tensor("sampling_parameters", np.array([b'{"max_tokens": 200}'], object)),
                ],
            )
            sender = request.get_response_sender()
            for answer in call.exec(decoupled=True):
                text = pb_utils.get_output_tensor_by_name(answer, "text_output")
                if text is not None:
                    loud = np.array([text.as_numpy()[0].upper()], object)
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", loud)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENSEMBLE = """
platform: "ensemble"
input { name: "QUESTION" data_type: TYPE_STRING dims: [1] }
output { name: "ANSWER" data_type: TYPE_STRING dims: [-1] }
ensemble_scheduling {
  step {
    model_name: "talker"
    model_version: -1
    input_map { key: "text_input" value: "QUESTION" }
    output_map { key: "text_output" value: "ANSWER" }
  }
}
"""


def crc(text: str) -> list[float]:
    """Return the embedding that EMBEDDER gives."""
    return [byte / 256 for byte in zlib.crc32(text.encode()).to_bytes(4, "little")]


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "talker", "messages": [{"role": "user", "content": content}], **more}


def events(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, each parsed as JSON, except "[DONE]"."""
    status, text = server.request("POST", path, json.dumps(body).encode())
    assert status == 200, text
    found = [line.removeprefix("data: ") for line in text.decode().split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in found]


def grpc_stream(server: Any, prompt: str, **sampling: Any) -> str:
    """Return the text that tritonclient's stream gives."""
    sampling_text = json.dumps({"max_tokens": 200, **sampling}).encode()
    inputs = [
        infer_input(grpc_client, "text_input", np.array([prompt.encode()], object)),
        infer_input(grpc_client, "stream", np.array([True])),
        infer_input(grpc_client, "sampling_parameters", np.array([sampling_text], object)),
    ]
    with TritonStream(server.grpc) as stream:
        stream.send("talker", inputs, enable_empty_final_response=True)
        text = ""
        while True:
            result = stream.result()
            outputs = result.as_numpy("text_output")
            text += "" if outputs is None else outputs[0].decode()
            if is_final(result):
                return text


def test_every_protocol_gives_the_same_text(server: Any) -> None:
    parameters = {"max_tokens": 200}
    flat = {"text_input": "count", "exclude_input_in_output": True, "parameters": parameters}
    _, answer = server.ask("/v2/models/talker/generate", flat)
    streamed = events(server, "/v2/models/talker/generate_stream", {**flat, "stream": True})
    _, completion = server.ask("/v1/completions", {"model": "talker", "prompt": "count", "max_tokens": 200})
    _, chatted = server.ask("/v3/chat/completions", chat("count"))
    texts = {
        answer["text_output"],
        "".join(event["text_output"] for event in streamed),
        grpc_stream(server, "count"),
        completion["choices"][0]["text"],
        chatted["choices"][0]["message"]["content"],
    }
    assert texts == {COUNT}


def test_a_python_model_and_an_ensemble_can_call_a_language_model(server: Any) -> None:
    streamed = events(server, "/v2/models/caller/generate_stream", {"text_input": "hello"})
    assert "".join(event["text_output"] for event in streamed) == ANSWERS["hello"].upper()
    assert len(streamed) > 10
    _, completion = server.ask("/v1/completions", {"model": "caller", "prompt": "hello"})
    assert completion["choices"][0]["text"] == ANSWERS["hello"].upper()
    status, answer = server.ask("/v1/chat/completions", chat("hello", model="caller"))
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "it needs an input 'messages'" in answer["error"]["message"]
    _, answer = server.ask("/v2/models/ensemble/generate", {"QUESTION": "hello"})
    assert answer["ANSWER"] == "hello" + ANSWERS["hello"][:16]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="needs jinja2, of the extra chat")
class TestChatTemplateOfAPythonModel:
    def test_a_chat_becomes_a_prompt(self, server: Any) -> None:
        _, answer = server.ask("/v1/chat/completions", chat("hello", model="templated"))
        assert answer["choices"][0]["message"]["content"] == ANSWERS["hello"].upper()

    @pytest.mark.parametrize(
        ("message", "said"),
        [
            ({"role": "system", "content": "hello"}, "the first role must be user"),
            ({"role": "user", "content": "hello", "more": 1}, None),
        ],
    )
    def test_messages_that_the_template_refuses_are_a_bad_request(
        self, server: Any, message: dict[str, Any], said: str | None
    ) -> None:
        status, answer = server.ask("/v1/chat/completions", {"model": "templated", "messages": [message]})
        if said is None:
            assert status == 200
        else:
            assert (status, answer["error"]["param"]) == (400, "messages")
            assert said in answer["error"]["message"]

    def test_a_template_that_cannot_be_compiled_does_not_load(self, server: Any) -> None:
        (entry,) = [item for item in server.ask("/v2/repository/index", {})[1] if item["name"] == "broken_template"]
        assert "model 'broken_template': chat template, line 2" in entry["reason"]


def test_a_prompt_is_repeated_unless_it_is_excluded(server: Any) -> None:
    _, answer = server.ask("/v2/models/talker/generate", {"text_input": "hello", "max_tokens": 6})
    assert answer["text_output"] == "helloHello!"


def test_a_chat_response_has_token_counts_and_the_finish_reason(server: Any) -> None:
    _, answer = server.ask("/v1/chat/completions", chat("hello"))
    assert answer["object"] == "chat.completion"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 26, "total_tokens": 31}
    assert answer["choices"][0]["finish_reason"] == "stop"
    _, answer = server.ask("/v1/chat/completions", chat("hello", max_completion_tokens=5))
    assert answer["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }


def test_a_streamed_chat_starts_with_the_role_and_ends_with_usage_and_done(server: Any) -> None:
    found = events(server, "/v1/chat/completions", chat("hello", stream=True, stream_options={"include_usage": True}))
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in found[:-2]) == ANSWERS["hello"]
    assert [event["choices"][0]["finish_reason"] for event in found[:-2]] == [None] * 27 + ["stop"]
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["completion_tokens"] == 26
    assert found[-1] == "[DONE]"


def test_prompts_and_choices_are_answered_together_and_each_prompt_counts_once(server: Any) -> None:
    body = {"model": "talker", "prompt": ["hello", "count"], "n": 2, "max_tokens": 300}
    _, answer = server.ask("/v1/completions", body)
    assert [choice["text"] for choice in answer["choices"]] == [ANSWERS["hello"]] * 2 + [COUNT] * 2
    assert answer["usage"]["prompt_tokens"] == 10
    streamed = events(server, "/v1/completions", {**body, "stream": True})
    texts = [""] * 4
    for event in streamed[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [ANSWERS["hello"]] * 2 + [COUNT] * 2


UNKNOWN = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}


def test_optional_tools_are_not_compiled(server: Any) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "slow", "parameters": UNKNOWN}}]
    assert server.ask("/v1/chat/completions", chat("hello", tools=tools))[0] == 200


def test_a_tool_call_is_parsed_and_its_arguments_are_streamed(server: Any) -> None:
    body = chat("weather", tools=[TOOL])
    _, answer = server.ask("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern", "days": [1, 2]}
    found = events(server, "/v1/chat/completions", {**body, "stream": True})[:-1]
    deltas = [event["choices"][0]["delta"] for event in found]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    assert [part["function"].get("name") for part in parts] == ["weather"] + [None] * (len(parts) - 1)
    assert len(parts) > 10
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs openai, of the extra test-all")
def test_openais_client_reports_unsupported_options_and_sends_supported_ones(server: Any) -> None:
    import openai

    with openai.OpenAI(base_url=server.url("/v1"), api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="unknown path: POST /v1/images/generations") as unknown:
            client.images.generate(model="talker", prompt="hello")
        assert unknown.value.code == "unknown_url"
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}]
        with pytest.raises(openai.BadRequestError, match="'verbosity' is not supported; supported are") as bad:
            client.chat.completions.create(model="talker", messages=messages, verbosity="low")
        assert bad.value.param == "verbosity"
        answer = client.chat.completions.create(
            model="talker", messages=messages, logprobs=True, top_logprobs=1, user="me", store=False, max_tokens=2
        )
        (choice,) = answer.choices
        assert choice.message.content == "He"
        assert [item.top_logprobs[0].token for item in choice.logprobs.content] == ["H", "e"]


@pytest.mark.full
def test_openais_client_gets_reasoning_apart_and_switches_it(server: Any) -> None:
    import openai

    with openai.OpenAI(base_url=server.url("/v1"), api_key="none", max_retries=0) as client:
        ask = partial(client.chat.completions.create, model="thinker")
        question = [{"role": "user", "content": "why"}]
        answer = ask(messages=question)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("4 > 3", "Because.")
        reasoning_tokens = len("<think>\n4 > 3\n</think>")
        assert answer.usage.completion_tokens_details.reasoning_tokens == reasoning_tokens
        *chunks, last = ask(messages=question, stream=True, stream_options={"include_usage": True})
        assert last.usage.completion_tokens_details.reasoning_tokens == reasoning_tokens
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "4 > 3"
        assert "".join(delta.content or "" for delta in deltas) == "Because."
        # The script repeats what it does not know: the prompt, of which the template's variables are a part.
        unknown: list[Any] = [{"role": "user", "content": "x"}]
        for more in (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            {"reasoning_effort": "none"},
        ):
            assert ask(messages=unknown, **more).choices[0].message.content == "enable_thinking=false"
        with pytest.raises(openai.BadRequestError, match="no variable 'reasoning_effort'; it has 'enable_thinking'"):
            ask(messages=question, reasoning_effort="high")


def test_the_model_list_contains_text_and_embedding_models(server: Any) -> None:
    _, answer = server.ask("/v1/models")
    listed = [model["id"] for model in answer["data"] if model["id"] not in TEMPLATES]  # loaded where jinja2 is
    assert listed == ["batched_embedder", "caller", "embedder", "talker", "thinker"]
    assert server.ask("/v1/models/talker")[1]["object"] == "model"
    assert server.ask("/v1/models/plain")[0] == 404


@pytest.mark.parametrize("model", ["embedder", "batched_embedder"])
def test_each_text_gets_its_embedding_in_both_encodings(server: Any, model: str) -> None:
    texts = [f"text {number}" for number in range(10)]
    call = {"model": model, "input": texts}
    _, answer = server.ask("/v1/embeddings", call)
    assert [item["embedding"] for item in answer["data"]] == [crc(text) for text in texts]
    assert answer["usage"] == {"prompt_tokens": 60, "total_tokens": 60}
    _, answer = server.ask("/v3/embeddings", {**call, "encoding_format": "base64"})
    found = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() for item in answer["data"]]
    assert found == [crc(text) for text in texts]
    _, answer = server.ask("/v1/embeddings", {**call, "input": texts[0]})
    assert [item["embedding"] for item in answer["data"]] == [crc(texts[0])]


def test_the_metrics_have_vllms_names(server: Any) -> None:
    server.ask("/v1/chat/completions", chat("hello"))
    text = server.read_metrics()
    for name in ("generation_tokens_total", "time_to_first_token_seconds_count", "num_requests_waiting"):
        assert f'vllm:{name}{{model="talker"' in text


# -- a real engine


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two models with OpenVINO GenAI, of which one computes in f32."""
    models = tmp_path_factory.mktemp("tiny")
    for name, more in (("tiny", ""), ("exact", parameters(deterministic="true", num_kv_blocks=64))):
        (models / name / "1").mkdir(parents=True)
        shutil.copy(TINY, models / name / "1/model.gguf")
        (models / name / "config.pbtxt").write_text(f'backend: "openvino_genai" {more}')
    with serve(models) as running:
        yield running


@pytest.fixture
def client(tiny_server: Any) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=tiny_server.url("/v1"), api_key="none", max_retries=0) as opened:
        yield opened


QUESTIONS = {
    "count from three": COUNT,
    "what is the capital of Japan?": "The capital of Japan is Tokyo.",
    "what is the capital of France?": "The capital of France is Paris.",
    "say hello": "Hello! How can I help you?",
    "give me json": '{"name": "edge", "size": 3}',
    "days from Friday": "Friday Saturday Sunday Monday Tuesday Wednesday Thursday",
    "days from Monday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "what is the colour of snow?": "The colour of snow is white.",
}


def ask(client: Any, question: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(**{"model": "exact", "messages": messages, "temperature": 0, **more})


class TestRealEngine:
    pytestmark = real_engine

    def test_a_model_needs_only_a_folder_with_a_model_file(self, client: Any) -> None:
        answer = ask(client, "what is the capital of France?", model="tiny")
        assert answer.choices[0].message.content == "The capital of France is Paris."

    def test_tokens_of_a_chat_are_those_of_its_usage(self, client: Any, tiny_server: Any) -> None:
        question = "what is the capital of Japan?"
        messages = [{"role": "user", "content": question}]
        _, found = tiny_server.ask("/v2/models/exact/generate", {"messages": json.dumps(messages), "tokenize": True})
        assert len(found["token_ids"]) == ask(client, question).usage.prompt_tokens
        assert found["max_context"] == 512
        _, counted = tiny_server.ask("/v1/messages/count_tokens", {"model": "exact", "messages": messages})
        assert counted == {"input_tokens": len(found["token_ids"])}

    def test_the_same_seed_gives_the_same_text(self, client: Any) -> None:
        texts = {
            ask(client, "say hello", temperature=1.5, seed=7, max_tokens=20).choices[0].message.content
            for _ in range(3)
        }
        assert len(texts) == 1

    def test_a_client_that_disconnects_does_not_disturb_running_chats(self, client: Any, tiny_server: Any) -> None:
        for _ in range(10):
            stream = ask(client, "count from zero", stream=True)
            next(iter(stream))
            stream.close()
        assert ask(client, "count from three").choices[0].message.content == COUNT
        running = 'vllm:num_requests_running{model="exact",model_name="exact",version="1"} 0.0'
        assert eventually(lambda: running in tiny_server.read_metrics())

    def test_a_killed_engine_fails_its_streams_and_is_restarted(self, client: Any, tiny_server: Any) -> None:
        import openai

        folder = Path(f"/proc/{tiny_server.process.pid}")
        assert ask(client, "count from three").choices[0].message.content == COUNT
        files, pages = len(os.listdir(folder / "fd")), int((folder / "statm").read_text().split()[1])
        # A client of its own, whose connections end with it: one of an answer that ended before the kill stays open.
        with client.copy(http_client=openai.DefaultHttpxClient()) as streaming:
            streams = [ask(streaming, "count from zero", stream=True) for _ in range(4)]
            children = children_of(tiny_server.process.pid)
            assert len(children) == 2
            for child in children:
                os.kill(child, signal.SIGKILL)
            ended = 0
            for stream in streams:
                try:
                    ended += any(chunk.choices[0].finish_reason for chunk in stream)
                except openai.APIError:
                    ended += 1
        assert ended == 4
        assert tiny_server.get("/v2/health/live")[0] == 200
        retrying = client.with_options(max_retries=5)
        assert ask(retrying, "count from three").choices[0].message.content == COUNT
        assert eventually(lambda: len(os.listdir(folder / "fd")) <= 1.1 * files)
        assert int((folder / "statm").read_text().split()[1]) <= 1.1 * pages


def embedding_model(folder: Path, **values: str) -> None:
    shutil.copytree(TINY_EMBEDDINGS, folder / "1", ignore=shutil.ignore_patterns("make.py"))
    (folder / "config.pbtxt").write_text('backend: "openvino_embeddings" ' + parameters(**values))


def cross_encoder(folder: Path, classes: int) -> None:
    """Make a model with so many classes of the embedding model: a random layer over its first vector."""
    import openvino
    from openvino import opset13

    embedding_model(folder)
    (folder / "config.pbtxt").write_text('backend: "openvino_rerank"')
    model = openvino.Core().read_model(TINY_EMBEDDINGS / "openvino_model.xml")
    vectors = model.output(0).get_node().input_value(0)
    first = opset13.gather(vectors, opset13.constant(0), opset13.constant(1))
    weights = np.random.default_rng(0).normal(size=(16, classes)).astype(np.float32)
    logits = opset13.result(opset13.matmul(first, opset13.constant(weights), False, False))
    logits.output(0).get_tensor().set_names({"logits"})
    whole = openvino.Model([logits], model.get_parameters(), "cross_encoder")
    openvino.save_model(whole, folder / "1/openvino_model.xml", compress_to_fp16=False)


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("embeddings")
    for pooling in ("cls", "mean", "last_token"):
        embedding_model(models / pooling, pooling=pooling, normalize="false")
    embedding_model(models / "default")
    embedding_model(models / "wrong", pooling="max")
    embedding_model(models / "incomplete")
    (models / "incomplete/1/openvino_tokenizer.xml").unlink()
    for name, classes in (("scorer", 1), ("classifier", 2)):
        cross_encoder(models / name, classes)
    embedding_model(models / "nested", matryoshka_dimensions="4, 8", normalize="false")
    with serve(models) as running:
        yield running


TEXTS = ["hello", "a", "a longer text with several words", "", "grüezi"]


@pytest.fixture(scope="module")
def token_vectors() -> list[Any]:
    """The vectors that the bare model gives to the tokens of each of TEXTS."""
    import openvino
    import openvino_genai

    tokenizer = openvino_genai.Tokenizer(str(TINY_EMBEDDINGS))
    model = openvino.Core().compile_model(TINY_EMBEDDINGS / "openvino_model.xml", "CPU")
    found = []
    for text in TEXTS:
        ids = np.array(tokenizer.encode([text]).input_ids.data)
        found.append(model([ids, np.ones_like(ids), np.zeros_like(ids)])[0][0])
    return found


class TestEmbeddingExport:
    pytestmark = real_engine

    @pytest.fixture
    def client(self, embedding_server: Any) -> Iterator[Any]:
        import openai

        with openai.OpenAI(base_url=embedding_server.url("/v1"), api_key="none", max_retries=0) as opened:
            yield opened

    @pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
    def test_the_embedding_is_the_pooled_vectors_of_the_bare_model(
        self, client: Any, token_vectors: list[Any], pooling: str
    ) -> None:
        answer = client.embeddings.create(model=pooling, input=TEXTS, dimensions=16)
        pool = {
            "cls": lambda rows: rows[0],
            "mean": lambda rows: rows.mean(axis=0),
            "last_token": lambda rows: rows[-1],
        }
        expected = [pool[pooling](rows) for rows in token_vectors]
        np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=0.02)
        assert answer.usage.prompt_tokens == sum(len(rows) for rows in token_vectors)

    def test_by_default_the_embedding_is_the_normalised_first_vector(
        self, client: Any, token_vectors: list[Any]
    ) -> None:
        texts = TEXTS * 5  # several batches
        answer = client.embeddings.create(model="default", input=texts, encoding_format="float")
        expected = [rows[0] / np.linalg.norm(rows[0]) for rows in token_vectors] * 5
        np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=0.02)

    def test_a_text_that_is_too_long_is_refused_with_length_and_limit(self, client: Any) -> None:
        import openai

        assert client.embeddings.create(model="default", input="x " * 62).usage.prompt_tokens == 64
        with pytest.raises(openai.BadRequestError, match="at most 64 tokens, got 65") as caught:
            client.embeddings.create(model="default", input="x " * 63)
        assert caught.value.code == "context_length_exceeded"

    def test_dimensions_cut_an_embedding_of_a_model_that_was_trained_so(
        self, client: Any, token_vectors: list[Any]
    ) -> None:
        import openai

        for size in (4, 8):
            answer = client.embeddings.create(model="nested", input=TEXTS, dimensions=size)
            cut = np.array([vectors[0][:size] for vectors in token_vectors])
            expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
            np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=0.02)
        whole = client.embeddings.create(model="nested", input=TEXTS, dimensions=16)
        np.testing.assert_allclose(
            [item.embedding for item in whole.data], [vectors[0] for vectors in token_vectors], atol=0.02
        )
        for model, message in (("nested", "expected 16, 4, 8, as"), ("default", "expected 16, as")):
            with pytest.raises(openai.BadRequestError, match=message):
                client.embeddings.create(model=model, input="a", dimensions=5)

    @pytest.mark.parametrize("name", ["scorer", "classifier"])
    def test_a_cross_encoder_scores_as_the_bare_model_does(
        self, embedding_server: Any, tmp_path_factory: pytest.TempPathFactory, name: str
    ) -> None:
        import openvino
        import openvino_genai

        folder = tmp_path_factory.mktemp("bare")
        cross_encoder(folder, 1 if name == "scorer" else 2)
        tokenizer = openvino_genai.Tokenizer(str(TINY_EMBEDDINGS))
        model = openvino.Core().compile_model(folder / "1/openvino_model.xml", "CPU")
        query, documents = "which cat", ["hello", "a cat", "", "something long here", "which cat", *TEXTS, "a", "b"]
        expected, tokens = [], 0
        for document in documents:
            one, other = (np.array(tokenizer.encode([text]).input_ids.data)[0] for text in (query, document))
            ids = np.concatenate([one, other[1:]])[None]  # the second text without its [CLS]
            kinds = np.concatenate([np.zeros(len(one)), np.ones(len(other) - 1)])[None].astype(np.int64)
            logits = model([ids, np.ones_like(ids), kinds])[0][0]
            powers = np.exp(logits)
            expected.append(powers[1] / powers.sum() if len(powers) == 2 else 1 / (1 + 1 / powers[0]))
            tokens += ids.size
        call = {"model": name, "query": query, "documents": documents}
        status, answer = embedding_server.ask("/v1/rerank", call)
        assert status == 200, answer
        scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
        np.testing.assert_allclose([scores[index] for index in range(len(documents))], expected, atol=1e-3)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert answer["usage"]["total_tokens"] == tokens

    def test_a_pair_that_is_too_long_is_refused_with_length_and_limit(self, embedding_server: Any) -> None:
        call = {"model": "scorer", "query": "x " * 30, "documents": ["x " * 31]}
        status, answer = embedding_server.ask("/v1/rerank", call)
        assert (status, answer["usage"]["total_tokens"]) == (200, 64)
        status, answer = embedding_server.ask("/v1/rerank", {**call, "documents": ["a", "x " * 32]})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "a query and a document of at most 64 tokens together, got 65" in answer["error"]["message"]
        # A document of the same tokens, cut to as many as fit.
        call = {**call, "documents": ["x " * 90, "x"]}
        status, answer = embedding_server.ask("/v2/rerank", {**call, "max_tokens_per_doc": 31})
        assert status == 200, answer
        assert answer["usage"]["total_tokens"] == 64 + 34
        _, expected = embedding_server.ask("/v2/rerank", {**call, "documents": ["x " * 31, "x"]})
        assert answer["results"] == expected["results"]

    def test_embeddings_are_compared_by_their_cosine(self, embedding_server: Any, client: Any) -> None:
        vectors = [np.array(item.embedding) for item in client.embeddings.create(model="default", input=TEXTS).data]
        _, answer = embedding_server.ask("/v1/rerank", {"model": "default", "query": TEXTS[0], "documents": TEXTS})
        scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
        expected = [float(vectors[0] @ vector) for vector in vectors]
        np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], expected, atol=1e-3)

    def test_an_unservable_model_has_its_reason(self, embedding_server: Any) -> None:
        index = {entry["name"]: entry for entry in embedding_server.ask("/v2/repository/index", {})[1]}
        assert "parameter pooling: expected cls, mean, last_token, got 'max'" in index["wrong"]["reason"]
        assert "expected 'openvino_tokenizer.xml' beside it" in index["incomplete"]["reason"]


@pytest.fixture(scope="module")
def llama_cpp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The folder and the file alone, without a configuration; one with adapters."""
    models = tmp_path_factory.mktemp("llama_cpp")
    (models / "adapted/1").mkdir(parents=True)
    shutil.copy(TINY, models / "adapted/1/model.gguf")
    shutil.copytree(ADAPTERS, models / "adapted/1/adapters")
    (models / "talker/1").mkdir(parents=True)
    shutil.copy(TINY, models / "talker/1/model.gguf")
    with serve(models) as running:
        yield running


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, of the extra test-all")
class TestLlamaCpp:
    def test_a_file_without_a_configuration_is_served_by_it_and_the_index_says_why(self, llama_cpp_server: Any) -> None:
        assert "llama_cpp: fixed order" in llama_cpp_server.notes("talker")

    def test_an_adapter_is_chosen_by_the_models_name_in_every_api(self, llama_cpp_server: Any) -> None:
        server = llama_cpp_server
        _, listed = server.ask("/v1/models")
        parents = {item["id"]: item.get("parent") for item in listed["data"]}
        assert parents == {
            "adapted": None, "adapted:first": "adapted", "adapted:second": "adapted", "talker": None
        }  # fmt: skip
        assert server.ask("/v1/models/adapted:first")[1]["id"] == "adapted:first"
        assert {item["name"] for item in server.ask("/api/tags")[1]["models"]} >= {"adapted:first", "adapted:latest"}
        assert "llama_cpp: fixed order for LoRA adapters" in server.notes("adapted")
        question = {"messages": [{"role": "user", "content": "say hello"}]}
        texts: dict[str, str] = {}
        for name in ("adapted", "adapted:first", "adapted:second"):
            call = {**question, "model": name, "max_tokens": 12}
            _, answer = server.ask("/v1/chat/completions", {**call, "temperature": 0})
            assert answer["model"] == name
            texts[name] = answer["choices"][0]["message"]["content"]
            _, answer = server.ask("/v1/messages", {**call, "temperature": 0})
            assert answer["content"][0]["text"] == texts[name]
            options = {"temperature": 0, "num_predict": 12}
            call = {**question, "model": name, "stream": False, "options": options}
            assert server.ask("/api/chat", call)[1]["message"]["content"] == texts[name]
            sampling = json.dumps({"temperature": 0, "max_tokens": 12, "lora_name": name.partition(":")[2]})
            call = {"messages": json.dumps(question["messages"]), "sampling_parameters": sampling}
            assert server.ask("/v2/models/adapted/generate", call)[1]["text_output"] == texts[name]
        assert QUESTIONS["say hello"].startswith(texts["adapted"])
        assert len(set(texts.values())) == 3
        _, counted = server.ask("/v1/messages/count_tokens", {**question, "model": "adapted:first"})
        assert counted["input_tokens"] > 5

    def test_an_adapter_that_is_not_there_is_an_unknown_model(self, llama_cpp_server: Any) -> None:
        for model in ("adapted:third", "talker:first", "nosuch:first"):
            status, answer = llama_cpp_server.ask("/v1/chat/completions", {**chat("say hello"), "model": model})
            assert status == 404
            assert model in answer["error"]["message"]
        sampling = json.dumps({"lora_name": "third"})
        call = {"text_input": "say hello", "sampling_parameters": sampling}
        status, answer = llama_cpp_server.ask("/v2/models/adapted/generate", call)
        assert status == 400
        assert "lora_name: no adapter 'third'; it has first, second" in answer["error"]


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.skipif(
    "EDGE_TEST_LANGUAGE_MODEL" not in os.environ or importlib.util.find_spec("openvino_genai") is None,
    reason="SmolLM2 is not here: tests/e2e/fetch_pipeline_models.sh fetches it; it needs openvino-genai too",
)
def test_a_real_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    import openai

    (tmp_path / "talker/1").mkdir(parents=True)
    (tmp_path / "talker/1/model.gguf").symlink_to(os.environ["EDGE_TEST_LANGUAGE_MODEL"])
    (tmp_path / "talker/config.pbtxt").write_text('backend: "openvino_genai"')
    with (
        serve(tmp_path, "--allow-external-links") as running,
        openai.OpenAI(base_url=running.url("/v1"), api_key="none") as client,
    ):
        answer = ask(client, "What is the capital of France?", model="talker", max_tokens=40)
        assert "Paris" in answer.choices[0].message.content
        prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        assert "Paris" in grpc_stream(running, prompt, temperature=0)


class TestIdleModels:
    pytestmark = real_engine

    def test_an_idle_model_frees_its_memory_and_the_next_request_loads_it(self, tmp_path: Path) -> None:
        import openai

        (tmp_path / "exact/1").mkdir(parents=True)
        shutil.copy(TINY, tmp_path / "exact/1/model.gguf")
        (tmp_path / "exact/config.pbtxt").write_text(
            'backend: "openvino_genai" ' + parameters(idle_unload_s=1, niceness=3)
        )
        with (
            serve(tmp_path) as running,
            openai.OpenAI(base_url=running.url("/v1"), api_key="none", max_retries=0) as client,
        ):
            assert eventually(lambda: not children_of(running.process.pid))
            assert [model.id for model in client.models.list().data] == ["exact"]
            answer = ask(client, "say hello", extra_body={"keep_alive": "1h"})
            assert answer.choices[0].message.content == ANSWERS["hello"]
            own = os.getpriority(os.PRIO_PROCESS, running.process.pid)
            assert min(own + 3, 19) in [
                os.getpriority(os.PRIO_PROCESS, pid) for pid in children_of(running.process.pid)
            ]
            ask(client, "say hello", extra_body={"keep_alive": 0})
            assert eventually(lambda: not children_of(running.process.pid))


class TestFilesThatCannotBeServed:
    pytestmark = real_engine

    def test_a_model_that_does_not_fit_into_memory_is_refused_with_size_and_limit(self, tmp_path: Path) -> None:
        for name, blocks in (("huge", 10_000_000_000), ("small", 64)):
            (tmp_path / name / "1").mkdir(parents=True)
            shutil.copy(TINY, tmp_path / name / "1/model.gguf")
            (tmp_path / name / "config.pbtxt").write_text(
                'backend: "openvino_genai" ' + parameters(num_kv_blocks=blocks)
            )
        with serve(tmp_path) as running:
            index = {entry["name"]: entry for entry in running.ask("/v2/repository/index", {})[1]}
            assert re.search(r"memory is short: \d+ MiB are available, .* about \d+ MiB", index["huge"]["reason"])
            (report,) = running.ask("/edge/v1/models")[1]["models"]
            assert any(re.match(r"needs about \d+ MiB of memory: process", note) for note in report["notes"])
            assert report["load_rss_bytes"] > 120 << 20
