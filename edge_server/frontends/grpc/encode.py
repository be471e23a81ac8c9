"""Answers to inferences as serialized protobuf, written by hand, in pieces: tensor memory is not copied.

What the answers to requests with one head have in common is kept with the head's memo. Format: ModelInferResponse and
ModelStreamInferResponse of grpc_service.proto, fields in ascending order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from edge_server.core.message import Parameter, RequestMemo, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.grpc.call import MAX_MESSAGE_BYTES
from edge_server.frontends.v2.regions import RegionRef
from edge_server.protocol.raw import raw_from_tensor
from edge_server.protocol.wire import delimited, delimited_head, number_field, text, varint

FINAL_KEY = "triton_final_response"

_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _OUTPUTS, _RAW = 1, 2, 3, 4, 5, 6
_STREAM_ERROR, _STREAM_RESPONSE = 1, 2
_INT64_END, _UINT64_END = 1 << 63, 1 << 64
_DOUBLE_TAG = b"\x21"
_RAW_TAG = bytes((_RAW << 3 | 2,))
_ID_TAG = bytes((_ID << 3 | 2,))
_ID_HEADS = tuple(_ID_TAG + bytes((size,)) for size in range(0x80))
_NOTHING_PLACED: Mapping[str, RegionRef] = {}

_SMALL_BYTES = 4096
"""Tensors of up to this are copied, which costs less than a view of them."""

_MAX_HEAD_BYTES = 1 << 24
"""More than all of a message takes that is no tensor data; data that leaves less room is counted exactly."""


def response_message(
    response: Response, placed: Mapping[str, RegionRef] = _NOTHING_PLACED, memo: RequestMemo | None = None
) -> list[bytes | memoryview]:
    """Return a ModelInferResponse, in pieces. `placed` tells outputs whose data is in shared memory; they carry no
    bytes here. `memo` is that of the request.

    Raises ServingFault when the message would be longer than gRPC allows.
    """
    return _pieces(response, placed, memo, b"")


def stream_message(
    response: Response, placed: Mapping[str, RegionRef] = _NOTHING_PLACED, memo: RequestMemo | None = None
) -> list[bytes | memoryview]:
    """Return a ModelStreamInferResponse around the response, saying whether it is the final one. Raises likewise."""
    pieces = _pieces(response, placed, memo, _FINAL if response.is_final else _NOT_FINAL)
    pieces.insert(0, delimited_head(_STREAM_RESPONSE, sum(map(len, pieces))))
    return pieces


def stream_error_message(message: str, request_id: str) -> list[bytes]:
    """Return a ModelStreamInferResponse that tells an error and which request failed."""
    inner = _FINAL
    if request_id:
        inner = delimited(_ID, text(request_id)) + inner
    # An empty sentence would read as no error at all.
    return [delimited(_STREAM_ERROR, text(message or "unknown error")), delimited(_STREAM_RESPONSE, inner)]


def empty_final_message(model: str, version_text: str, request_id: str) -> list[bytes]:
    """Return the ModelStreamInferResponse that only says that no more responses follow; names are the request's."""
    inner = delimited(_MODEL_NAME, text(model))
    if version_text:
        inner += delimited(_MODEL_VERSION, text(version_text))
    if request_id:
        inner += delimited(_ID, text(request_id))
    return [delimited(_STREAM_RESPONSE, inner + _FINAL)]


class _OutputHead(NamedTuple):
    """The InferOutputTensor field of an output, and the head of its raw contents of `size` bytes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    field: bytes
    raw_head: bytes
    size: int


class _AnswerHead(NamedTuple):
    """What the answers to requests with one head have in common."""

    model: str
    version: int
    fields: bytes
    outputs: tuple[_OutputHead, ...]


def _pieces(
    response: Response, placed: Mapping[str, RegionRef], memo: RequestMemo | None, final: bytes
) -> list[bytes | memoryview]:
    """Return what a ModelInferResponse consists of."""
    kept = memo.front_end if memo is not None and not placed else None
    if not isinstance(kept, _AnswerHead) or kept.version != response.version or kept.model != response.model:
        fields = delimited(_MODEL_NAME, text(response.model)) + delimited(
            _MODEL_VERSION, str(response.version).encode()
        )
        kept = _AnswerHead(response.model, response.version, fields, ())
    pieces: list[bytes | memoryview] = [kept.fields]
    request_id = response.request_id
    if request_id:
        encoded = request_id.encode("utf-8", "replace")
        size = len(encoded)
        pieces.append((_ID_HEADS[size] if size < 0x80 else _ID_TAG + varint(size)) + encoded)
    if response.parameters:
        for key, value in response.parameters.items():
            # Reserved words are the server's own; a model cannot contradict it.
            if not (final and key == FINAL_KEY):
                pieces.append(parameter_entry(_PARAMETERS, key, value))
    if final:
        pieces.append(final)
    heads = kept.outputs
    is_new = len(heads) != len(response.outputs)
    raws: list[bytes | memoryview] = []
    made: list[_OutputHead] = []
    data_bytes = 0
    for index, tensor in enumerate(response.outputs):
        region = placed.get(tensor.name) if placed else None
        raw: bytes | memoryview
        if region is not None:
            shape, raw = tuple(tensor.shape), b""
        else:
            array = tensor.array
            shape = array.shape
            if tensor.dtype is not DType.BYTES and array.nbytes <= _SMALL_BYTES:
                raw = array.tobytes()
            else:
                raw = raw_from_tensor(tensor)
        size = len(raw)
        data_bytes += size
        head = heads[index] if not is_new else None
        if (
            head is None
            or head.shape != shape
            or head.size != size
            or head.dtype is not tensor.dtype
            or head.name != tensor.name
        ):
            head = _output_head(tensor, shape, region, size)
            is_new = True
        made.append(head)
        pieces.append(head.field)
        raws.append(head.raw_head)
        raws.append(raw)
    pieces += raws
    if is_new and memo is not None and not placed:
        memo.front_end = kept._replace(outputs=tuple(made))
    if data_bytes > MAX_MESSAGE_BYTES - _MAX_HEAD_BYTES:
        size = sum(map(len, pieces))
        # Tag and length of a surrounding stream message take less than 16 bytes.
        if size + 16 > MAX_MESSAGE_BYTES:
            raise ServingFault(
                f"response of model '{response.model}' takes {size} bytes, more than the {MAX_MESSAGE_BYTES} bytes "
                "that a gRPC message may have; ask for fewer outputs or use shared memory"
            )
    return pieces


def _output_head(tensor: Tensor, shape: tuple[int, ...], region: RegionRef | None, size: int) -> _OutputHead:
    dims = b"".join(map(varint, shape))
    inner = delimited(1, text(tensor.name)) + delimited(2, tensor.dtype.value.encode())
    if dims:
        inner += delimited(3, dims)
    if region is not None:
        inner += parameter_entry(4, "shared_memory_region", region.name)
        inner += parameter_entry(4, "shared_memory_byte_size", region.byte_size)
        if region.offset:
            inner += parameter_entry(4, "shared_memory_offset", region.offset)
    return _OutputHead(tensor.name, tensor.dtype, shape, delimited(_OUTPUTS, inner), _RAW_TAG + varint(size), size)


def parameter_entry(field: int, key: str, value: Parameter) -> bytes:
    """Return one entry of a map<string, InferParameter>. Raises ServingFault for a number that needs over 64 bits."""
    return delimited(field, delimited(1, text(key)) + delimited(2, _parameter(key, value)))


def _parameter(key: str, value: Parameter) -> bytes:
    if isinstance(value, bool):
        return number_field(1, int(value))
    if isinstance(value, int):
        if -_INT64_END <= value < _INT64_END:
            return number_field(2, value)
        if value < 0 or value >= _UINT64_END:
            raise ServingFault(f"response parameter '{key}' does not fit into 64 bits")
        return number_field(5, value)
    if isinstance(value, float):
        return _DOUBLE_TAG + struct.pack("<d", value)
    return delimited(3, text(value))


_FINAL = parameter_entry(_PARAMETERS, FINAL_KEY, True)
_NOT_FINAL = parameter_entry(_PARAMETERS, FINAL_KEY, False)
