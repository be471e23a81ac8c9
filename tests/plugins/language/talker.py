"""A language model of a few lines, which the tests of the text APIs serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor

TEXTS = ("text_output", "finish_reason", "tool_calls", "reasoning_content", "logprobs", "warnings")
COUNTS = ("num_input_tokens", "num_output_tokens", "num_cached_tokens", "num_reasoning_tokens", "token_ids")
FLAGS = ("stream", "return_logprobs", "tokenize")
TALKER = ModelSpec(
    "talker",
    "stub",
    "",
    max_batch_size=0,
    inputs=tuple(
        InputSpec(name, DType.BOOL if name in FLAGS else DType.BYTES, (1,), is_optional=True)
        for name in ("text_input", "messages", "sampling_parameters", *FLAGS)
    ),
    outputs=(
        *(OutputSpec(name, DType.BYTES, (-1,)) for name in TEXTS),
        *(OutputSpec(name, DType.UINT32, (-1,)) for name in COUNTS),
    ),
    instance_groups=(),
    is_decoupled=True,
)
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "does it", "parameters": SCHEMA, "strict": True},
}


def response(request: Request, *, is_final: bool = False, **outputs: Any) -> Response:
    tensors = []
    for name, value in outputs.items():
        if name in COUNTS:
            tensors.append(Tensor(name, DType.UINT32, np.array(value, np.uint32).reshape(-1)))
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            tensors.append(Tensor(name, DType.BYTES, np.array([text.encode()], object)))
    return Response(request.model, 1, request.id, outputs=tuple(tensors), is_final=is_final)


def two_words(request: Request) -> list[Response]:
    """Answer with two words; their logarithms are 0 and -0.5. A prompt has nine tokens, or three that are listed."""
    if "tokenize" in request.inputs:
        return [response(request, is_final=True, token_ids=[1, 2, 3])]
    tokens: list[dict[str, Any]] = [{"logprobs": [{"token": "two", "logprob": 0.0}]},
                                    {"logprobs": [{"token": " words", "logprob": -0.5}]}]  # fmt: skip
    if (asked := request.inputs.get("return_logprobs")) is None or not asked.array.item():
        tokens = [{}, {}]
    return [
        response(request, text_output="two", num_input_tokens=9, num_output_tokens=1, **tokens[0]),
        response(request, text_output=" words", num_output_tokens=2, **tokens[1]),
        response(request, is_final=True, text_output="", finish_reason="stop"),
    ]


def calls(*arguments: str, text: str = "") -> Callable[[Request], list[Response]]:
    """Return the model that says a text and calls f with each of the arguments, in parts of one character."""

    def answer(request: Request) -> list[Response]:
        parts: list[dict[str, Any]] = []
        for index, given in enumerate(arguments):
            parts.append({"index": index, "id": f"call_{index}", "type": "function", "function": {"name": "f"}})
            parts += [{"index": index, "function": {"arguments": character}} for character in given]
        return [
            response(request, text_output=text),
            *(response(request, text_output="", tool_calls=[part]) for part in parts),
            response(request, is_final=True, text_output="", finish_reason="tool_calls"),
        ]

    return answer


def fails_with(error: Exception, *texts: str) -> Callable[[Request], list[Response]]:
    """Return the model that fails after these texts."""
    return lambda request: [
        *(response(request, text_output=text) for text in texts),
        Response(request.model, 1, request.id, error=error),  # type: ignore[arg-type]
    ]


def sent(site: Any, path: str, members: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the request that a call becomes."""
    reply = site.post(path, {"model": "talker", **members})
    assert reply.status == 200, reply.body
    request = site.service.requests.pop()
    values = {name: tensor.array.tolist()[0] for name, tensor in request.inputs.items()}
    return {
        name: json.loads(value) if name in ("sampling_parameters", "messages") else value
        for name, value in values.items()
    }
