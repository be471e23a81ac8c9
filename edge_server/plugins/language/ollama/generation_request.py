"""Parser of the requests `chat` and `generate` of ollama's API: translates them to calls of OpenAI's API.

The format is https://github.com/ollama/ollama/blob/main/docs/api.md. As in OpenAI's API, members and options that are
not supported are errors if they might constrain the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from edge_server.frontends.json_text import parse_object
from edge_server.plugins.language.openai.completion_request import (
    BadMember,
    CompletionRequest,
    check_names,
    decode_base64,
    make_completion_request,
    read_boolean,
    read_keep_alive,
    read_model,
    read_object,
    read_text,
)
from edge_server.plugins.language.text.requested_template_variables import EFFORT, THINKING
from edge_server.protocol.raw_tensors import Buffer

_COMMON = {"model", "stream", "format", "options", "keep_alive", "think", "logprobs", "top_logprobs"}
_OF_CHATS = _COMMON | {"messages", "tools"}
_OF_GENERATION = _COMMON | {"prompt", "system", "raw", "images"}

_SAME_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
_OPTIONS = {*_SAME_OPTIONS, "num_predict", "repeat_penalty"}

_WITHOUT_EFFECT = {
    # Of a model's load, which the operator configures here. A prompt that does not fit is refused, not cut.
    "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa",
    "use_mlock", "use_mmap", "vocab_only",
    # Without effect in ollama too, or without 'mirostat', which is refused.
    "embedding_only", "mirostat_eta", "mirostat_tau", "penalize_newline", "tfs_z",
}  # fmt: skip
"""Options that are ignored, because the answer does not depend on them."""

_OWN_NAMES = {
    "max_tokens": "options.num_predict",
    "prompt": "prompt",
    "response_format": "format",
    "seed": "options.seed",
    "stop": "options.stop",
    EFFORT: "think",
    THINKING: "think",
}
"""Member of OpenAI's API -> the name that the client knows."""


class GenerationRequest(NamedTuple):
    """One call. `completion` None: it only loads the model, or unloads it if `keep_alive_s` is 0."""

    model: str
    """As the client names it."""
    is_chat: bool
    """Whether the API is `chat`; `generate` makes a chat of a prompt, too."""
    keep_alive_s: float | None
    completion: CompletionRequest | None


def read_chat_request(body: Buffer) -> GenerationRequest:
    """Return the call of a body of `chat`. Raises InvalidRequest."""
    members = parse_object(body)
    check_names(members, _OF_CHATS)
    messages = members.get("messages")
    if isinstance(messages, list):
        messages = [_message(message, place) for place, message in enumerate(messages)]
    return _request(members, {"messages": messages, "tools": members.get("tools")}, is_empty=not messages, is_chat=True)


def read_generate_request(body: Buffer, takes_chats: Callable[[str], bool]) -> GenerationRequest:
    """Return the call of a body of `generate`. Raises InvalidRequest.

    `takes_chats` returns whether a model has a chat template. Its prompt is then a chat of one message, as in ollama,
    unless the client sends it `raw`.
    """
    members = parse_object(body)
    check_names(members, _OF_GENERATION)
    model = read_model(members)
    prompt, system, is_raw = read_text(members, "prompt"), read_text(members, "system"), read_boolean(members, "raw")
    if not is_raw and takes_chats(model_name(model)):
        messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
        images = members.get("images")
        messages.append({"role": "user", "content": _content(prompt, images, "images")})
        return _request(members, {"messages": messages}, is_empty=not prompt and not images, is_chat=False)
    if members.get("images"):
        raise BadMember("images", "'images': expected none with 'raw', or for a model without a chat template")
    if system:
        raise BadMember("system", "'system': expected none with 'raw', or for a model without a chat template")
    return _request(members, {"prompt": prompt}, is_empty=not prompt, is_chat=False)


def model_name(name: str) -> str:
    """Return the server's name of a model that the client names with or without the tag `latest`."""
    return name.removesuffix(":latest")


def _request(
    members: Mapping[str, Any], content: Mapping[str, Any], *, is_empty: bool, is_chat: bool
) -> GenerationRequest:
    """Return the call with the members `content` of OpenAI's API."""
    model, keep_alive_s = read_model(members), read_keep_alive(members)
    if is_empty:
        return GenerationRequest(model, is_chat, keep_alive_s, None)
    is_prompt = "prompt" in content
    think = members.get("think")
    if think and is_prompt:
        raise BadMember("think", "'think': expected false or none with 'raw', or for a model without a chat template")
    stream, logprobs = members.get("stream"), members.get("logprobs")
    translated = {
        **content,
        "model": model_name(model),
        "stream": True if stream is None else stream,
        "keep_alive": members.get("keep_alive"),
        "response_format": _response_format(members.get("format")),
        "logprobs": (members.get("top_logprobs") or 0 if logprobs else None) if is_prompt else logprobs,
        "top_logprobs": None if is_prompt else members.get("top_logprobs"),
        **({} if is_prompt else {EFFORT if isinstance(think, str) else THINKING: think}),
        **_sampling(read_object(members, "options")),
    }
    try:
        completion = make_completion_request(translated, is_chat=not is_prompt)
    except BadMember as error:
        raise error.renamed(_OWN_NAMES) from None
    if translated.get("max_tokens") is None:
        # As many as fit, which OpenAI's API has for chats alone.
        completion = replace(completion, sampling={**completion.sampling, "max_tokens": 0})
    return GenerationRequest(model, is_chat, keep_alive_s, completion)


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    if given.get("repeat_last_n") == -1:
        del given["repeat_last_n"]  # the whole text, as always here
    try:
        check_names(given, _OPTIONS)
    except BadMember as error:
        raise BadMember(f"options.{error.param}", f"'options': {error.message}") from None
    found = {name: given.get(name) for name in _SAME_OPTIONS}
    found["repetition_penalty"] = given.get("repeat_penalty")
    most, seed = given.get("num_predict"), found["seed"]
    # Negative numbers mean as many tokens as fit, and another answer each time.
    found["max_tokens"] = None if isinstance(most, int | float) and most <= 0 else most
    found["seed"] = None if isinstance(seed, int | float) and seed < 0 else seed
    return found


def _response_format(form: object) -> object:
    if form in (None, ""):
        return None
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"schema": form}}
    raise BadMember("format", f"'format': expected json or a JSON schema, got {str(form)[:40]}")


def _message(message: object, place: int) -> object:
    """Return a message in OpenAI's form, in which calls of tools have a type and their results a name."""
    if not isinstance(message, dict):
        return message
    found = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
    found["content"] = _content(found.get("content"), message.get("images"), f"messages[{place}].images")
    if message.get("tool_name") is not None:
        found["name"] = message["tool_name"]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        found["tool_calls"] = [{"type": "function", **call} for call in calls]
    return found


def _content(text: object, images: object, place: str) -> object:
    """Return the content of a message with pictures, which are before the text."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise BadMember(place.partition("[")[0], f"'{place}': expected a list of pictures in base64")
    files = [decode_base64(image, f"{place}[{index}]") for index, image in enumerate(images)]
    return [*({"type": "image_url", "image_url": file} for file in files), {"type": "text", "text": text or ""}]
