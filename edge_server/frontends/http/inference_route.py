"""Handler of HTTP inference requests: decodes the body, submits the request, and sends the response.

Work that takes more than a few milliseconds runs on a worker thread: large JSON, decompression, images, compression.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Parameter, Request, Response, SubmittedRequest
from edge_server.core.tensor import Tensor
from edge_server.errors import ServingFault, Unsupported
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.http.body_reader import Body, BodyReader
from edge_server.frontends.http.compression import accepted_encoding, compress, request_encoding
from edge_server.frontends.http.connection import HttpConnection
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import (
    BINARY_HEAD,
    JOIN_BELOW_BYTES,
    JSON_HEAD,
    JSON_TYPE,
    LAST_LINES,
    WRITE_BYTES,
    failure_response,
)
from edge_server.frontends.http.routes import Route, model_paths
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.frontends.v2.header_forwarding import header_parameters
from edge_server.frontends.v2.infer_body_codec import DecodedRequest, decode_infer, parse_header_length
from edge_server.frontends.v2.infer_json_cache import InferJsonCache
from edge_server.frontends.v2.requested_outputs import RequestedOutput
from edge_server.frontends.v2.version_text import parse_version
from edge_server.memory.region_pins import RequestRegions
from edge_server.service import READING_THREAD_HOLD_US, Handle, InferenceService

if TYPE_CHECKING:
    from edge_server.telemetry.trace_record import TracedRequest

BodyDecoder = Callable[[str, Body, ModelSpec], tuple[dict[str, Tensor], dict[str, RequestedOutput]]]
"""Given the content type, the body and the model: the inputs, and the requested outputs (empty: all as they are).

Called on a worker thread. Raises InvalidRequest and Unsupported.
"""

HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_TYPE = "application/octet-stream"

TEXT_ON_LOOP_BYTES = 256 * 1024
"""Maximum length of JSON text parsed on the event loop, in some milliseconds. A worker thread parses longer texts,
which may take seconds."""

_COMPRESS_ON_LOOP_BYTES = 16 * 1024

INFER_ROUTES = tuple(
    Route(
        "POST",
        path,
        "inference",
        "Run a model on tensors or on an image file",
        schema="edge_server.frontends.http.schemas:INFER",
    )
    for path in model_paths("/infer")
)

DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


class InferenceContext:
    """Shared objects of all inference requests. Lives on one event loop; `workers` run the slow work."""

    __slots__ = (
        "_body_decoders",
        "_decoded_types",
        "_header_pattern",
        "dispatch",
        "handles",
        "infer_json_cache",
        "service",
        "tokens",
        "traces",
        "workers",
    )

    def __init__(
        self,
        service: InferenceService,
        dispatch: LoopDispatch,
        workers: Executor,
        tokens: Tokens,
        header_pattern: re.Pattern[str] | None,
        body_decoders: Mapping[str, BodyDecoder],
    ) -> None:
        self.service = service
        self.handles = service.handle_cache()
        self.traces = service.traces
        self.dispatch = dispatch
        self.workers = workers
        self.tokens = tokens
        self.infer_json_cache = InferJsonCache(service.shared_memory)
        self._header_pattern = header_pattern
        self._body_decoders = body_decoders

    def target(self, head: RequestHead, model: str, version: str, caller: str) -> InferTarget:
        """Return the target of requests with this head. `caller` is the name of their token, or "".

        Raises InvalidRequest.
        """
        headers = head.headers
        text = headers.get(HEADER_LENGTH)
        json_size = None if text is None else parse_header_length(text)
        content_type = headers.get("Content-Type") or ""
        decode_body = None
        if json_size is None:
            for beginning, decoder in self._body_decoders.items():
                if content_type.startswith(beginning):
                    decode_body = partial(decoder, content_type)
        extra = header_parameters(headers.items(), self._header_pattern)
        encoding = request_encoding(headers.get("Content-Encoding"))
        if json_size and json_size == head.body_size and encoding is None:
            # Triton's C++ client names the length also of a body that is all JSON. Without it, texts that differ in
            # their numbers are recognised.
            json_size = None
        return InferTarget(
            self,
            model,
            parse_version(version),
            json_size,
            extra,
            caller,
            head,
            encoding,
            accepted_encoding(headers.get("Accept-Encoding")),
            decode_body,
            not (extra or encoding or decode_body),
            max(0, json_size or 0),
        )


class InferTarget(NamedTuple):
    """Target of the inference requests with one head.

    `json_size` is the `header_length` of `decode_infer`, None if all of the body is JSON; `extra` are the parameters
    from forwarded headers.
    `decode_body` is a plugin's decoder for this content type, None for the bodies of KServe.
    """

    inference: InferenceContext
    model: str
    version: int | None
    json_size: int | None
    extra: dict[str, Parameter]
    caller: str
    head: RequestHead
    encoding: str | None
    accepts: str | None
    decode_body: Callable[[Body, ModelSpec], tuple[dict[str, Tensor], dict[str, RequestedOutput]]] | None
    is_plain: bool
    """Whether the body is decoded as received, and the head adds nothing to the request."""
    aligned_at: int
    is_cacheable: bool = True

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> HttpInferCall:
        """Start a request; see connection.RequestTarget."""
        call = HttpInferCall(self, connection)
        call.begin(connection, body, reader)
        return call


class HttpInferCall:
    """One inference request that runs."""

    __slots__ = (
        "_connection",
        "_decoded",
        "_handle",
        "_response",
        "_response_count",
        "_target",
        "_task",
        "_ticket",
        "_trace",
    )

    def __init__(self, target: InferTarget, connection: HttpConnection) -> None:
        self._target = target
        self._connection: HttpConnection | None = connection
        self._decoded: DecodedRequest | None = None
        self._handle: Handle | None = None
        self._ticket: SubmittedRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._response: Response | None = None
        self._response_count = 0
        self._trace: TracedRequest | None = None

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> None:
        """Decode and submit the request; large bodies are decoded on a worker thread."""
        target = self._target
        inference = target.inference
        try:
            if target.caller:
                inference.tokens.count(target.caller, "inference")
            if inference.traces.is_on:
                began_ns = connection.began_ns
                trace = inference.traces.sample(target.model, target.head.headers.items(), began_ns)
                if trace is not None:
                    self._trace = trace
                    trace.stamp("HTTP_RECV_START", began_ns)
                    trace.stamp("HTTP_RECV_END")
            cache, size, version = inference.infer_json_cache, target.json_size, target.version
            decoded = cache.lookup(body, size, target.model, version) if target.is_plain else None
            self._handle = handle = inference.handles.find(target.model, version)
            spec = handle.spec
            if spec.is_decoupled:
                raise Unsupported(DECOUPLED)
            if decoded is None:
                if not target.is_plain or (len(body) if size is None else size) > TEXT_ON_LOOP_BYTES:
                    self._start_task(self._decode_on_worker(body, handle, reader))
                    return
                decoded = cache.decode_and_store(body, size, spec, version)
            if reader is not None:
                reader.release()
            self._submit(handle, decoded)
        except Exception as error:  # noqa: BLE001 - any error gets a response: `failure_response` logs it
            self._fail(error)

    def cancel(self) -> None:
        """Cancel the request: the client has disconnected."""
        self._connection = None
        if self._task is not None:
            self._task.cancel()
        if self._ticket is not None:
            self._ticket.cancel()
        self._release()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._connection is not None
        self._task = asyncio.get_running_loop().create_task(work)
        self._connection.track_task(self._task)

    async def _decode_on_worker(self, body: Body, handle: Handle, reader: BodyReader | None) -> None:
        """Decode on a worker thread. If the client disconnects meanwhile, the decoded request is released."""
        target, workers = self._target, self._target.inference.workers
        connection = self._connection
        assert connection is not None
        try:
            reader = reader or connection.register_body()
            if target.encoding is not None:
                body = await reader.decompress(body, target.encoding, workers)
            work = workers.submit(self._decode, body, handle.spec)
            del body
            try:
                decoded = await asyncio.wrap_future(work)
            except asyncio.CancelledError:
                work.add_done_callback(_release_decoded)
                raise
            reader.release()
            self._submit(handle, decoded)
        except Exception as error:  # noqa: BLE001 - any error gets a response: `failure_response` logs it
            self._fail(error)

    def _decode(self, body: Body, spec: ModelSpec) -> DecodedRequest:
        target = self._target
        inference = target.inference
        regions, version, extra = inference.service.shared_memory, target.version, target.extra
        if target.decode_body is not None:
            inputs, outputs = target.decode_body(body, spec)
            request = Request(spec.name, inputs, version, outputs=tuple(outputs), parameters=extra)
            return DecodedRequest(request, outputs, False, RequestRegions(regions))
        return decode_infer(body, target.json_size, spec, regions, version=version, extra=extra)

    def _submit(self, handle: Handle, decoded: DecodedRequest) -> None:
        self._decoded = decoded
        if self._trace is not None:
            decoded.request.trace = self._trace.first
        self._ticket = handle.submit(decoded.request, self._deliver, hold_us=READING_THREAD_HOLD_US)

    def _deliver(self, response: Response) -> None:
        """Pass a response, from any thread, to `_receive` on the event loop."""
        dispatch = self._target.inference.dispatch
        if dispatch.thread_id == get_ident() and not dispatch.arrived:
            self._receive(response)
        else:
            dispatch.deliver(self._receive, response)

    def _receive(self, response: Response) -> None:
        """Keep the response; after the final one encode it, compress it if the client accepts that, and send it."""
        if not response.is_empty:
            self._response_count += 1
            if self._response is None or self._response.error is None:
                self._response = response
        if not response.is_final or self._connection is None:
            return
        only, decoded, handle, target = self._response, self._decoded, self._handle, self._target
        assert decoded is not None
        assert handle is not None
        try:
            if only is not None and only.error is not None:
                raise only.error
            if only is None or self._response_count != 1:
                raise ServingFault(
                    f"model '{target.model}' sent {self._response_count} responses where one was expected"
                )
            if self._trace is not None:
                self._trace.stamp("INFER_RESPONSE_COMPLETE")
            text, chunks, json_size = target.inference.infer_json_cache.encode(only, decoded, only.spec or handle.spec)
            if target.accepts is None:
                self._send([text, *chunks], json_size)
            elif len(text) + sum(map(len, chunks)) <= _COMPRESS_ON_LOOP_BYTES:
                self._send([compress([text, *chunks], target.accepts)], json_size)
            else:
                self._start_task(self._compress_on_worker([text, *chunks], json_size))
        except Exception as error:  # noqa: BLE001 - any error gets a response: `failure_response` logs it
            self._fail(error)

    async def _compress_on_worker(self, chunks: list[bytes | memoryview], json_size: int | None) -> None:
        target = self._target
        try:
            assert target.accepts is not None
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(target.inference.workers, compress, chunks, target.accepts)
            self._send([body], json_size)
        except Exception as error:  # noqa: BLE001 - any error gets a response: `failure_response` logs it
            self._fail(error)

    def _send(self, chunks: list[bytes | memoryview], json_size: int | None) -> None:
        """Send the response body `chunks`; the first one is the JSON text unless they are compressed."""
        self._release()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        size = sum(map(len, chunks))
        if connection.is_plain and self._target.accepts is None:
            second = int(time.time())
            last = LAST_LINES.lines if LAST_LINES.second == second else LAST_LINES.renew(second)
            head = JSON_HEAD % (size, last) if json_size is None else BINARY_HEAD % (json_size, size, last)
        else:
            headers = {"Content-Type": JSON_TYPE}
            if json_size is not None:
                headers = {"Content-Type": BINARY_TYPE, HEADER_LENGTH: str(json_size)}
            if self._target.accepts is not None:
                headers["Content-Encoding"] = self._target.accepts
            head = connection.head_bytes(200, {**headers, "Content-Length": str(size)})
        trace = self._trace
        if trace is not None:
            trace.stamp("HTTP_SEND_START")
        if size < JOIN_BELOW_BYTES:
            connection.send_pieces([b"".join((head, *chunks))])
        else:
            pieces: list[bytes | memoryview] = [head]
            for chunk in chunks:
                view = memoryview(chunk)
                pieces += [view[start : start + WRITE_BYTES] for start in range(0, len(view), WRITE_BYTES)]
            connection.send_pieces(pieces)
        if trace is not None:
            trace.stamp("HTTP_SEND_END")
            trace.finish()

    def _fail(self, error: Exception) -> None:
        handle, trace = self._handle, self._trace
        response = failure_response(
            error, "inference" if handle is None else f"inference of model '{handle.spec.name}'"
        )
        self._release()
        connection, self._connection = self._connection, None
        if trace is not None:
            trace.finish()
        if connection is not None:
            connection.send_response(response)

    def _release(self) -> None:
        decoded, self._decoded = self._decoded, None
        self._response = self._ticket = None
        if decoded is not None and decoded.output_views:
            decoded.output_pins.release()
        if self._connection is None and self._trace is not None:
            self._trace.finish()


def _release_decoded(work: Future[DecodedRequest]) -> None:
    """Release a decoded request that is not submitted."""
    if work.cancelled() or work.exception() is not None:
        return
    decoded = work.result()
    decoded.output_pins.release()
    if decoded.request.release is not None:
        decoded.request.release()
