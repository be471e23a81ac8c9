"""Bodies of OpenAI's responses and of Anthropic's messages, the chats that they become, and the encoding of answers as
whole objects and as events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from input_reader import InputReader
from stubs import result_of

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.frontends.json_text import to_json
from edge_server.plugins.language.anthropic.message_request import read_count_request, read_message_request
from edge_server.plugins.language.anthropic.message_response import MessageEncoder
from edge_server.plugins.language.openai.completion_request import CompletionRequest
from edge_server.plugins.language.openai.completion_response import CompletionChoice, CompletionEncoder
from edge_server.plugins.language.openai.responses_api_encoder import ResponseEncoder
from edge_server.plugins.language.openai.responses_api_request import ResponseRequest, read_response_request
from edge_server.plugins.language.openai.responses_api_store import StoredResponse, TextResponseStore

_NAMES = ("messages", "image", "sampling_parameters", "stream", "exclude_input_in_output", "return_logprobs")
_MODEL = ModelSpec(
    "m",
    "llm",
    "",
    0,
    tuple(InputSpec(name, DType.BYTES, (1,)) for name in _NAMES),
    (OutputSpec("text_output", DType.BYTES, (1,)), OutputSpec("tool_calls", DType.BYTES, (1,))),
    (),
)
_STORED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

_FIRST = read_response_request(b'{"model": "m", "input": "a"}', lambda response_id: None)
_CALL = _FIRST.completion


PICTURE = "data:image/png;base64,AAAA"


def seeds() -> Iterable[bytes]:
    schema = {"type": "object"}
    tool = {"type": "function", "name": "f", "parameters": schema}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PICTURE}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]},
    ]
    own: dict[str, Any] = {"model": "m", "input": "a", "stream": True}
    yield b"\0" + json.dumps({**own, "input": items[1:], "tools": [tool], "tool_choice": "auto"}).encode()
    yield b"\0" + json.dumps({**own, "input": items, "instructions": "b", "previous_response_id": "old"}).encode()
    yield b"\0" + json.dumps({**own, "text": {"format": {"type": "json_schema", "schema": schema}}}).encode()
    yield b"\0" + json.dumps({**own, "reasoning": {"effort": "low", "summary": "auto"}, "top_logprobs": 1}).encode()
    yield b"\0" + json.dumps({**own, "metadata": {"a": "b"}, "store": False, "include": []}).encode()
    blocks: list[Any] = [
        {"type": "thinking", "thinking": "h", "signature": "s"},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, {"type": "text", "text": "c"}]},
    ]
    told: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": messages}
    thinking = {"type": "enabled", "budget_tokens": 5}
    of_tools = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "tool", "name": "f"}}
    yield b"\1" + json.dumps({**told, "system": "s", "thinking": thinking, **of_tools}).encode()
    yield b"\1" + json.dumps({**told, "output_config": {"format": {"type": "json_schema", "schema": schema}}}).encode()
    yield b"\2" + json.dumps({"model": "m", "messages": messages, "system": [{"type": "text", "text": "s"}]}).encode()
    yield b"\3\7" + bytes((1, 2, 65, 66, 0, 1, 67, 2, 3, 1, 123, 3, 1, 125, 0, 1, 68, 2))
    for kind in range(3):
        yield bytes((0x80 | kind, 3, WORDS.index("input"), 65, 2, 2, 127, 6, 3, 127, 5, WORDS.index("tools"), 160, 5))


WORDS = (
    "model", "m", "input", "messages", "role", "content", "type", "text", "user", "assistant", "developer", "system",
    "message", "input_text", "output_text", "refusal", "input_image", "image_url", "detail", "function_call", "call_id",
    "name", "arguments", "function_call_output", "output", "reasoning", "summary", "effort", "auto", "low", "tools",
    "function", "parameters", "tool_choice", "none", "required", "instructions", "previous_response_id", "old", "store",
    "metadata", "max_output_tokens", "format", "json_schema", "schema", "include", "message.output_text.logprobs",
    "truncation", "background", "stream", "stream_options", "include_obfuscation", "top_logprobs", "verbosity", "tool",
    "max_tokens", "thinking", "enabled", "adaptive", "disabled", "budget_tokens", "display", "omitted", "signature",
    "tool_use", "tool_result", "tool_use_id", "input_schema", "id", "stop_sequences", "output_config", "any",
    PICTURE, "image", "source", "base64", "data", "media_type", "disable_parallel_tool_use", "keep_alive",
    "chat_template_kwargs", "enable_thinking", "top_k",
)  # fmt: skip


def check(data: bytes) -> None:
    """The first byte is the kind of input: 0 a body of responses, 1 one of messages, 2 one of messages/count_tokens, 3
    an answer."""
    kind, body = (data[0] & 3, data[1:]) if data else (0, b"")
    if kind == 3:
        _check_answer(InputReader(body))
        return
    if data[:1] >= b"\x80":
        take = InputReader(body)
        members = {"model": "m", "max_tokens": 5} if kind == 1 else {"model": "m"}
        call = {**members, **{take.choice(WORDS): take.json(WORDS) for _ in range(take.byte() & 15)}}
        body = json.dumps(call, ensure_ascii=False).encode()
    if kind == 0:
        found = result_of(lambda: read_response_request(body, _find))
        while found is not None:
            _check_chat(found.completion)
            made = json.loads(to_json(ResponseEncoder(found, TextResponseStore()).body([_choice("b")])))
            assert made["output"][0]["content"][0]["text"] == "b"
            count = len(found.messages)
            found = found.without_oldest_turns()
            assert found is None or 0 < len(found.messages) < count
    elif kind == 1:
        message = result_of(lambda: read_message_request(body))
        if message is not None:
            _check_chat(message.completion)
    else:
        count = result_of(lambda: read_count_request(body))
        if count is not None:
            _check_chat(count)


def _find(response_id: str) -> StoredResponse | None:
    return StoredResponse(b"{}", _STORED) if response_id == "old" else None


def _check_chat(call: CompletionRequest) -> None:
    assert call.keep_alive_s is None or call.keep_alive_s >= 0
    requests = result_of(lambda: call.inference_requests(_MODEL))
    if requests is None:
        return
    (request,) = requests
    assert json.loads(request.inputs["sampling_parameters"].array[0])["max_tokens"] >= 0
    given = json.loads(request.inputs["messages"].array[0])
    pictures = 0
    for message in given["messages"] if isinstance(given, dict) else given:
        assert isinstance(message["role"], str)
        assert isinstance(message.get("reasoning_content", ""), str)
        if not isinstance(message["content"], str):
            kinds = [part["type"] for part in message["content"]]
            assert set(kinds) <= {"text", "image"}
            pictures += kinds.count("image")
    assert pictures == len(call.images)


def _choice(*texts: str) -> CompletionChoice:
    choice = CompletionChoice(0)
    for text in texts:
        choice.add(_response(text_output=text))
    choice.finish_reason = "stop"
    return choice


def _response(*, is_final: bool = False, **outputs: Any) -> Response:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in outputs.items()}
    tensors = [
        Tensor(name, DType.BYTES, np.array([text.encode("utf-8", "replace")], object)) for name, text in texts.items()
    ]
    return Response("m", 1, "", outputs=tuple(tensors), is_final=is_final)


def _check_answer(take: InputReader) -> None:
    """The events of a stream, put together, are the whole answer."""
    flags = take.byte()
    request = _FIRST._replace(completion=replace(_CALL, is_stream=True), has_summary=bool(flags & 1))
    responses, calls = [], 0
    while take.left and len(responses) < 12:
        kind = take.byte() & 3
        if kind == 2 and calls < 16:
            part = {"index": calls, "id": f"c{calls}", "type": "function", "function": {"name": "f"}}
            responses.append(_response(text_output="", tool_calls=[part]))
            calls += 1
            continue
        text = take.take(take.byte() & 15).decode("utf-8", "replace")
        if kind == 3 and calls:
            part = {"index": calls - 1, "function": {"arguments": text}}
            responses.append(_response(text_output="", tool_calls=[part]))
        else:
            responses.append(_response(**{"reasoning_content" if kind == 1 else "text_output": text}))
    reason = "length" if flags & 2 else "stop"
    responses.append(_response(is_final=True, text_output="", finish_reason=reason))
    _check_response_events(request, responses)
    _check_message_events(responses)


def _run(encoder: CompletionEncoder, responses: Sequence[Response]) -> tuple[CompletionChoice, list[dict[str, Any]]]:
    """Return the choice with all responses, and the data of the events."""
    choice = CompletionChoice(0)
    events = []
    for response in responses:
        choice.add(response)
        for piece in encoder.pieces(choice):
            assert piece.count(b"\n\n") == 1
            assert piece.endswith(b"\n\n")
            name, data = piece.split(b"\n", 1)
            events.append(json.loads(data.removeprefix(b"data: ")))
            assert name == b"event: " + events[-1]["type"].encode()
    return choice, events


def _check_response_events(request: ResponseRequest, responses: Sequence[Response]) -> None:
    choice, events = _run(ResponseEncoder(request, TextResponseStore()), responses)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas: list[str] = []
    done = 0
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert len(deltas) == done == event["output_index"]
            deltas.append("")
        elif kind.endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
        elif kind == "response.output_item.done":
            done += 1
            assert deltas[event["output_index"]] == _item_text(event["item"])
    output = events[-1]["response"]["output"]
    assert (done, deltas) == (len(output), [_item_text(item) for item in output])
    whole = ResponseEncoder(request._replace(completion=_CALL), TextResponseStore()).body([choice])
    assert isinstance(whole, dict)
    assert whole["status"] == events[-1]["response"]["status"] == events[-1]["type"].removeprefix("response.")
    for kind in ("reasoning", "message", "function_call"):
        joined = [
            "".join(_item_text(item) for item in found if item["type"] == kind) for found in (output, whole["output"])
        ]
        assert joined[0] == joined[1]


def _item_text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    (part,) = item["summary"] or item["content"] if item["type"] == "reasoning" else item["content"]
    return str(part["text"])


def _check_message_events(responses: Sequence[Response]) -> None:
    choice, events = _run(MessageEncoder(_CALL, shows_thinking=True), responses)
    texts = {"thinking": "", "text": ""}
    open_index = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_index is None
            open_index = event["index"]
        elif event["type"] == "content_block_stop":
            assert open_index == event["index"]
            open_index = None
        elif event["type"] == "content_block_delta":
            assert open_index == event["index"]
            for name in texts:
                texts[name] += event["delta"].get(name, "")
    assert open_index is None
    assert (texts["thinking"], texts["text"]) == (choice.reasoning, choice.text)
    json.loads(to_json(MessageEncoder(_CALL, shows_thinking=True).body([choice])))
