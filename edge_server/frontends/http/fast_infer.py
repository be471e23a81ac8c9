"""Plain inferences without a task: submitted as their last byte comes, answered as their response does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from aiohttp.http_parser import RawRequestMessage

from edge_server.core.message import Parameter, Response
from edge_server.core.model import ModelSpec
from edge_server.errors import EdgeServerError, ServingFault, Unsupported
from edge_server.frontends.http.body import Body
from edge_server.frontends.http.compression import accepted_encoding
from edge_server.frontends.http.head import InferTarget
from edge_server.frontends.http.homecoming import Homecoming
from edge_server.frontends.http.images import is_image_body
from edge_server.frontends.http.reply import JOIN_BELOW_BYTES, WRITE_BYTES, failure_reply
from edge_server.frontends.http.wire import infer_head, wire_reply
from edge_server.frontends.tokens import Tokens
from edge_server.frontends.v2.forwarding import forwarded
from edge_server.frontends.v2.json_codec import DecodedRequest, encode_infer, parse_header_length
from edge_server.frontends.v2.json_header import InferDecoder
from edge_server.frontends.v2.version import parse_version
from edge_server.service import READING_THREAD_HOLD_US, InferenceService, Ticket

Answer: TypeAlias = Callable[[list[bytes | memoryview], bool], None]

HEADER_LENGTH = "Inference-Header-Content-Length"

TEXT_ON_LOOP_BYTES = 256 * 1024
"""The longest JSON that the event loop parses itself: some milliseconds. More would keep everybody waiting, up to
seconds, and is parsed on another thread."""

DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


def infer_target(
    message: RawRequestMessage,
    size: int,
    names: Mapping[str, str],
    header_pattern: re.Pattern[str] | None,
    caller: str = "",
) -> InferTarget | None:
    """Return what a POST of `size` bytes to an infer path asks for; None where it is not plain: compressed either way,
    an image, much JSON, or wrong. Of those the ordinary path says more."""
    headers = message.headers
    if "Content-Encoding" in headers or accepted_encoding(headers.get("Accept-Encoding")) is not None:
        return None
    text = headers.get(HEADER_LENGTH)
    if text is None and is_image_body(headers.get("Content-Type", "")):
        return None
    extra: dict[str, Parameter] = {}
    try:
        json_size = None if text is None else parse_header_length(text)
        if (size if json_size is None else json_size) > TEXT_ON_LOOP_BYTES:
            return None
        version = parse_version(names.get("version", ""))
        if header_pattern is not None:
            extra = forwarded(headers.items(), header_pattern)
    except EdgeServerError:
        return None
    return InferTarget(names["model"], version, json_size, extra, caller)


class FastInfer:
    """What every such inference needs. Lives on one event loop."""

    __slots__ = ("decoder", "homecoming", "regions", "service", "tokens", "traces")

    def __init__(self, service: InferenceService, homecoming: Homecoming, tokens: Tokens) -> None:
        self.tokens = tokens
        self.service = service
        self.traces = service.traces
        self.homecoming = homecoming
        self.decoder = InferDecoder(service.shared_memory)

    def is_open(self) -> bool:
        """Return whether nothing needs the ordinary path: no traces, and no connections to close."""
        return not (self.traces.is_on or self.service.is_in_drain_delay)

    def begin(self, target: InferTarget, body: Body, answer: Answer) -> FastCall:
        """See lanes.FastInference."""
        if target.caller:
            self.tokens.count(target.caller, "inference")
        call = FastCall(self, target, answer)
        call.begin(target, body)
        return call


class FastCall:
    """One inference under way."""

    __slots__ = ("_answer", "_decoded", "_infer", "_response", "_responses", "_spec", "_ticket")

    def __init__(self, infer: FastInfer, target: InferTarget, answer: Answer) -> None:
        self._infer = infer
        self._answer: Answer | None = answer
        self._decoded: DecodedRequest | None = None
        self._spec: ModelSpec | None = None
        self._ticket: Ticket | None = None
        self._response: Response | None = None
        self._responses = 0

    def begin(self, target: InferTarget, body: Body) -> None:
        infer = self._infer
        try:
            self._spec = spec = infer.service.model_spec(target.model, target.version)
            if spec.is_decoupled:
                raise Unsupported(DECOUPLED)
            self._decoded = decoded = infer.decoder.decode(
                body, target.json_size, spec, version=target.version, extra=target.extra
            )
            sink = partial(infer.homecoming.deliver, self._receive)
            self._ticket = infer.service.submit(decoded.request, sink, hold_us=READING_THREAD_HOLD_US)
        except Exception as error:  # noqa: BLE001 - the boundary: `failure_reply` logs and maps
            self._fail(error)

    def cancel(self) -> None:
        """Take the request back: the client is gone."""
        self._answer = None
        if self._ticket is not None:
            self._ticket.cancel()
        self._release()

    def _receive(self, response: Response) -> None:
        if not response.is_empty:
            self._responses += 1
            if self._response is None or self._response.error is None:
                self._response = response
        if not response.is_final or self._answer is None:
            return
        try:
            self._succeed()
        except Exception as error:  # noqa: BLE001 - the boundary: `failure_reply` logs and maps
            self._fail(error)

    def _succeed(self) -> None:
        response, decoded, spec = self._response, self._decoded, self._spec
        assert decoded is not None
        assert spec is not None
        if response is not None and response.error is not None:
            raise response.error
        if response is None or self._responses != 1:
            raise ServingFault(f"model '{spec.name}' sent {self._responses} responses where one was expected")
        text, chunks, json_size = encode_infer(response, decoded, response.spec or spec)
        self._finish(_pieces(text, chunks, json_size))

    def _fail(self, error: Exception) -> None:
        spec = self._spec
        reply = failure_reply(error, "inference" if spec is None else f"inference of model '{spec.name}'")
        self._finish([wire_reply(reply, will_stay=True)])

    def _finish(self, pieces: list[bytes | memoryview]) -> None:
        self._release()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer(pieces, True)

    def _release(self) -> None:
        decoded, self._decoded = self._decoded, None
        self._response = self._ticket = None
        if decoded is not None:
            decoded.output_pins.release()


def _pieces(text: bytes, chunks: list[bytes | memoryview], json_size: int | None) -> list[bytes | memoryview]:
    size = len(text) + sum(map(len, chunks))
    head = infer_head(size, json_size)
    if size < JOIN_BELOW_BYTES:
        return [b"".join((head, text, *chunks))]
    pieces: list[bytes | memoryview] = [head + text]
    for chunk in chunks:
        view = memoryview(chunk)
        pieces += [view[start : start + WRITE_BYTES] for start in range(0, len(view), WRITE_BYTES)]
    return pieces
