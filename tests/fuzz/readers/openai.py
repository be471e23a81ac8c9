"""Bodies of the text APIs: OpenAI's chats, completions and embeddings, ollama's chats, prompts and embeddings, Jina's
and Cohere's rerank, and the requests that they become."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from input_reader import InputReader
from stubs import result_of

from edge_server.core.model_spec import ChatTemplate, InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.language.ollama.endpoints import _read_embed_request
from edge_server.plugins.language.ollama.generation_request import read_chat_request, read_generate_request
from edge_server.plugins.language.openai.completion_request import CompletionRequest, read_completion_request
from edge_server.plugins.language.openai.embedding_codec import read_embedding_request
from edge_server.plugins.language.openai.rerank_codec import (
    RerankRequest,
    Scores,
    read_rerank_request,
    rerank_response,
)

_TEMPLATE = ChatTemplate(
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}",
    {},
)


def _spec(inputs: tuple[InputSpec, ...], template: ChatTemplate | None = None) -> ModelSpec:
    outputs = (OutputSpec("text_output", DType.BYTES, (1,)), OutputSpec("tool_calls", DType.BYTES, (1,)))
    return ModelSpec("m", "llm", "", 0, inputs, outputs, (), chat_template=template)


_NAMES = ("sampling_parameters", "stream", "exclude_input_in_output", "return_logprobs")
_TEXT = tuple(
    InputSpec(name, DType.BYTES if name != "stream" else DType.BOOL, (1,)) for name in ("text_input", *_NAMES)
)
_CHAT = (*(InputSpec(name, DType.BYTES, (-1,)) for name in ("messages", "image")), *_TEXT)
_SPECS = (_spec(_CHAT), _spec(_TEXT, _TEMPLATE))
_EMBEDDINGS = ModelSpec(
    "m", "llm", "", 4, (InputSpec("text", DType.BYTES, (1,)),), (OutputSpec("e", DType.FP32, (8,)),), ()
)
_SCORES = ModelSpec(
    "m",
    "llm",
    "",
    4,
    tuple(InputSpec(name, DType.BYTES, (1,)) for name in ("query", "document")),
    (OutputSpec("score", DType.FP32, (1,)),),
    (),
)
PICTURE = "data:image/png;base64,AAAA"


def seeds() -> Iterable[bytes]:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    chat: dict[str, Any] = {
        "model": "m",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    yield b"\0" + json.dumps(chat).encode()
    yield b"\1" + json.dumps({**chat, "tools": [tool], "tool_choice": "auto", "n": 2, "seed": 5}).encode()
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    yield b"\0" + json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()
    yield b"\0" + json.dumps({"model": "m", "messages": messages, "response_format": schema, "stop": ["x"]}).encode()
    yield b"\0" + json.dumps({"model": "m", "messages": messages, "logprobs": True, "top_logprobs": 1}).encode()
    yield b"\2" + json.dumps({"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "echo": True}).encode()
    yield b"\2" + json.dumps({"model": "m", "prompt": "a", "keep_alive": "5m", "temperature": 0.5, "top_p": 1}).encode()
    yield b"\3" + json.dumps({"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}).encode()
    yield b"\3" + json.dumps({"model": "m", "input": "a", "keep_alive": -1}).encode()
    options = {"num_predict": 5, "seed": -1, "stop": ["x"], "num_ctx": 9, "repeat_penalty": 1.5}
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    answered = [
        *messages,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "f", "content": "1"},
    ]
    yield b"\4" + json.dumps({"model": "m:latest", "messages": answered, "tools": [tool], "options": options}).encode()
    yield (b"\4" + json.dumps({"model": "m", "messages": messages, "format": {}, "think": False}).encode())
    seen = [{"role": "user", "content": "a", "images": ["AAAA"]}]
    yield b"\4" + json.dumps({"model": "m", "messages": seen}).encode()
    yield (b"\5" + json.dumps({"model": "m", "prompt": "a", "system": "b", "keep_alive": "5m"}).encode())
    yield b"\5" + json.dumps({"model": "m", "prompt": "a", "raw": True, "logprobs": True, "options": options}).encode()
    yield b"\6" + json.dumps({"model": "m", "query": "a", "documents": ["a", {"text": "b"}], "top_n": 1}).encode()
    yield b"\7" + json.dumps({"model": "m:latest", "input": ["a"], "truncate": True, "options": {}}).encode()
    for kind in range(8):
        yield bytes((0x80 | kind, 3, WORDS.index("messages"), 65, 2, 2, 127, 6, 3, 127, 5, WORDS.index("n"), 160, 5))


WORDS = (
    "model", "messages", "role", "content", "type", "text", "user", "stream", "stream_options", "include_usage", "n",
    "tools", "tool_choice", "function", "name", "auto", "none", "seed", "max_tokens", "max_completion_tokens",
    "response_format", "json_schema", "json_object", "schema", "logprobs", "top_logprobs", "prompt", "echo", "stop",
    "keep_alive", "5m", "-1", "temperature", "input", "encoding_format", "base64", "float", "dimensions", "logit_bias",
    "modalities", "tool_calls", "arguments", "id", "m", "options", "num_predict", "raw", "system", "format", "think",
    "tool_name", "images", "repeat_penalty", "m:latest", "tokens", "chat_template_kwargs", "enable_thinking",
    "reasoning_effort", "low", "query", "documents", "top_n", "return_documents", "truncate", "image_url", "url",
    PICTURE, "AAAA",
)  # fmt: skip


def _read_completion(kind: bytes, body: bytes) -> CompletionRequest | None:
    if kind == b"\4":
        return read_chat_request(body).completion
    if kind == b"\5":
        return read_generate_request(body, lambda model: model == "m").completion
    return read_completion_request(body, is_chat=kind != b"\2")


def check(data: bytes) -> None:
    """The first byte is the kind of call: 0 a chat, 1 a chat for a model with a template, 2 a prompt, 3 embeddings, 4 a
    chat and 5 a prompt of ollama's API, 6 documents to be sorted, 7 embeddings of ollama's API."""
    kind, body = bytes((data[0] & 7,)) if data else b"", data[1:]
    if data[:1] >= b"\x80":
        take = InputReader(body)
        call = {"model": "m", **{take.choice(WORDS): take.json(WORDS) for _ in range(take.byte() & 15)}}
        body = json.dumps(call, ensure_ascii=False).encode()
    if kind == b"\6":
        if (ranked := result_of(lambda: read_rerank_request(body))) is not None:
            _check_scores(ranked)
        return
    if kind in (b"\3", b"\7"):
        embedding = result_of(lambda: (read_embedding_request if kind == b"\3" else _read_embed_request)(body))
        if (
            embedding is not None
            and (requests := result_of(lambda: embedding.inference_requests(_EMBEDDINGS))) is not None
        ):
            texts = [text for request in requests for text in request.inputs["text"].array.reshape(-1).tolist()]
            assert texts == [text.encode("utf-8", "replace") for text in embedding.texts]
        return
    call = result_of(lambda: _read_completion(kind, body))
    if call is None:
        return
    assert call.keep_alive_s is None or call.keep_alive_s >= 0
    requests = result_of(lambda: call.inference_requests(_SPECS[kind == b"\1"]))
    if requests is None:
        return
    assert len(requests) == len(call.prompts) * call.choices <= 256
    for request in requests:
        sampling = json.loads(request.inputs["sampling_parameters"].array[0])
        assert sampling["max_tokens"] >= 0
        source = request.inputs.get("messages") or request.inputs["text_input"]
        source.array[0].decode("utf-8")
        if "messages" in request.inputs:
            given, pictures = json.loads(source.array[0]), 0
            for message in given["messages"] if isinstance(given, dict) else given:
                assert isinstance(message["role"], str)
                kinds = [] if isinstance(message["content"], str) else [part["type"] for part in message["content"]]
                assert set(kinds) <= {"text", "image"}
                pictures += kinds.count("image")
            assert pictures == len(call.images)


def _check_scores(call: RerankRequest) -> None:
    """Each document is asked for once, in its place, and answered so."""
    requests = call.inference_requests(_SCORES)
    for name, texts in (("query", [call.query] * len(call.documents)), ("document", call.documents)):
        found = [text for request in requests for text in request.inputs[name].array.reshape(-1).tolist()]
        assert found == [text.encode("utf-8", "replace") for text in texts]
    values = [len(text) / 2 for text in call.documents]
    answer = rerank_response(call, Scores(values, 0))
    results = answer["results"]
    assert isinstance(results, list)
    assert len(results) == min(call.top_n or len(values), len(values))
    assert [item["relevance_score"] for item in results] == sorted(values, reverse=True)[: len(results)]
