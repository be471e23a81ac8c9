"""Handler of ModelInfer: parses a request, submits it, and encodes the response; parsed headers are cached.

A client's requests to a model usually differ only in id and tensor bytes. The rest of a message is its header. The
protobuf class parses a header once; after that a cache recognises the header by its bytes. The header's memo holds the
common parts of the responses. A header is not cached if it carries data, or if its meaning changes with each request (a
deadline, a sequence step). Streams use the same functions.

Formats: ModelInferRequest, ModelInferResponse and ModelStreamInferResponse of grpc_service.proto. Response fields are
in ascending order. Data of large tensors is not copied.
"""

from __future__ import annotations

import functools
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from edge_server.core.decode_cache import MAX_KEY_BYTES, DecodeCache
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request, RequestMemo, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault, Unsupported
from edge_server.frontends.grpc.apply_requested_outputs import PlacedOutput, apply_plan
from edge_server.frontends.grpc.call import (
    MAX_MESSAGE_BYTES,
    Message,
    Metadata,
    RpcCall,
    UnaryHandler,
    call_status,
    client_error,
    run_blocking,
)
from edge_server.frontends.grpc.infer_message import InferMessage, MessageReader, Outline
from edge_server.frontends.grpc.infer_request import (
    ResponsePlan,
    decode_request,
    parameter_values,
    pin_targets,
    set_parameters,
)
from edge_server.frontends.v2.header_forwarding import header_parameters
from edge_server.frontends.v2.parameters import region_reference
from edge_server.frontends.v2.requested_outputs import OutputPlaces, RequestedOutput
from edge_server.frontends.v2.version_text import parse_version
from edge_server.memory.region_pins import (
    OutputRegion,
    RegionRef,
    Regions,
    RegionView,
    RequestRegions,
    tensor_in_region,
)
from edge_server.memory.shared_memory import RegionPin, RequestPieces
from edge_server.protocol.protobuf_wire_format import (
    DELIMITED,
    encode_delimited,
    encode_delimited_header,
    encode_number_field,
    encode_text,
    encode_varint,
    read_varint,
)
from edge_server.protocol.raw_tensors import raw_from_tensor, tensor_from_raw
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

    from edge_server.core.request_response import SubmittedRequest
    from edge_server.service import Handle, InferenceService
    from edge_server.telemetry.trace_record import TracedRequest
    from edge_server.telemetry.tracing import Traces


# -- requests

_SMALL_BYTES = 4096
"""Data up to this size is copied: that costs less than a view or an alignment check."""

_REQUEST_ID = 3 << 3 | DELIMITED
_REQUEST_RAW = 7 << 3 | DELIMITED
_REQUEST_PLAIN = frozenset(number << 3 | DELIMITED for number in (1, 2, 3, 4, 5, 6))
"""Tags of model_name, model_version, id, parameters, inputs and outputs: a cacheable header has only these fields."""

KnownMessage: TypeAlias = "tuple[RequestHeader, str, list[int]]"
"""A message with a cached header: the header, the id, then start and end offset of each of its raw_input_contents."""

MAX_LAYOUTS = 64
"""Layouts of messages that a reader keeps. Before one more is kept, all are dropped."""

MAX_LAYOUTS_OF_LENGTH = 8
"""Layouts for one length of messages. A C++ client writes the parameters of a tensor in shared memory in an order that
differs between its request objects."""


@record(slots=True)
class HeaderInput:
    """One input as a header declares it.

    `size` is the required data size in bytes, or -1 if the right size alone does not make the data valid. `region` is
    None if the data follows in raw_input_contents.
    """

    name: str
    dtype: DType
    numpy: np.dtype[np.generic]
    shape: tuple[int, ...]
    size: int
    region: RegionRef | None

    def tensor(self, data: Message, start: int, end: int, model: str) -> Tensor:
        """Return the input from data[start:end]. Raises InvalidRequest if the size does not match the shape."""
        size = end - start
        if size != self.size:
            return tensor_from_raw(self.name, self.dtype, self.shape, memoryview(data)[start:end], model=model)
        if size <= _SMALL_BYTES:
            return Tensor(self.name, self.dtype, np.ndarray(self.shape, self.numpy, bytes(data[start:end])))
        # np.ndarray is faster, but does not export the buffer: a region could be unmapped under it.
        flat: npt.NDArray[np.generic] = np.frombuffer(data, self.numpy, size // self.numpy.itemsize, start)
        array = flat.reshape(self.shape)
        return Tensor(self.name, self.dtype, array if array.flags.aligned else array.copy())


@record(slots=True)
class RequestHeader:
    """Parsed request header. Requests share it, so it never changes, but for `pieces` as a whole.

    `given` holds all parameters, `custom` those that the model sees. `memo` is the server's cache for this header.
    `pieces` are the pieces of system shared memory that the last request found, None before.
    """

    model: str
    version_text: str
    version: int | None
    outputs: tuple[str, ...]
    special: Mapping[str, RequestedOutput] | None
    inputs: tuple[HeaderInput, ...]
    raw_count: int
    given: Mapping[str, object]
    custom: Mapping[str, Parameter]
    priority: int
    timeout_us: int
    wants_empty_final: bool
    memo: RequestMemo = field(default_factory=RequestMemo)
    pieces: RequestPieces | None = None


class MessageLayout:
    """Layout of a message with a cached header. A message of the same length has the same layout and header if it has
    the same bytes but for the id and the raw contents."""

    __slots__ = ("_gaps", "_head", "_head_end", "_header", "_id_end", "_id_start", "_raws", "_tail")

    def __init__(self, data: Message, outline: Outline, header: RequestHeader) -> None:
        self._header = header
        self._raws = raws = outline.raws
        self._id_end = outline.id_end
        self._id_start = outline.id_end - len(outline.request_id)
        self._head_end = raws[0] if raws else len(data)
        self._head = bytes(data[: self._id_start])
        self._tail = bytes(data[self._id_end : self._head_end])
        gaps = zip(raws[1::2], raws[2::2], strict=False)
        self._gaps = [(start, end, bytes(data[start:end])) for start, end in gaps]

    def match(self, data: Message) -> KnownMessage | None:
        """Return the message, which has the same length, if it has this layout."""
        head = bytes(data[: self._head_end])
        if not (head.startswith(self._head) and head.endswith(self._tail)):
            return None
        for start, end, gap in self._gaps:
            if data[start:end] != gap:
                return None
        try:
            return self._header, head[self._id_start : self._id_end].decode(), self._raws
        except UnicodeDecodeError:
            # The message class reports this error.
            return None


def split_message(data: Message) -> Outline | None:
    """Return the parts of a serialized message.

    None if the message has other fields than a cacheable header, is incomplete, or its header is too long.
    """
    position = 0
    end = len(data)
    id_start = id_end = 0
    request_id = b""
    raws: list[int] = []
    try:
        while position < end:
            tag = data[position]
            if tag != _REQUEST_RAW and (tag not in _REQUEST_PLAIN or raws):
                return None
            size = data[position + 1]
            body = position + 2
            if size >= 0x80:
                size, body = read_varint(data, position + 1)
            stop = body + size
            if tag == _REQUEST_RAW:
                if not raws:
                    header_end = position
                raws.append(body)
                raws.append(stop)
            elif tag == _REQUEST_ID:
                if id_end:
                    return None
                id_start, id_end, request_id = position, stop, bytes(data[body:stop])
            position = stop
    except (IndexError, ValueError):
        return None
    if position != end:
        return None
    if not raws:
        header_end = end
    if header_end - (id_end - id_start) > MAX_KEY_BYTES:
        return None
    header = bytes(data[:id_start]) + bytes(data[id_end:header_end]) if id_end else bytes(data[:header_end])
    return Outline(header, request_id, raws, id_end)


def is_quick(known: KnownMessage | Outline | None) -> bool:
    """Return whether parsing takes only microseconds: the header is cached, and no input's values need a check."""
    if known is None or isinstance(known, Outline):
        return False
    return all(declared.size >= 0 for declared in known[0].inputs)


class RequestReader:
    """Request parser with a header cache. Thread-safe."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._messages = MessageReader()
        self._headers: DecodeCache[bytes, RequestHeader] = DecodeCache()
        self._lock = threading.Lock()
        """Held to add a header or a layout."""
        self._layouts: dict[int, tuple[MessageLayout, ...]] = {}
        """By the length of the messages, of which a client sends few: the newest layouts of each."""
        self._layout_count = 0

    def recognise(self, data: Message) -> KnownMessage | Outline | None:
        """Return a received message if its header is cached, else its outline, or None if it is not cacheable."""
        for layout in self._layouts.get(len(data), ()):
            known = layout.match(data)
            if known is not None:
                return known
        outline = split_message(data)
        header = self._headers.get(outline.header) if outline is not None else None
        if outline is None or header is None or 2 * header.raw_count != len(outline.raws):
            return outline
        layout = MessageLayout(data, outline, header)
        with self._lock:
            if self._layout_count >= MAX_LAYOUTS:
                self._layouts.clear()
                self._layout_count = 0
            older = self._layouts.get(len(data), ())[: MAX_LAYOUTS_OF_LENGTH - 1]
            self._layouts[len(data)] = (layout, *older)
            self._layout_count += 1
        return layout.match(data)

    def find(
        self, data: Message, known: KnownMessage | Outline | None, plan: ResponsePlan
    ) -> KnownMessage | InferMessage:
        """Parse a message, for which `recognise` returned `known`, and set model, version and id in `plan`. Raises
        InvalidRequest."""
        if known is not None and not isinstance(known, Outline):
            header, plan.request_id, _ = known
            plan.model, plan.version_text, plan.version = header.model, header.version_text, header.version
            return known
        found = self._messages.read(data)
        found.outline = known
        message = found.message
        plan.model, plan.version_text, plan.request_id = message.model_name, message.model_version, message.id
        plan.version = parse_version(plan.version_text)
        return found

    def request(
        self, data: Message, found: KnownMessage | InferMessage, plan: ResponsePlan, forwarded: Mapping[str, Parameter]
    ) -> Request:
        """Return the request, and fill in the plan. Large tensors are views of the message or of pinned shared memory.

        `forwarded` are request headers that become parameters. The request's `release` frees the memory of inputs, the
        plan's `release` that of outputs. Raises InvalidRequest, and the registry's errors for a region; nothing stays
        pinned then.
        """
        if isinstance(found, InferMessage):
            request = decode_request(found, plan, self._regions, forwarded)
            if found.outline is not None and not forwarded:
                header = _request_header(found, plan, request)
                if header is not None:
                    key = found.outline.header
                    items = len(header.inputs) + len(header.outputs) + len(header.given)
                    # The key, what was parsed from it, and the names of the regions that `pieces` refers to.
                    octets = (3 if request.release is not None or plan.places is not None else 2) * len(key)
                    with self._lock:
                        self._headers.add(key, header, octets=octets, items=items)
                    request.memo = header.memo
            return request
        header, _, raws = found
        tensors: dict[str, Tensor] = {}
        request = Request(
            header.model, tensors, header.version, plan.request_id, header.outputs, header.custom, header.priority
        )
        request.timeout_us = header.timeout_us
        plan.wants_empty_final = header.wants_empty_final
        if forwarded:
            set_parameters(request, plan, {**forwarded, **header.given})
        else:
            request.memo = header.memo
        if header.special or header.raw_count != len(header.inputs):
            plan.special = header.special
            self._pin_known(request, plan, header, data, raws)
            return request
        position = 0
        for declared in header.inputs:
            tensors[declared.name] = declared.tensor(data, raws[position], raws[position + 1], header.model)
            position += 2
        return request

    def _pin_known(
        self, request: Request, plan: ResponsePlan, header: RequestHeader, data: Message, raws: list[int]
    ) -> None:
        """Set the inputs and output regions of a request with a cached header that uses shared memory."""
        if header.pieces is not None and _pin_again(header.pieces, request, plan, header, data, raws):
            return
        pins = RequestRegions(self._regions)
        tensors: dict[str, Tensor] = {}
        given: list[RegionView] = []
        position = 0
        try:
            if plan.special:
                request.targets = pin_targets(plan, self._regions, pins)
            for declared in header.inputs:
                name, region = declared.name, declared.region
                if region is None:
                    tensors[name] = declared.tensor(data, raws[position], raws[position + 1], header.model)
                    position += 2
                    continue
                pin = pins.pin_view(region, writable=False)
                given.append(pin)
                if pin.device is None:
                    tensors[name] = declared.tensor(pin.view, 0, region.byte_size, header.model)
                else:
                    tensors[name] = tensor_in_region(
                        name, declared.dtype, declared.shape, pin, region.byte_size, model=header.model
                    )
        except BaseException:
            pins.release()
            plan.release()
            raise
        request.inputs = tensors
        request.release = pins.release if pins else None
        header.pieces = _pieces_of(given, {} if plan.places is None else plan.places.pieces)


def _pin_again(
    pieces: RequestPieces, request: Request, plan: ResponsePlan, header: RequestHeader, data: Message, raws: list[int]
) -> bool:
    """Set the inputs and output regions of a request from the pieces that an earlier one found. Return False if these
    must be found anew."""
    holds = pieces.pin()
    if holds is None:
        return False
    inputs, outputs = holds
    if pieces.outputs:
        plan.places = OutputPlaces(pieces.outputs, outputs.release)
    if pieces.inputs:
        request.release = inputs.release
    tensors: dict[str, Tensor] = {}
    position = index = 0
    try:
        for declared in header.inputs:
            if declared.region is None:
                tensors[declared.name] = declared.tensor(data, raws[position], raws[position + 1], header.model)
                position += 2
            else:
                piece = pieces.inputs[index]
                tensors[declared.name] = declared.tensor(piece.memory, piece.start, piece.stop, header.model)
                index += 1
    except BaseException:
        inputs.release()
        plan.release()
        raise
    request.inputs = tensors
    return True


def _pieces_of(inputs: Sequence[RegionView], outputs: Mapping[str, OutputRegion]) -> RequestPieces | None:
    """Return the pieces of a request's pins, for further requests; None if one is in GPU memory, or there are none."""
    given = [pin.piece for pin in inputs if isinstance(pin, RegionPin)]
    wanted = {name: pin.piece for name, pin in outputs.items() if isinstance(pin, RegionPin)}
    if len(given) < len(inputs) or len(wanted) < len(outputs) or not (given or wanted):
        return None
    return RequestPieces(given, wanted)


def _request_header(found: InferMessage, plan: ResponsePlan, request: Request) -> RequestHeader | None:
    """Return the header of a valid request, or None if it must not be cached (see the module's docstring)."""
    if request.sequence is not None or request.deadline_ns:
        return None
    inputs = []
    for position, given in enumerate(found.inputs):
        if position in found.contents or given.HasField("contents"):
            return None
        region = region_reference(parameter_values(given.parameters, {}), given.name) if given.parameters else None
        inputs.append(_header_input(request.inputs[given.name], region))
    raw_count = sum(declared.region is None for declared in inputs)
    if raw_count != len(found.raw):
        return None
    return RequestHeader(
        plan.model,
        plan.version_text,
        plan.version,
        request.outputs,
        plan.special,
        tuple(inputs),
        raw_count,
        parameter_values(found.message.parameters, {}),
        request.parameters,
        request.priority,
        request.timeout_us,
        plan.wants_empty_final,
    )


def _header_input(tensor: Tensor, region: RegionRef | None) -> HeaderInput:
    """Return the header's entry for an input that was parsed to this tensor."""
    shape = tuple(map(int, tensor.shape))
    size = -1 if tensor.dtype in (DType.BYTES, DType.BOOL) or 0 in shape else tensor.nbytes
    return HeaderInput(tensor.name, tensor.dtype, tensor.dtype.numpy, shape, size, region)


# -- responses

FINAL_KEY = "triton_final_response"

_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _OUTPUTS, _RAW = 1, 2, 3, 4, 5, 6
_STREAM_ERROR, _STREAM_RESPONSE = 1, 2
_INT64_END, _UINT64_END = 1 << 63, 1 << 64
_DOUBLE_TAG = b"\x21"
_RAW_TAG = bytes((_RAW << 3 | 2,))
_ID_TAG = bytes((_ID << 3 | 2,))
_ID_PREFIXES = tuple(_ID_TAG + bytes((size,)) for size in range(0x80))
_NOTHING_PLACED: Mapping[str, PlacedOutput] = {}

_MAX_NON_TENSOR_BYTES = 1 << 24
"""Assumed maximum of the bytes of a message that are not tensor data. If tensor data leaves less room than this, the
message size is computed exactly."""


def response_message(
    response: Response, placed: Mapping[str, PlacedOutput] = _NOTHING_PLACED, memo: RequestMemo | None = None
) -> list[bytes | memoryview]:
    """Return a ModelInferResponse, in pieces. `memo` is that of the request.

    `placed` gives the outputs in shared memory: the message carries no data for them. Raises ServingFault if
    the message is longer than gRPC allows.
    """
    return _pieces(response, placed, memo, b"")


def stream_message(
    response: Response, placed: Mapping[str, PlacedOutput] = _NOTHING_PLACED, memo: RequestMemo | None = None
) -> list[bytes | memoryview]:
    """Return a ModelStreamInferResponse with the response and whether it is final. Raises as `response_message`."""
    pieces = _pieces(response, placed, memo, _FINAL if response.is_final else _NOT_FINAL)
    pieces.insert(0, _stream_response_prefix(sum(map(len, pieces))))
    return pieces


@functools.lru_cache(maxsize=256)
def _stream_response_prefix(size: int) -> bytes:
    return encode_delimited_header(_STREAM_RESPONSE, size)


def stream_error_message(message: str, request_id: str) -> list[bytes]:
    """Return a ModelStreamInferResponse with an error and the id of the failed request."""
    inner = _FINAL
    if request_id:
        inner = encode_delimited(_ID, encode_text(request_id)) + inner
    # An empty error message means no error.
    return [
        encode_delimited(_STREAM_ERROR, encode_text(message or "unknown error")),
        encode_delimited(_STREAM_RESPONSE, inner),
    ]


def empty_final_message(model: str, version_text: str, request_id: str) -> list[bytes]:
    """Return a ModelStreamInferResponse that only marks the end of the responses. The names are the request's."""
    inner = encode_delimited(_MODEL_NAME, encode_text(model))
    if version_text:
        inner += encode_delimited(_MODEL_VERSION, encode_text(version_text))
    if request_id:
        inner += encode_delimited(_ID, encode_text(request_id))
    return [encode_delimited(_STREAM_RESPONSE, inner + _FINAL)]


OutputKey: TypeAlias = "tuple[str, DType, tuple[int, ...], int, RegionRef | None]"
"""What the encoded fields of an output depend on: name, type, shape, size of the data, region."""


class _ResponseHeader(NamedTuple):
    """Common parts of the responses to requests with one header.

    `names` are the fields of model name and version. `parts` are the bytes before the raw contents of each output: the
    tag and length of the contents, and before the first ones the fields of all outputs.
    """

    model: str
    version: int
    outputs: list[OutputKey]
    names: bytes
    parts: Sequence[bytes]


def _pieces(
    response: Response, placed: Mapping[str, PlacedOutput], memo: RequestMemo | None, final: bytes
) -> list[bytes | memoryview]:
    """Return a ModelInferResponse, in pieces."""
    outputs: list[OutputKey] = []
    raws: list[bytes | memoryview] = []
    data_bytes = 0
    for tensor in response.outputs:
        place = placed.get(tensor.name) if placed else None
        raw: bytes | memoryview
        if place is not None:
            region, size = place
            raws.append(b"")
            outputs.append((tensor.name, tensor.dtype, tuple(tensor.shape), size, region))
            continue
        array = tensor.array
        if tensor.dtype is not DType.BYTES and array.nbytes <= _SMALL_BYTES:
            raw = array.tobytes()
        else:
            raw = raw_from_tensor(tensor)
        size = len(raw)
        data_bytes += size
        raws.append(raw)
        outputs.append((tensor.name, tensor.dtype, array.shape, size, None))
    header = memo.front_end if memo is not None else None
    if (
        not isinstance(header, _ResponseHeader)
        or header.outputs != outputs
        or header.version != response.version
        or header.model != response.model
    ):
        header = _response_header(response, outputs)
        if memo is not None:
            memo.front_end = header
    pieces: list[bytes | memoryview] = [header.names]
    request_id = response.request_id
    if request_id:
        encoded = request_id.encode("utf-8", "replace")
        size = len(encoded)
        pieces.append(_ID_PREFIXES[size] if size < 0x80 else _ID_TAG + encode_varint(size))
        pieces.append(encoded)
    if response.parameters:
        for key, value in response.parameters.items():
            # The server sets this reserved parameter; a model cannot override it.
            if not (final and key == FINAL_KEY):
                pieces.append(parameter_entry(_PARAMETERS, key, value))
    if final:
        pieces.append(final)
    # `header` is for outputs of this number. By position: zip costs twice as much.
    for position in range(len(raws)):
        pieces.append(header.parts[position])
        pieces.append(raws[position])
    if data_bytes > MAX_MESSAGE_BYTES - _MAX_NON_TENSOR_BYTES:
        size = sum(map(len, pieces))
        # The tag and length of an enclosing stream message take less than 16 bytes.
        if size + 16 > MAX_MESSAGE_BYTES:
            raise ServingFault(
                f"response of model '{response.model}' takes {size} bytes, more than the {MAX_MESSAGE_BYTES} bytes "
                "that a gRPC message may have; ask for fewer outputs or use shared memory"
            )
    return [b"".join(pieces)] if data_bytes <= _SMALL_BYTES else pieces


def _response_header(response: Response, outputs: list[OutputKey]) -> _ResponseHeader:
    names = encode_delimited(_MODEL_NAME, encode_text(response.model))
    names += encode_delimited(_MODEL_VERSION, str(response.version).encode())
    parts = [_RAW_TAG + encode_varint(size if region is None else 0) for _, _, _, size, region in outputs]
    if parts:
        parts[0] = b"".join(map(_output_field, outputs)) + parts[0]
    return _ResponseHeader(response.model, response.version, outputs, names, parts)


def _output_field(key: OutputKey) -> bytes:
    """Return the InferOutputTensor field of an output."""
    name, dtype, shape, size, region = key
    dims = b"".join(map(encode_varint, shape))
    inner = encode_delimited(1, encode_text(name)) + encode_delimited(2, dtype.value.encode())
    if dims:
        inner += encode_delimited(3, dims)
    if region is not None:
        inner += parameter_entry(4, "shared_memory_region", region.name)
        inner += parameter_entry(4, "shared_memory_byte_size", size)
        if region.offset:
            inner += parameter_entry(4, "shared_memory_offset", region.offset)
    return encode_delimited(_OUTPUTS, inner)


def parameter_entry(field: int, key: str, value: Parameter) -> bytes:
    """Return one entry of a map<string, InferParameter>. Raises ServingFault for a number that needs over 64 bits."""
    return encode_delimited(field, encode_delimited(1, encode_text(key)) + encode_delimited(2, _parameter(key, value)))


def _parameter(key: str, value: Parameter) -> bytes:
    if isinstance(value, bool):
        return encode_number_field(1, int(value))
    if isinstance(value, int):
        if -_INT64_END <= value < _INT64_END:
            return encode_number_field(2, value)
        if value < 0 or value >= _UINT64_END:
            raise ServingFault(f"response parameter '{key}' does not fit into 64 bits")
        return encode_number_field(5, value)
    if isinstance(value, float):
        return _DOUBLE_TAG + struct.pack("<d", value)
    return encode_delimited(3, encode_text(value))


_FINAL = parameter_entry(_PARAMETERS, FINAL_KEY, True)
_NOT_FINAL = parameter_entry(_PARAMETERS, FINAL_KEY, False)


# -- calls

REAL_ERRORS_KEY = "triton_grpc_error"
"""Metadata key. If its value is "true", the first error ends a stream with a gRPC status, else it is a message."""

LARGE_BYTES = 256 << 10
"""Messages of at least this size are parsed on the transport's thread only if `is_quick`."""

COMPLETE, SEND_START, SEND_END = "INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "GRPC_SEND_END"
"""Triton's trace names for the steps of the front end after the model's response."""


class InferContext:
    """Shared objects of inference calls: the service, the request parser, the pattern of forwarded metadata names."""

    __slots__ = ("handles", "header_pattern", "reader", "service")

    def __init__(self, service: InferenceService, header_pattern: re.Pattern[str] | None) -> None:
        self.service = service
        self.handles = service.handle_cache()
        self.reader = RequestReader(service.shared_memory)
        self.header_pattern = header_pattern


class UnaryInferCall(UnaryHandler):
    """One ModelInfer call."""

    __slots__ = (
        "_call", "_handle", "_has_left", "_inference", "_is_answered", "_memo", "_plan", "_response", "_ticket",
        "_trace",
    )  # fmt: skip

    def __init__(self, inference: InferContext, call: RpcCall) -> None:
        self._inference = inference
        self._call = call
        self._handle: Handle
        self._memo: RequestMemo | None = None
        self._response: Response | None = None
        self._ticket: SubmittedRequest | None = None
        self._trace: TracedRequest | None = None
        self._is_answered = self._has_left = False

    def on_message(self, message: Message) -> None:
        known = self._inference.reader.recognise(message)
        if len(message) >= LARGE_BYTES and not is_quick(known):
            run_blocking(self._call, partial(self._submit, message, known))
        else:
            self._submit(message, known)

    def _submit(self, message: Message, known: KnownMessage | Outline | None) -> None:
        call, inference = self._call, self._inference
        service = inference.service
        self._plan = plan = ResponsePlan()
        try:
            traces = service.traces
            received_ns = time.monotonic_ns() if traces.is_on else 0
            found = inference.reader.find(message, known, plan)
            self._handle = handle = inference.handles.find(plan.model, plan.version)
            if handle.spec.is_decoupled:
                raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
            pattern = inference.header_pattern
            headers = NO_PARAMETERS if pattern is None else forwarded_metadata(call.metadata, pattern)
            request = inference.reader.request(message, found, plan, headers)
            self._memo = request.memo
            deadline_ns = call.deadline_ns
            if deadline_ns and not 0 < request.deadline_ns < deadline_ns:
                request.deadline_ns = deadline_ns
            if traces.is_on:
                self._trace = begin_trace(traces, request, call.metadata, received_ns)
            ticket = handle.submit(request, self._on_response, hold_us=call.hold_us)
        except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
            plan.release()
            if self._trace is not None:
                self._trace.finish()
            call.end(call_status(client_error(error)))
            return
        if self._is_answered:
            return
        # No lock is needed: each of the two threads writes its own flag first, and reads the other's after. If both
        # read too early, as processors may without an interpreter lock, the request only runs to its end.
        self._ticket = ticket
        if self._has_left:
            ticket.cancel()
        if self._is_answered:
            self._ticket = None

    def on_client_left(self) -> None:
        self._has_left = True
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()

    def _on_response(self, response: Response) -> None:
        """Receive a response of the model, on any thread. After the final one, send the last one that is not empty."""
        if not response.is_final:
            if not response.is_empty:
                self._response = response
            return
        if response.is_empty and self._response is not None:
            response = self._response
        self._is_answered = True
        self._ticket = self._response = None
        plan, trace, error = self._plan, self._trace, response.error
        if trace is not None:
            trace.stamp(COMPLETE)
            trace.stamp(SEND_START)
        if error is None:
            try:
                if plan.special:
                    message = response_message(*apply_plan(response, plan, self._handle.spec), self._memo)
                else:
                    message = response_message(response, memo=self._memo)
            except Exception as failure:  # noqa: BLE001 - any error gets a status: `client_error` logs it
                error = client_error(failure)
        if plan.places is not None:
            plan.release()
        # Do not raise the error: requests of a batch share it, and a traceback would keep all these requests alive.
        # `self` and the call refer to each other: break the cycle, so that both and the message are freed at once.
        call = self._call
        del self._call
        if error is None:
            call.respond(message)
        else:
            call.end(call_status(error))
        if trace is not None:
            trace.stamp(SEND_END)
            trace.finish()


def forwarded_metadata(metadata: Metadata, pattern: re.Pattern[str] | None) -> Mapping[str, Parameter]:
    """Return the metadata that becomes request parameters.

    Raises InvalidRequest for a reserved name or a value that is not printable.
    """
    if pattern is None:
        return NO_PARAMETERS
    # Binary metadata is not text, and REAL_ERRORS_KEY is only for this front end.
    return header_parameters(
        (
            (key, value)
            for key, value in metadata
            if isinstance(value, str) and not key.endswith("-bin") and key != REAL_ERRORS_KEY
        ),
        pattern,
    )


def begin_trace(traces: Traces, request: Request, metadata: Metadata, received_ns: int) -> TracedRequest | None:
    """Return the trace of a parsed request, or None if it is not sampled. `received_ns` is the time of its arrival."""
    trace = traces.sample(request.model, ((key, value) for key, value in metadata if isinstance(value, str)))
    if trace is not None:
        trace.stamps.append(("GRPC_WAITREAD_START", received_ns))
        trace.start_ns = received_ns
        trace.stamp("GRPC_WAITREAD_END")
        request.trace = trace.first
    return trace
