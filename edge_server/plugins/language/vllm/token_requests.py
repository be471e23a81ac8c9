"""Parsers of the requests `tokenize` and `detokenize` of vLLM's server, and the encoders of their responses.

The format is that of vLLM's `vllm/entrypoints/openai/protocol.py`. A request becomes an inference request of the
model, which has the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.v2.json_parser import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import (
    BadMember,
    CompletionRequest,
    check_names,
    make_completion_request,
    read_model,
)
from edge_server.protocol.raw_tensors import Buffer

_OF_PROMPTS = {"model", "prompt"}
_OF_CHATS = {"model", "messages", "tools"}
_OF_TOKENS = {"model", "tokens"}

_LARGEST_TOKEN = (1 << 31) - 1


def read_tokenize_request(body: Buffer) -> CompletionRequest:
    """Return the chat or the prompt of a body, whose tokens are wanted. Raises InvalidRequest."""
    members = parse_object(body)
    is_chat = "messages" in members
    check_names(members, _OF_CHATS if is_chat else _OF_PROMPTS)
    if isinstance(members.get("prompt"), list):
        raise BadMember("prompt", "'prompt': expected a text, got an array")
    return make_completion_request(members, is_chat=is_chat)


def tokenize_request(call: CompletionRequest, spec: ModelSpec) -> Request:
    """Return the inference request for a call. Raises BadMember if the model cannot take it."""
    _check_tensors(spec, "tokenize", "token_ids")
    if call.images:
        raise BadMember(
            "messages",
            "'messages': expected no pictures: their tokens are known when the model reads them",
        )
    (request,) = call.inference_requests(spec)
    inputs = {name: tensor for name, tensor in request.inputs.items() if name in ("messages", "text_input")}
    inputs["tokenize"] = Tensor("tokenize", DType.BOOL, np.array([True]))
    return Request(model=spec.name, id=call.id, inputs=inputs)


def tokenize_response(response: Response) -> dict[str, Any]:
    """Return the answer of `tokenize`. Raises ServingFault for a response without tokens."""
    outputs = _outputs(response, "token_ids")
    tokens: list[int] = outputs["token_ids"].array.ravel().tolist()
    most = outputs.get("max_context")
    return {
        "count": len(tokens),
        "max_model_len": None if most is None else int(most.array.ravel()[0]),
        "tokens": tokens,
        "token_strs": None,
    }


def read_detokenize_request(body: Buffer) -> tuple[str, list[int]]:
    """Return the model and the tokens of a body. Raises InvalidRequest."""
    members = parse_object(body)
    model = read_model(members)
    check_names(members, _OF_TOKENS)
    tokens = members.get("tokens")
    if not isinstance(tokens, list):
        raise BadMember("tokens", f"'tokens': expected a list of tokens, got {json_type(tokens)}")
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= _LARGEST_TOKEN:
            raise BadMember(
                "tokens",
                f"'tokens[{place}]': expected a whole number from 0 to {_LARGEST_TOKEN}, got {str(token)[:40]}",
            )
    return model, tokens


def detokenize_request(tokens: list[int], spec: ModelSpec) -> Request:
    """Return the inference request for tokens. Raises BadMember if the model cannot take them."""
    _check_tensors(spec, "token_ids", "text_output")
    return Request(model=spec.name, inputs={"token_ids": Tensor("token_ids", DType.INT32, np.array(tokens, np.int32))})


def detokenize_response(response: Response) -> dict[str, Any]:
    """Return the answer of `detokenize`. Raises ServingFault for a response without a text."""
    texts = _outputs(response, "text_output")["text_output"].array.ravel()
    return {"prompt": b"".join(texts.tolist()).decode("utf-8", "replace")}


def _check_tensors(spec: ModelSpec, source: str, output: str) -> None:
    if spec.input(source) is None or spec.output(output) is None:
        raise BadMember(
            "model", f"model '{spec.name}' shows no tokens: it needs an input '{source}' and an output '{output}'"
        )


def _outputs(response: Response, name: str) -> Mapping[str, Tensor]:
    outputs = {tensor.name: tensor for tensor in response.outputs}
    if name not in outputs:
        raise ServingFault(f"model '{response.model}' gave no output '{name}'")
    return outputs
