"""HTTP handlers of Anthropic's API: messages, and messages/count_tokens."""

from __future__ import annotations

from functools import partial

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.plugins.language.anthropic.message_request import read_count_request, read_message_request
from edge_server.plugins.language.anthropic.message_response import ANTHROPIC_ERRORS, MessageEncoder
from edge_server.plugins.language.openai.api_endpoints import ApiEndpoints, answering
from edge_server.plugins.language.openai.completion_request import BadMember, CompletionRequest


class AnthropicEndpoints(ApiEndpoints):
    errors = ANTHROPIC_ERRORS
    has_scores_and_speech = False

    @answering
    async def create(self, request: HttpRequest) -> HttpResponse | None:
        call = await self.read(request, read_message_request)
        encoder = partial(MessageEncoder, shows_thinking=call.shows_thinking)
        return await self.run_completion(request, call.completion, encoder)

    @answering
    async def count_tokens(self, request: HttpRequest) -> HttpResponse:
        call = await self.read(request, read_count_request)
        handle, _ = self.find(call.model)
        inference = _tokenize_request(call, handle.spec)
        (response,) = await self.submit_all(handle, request.context.dispatch, [inference])
        tokens = next((tensor for tensor in response.outputs if tensor.name == "token_ids"), None)
        if tokens is None:
            raise ServingFault(f"model '{response.model}' gave no output 'token_ids'")
        return json_response({"input_tokens": tokens.array.size})


def _tokenize_request(call: CompletionRequest, spec: ModelSpec) -> Request:
    """Return the inference request for the tokens of a chat. Raises BadMember if the model cannot take it."""
    if spec.input("tokenize") is None or spec.output("token_ids") is None:
        raise BadMember(
            "model", f"model '{spec.name}' shows no tokens: it needs an input 'tokenize' and an output 'token_ids'"
        )
    if call.images:
        raise BadMember(
            "messages", "'messages': expected no pictures: their tokens are known when the model reads them"
        )
    (request,) = call.inference_requests(spec)
    inputs = {name: tensor for name, tensor in request.inputs.items() if name in ("messages", "text_input")}
    inputs["tokenize"] = Tensor("tokenize", DType.BOOL, np.array([True]))
    return Request(model=spec.name, id=call.id, inputs=inputs)
