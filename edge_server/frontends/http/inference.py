"""The inference endpoints: infer (JSON, binary, raw and image bodies), generate and generate_stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial

from aiohttp import web

from edge_server.config import HttpConfig
from edge_server.core.message import Parameter, Request, Response
from edge_server.core.model import ModelSpec
from edge_server.errors import InvalidRequest, ServingFault, Unsupported
from edge_server.frontends.http.body import read_body
from edge_server.frontends.http.homecoming import Homecoming, OneAnswer
from edge_server.frontends.http.images import ImageBodies
from edge_server.frontends.http.reply import BINARY_TYPE, JSON_TYPE, json_reply, send_chunks
from edge_server.frontends.v2.forwarding import forwarded
from edge_server.frontends.v2.generate import decode_generate, encode_generate
from edge_server.frontends.v2.json_codec import DecodedRequest, decode_infer, encode_infer, parse_header_length
from edge_server.frontends.v2.json_text import to_json
from edge_server.frontends.v2.version import parse_version
from edge_server.service import InferenceService

HEADER_LENGTH = "Inference-Header-Content-Length"

_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


class InferenceEndpoints:
    """Answers requests for inference. Lives on one event loop; `workers` take what would hold the loop up."""

    def __init__(
        self, service: InferenceService, config: HttpConfig, homecoming: Homecoming, workers: Executor
    ) -> None:
        self._service = service
        self._limit = config.max_input_size_bytes
        self._header_pattern = config.header_pattern
        self._homecoming = homecoming
        self._workers = workers
        self._images = ImageBodies()

    async def infer(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        version = parse_version(names.get("version", ""))
        spec = self._service.model_spec(names["model"], version)
        if spec.is_decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        decoded = await self._decode(request, spec, version)
        try:
            response = await self._answer(decoded.request)
            text, chunks, json_length = encode_infer(response, decoded, response.spec or spec)
        finally:
            decoded.output_pins.release()
        headers = {"Content-Type": JSON_TYPE}
        if json_length is not None:
            headers = {"Content-Type": BINARY_TYPE, HEADER_LENGTH: str(json_length)}
        return await send_chunks(request, headers, [text, *chunks], self._workers)

    async def generate(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        inference = await self._decode_generate(request, names)
        responses = await self._answers(inference)
        _raise_first_error(responses)
        if len(responses) != 1:
            raise ServingFault(f"{_ONE_RESPONSE}, got {len(responses)}")
        return json_reply(encode_generate(responses[0]))

    async def generate_stream(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Answer with one server-sent event for each response; the first response decides the status."""
        inference = await self._decode_generate(request, names)
        responses: asyncio.Queue[Response] = asyncio.Queue()
        ticket = self._service.submit(inference, partial(self._homecoming.deliver, responses.put_nowait))
        try:
            response = await responses.get()
            if response.error is not None:
                raise response.error
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await reply.prepare(request)
            while True:
                if not response.is_empty:
                    await reply.write(b"data: " + to_json(_event(response)) + b"\n\n")
                if response.is_final:
                    return reply
                response = await responses.get()
        finally:
            ticket.cancel()

    async def _decode(self, request: web.BaseRequest, spec: ModelSpec, version: int | None) -> DecodedRequest:
        text = request.headers.get(HEADER_LENGTH)
        header_length = None if text is None else parse_header_length(text)
        body = await read_body(request, self._limit, self._workers, aligned_at=max(0, header_length or 0))
        extra = self._extra(request)
        if header_length is None and request.headers.get("Content-Type", "").startswith("image/"):
            decode = partial(self._images.decode, body, spec, self._service.shared_memory, version=version, extra=extra)
            return await asyncio.get_running_loop().run_in_executor(self._workers, decode)
        return decode_infer(body, header_length, spec, self._service.shared_memory, version=version, extra=extra)

    async def _decode_generate(self, request: web.BaseRequest, names: Mapping[str, str]) -> Request:
        version = parse_version(names.get("version", ""))
        spec = self._service.model_spec(names["model"], version)
        body = await read_body(request, self._limit, self._workers)
        return decode_generate(body, spec, version=version, extra=self._extra(request))

    def _extra(self, request: web.BaseRequest) -> dict[str, Parameter]:
        return forwarded(request.headers.items(), self._header_pattern) if self._header_pattern is not None else {}

    async def _answer(self, inference: Request) -> Response:
        responses = await self._answers(inference)
        _raise_first_error(responses)
        if len(responses) != 1:
            raise ServingFault(f"model '{inference.model}' sent {len(responses)} responses where one was expected")
        return responses[0]

    async def _answers(self, inference: Request) -> list[Response]:
        """Submit and wait. A client that leaves takes its request back."""
        answer = OneAnswer(asyncio.get_running_loop())
        ticket = self._service.submit(inference, partial(self._homecoming.deliver, answer.receive))
        try:
            return await answer.wait()
        except asyncio.CancelledError:
            ticket.cancel()
            raise


def _raise_first_error(responses: list[Response]) -> None:
    for response in responses:
        if response.error is not None:
            raise response.error


def _event(response: Response) -> dict[str, object]:
    if response.error is not None:
        return {"error": response.error.message}
    try:
        return encode_generate(response)
    except InvalidRequest as error:
        return {"error": error.message}
