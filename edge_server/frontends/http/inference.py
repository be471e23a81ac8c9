"""The inference endpoints: infer (JSON, binary, raw and image bodies), generate and generate_stream."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from edge_server.core.message import Parameter, Request, Response
from edge_server.core.model import ModelSpec
from edge_server.errors import ServingFault, Unsupported
from edge_server.frontends.http.body import read_body
from edge_server.frontends.http.budget import BodyBudget
from edge_server.frontends.http.fast_infer import DECOUPLED, HEADER_LENGTH, TEXT_ON_LOOP_BYTES
from edge_server.frontends.http.generation import send_responses
from edge_server.frontends.http.homecoming import Homecoming, OneAnswer
from edge_server.frontends.http.images import FORM_TYPE, ImageBodies, form_file, is_image_body
from edge_server.frontends.http.reply import BINARY_TYPE, JSON_TYPE, json_reply, send_chunks
from edge_server.frontends.v2.forwarding import forwarded
from edge_server.frontends.v2.generate import decode_generate, encode_generate
from edge_server.frontends.v2.json_codec import DecodedRequest, decode_infer, encode_infer, parse_header_length
from edge_server.frontends.v2.version import parse_version
from edge_server.service import READING_THREAD_HOLD_US, InferenceService

if TYPE_CHECKING:
    from edge_server.telemetry.trace_record import TracedRequest

_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)

_RECV_START = "HTTP_RECV_START"
_RECV_END = "HTTP_RECV_END"
_COMPLETE = "INFER_RESPONSE_COMPLETE"
_SEND_START = "HTTP_SEND_START"
_SEND_END = "HTTP_SEND_END"


class InferenceEndpoints:
    """Answers requests for inference. Lives on one event loop; `workers` take what would hold the loop up."""

    def __init__(
        self,
        service: InferenceService,
        header_pattern: re.Pattern[str] | None,
        budget: BodyBudget,
        homecoming: Homecoming,
        workers: Executor,
    ) -> None:
        self._service = service
        self._traces = service.traces
        self._budget = budget
        self._header_pattern = header_pattern
        self._homecoming = homecoming
        self._workers = workers
        self._images = ImageBodies()

    async def infer(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        if not self._traces.is_on:
            return await self._infer(request, names, None)
        with self._trace(request, names) as trace:
            return await self._infer(request, names, trace)

    async def generate(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        with self._trace(request, names) as trace:
            inference = await self._decode_generate(request, names, trace)
            responses = await self._answers(inference)
            if trace is not None:
                trace.stamp(_COMPLETE)
            _raise_first_error(responses)
            if len(responses) != 1:
                raise ServingFault(f"{_ONE_RESPONSE}, got {len(responses)}")
            return json_reply(encode_generate(responses[0]))

    async def generate_stream(self, request: web.BaseRequest, names: Mapping[str, str]) -> web.StreamResponse:
        """Answer with one server-sent event for each response; the first response decides the status."""
        with self._trace(request, names) as trace:
            inference = await self._decode_generate(request, names, trace)
            return await send_responses(request, inference, self._service, self._homecoming)

    async def _infer(
        self, request: web.BaseRequest, names: Mapping[str, str], trace: TracedRequest | None
    ) -> web.StreamResponse:
        version = parse_version(names.get("version", ""))
        spec = self._service.model_spec(names["model"], version)
        if spec.is_decoupled:
            raise Unsupported(DECOUPLED)
        decoded = await self._decode(request, spec, version, trace)
        try:
            response = await self._answer(decoded.request, hold_us=READING_THREAD_HOLD_US)
            if trace is not None:
                trace.stamp(_COMPLETE)
            text, chunks, json_length = encode_infer(response, decoded, response.spec or spec)
        finally:
            decoded.output_pins.release()
        headers = {"Content-Type": JSON_TYPE}
        if json_length is not None:
            headers = {"Content-Type": BINARY_TYPE, HEADER_LENGTH: str(json_length)}
        if trace is not None:
            trace.stamp(_SEND_START)
        reply = await send_chunks(request, headers, [text, *chunks], self._workers)
        if trace is not None:
            trace.stamp(_SEND_END)
        return reply

    @contextlib.contextmanager
    def _trace(self, request: web.BaseRequest, names: Mapping[str, str]) -> Iterator[TracedRequest | None]:
        """Yield the trace of a request that begins to come in now, None for most. It is finished when the block is."""
        trace = self._traces.sample(names["model"], request.headers.items()) if self._traces.is_on else None
        if trace is None:
            yield None
            return
        trace.stamp(_RECV_START)
        try:
            yield trace
        finally:
            trace.finish()

    async def _decode(
        self, request: web.BaseRequest, spec: ModelSpec, version: int | None, trace: TracedRequest | None
    ) -> DecodedRequest:
        text = request.headers.get(HEADER_LENGTH)
        header_length = None if text is None else parse_header_length(text)
        with self._budget.share() as share:
            body = await read_body(request, share, self._workers, aligned_at=max(0, header_length or 0))
            if trace is not None:
                trace.stamp(_RECV_END)
            extra = self._extra(request)
            regions = self._service.shared_memory
            content_type = request.headers.get("Content-Type", "")
            if header_length is None and is_image_body(content_type):
                if content_type.startswith(FORM_TYPE):
                    body = form_file(body, content_type)
                decoded = await self._beside(
                    partial(self._images.decode, body, spec, regions, version=version, extra=extra)
                )
            else:
                decode = partial(decode_infer, body, header_length, spec, regions, version=version, extra=extra)
                is_long = (len(body) if header_length is None else header_length) > TEXT_ON_LOOP_BYTES
                decoded = await self._beside(decode) if is_long else decode()
        if trace is not None:
            decoded.request.trace = trace.first
        return decoded

    async def _beside(self, decode: Callable[[], DecodedRequest]) -> DecodedRequest:
        """Decode on another thread. What was decoded for a client that left meanwhile is let go of."""
        work = self._workers.submit(decode)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            work.add_done_callback(_let_go)
            raise

    async def _decode_generate(
        self, request: web.BaseRequest, names: Mapping[str, str], trace: TracedRequest | None
    ) -> Request:
        version = parse_version(names.get("version", ""))
        spec = self._service.model_spec(names["model"], version)
        with self._budget.share() as share:
            body = await read_body(request, share, self._workers)
            if trace is not None:
                trace.stamp(_RECV_END)
            decode = partial(decode_generate, body, spec, version=version, extra=self._extra(request))
            is_long = len(body) > TEXT_ON_LOOP_BYTES
            loop = asyncio.get_running_loop()
            inference = await loop.run_in_executor(self._workers, decode) if is_long else decode()
        inference.trace = None if trace is None else trace.first
        return inference

    def _extra(self, request: web.BaseRequest) -> dict[str, Parameter]:
        return forwarded(request.headers.items(), self._header_pattern) if self._header_pattern is not None else {}

    async def _answer(self, inference: Request, *, hold_us: float) -> Response:
        responses = await self._answers(inference, hold_us=hold_us)
        _raise_first_error(responses)
        if len(responses) != 1:
            raise ServingFault(f"model '{inference.model}' sent {len(responses)} responses where one was expected")
        return responses[0]

    async def _answers(self, inference: Request, *, hold_us: float = 0.0) -> list[Response]:
        """Submit and wait. A client that leaves takes its request back. `hold_us`: see `submit`."""
        answer = OneAnswer(asyncio.get_running_loop())
        ticket = self._service.submit(inference, partial(self._homecoming.deliver, answer.receive), hold_us=hold_us)
        try:
            return await answer.wait()
        except asyncio.CancelledError:
            ticket.cancel()
            raise


def _let_go(work: Future[DecodedRequest]) -> None:
    if work.cancelled() or work.exception() is not None:
        return
    decoded = work.result()
    decoded.output_pins.release()
    if decoded.request.release is not None:
        decoded.request.release()


def _raise_first_error(responses: list[Response]) -> None:
    for response in responses:
        if response.error is not None:
            raise response.error
