"""HTTP handlers of OpenAI's API `responses`, under /v1/ and /v3/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qs

from edge_server.errors import ContextTooLong, EdgeServerError, InvalidRequest
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import JSON_TYPE, HttpResponse, json_response
from edge_server.plugins.language.openai.api_endpoints import CallRunner
from edge_server.plugins.language.openai.completion_request import BadMember
from edge_server.plugins.language.openai.response_encoder import RESPONSE_ERRORS, ResponseEncoder, UnknownResponse
from edge_server.plugins.language.openai.response_request import own_error, read_response_request
from edge_server.plugins.language.openai.response_store import StoredResponse, TextResponseStore
from edge_server.service import InferenceService


class ResponseEndpoints:
    """The handlers. `may_change_models` returns whether the sender of a request may load and unload models."""

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        self._runner = CallRunner(service, may_change_models, RESPONSE_ERRORS, is_openai=True)
        self._store = TextResponseStore()

    async def create(self, request: HttpRequest) -> HttpResponse | None:
        return await self._runner.respond(request, partial(self._create, request))

    async def show(self, request: HttpRequest) -> HttpResponse | None:
        request.release_body()
        return await self._runner.respond(request, partial(self._show, request))

    async def delete(self, request: HttpRequest) -> HttpResponse | None:
        request.release_body()
        return await self._runner.respond(request, partial(self._delete, request.names["response"]))

    async def input_items(self, request: HttpRequest) -> HttpResponse | None:
        request.release_body()
        return await self._runner.respond(request, partial(self._input_items, request))

    async def cancel(self, request: HttpRequest) -> HttpResponse | None:
        request.release_body()
        return await self._runner.respond(request, partial(self._cancel, request.names["response"]))

    async def _create(self, request: HttpRequest) -> HttpResponse | None:
        call = await self._runner.read(request, partial(read_response_request, find=self._store.find))
        while True:
            encoder = ResponseEncoder(call, self._store)
            try:
                return await self._runner.complete(request, call.completion, encoder.for_call)
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

    async def _show(self, request: HttpRequest) -> HttpResponse:
        query = parse_qs(request.head.target.partition("?")[2])
        if query.get("stream", ["false"]) != ["false"]:
            raise BadMember("stream", "'stream': expected false: the events of a stored response are not kept")
        stored = self._find(request.names["response"])
        return HttpResponse(stored.body, headers={"Content-Type": JSON_TYPE})

    async def _input_items(self, request: HttpRequest) -> HttpResponse:
        # Imported for the first such request.
        from edge_server.plugins.language.openai.input_items import input_items

        response_id, query = request.names["response"], request.head.target.partition("?")[2]
        # The last message is the answer.
        messages = self._find(response_id).messages[:-1]
        return json_response(await request.run_on_worker(partial(input_items, response_id, messages, query)))

    async def _cancel(self, response_id: str) -> HttpResponse:
        self._find(response_id)
        raise InvalidRequest(f"response '{response_id[:80]}' cannot be cancelled: it was not made in the background")

    def _find(self, response_id: str) -> StoredResponse:
        stored = self._store.find(response_id)
        if stored is None:
            raise _unknown(response_id)
        return stored

    async def _delete(self, response_id: str) -> HttpResponse:
        if not self._store.remove(response_id):
            raise _unknown(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(f"no response '{response_id[:80]}' is stored")
