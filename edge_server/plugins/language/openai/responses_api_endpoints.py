"""HTTP handlers of OpenAI's API `responses`, under /v1/ and /v3/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs

from edge_server.errors import ContextTooLong, EdgeServerError, InvalidRequest
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import JSON_TYPE, HttpResponse, json_response
from edge_server.plugins.language.openai.api_endpoints import ApiEndpoints, answering
from edge_server.plugins.language.openai.completion_request import BadMember
from edge_server.plugins.language.openai.responses_api_encoder import (
    RESPONSE_ERRORS,
    ResponseEncoder,
    UnknownResponse,
    input_items,
)
from edge_server.plugins.language.openai.responses_api_request import own_error, read_response_request
from edge_server.plugins.language.openai.responses_api_store import StoredResponse, TextResponseStore
from edge_server.service import InferenceService


class ResponseEndpoints(ApiEndpoints):
    errors = RESPONSE_ERRORS

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        super().__init__(service, may_change_models)
        self._store = TextResponseStore()

    @answering
    async def create(self, request: HttpRequest) -> HttpResponse | None:
        call = await self.read(request, partial(read_response_request, find=self._store.find))
        while True:
            encoder = ResponseEncoder(call, self._store)
            try:
                return await self.run_completion(request, call.completion, encoder.for_call)
            except BadMember as error:
                raise own_error(error) from None
            except EdgeServerError as error:
                is_too_long = isinstance(error, ContextTooLong) and call.may_shorten
                shorter = await request.run_on_worker(call.without_oldest_turns) if is_too_long else None
                if shorter is not None:
                    call = shorter
                    continue
                if not request.is_streaming:
                    raise
                for piece in encoder.failed_pieces(error):
                    await request.write(piece)
                return None

    @answering
    async def show(self, request: HttpRequest) -> HttpResponse:
        query = parse_qs(request.head.target.partition("?")[2])
        if query.get("stream", ["false"]) != ["false"]:
            raise BadMember("stream", "'stream': expected false: the events of a stored response are not kept")
        return HttpResponse(self._find(request).body, headers={"Content-Type": JSON_TYPE})

    @answering
    async def delete(self, request: HttpRequest) -> HttpResponse:
        self._find(request)
        response_id = request.names["response"]
        self._store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @answering
    async def input_items(self, request: HttpRequest) -> HttpResponse:
        # The last message is the answer.
        messages, query = self._find(request).messages[:-1], request.head.target.partition("?")[2]
        return json_response(
            await request.run_on_worker(partial(input_items, request.names["response"], messages, query))
        )

    @answering
    async def cancel(self, request: HttpRequest) -> HttpResponse:
        self._find(request)
        name = request.names["response"][:80]
        raise InvalidRequest(f"response '{name}' cannot be cancelled: it was not made in the background")

    def _find(self, request: HttpRequest) -> StoredResponse:
        """Return the response that the path names. Raises UnknownResponse."""
        stored = self._store.find(request.names["response"])
        if stored is None:
            raise UnknownResponse(f"no response '{request.names['response'][:80]}' is stored")
        return stored
