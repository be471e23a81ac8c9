"""Parser of a request to a language model: reads and checks its tensors (prompt or messages, sampling parameters).

The tensors are those of Triton's vLLM backend (triton-inference-server/vllm_backend, docs), and `messages`. Its `image`
has a picture in each element, as a file or in base64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_server.core.json_tensor import JsonTensor
from edge_server.core.request_response import Request
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.sampling_parser import DEFAULT_SAMPLING, parse_json_object, read_sampling
from edge_server.plugins.language.engines.token_engine import NO_VARIABLES, ChatMessage, Sampling
from edge_server.plugins.language.text.requested_tools import Tools, read_tools


@dataclass(frozen=True, slots=True)
class TextRequest:
    """`prompt` is None if the chat template makes it from `messages` and `tools`. `sampling.max_tokens` 0: as many as
    fit."""

    prompt: str | None
    messages: Sequence[ChatMessage]
    images: Sequence[bytes]
    """Files of the pictures. Each part `{"type": "image"}` in the content of a message stands for the next one."""
    tools: Tools | None
    variables: Mapping[str, Any]
    """Of the chat template."""
    sampling: Sampling
    is_stream: bool
    has_prompt_in_output: bool
    has_finish_reason: bool
    has_input_count: bool
    has_output_count: bool
    has_logprobs: bool
    has_cumulative_logprob: bool
    is_tokenization: bool
    """Whether the answer is the prompt's tokens, and no text."""


def read_request(request: Request, defaults: Sampling = DEFAULT_SAMPLING) -> TextRequest:
    """Return the checked request. `defaults` are the model's, for what it does not say. Raises InvalidRequest."""
    title = f"inference request to model '{request.model}'"
    prompt, chat = _text(request, "text_input"), _json_input(request, "messages")
    if (prompt is None) == (chat is None):
        given = "neither" if prompt is None else "both"
        raise InvalidRequest(f"{title}: expected one of the inputs 'text_input' and 'messages', got {given}")
    stated = _json_input(request, "sampling_parameters")
    # As in Triton's vLLM backend: without the tensor, the request parameters are the sampling parameters.
    values: Mapping[str, Any] = dict(request.parameters) if stated is None else parse_json_object(stated, title)
    is_stream = _flag(request, "stream", bool(values.get("stream", False)))
    excludes = _flag(request, "exclude_input_in_output", is_stream or prompt is None)
    if is_stream and not excludes:
        raise InvalidRequest(f"{title}: a stream cannot have exclude_input_in_output false")
    messages, tools, variables = _chat(chat, title) if chat is not None else ((), None, NO_VARIABLES)
    images = _images(request, title)
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    parts = sum(part["type"] == "image" for content in contents for part in content)
    if chat is not None and parts != len(images):
        raise InvalidRequest(
            f"{title}: input 'image': expected a picture for each part of type image in 'messages', of which there are "
            f"{parts}, got {len(images)}"
        )
    sampling = read_sampling(values, title, is_strict=stated is not None, defaults=defaults)
    if tools is not None and (schema := tools.json_schema()):
        if sampling.constraint:
            raise InvalidRequest(f"{title}: expected a tool choice or {sampling.constraint}, got both")
        sampling = replace(sampling, json_schema=schema)
    return TextRequest(
        prompt,
        messages,
        images,
        tools,
        variables,
        sampling,
        is_stream,
        not excludes,
        *(
            _flag(request, name, False)
            for name in (
                "return_finish_reason",
                "return_num_input_tokens",
                "return_num_output_tokens",
                "return_logprobs",
                "return_cumulative_logprob",
                "tokenize",
            )
        ),
    )


def _chat(given: str | JsonTensor, title: str) -> tuple[Sequence[ChatMessage], Tools | None, Mapping[str, Any]]:
    """Return messages, tools and variables of the template of the input `messages`: a list of messages, or an object
    with `messages`, `tools`, `tool_choice`, `parallel_tool_calls` and `chat_template_kwargs`."""
    try:
        messages = given.value if isinstance(given, JsonTensor) else json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{title}: input 'messages': expected JSON, got an error: {error}") from None
    tools = None
    variables: object = None
    if isinstance(messages, dict):
        variables = messages.get("chat_template_kwargs")
        several = messages.get("parallel_tool_calls") is True
        tools = read_tools(messages.get("tools"), messages.get("tool_choice"), title, allows_several=several)
        messages = messages.get("messages")
    if not isinstance(variables, dict | None):
        raise InvalidRequest(f"{title}: input 'messages': chat_template_kwargs: expected an object")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"{title}: input 'messages': expected a list of at least one message")
    read: list[ChatMessage] = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{title}: input 'messages': message {place} has no role")
        content = message.get("content")
        if not isinstance(content, str) and not _are_parts(content):
            raise InvalidRequest(f"{title}: input 'messages': message {place} ('{message['role'][:40]}'): expected a "
                                 "text as content, or a list of parts of type text or image")  # fmt: skip
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            message = {**message, "content": "".join(part["text"] for part in content)}
        if message.get("tool_calls"):
            message = _parse_arguments(message, f"{title}: input 'messages': message {place}")
        read.append(message)
    return read, tools, variables or NO_VARIABLES


def _are_parts(content: object) -> bool:
    """Return whether the content of a message is a list of texts and of places of pictures."""
    return isinstance(content, list) and all(
        isinstance(part, dict)
        and (part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str)))
        for part in content
    )


def _images(request: Request, title: str) -> Sequence[bytes]:
    """Return the checked pictures of the input `image`. Raises InvalidRequest."""
    tensor = request.inputs.get("image")
    if tensor is None:
        return ()
    # Imported only for requests with pictures.
    from edge_server.plugins.language.engines.pictures import check_pictures

    files: list[bytes] = tensor.array.ravel().tolist()
    return check_pictures(files, f"{title}: input 'image'")


def _parse_arguments(message: dict[str, Any], title: str) -> dict[str, Any]:
    """Return the message with the arguments of earlier tool calls, JSON text in OpenAI's form, as values: templates
    expect these."""
    calls = []
    try:
        for call in message["tool_calls"]:
            function = call["function"]
            if isinstance(function["arguments"], str):
                function = {**function, "arguments": json.loads(function["arguments"] or "{}")}
            calls.append({**call, "function": function})
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidRequest(f"{title}: expected tool_calls with a function and its arguments as JSON") from None
    return {**message, "tool_calls": calls}


def _json_input(request: Request, name: str) -> str | JsonTensor | None:
    """Return a JSON text, or the tensor of one that is parsed already."""
    tensor = request.inputs.get(name)
    return tensor if isinstance(tensor, JsonTensor) else _text(request, name)


def _text(request: Request, name: str) -> str | None:
    tensor = request.inputs.get(name)
    if tensor is None:
        return None
    if tensor.array.size != 1:
        raise InvalidRequest(
            f"inference request to model '{request.model}': input '{name}': expected one text, got {tensor.array.size}"
        )
    value: bytes = tensor.array.ravel()[0]
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"inference request to model '{request.model}': input '{name}': expected UTF-8") from None


def _flag(request: Request, name: str, default: bool) -> bool:
    tensor = request.inputs.get(name)
    if tensor is None or tensor.array.size == 0:
        return default
    return bool(tensor.array.ravel()[0])
