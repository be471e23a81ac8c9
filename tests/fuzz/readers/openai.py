"""Bodies of the text APIs: OpenAI's chats, completions and embeddings, ollama's chats and prompts, vLLM's tokens, and
the requests that they become."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from input_reader import InputReader
from stubs import result_of

from edge_server.core.model_spec import ChatTemplate, InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.language.ollama.generation_request import read_chat_request, read_generate_request
from edge_server.plugins.language.openai.completion_request import CompletionRequest, read_completion_request
from edge_server.plugins.language.openai.embedding_request import read_embedding_request
from edge_server.plugins.language.vllm.token_requests import read_detokenize_request, read_tokenize_request

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
_CHAT = (InputSpec("messages", DType.BYTES, (1,)), *_TEXT)
_SPECS = (_spec(_CHAT), _spec(_TEXT, _TEMPLATE))
_EMBEDDINGS = ModelSpec(
    "m", "llm", "", 4, (InputSpec("text", DType.BYTES, (1,)),), (OutputSpec("e", DType.FP32, (8,)),), ()
)


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
    yield (b"\5" + json.dumps({"model": "m", "prompt": "a", "system": "b", "keep_alive": "5m"}).encode())
    yield b"\5" + json.dumps({"model": "m", "prompt": "a", "raw": True, "logprobs": True, "options": options}).encode()
    yield b"\6" + json.dumps({"model": "m", "messages": messages, "tools": [tool]}).encode()
    yield b"\7" + json.dumps({"model": "m", "tokens": [1, 2]}).encode()
    for kind in range(8):
        yield bytes((0x80 | kind, 3, WORDS.index("messages"), 65, 2, 2, 127, 6, 3, 127, 5, WORDS.index("n"), 160, 5))


WORDS = (
    "model", "messages", "role", "content", "type", "text", "user", "stream", "stream_options", "include_usage", "n",
    "tools", "tool_choice", "function", "name", "auto", "none", "seed", "max_tokens", "max_completion_tokens",
    "response_format", "json_schema", "json_object", "schema", "logprobs", "top_logprobs", "prompt", "echo", "stop",
    "keep_alive", "5m", "-1", "temperature", "input", "encoding_format", "base64", "float", "dimensions", "logit_bias",
    "modalities", "tool_calls", "arguments", "id", "m", "options", "num_predict", "raw", "system", "format", "think",
    "tool_name", "images", "repeat_penalty", "m:latest", "tokens", "chat_template_kwargs", "enable_thinking",
    "reasoning_effort", "low",
)  # fmt: skip


def _read_completion(kind: bytes, body: bytes) -> CompletionRequest | None:
    if kind == b"\4":
        return read_chat_request(body).completion
    if kind == b"\5":
        return read_generate_request(body, lambda model: model == "m").completion
    if kind == b"\6":
        return read_tokenize_request(body)
    return read_completion_request(body, is_chat=kind != b"\2")


def check(data: bytes) -> None:
    """The first byte is the kind of call: 0 a chat, 1 a chat for a model with a template, 2 a prompt, 3 embeddings, 4 a
    chat and 5 a prompt of ollama's API, 6 a text whose tokens are wanted, 7 tokens whose text is wanted."""
    kind, body = bytes((data[0] & 7,)) if data else b"", data[1:]
    if data[:1] >= b"\x80":
        take = InputReader(body)
        call = {"model": "m", **{take.choice(WORDS): take.json(WORDS) for _ in range(take.byte() & 15)}}
        body = json.dumps(call, ensure_ascii=False).encode()
    if kind == b"\7":
        tokens = result_of(lambda: read_detokenize_request(body))
        assert tokens is None or all(0 <= token < 1 << 31 for token in tokens[1])
        return
    if kind == b"\3":
        embedding = result_of(lambda: read_embedding_request(body))
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
            given = json.loads(source.array[0])
            for message in given["messages"] if isinstance(given, dict) else given:
                assert isinstance(message["role"], str)
                assert isinstance(message["content"], str)
