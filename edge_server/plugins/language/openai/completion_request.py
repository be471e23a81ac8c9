"""Parser of the requests `chat/completions` and `completions` of OpenAI's API: makes inference requests of them.

The format is https://platform.openai.com/docs/api-reference. Members that this server does not support are errors that
name the member, because they might constrain the answer; only those that have no effect on it are ignored. Templates
and token counts belong to the model, which has the tokenizer: messages go to it as JSON, which a model of this server
gets as it was parsed (JsonTensor).
"""

from __future__ import annotations

import base64
import math
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from edge_server.core.json_tensor import JsonTensor
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.json_text import json_type, parse_object
from edge_server.plugins.language.engines.sampling_parser import SAME_AS, UNSUPPORTED
from edge_server.plugins.language.text.requested_template_variables import (
    CONTINUE,
    EFFORT,
    NEW_TURN,
    THINKING,
    check_variables,
)
from edge_server.protocol.raw_tensors import Buffer

_MAX_CHOICES = 16
_DEFAULT_COMPLETION_TOKENS = 16

_LARGEST_SEED = (1 << 63) - 1
_MAX_TOP_LOGPROBS = 20

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

_COMMON = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "min_tokens", "ignore_eos", "stop", "logit_bias")  # fmt: skip
"""Members that are sampling parameters under the same name. Those that OpenAI does not have are vLLM's."""

_GUIDED = {"guided_json": "json", "guided_choice": "choice", "guided_regex": "regex", "guided_grammar": "grammar",
           "grammar": "grammar"}  # fmt: skip
"""Older member of vLLM's API, or member of llama.cpp's -> the same in `structured_outputs`."""
_KINDS = {"json": "a JSON schema", "choice": "a list of texts", "regex": "a regular expression",
          "grammar": "rules in GBNF"}  # fmt: skip
"""Of `structured_outputs` -> what its value is."""

_SUPPORTED = {"model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "logprobs",
              "response_format", "structured_outputs", *_GUIDED, "keep_alive", *_COMMON}  # fmt: skip
_OF_CHATS = {"messages", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
             EFFORT, THINKING, NEW_TURN, CONTINUE}  # fmt: skip
_OF_COMPLETIONS = {"prompt", "echo"}

_NO_EFFECT = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
    "priority", "request_id",  # vLLM's
    "cache_prompt", "id_slot",  # llama.cpp's
}  # fmt: skip
"""Members that are ignored, because the answer does not depend on them."""

_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"-?(?:{_NUMBER}|(?:{_NUMBER}(?:h|ms|m|s)){{1,4}})")
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "": 1.0}
"""`keep_alive` as a text: a number, or Go's durations, which ollama's own clients send."""

_DATA_URL = re.compile(r"data:[^,;]{0,100}(?:;[^,;]{0,100}){0,4};base64,", re.IGNORECASE)
_MAX_URL = 2048

_JSON = "'response_format' with a JSON schema"
_INSTEAD = {
    **{name: f"use {_JSON if same == 'json_schema' else repr(same)}" for name, same in SAME_AS.items()},
    "json_schema": f"use {_JSON}",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "input": "use 'messages', or 'prompt' of completions",
}
"""Member that is not supported -> what does the same here."""


Chat: TypeAlias = "list[dict[str, Any]] | dict[str, Any]"
"""The messages, each with its content as one text, or as parts of type text and image if it has pictures; or an object
with `messages`, `tools`, `tool_choice`, `parallel_tool_calls` and `chat_template_kwargs`."""


class BadMember(InvalidRequest):
    """A member of the call is wrong. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param

    def renamed(self, names: Mapping[str, str]) -> BadMember:
        """Return the error with the name that the client of another API knows; `names` has it for OpenAI's."""
        own = names.get(self.param, self.param)
        return BadMember(own, self.message.replace(f"'{self.param}", f"'{own}", 1))


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One call. Each of `prompts` has `choices` answers; choice i belongs to prompt i // choices."""

    model: str
    is_chat: bool
    prompts: tuple[str | Chat, ...]
    """Texts, or one chat."""
    images: tuple[bytes | str, ...]
    """Pictures of the chat as files, or URLs to be fetched: each for the next part of type image in its messages."""
    choices: int
    sampling: Mapping[str, Any]
    is_stream: bool
    includes_usage: bool
    has_logprobs: bool
    top_logprobs: int
    """How many of the most likely tokens are told at the place of each."""
    has_tools: bool
    has_parallel_calls: bool
    """Whether an answer may have several calls of tools; otherwise those after the first are dropped, as in vLLM."""
    echoes: bool
    keep_alive_s: float | None
    """How long the model stays loaded after this call; math.inf: for ever, None: as before. As in ollama's API."""
    warnings: tuple[str, ...] = ()
    """What the server ignored, for the member `warnings` of the answer, or of each choice's last chunk in a stream."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def inference_requests(self, spec: ModelSpec) -> list[Request]:
        """Return a request for each choice. Raises BadMember if the model cannot take them."""
        inputs = {item.name for item in spec.inputs}
        source = "messages" if self.is_chat else "text_input"
        prompts: Sequence[str | Chat] = self.prompts
        if self.is_chat and spec.chat_template is not None:
            # Imported only for such models: it imports Jinja.
            from edge_server.plugins.language.text.chat_template import chat_prompt

            try:
                source, prompts = "text_input", [chat_prompt(spec, chat) for chat in prompts]
            except InvalidRequest as error:
                raise BadMember("messages", error.message) from error
        if source not in inputs or spec.output("text_output") is None:
            tokenizer = " (or the parameter chat_tokenizer)" if self.is_chat else ""
            raise BadMember(
                "model",
                f"model '{spec.name}' takes no {'chats' if self.is_chat else 'prompts'}: it needs an input '{source}'"
                f"{tokenizer} and an output 'text_output'",
            )
        if self.images:
            self.check_takes_pictures(spec)
        if self.has_tools and spec.output("tool_calls") is None:
            raise BadMember("tools", f"model '{spec.name}' has no output 'tool_calls'")
        return [
            self._request(spec, inputs, source, prompt, choice) for prompt in prompts for choice in range(self.choices)
        ]

    def check_takes_pictures(self, spec: ModelSpec) -> None:
        """Raise BadMember if the model takes texts only."""
        if spec.input("image") is None:
            raise BadMember("messages", f"'messages': model '{spec.name}' takes no pictures")

    def _request(self, spec: ModelSpec, inputs: set[str], source: str, prompt: str | Chat, choice: int) -> Request:
        sampling = dict(self.sampling)
        if self.top_logprobs:
            sampling["logprobs"] = self.top_logprobs
        if "seed" in sampling and choice:
            sampling["seed"] = (sampling["seed"] + choice) & _LARGEST_SEED  # answers to one prompt differ
        values: dict[str, str | bool | Chat | tuple[bytes | str, ...]] = {
            source: prompt,
            **({"image": self.images} if self.images else {}),
            "sampling_parameters": sampling,
            "stream": self.is_stream,
            "exclude_input_in_output": not self.echoes,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "return_logprobs": self.has_logprobs,
        }
        return Request(
            model=spec.name,
            id=self.id,
            inputs={name: _tensor(name, value) for name, value in values.items() if name in inputs},
        )


def read_completion_request(body: Buffer, *, is_chat: bool) -> CompletionRequest:
    """Return the call of a body. Raises InvalidRequest."""
    return make_completion_request(parse_object(body), is_chat=is_chat)


def make_completion_request(members: Mapping[str, Any], *, is_chat: bool) -> CompletionRequest:
    """Return the call of the members of OpenAI's object, to which other wires translate theirs. Raises BadMember."""
    model = read_model(members)
    check_names(members, _SUPPORTED | (_OF_CHATS if is_chat else _OF_COMPLETIONS))
    is_stream = read_boolean(members, "stream")
    options = read_object(members, "stream_options")
    if options and not is_stream:
        raise BadMember("stream_options", "'stream_options': only for a stream")
    has_tools = is_chat and bool(members.get("tools"))
    echoes = not is_chat and read_boolean(members, "echo")
    if echoes and is_stream:
        raise BadMember("echo", "'echo' is not supported for a stream")
    has_logprobs, top_logprobs = _read_logprobs(members, is_chat=is_chat)
    images: list[bytes | str] = []
    if echoes and has_logprobs:
        raise BadMember(
            "logprobs", "'logprobs' is not supported with 'echo': the probabilities of a prompt's tokens are not known"
        )
    return CompletionRequest(
        model=model,
        is_chat=is_chat,
        prompts=(_chat(members, images, has_tools=has_tools),) if is_chat else _prompts(members),
        images=tuple(images),
        choices=read_whole_number(members, "n", 1, _MAX_CHOICES) or 1,
        sampling=_sampling(members, is_chat=is_chat),
        is_stream=is_stream,
        includes_usage=bool(options.get("include_usage", False)),
        has_logprobs=has_logprobs,
        top_logprobs=top_logprobs,
        has_tools=has_tools,
        has_parallel_calls=members.get("parallel_tool_calls") is None or read_boolean(members, "parallel_tool_calls"),
        echoes=echoes,
        keep_alive_s=read_keep_alive(members),
    )


def check_names(members: Mapping[str, Any], supported: Set[str]) -> None:
    """Raise BadMember for a member that is not supported, and might constrain the answer."""
    for name, value in members.items():
        if name in supported or name in _NO_EFFECT or value is None or value in UNSUPPORTED.get(name, ()):
            continue
        instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise BadMember(
            name[:80], f"'{name[:80]}' is not supported{instead}; supported are {', '.join(sorted(supported))}"
        )


def read_model(members: Mapping[str, Any]) -> str:
    """Return the name of the model. Raises BadMember."""
    model = members.get("model")
    if not isinstance(model, str) or not model:
        raise BadMember("model", f"'model': expected the name of a model, got {json_type(model)}")
    return model


def read_keep_alive(members: Mapping[str, Any]) -> float | None:
    """Return the seconds of `keep_alive`: a number, or a text such as "90", "5m" or "1h30m0s"; a negative one is for
    ever.

    Raises BadMember.
    """
    value = members.get("keep_alive")
    if value is None:
        return None
    seconds: object = value
    if isinstance(value, str) and _DURATION.fullmatch(value):
        parts = re.findall(r"([0-9.]+)(h|ms|m|s|)", value)
        seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts) * (-1 if value[0] == "-" else 1)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) < 1e12:
        raise BadMember("keep_alive", f"'keep_alive': expected seconds or a text such as 5m, got {str(value)[:40]!r}")
    return float(seconds) if seconds >= 0 else math.inf


def _sampling(members: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    sampling = {name: members[name] for name in _COMMON if members.get(name) is not None}
    if (seed := sampling.get("seed")) == -1:
        del sampling["seed"]
    elif seed is not None and (type(seed) is not int or not 0 <= seed <= _LARGEST_SEED):
        raise BadMember(
            "seed",
            f"'seed': expected a whole number from 0 to {_LARGEST_SEED}, or -1 for another answer each time, "
            f"got {str(seed)[:40]}",
        )
    name = "max_completion_tokens" if members.get("max_completion_tokens") is not None else "max_tokens"
    # 0 lets a chat use all the room that the model has.
    sampling["max_tokens"] = read_whole_number(members, name, 1) or (0 if is_chat else _DEFAULT_COMPLETION_TOKENS)
    form = members.get("response_format")
    constraints = [*_structured_outputs(members)]
    if form is not None and (schema := _response_format(form)):
        constraints.append(("response_format", schema))
    if len(constraints) > 1:
        (first, _), (name, _) = constraints[:2]
        raise BadMember(name, f"'{name}': expected none beside '{first}', which constrains the answer too")
    for _, constraint in constraints:
        sampling.update(constraint)
    return sampling


def _structured_outputs(members: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each of vLLM's constraints with its name, as a sampling parameter. Raises BadMember."""
    given = read_object(members, "structured_outputs")
    stated = [("structured_outputs", kind, value) for kind, value in given.items()]
    stated += [(name, kind, members.get(name)) for name, kind in _GUIDED.items()]
    for name, kind, value in stated:
        if value is None or value is False:
            continue
        place = f"'{name}.{kind[:40]}'" if name == "structured_outputs" else f"'{name}'"
        if kind == "json" and isinstance(value, dict | str):
            yield name, {"json_schema": value}
        elif kind == "json_object":
            yield name, {"json_schema": {"type": "object"}}
        elif kind == "choice" and isinstance(value, list) and value and all(isinstance(x, str) and x for x in value):
            yield name, {"choice": value}
        elif kind in ("regex", "grammar") and isinstance(value, str):
            if value:
                yield name, {kind: value}
        elif kind in _KINDS:
            raise BadMember(name, f"{place}: expected {_KINDS[kind]}, got {json_type(value)}")
        else:
            raise BadMember(
                name, f"{place} is not supported; supported are json, json_object, choice, regex and grammar"
            )


def _response_format(form: object) -> dict[str, Any]:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema" and isinstance(form, dict):
        named = form.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict):
            return {"json_schema": schema}
        raise BadMember("response_format", "'response_format.json_schema.schema': expected an object, got "
                        f"{json_type(schema)}")  # fmt: skip
    raise BadMember(
        "response_format", f"'response_format.type': expected text, json_object or json_schema, got {str(kind)[:40]}"
    )


def _read_logprobs(members: Mapping[str, Any], *, is_chat: bool) -> tuple[bool, int]:
    """Return whether the call wants the probability of each token, and of how many of the most likely at its place."""
    top = read_whole_number(members, "top_logprobs" if is_chat else "logprobs", 0, _MAX_TOP_LOGPROBS)
    if not is_chat:
        return top is not None, top or 0
    has_logprobs = read_boolean(members, "logprobs")
    if top and not has_logprobs:
        raise BadMember("top_logprobs", "'top_logprobs': only with 'logprobs' true")
    return has_logprobs, top or 0


def _chat(members: Mapping[str, Any], images: list[bytes | str], *, has_tools: bool) -> Chat:
    """Return the messages, and the tools, which the model checks. Append the pictures of the messages to `images`."""
    messages = read_messages(members)
    if not messages:
        raise BadMember("messages", "'messages': expected at least one message, got an empty list")
    plain = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadMember("messages", f"'messages[{place}].role': expected a text")
        plain.append({**message, "content": _content(message.get("content"), images, place)})
    choice = members.get("tool_choice")
    if not has_tools and choice not in (None, "none", "auto"):
        raise BadMember("tool_choice", "'tool_choice': expected none or auto without tools")
    chat: dict[str, Any] = {"messages": plain}
    if has_tools:
        chat.update(tools=members["tools"], tool_choice=choice)
        if choice == "required" and members.get("parallel_tool_calls"):
            chat["parallel_tool_calls"] = True
    if variables := _template_variables(members):
        chat["chat_template_kwargs"] = variables
    return chat if len(chat) > 1 else plain


def _template_variables(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template: `chat_template_kwargs`, and those that are members themselves."""
    variables = dict(read_object(members, "chat_template_kwargs"))
    effort = members.get(EFFORT)
    if effort is not None and effort not in _EFFORTS:
        raise BadMember(EFFORT, f"'{EFFORT}': expected {', '.join(_EFFORTS)}, got {str(effort)[:40]!r}")
    for name in (THINKING, NEW_TURN, CONTINUE):
        read_boolean(members, name)
    for name in (EFFORT, THINKING, NEW_TURN, CONTINUE):
        value = members.get(name)
        if value is not None and variables.setdefault(name, value) != value:
            raise BadMember(name, f"'{name}': 'chat_template_kwargs' has another value")
    try:
        check_variables(variables, "'chat_template_kwargs'")
    except InvalidRequest as error:
        raise BadMember("chat_template_kwargs", error.message) from None
    return variables


def _content(content: object, images: list[bytes | str], place: int) -> str | list[dict[str, str]]:
    """Return the text of a message, or its parts if it has pictures, which are appended to `images`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMember("messages", f"'messages[{place}].content': expected a text, got {json_type(content)}")
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            images.append(_read_image(part, f"messages[{place}].content[{index}]"))
            parts.append({"type": "image"})
        else:
            raise BadMember("messages", f"'messages[{place}].content': expected parts of type text or image_url, got "
                            f"{str(kind)[:40]}")  # fmt: skip
    has_images = any(part["type"] == "image" for part in parts)
    return parts if has_images else "".join(part["text"] for part in parts)


def _read_image(part: Mapping[str, Any], place: str) -> bytes | str:
    """Return the file in a part of type `image_url`, or its URL if it is to be fetched. Raises BadMember.

    The file may be there instead of the URL, put there by the parser of another API.
    """
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if isinstance(url, bytes):
        return url
    place = f"{place}.image_url.url"
    if not isinstance(url, str):
        raise BadMember("messages", f"'{place}': expected a text, got {json_type(url)}")
    head = _DATA_URL.match(url)
    if head is not None:
        return decode_base64(url[head.end() :], place)
    if not url[:8].lower().startswith(("http://", "https://")):
        expected = "expected a URL like data:image/jpeg;base64,..., or one of http or https"
        raise BadMember("messages", f"'{place}': {expected}, got {url[:40]!r}")
    if len(url) > _MAX_URL:
        raise BadMember("messages", f"'{place}': expected at most {_MAX_URL} characters, got {len(url)}")
    return url


def decode_base64(text: str, place: str) -> bytes:
    """Return the bytes of a member. Raises BadMember."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise BadMember(place.partition("[")[0], f"'{place}': expected base64, got an error: {error}") from None


def _prompts(members: Mapping[str, Any]) -> tuple[str, ...]:
    given = members.get("prompt")
    prompts: Sequence[object] = given if isinstance(given, list) else [given]
    if not prompts or len(prompts) > _MAX_CHOICES or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadMember("prompt", f"'prompt': expected a text or a list of 1 to {_MAX_CHOICES} texts")
    return tuple(str(prompt) for prompt in prompts)


def read_boolean(members: Mapping[str, Any], name: str) -> bool:
    """Return a member that is true or false, false if it is missing or null. Raises BadMember."""
    value = members.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadMember(name, f"'{name}': expected true or false, got {json_type(value)}")
    return bool(value)


def read_object(members: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a member that is an object, an empty one if it is missing or null. Raises BadMember."""
    value = members.get(name)
    if not isinstance(value, dict | None):
        raise BadMember(name, f"'{name}': expected an object, got {json_type(value)}")
    return value or {}


def read_text(members: Mapping[str, Any], name: str) -> str:
    """Return a member that is a text, "" if it is missing or null. Raises BadMember."""
    value = members.get(name)
    if not isinstance(value, str | None):
        raise BadMember(name, f"'{name}': expected a text, got {json_type(value)}")
    return value or ""


def read_messages(members: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a chat, which may be wrong. Raises BadMember for anything but a list."""
    messages = members.get("messages")
    if not isinstance(messages, list):
        raise BadMember("messages", f"'messages': expected a list of messages, got {json_type(messages)}")
    return messages


def read_whole_number(members: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    """Return a member that is a whole number from `least` to `most`, None if it is missing or null. Raises
    BadMember."""
    value = members.get(name)
    if value is not None and (type(value) is not int or value < least or (most is not None and value > most)):
        bounds = f"from {least}" if most is None else f"from {least} to {most}"
        raise BadMember(name, f"'{name}': expected a whole number {bounds}, got {str(value)[:40]}")
    return value


def _tensor(name: str, value: str | bool | Chat | tuple[bytes | str, ...]) -> Tensor:
    if isinstance(value, tuple):
        files = np.empty(len(value), object)
        files[:] = value
        return Tensor(name, DType.BYTES, files)
    if isinstance(value, list | dict):
        return JsonTensor(name, value)
    if isinstance(value, bool):
        return Tensor(name, DType.BOOL, np.array([value]))
    array = np.empty(1, object)
    array[0] = value.encode("utf-8", "replace")
    return Tensor(name, DType.BYTES, array)
