"""Parser of a request to a language model: reads and checks its tensors (prompt or messages, sampling parameters).

The tensors are those of Triton's vLLM backend (triton-inference-server/vllm_backend, docs), and `messages`. Its `image`
has a picture in each element, as a file or in base64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edge_server.core.json_tensor import JsonTensor
from edge_server.core.request_response import Request
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.token_engine import NO_VARIABLES, ChatMessage, Sampling
from edge_server.plugins.language.text.tool_calls import Tools, read_tools
from edge_server.plugins.language.text_parameters import SAME_AS, UNSUPPORTED

DEFAULT_MAX_TOKENS = 16
"""Of vLLM."""

DEFAULT_TEMPERATURE = 0.8
"""For models whose files do not say how to sample, as in llama.cpp. With 1, the default of OpenAI and vLLM, the small
models of edge machines wander from the subject."""

DEFAULT_SAMPLING = Sampling(DEFAULT_MAX_TOKENS, temperature=DEFAULT_TEMPERATURE)

_ELSEWHERE = {"max_completion_tokens", "response_format", "tool_choice", "tools"}
"""What constrains a text in OpenAI's API only. As a request parameter it is an error, as all that is unsupported is;
other unknown request parameters are not for the model."""

MAX_TOP_LOGPROBS = 20
"""Of OpenAI."""

_MAX_BIASES = 1024
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 1024


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
    values: Mapping[str, Any] = dict(request.parameters) if stated is None else _json(stated, title)
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


def read_sampling(
    values: Mapping[str, Any], title: str, *, is_strict: bool, defaults: Sampling = DEFAULT_SAMPLING
) -> Sampling:
    """Return the sampling parameters; `defaults` where they are missing or null.

    Unknown names are errors if `is_strict`, otherwise those that are known to constrain a text. Raises InvalidRequest.
    """

    def bad(key: str, expected: str) -> InvalidRequest:
        return InvalidRequest(f"{title}: sampling parameter {key}: expected {expected}, got {str(values[key])[:80]!r}")

    def number(key: str, default: float, least: float, most: float) -> float:
        value = values.get(key)
        if value is None:
            return default
        if isinstance(value, str):  # values of request parameters may be text
            try:
                value = float(value)
            except ValueError:
                raise bad(key, f"{least:g} to {most:g}") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise bad(key, f"{least:g} to {most:g}")
        return value

    def whole(key: str, default: int, least: int, most: int = 1 << 31) -> int:
        value = number(key, default, least, most)
        if value != math.floor(value):
            raise bad(key, "a whole number")
        return int(value)

    known = {
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "stop", "ignore_eos", "json_schema", "choice", "regex", "grammar",
        "stream", "logprobs", "logit_bias", "n", "lora_name",
    }  # fmt: skip
    unknown = sorted(set(values) - known if is_strict else filter(partial(_constrains, values), values))
    if unknown:
        instead = f"; use '{SAME_AS[unknown[0]]}'" if unknown[0] in SAME_AS else ""
        raise InvalidRequest(
            f"{title}: unknown sampling parameter '{unknown[0][:80]}'{instead}; known are {', '.join(sorted(known))}"
        )
    if whole("n", 1, 1) != 1:
        raise bad("n", "1; send the request once for each text")
    stop = values.get("stop") or ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(item, str) for item in stops):
        raise bad("stop", "a text or a list of texts")
    if len(stops) > _MAX_STOPS or any(len(item) > _MAX_STOP_CHARACTERS for item in stops):
        raise bad("stop", f"at most {_MAX_STOPS} texts of at most {_MAX_STOP_CHARACTERS} characters")
    schema = values.get("json_schema")
    if isinstance(schema, dict):  # an empty one is for any JSON
        schema = json.dumps(schema)
    elif schema and (not isinstance(schema, str) or not isinstance(_json(schema, title), dict)):
        raise bad("json_schema", "a JSON schema, as an object or its text")
    choice = values.get("choice") or ()
    if not isinstance(choice, list | tuple) or not all(isinstance(item, str) and item for item in choice):
        raise bad("choice", "a list of texts that are not empty")
    regex, grammar = values.get("regex") or "", values.get("grammar") or ""
    if not isinstance(regex, str):
        raise bad("regex", "a regular expression")
    if not isinstance(grammar, str):
        raise bad("grammar", "rules in GBNF")
    if sum(map(bool, (schema, choice, regex, grammar))) > 1:
        raise InvalidRequest(f"{title}: expected one of the sampling parameters json_schema, choice, regex and grammar")
    seed = whole("seed", -1, -1, (1 << 63) - 1)  # as in vLLM -1 is none
    adapter = values.get("lora_name") or ""
    if not isinstance(adapter, str):
        raise bad("lora_name", "the name of an adapter")
    for key in ("ignore_eos",):
        if not isinstance(values.get(key, False), bool):
            raise bad(key, "true or false")
    return Sampling(
        max_tokens=whole("max_tokens", defaults.max_tokens, 0),
        min_tokens=whole("min_tokens", 0, 0),
        temperature=number("temperature", defaults.temperature, 0.0, 100.0),
        top_p=number("top_p", defaults.top_p, 1e-6, 1.0),
        top_k=whole("top_k", defaults.top_k, -1),
        min_p=number("min_p", defaults.min_p, 0.0, 1.0),
        seed=None if seed == -1 else seed,
        repetition_penalty=number("repetition_penalty", defaults.repetition_penalty, 0.01, 100.0),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
        stop=tuple(stops),
        ignore_eos=bool(values.get("ignore_eos", False)),
        json_schema=schema or "",
        top_logprobs=whole("logprobs", 0, 0, MAX_TOP_LOGPROBS),
        logit_bias=_read_bias(values, title),
        choice=tuple(choice),
        regex=regex,
        grammar=grammar,
        adapter=adapter,
    )


def _read_bias(values: Mapping[str, Any], title: str) -> tuple[tuple[int, float], ...]:
    """Return `logit_bias`: an object whose names are tokens. Raises InvalidRequest."""
    bias = values.get("logit_bias") or {}
    if not isinstance(bias, dict) or len(bias) > _MAX_BIASES:
        raise InvalidRequest(f"{title}: sampling parameter logit_bias: expected an object of at most {_MAX_BIASES}")
    for token, value in bias.items():
        is_token = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 10
        if not is_token or isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequest(
                f"{title}: sampling parameter logit_bias: expected tokens with numbers from -100 to 100, got "
                f"{str(token)[:20]!r}: {str(value)[:20]!r}"
            )
    return tuple((int(token), float(value)) for token, value in bias.items())


def _constrains(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a request parameter asks for what no model supports. An empty text asks for nothing."""
    value = values[name]
    return value not in (None, "") and (name in _ELSEWHERE or (name in UNSUPPORTED and value not in UNSUPPORTED[name]))


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
    from edge_server.plugins.language.pictures import check_pictures

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


def _json(given: str | JsonTensor, title: str) -> dict[str, Any]:
    try:
        value = given.value if isinstance(given, JsonTensor) else json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{title}: expected a JSON object, got an error: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{title}: expected a JSON object, got {type(value).__name__}")
    return value


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
