"""Answers to inferences as serialized protobuf, written by hand: tensor memory is copied once, into the message.

Format: ModelInferResponse and ModelStreamInferResponse of grpc_service.proto, fields in ascending order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache

from edge_server.core.message import Parameter, Response
from edge_server.errors import ServingFault
from edge_server.frontends.v2.regions import RegionRef
from edge_server.protocol.raw import raw_from_tensor
from edge_server.protocol.wire import delimited, delimited_head, number_field, text, varint

FINAL_KEY = "triton_final_response"
MAX_MESSAGE_BYTES = 2**31 - 1
"""Longest message of gRPC and protobuf."""

_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _OUTPUTS, _RAW = 1, 2, 3, 4, 5, 6
_STREAM_ERROR, _STREAM_RESPONSE = 1, 2
_INT64_END, _UINT64_END = 1 << 63, 1 << 64
_DOUBLE_TAG = b"\x21"

Piece = bytes | memoryview


def response_message(response: Response, placed: Mapping[str, RegionRef]) -> bytes:
    """Return a ModelInferResponse. `placed` tells outputs whose data is in shared memory; they carry no bytes here.

    Raises ServingFault when the message would be longer than gRPC allows.
    """
    pieces, _ = _response_pieces(response, placed, b"")
    return b"".join(pieces)


def stream_message(response: Response, placed: Mapping[str, RegionRef]) -> bytes:
    """Return a ModelStreamInferResponse around the response, saying whether it is the final one. Raises likewise."""
    pieces, size = _response_pieces(response, placed, _FINAL if response.is_final else _NOT_FINAL)
    return b"".join((delimited_head(_STREAM_RESPONSE, size), *pieces))


def stream_error_message(message: str, request_id: str) -> bytes:
    """Return a ModelStreamInferResponse that tells an error and which request failed."""
    inner = _FINAL
    if request_id:
        inner = delimited(_ID, text(request_id)) + inner
    # An empty sentence would read as no error at all.
    return delimited(_STREAM_ERROR, text(message or "unknown error")) + delimited(_STREAM_RESPONSE, inner)


def empty_final_message(model: str, version_text: str, request_id: str) -> bytes:
    """Return the ModelStreamInferResponse that only says that no more responses follow; names are the request's."""
    inner = delimited(_MODEL_NAME, text(model))
    if version_text:
        inner += delimited(_MODEL_VERSION, text(version_text))
    if request_id:
        inner += delimited(_ID, text(request_id))
    return delimited(_STREAM_RESPONSE, inner + _FINAL)


def _response_pieces(response: Response, placed: Mapping[str, RegionRef], final: bytes) -> tuple[list[Piece], int]:
    """Return what a ModelInferResponse consists of, and its length in bytes."""
    pieces: list[Piece] = [_model_head(response.model, response.version)]
    if response.request_id:
        pieces.append(delimited(_ID, text(response.request_id)))
    if response.parameters:
        for key, value in response.parameters.items():
            # Reserved words are the server's own; a model cannot contradict it.
            if not (final and key == FINAL_KEY):
                pieces.append(parameter_entry(_PARAMETERS, key, value))
    if final:
        pieces.append(final)
    raws: list[Piece] = []
    for tensor in response.outputs:
        region = placed.get(tensor.name) if placed else None
        pieces.append(
            _output_head(
                tensor.name, tensor.dtype.value, tensor.array.shape if region is None else tensor.shape, region
            )
        )
        raw = b"" if region is not None else raw_from_tensor(tensor)
        raws.append(_RAW_TAG + varint(len(raw)))
        raws.append(raw)
    pieces += raws
    size = sum(map(len, pieces))
    # Tag and length of a surrounding stream message take less than 16 bytes.
    if size + 16 > MAX_MESSAGE_BYTES:
        raise ServingFault(
            f"response of model '{response.model}' takes {size} bytes, more than the {MAX_MESSAGE_BYTES} bytes that a "
            "gRPC message may have; ask for fewer outputs or use shared memory"
        )
    return pieces, size


_RAW_TAG = bytes((_RAW << 3 | 2,))


@lru_cache(maxsize=1024)
def _model_head(model: str, version: int) -> bytes:
    return delimited(_MODEL_NAME, text(model)) + delimited(_MODEL_VERSION, str(version).encode())


@lru_cache(maxsize=1024)
def _output_head(name: str, datatype: str, shape: tuple[int, ...], region: RegionRef | None) -> bytes:
    """Return the InferOutputTensor field of an output; models repeat theirs, so they are kept."""
    dims = b"".join(map(varint, shape))
    inner = delimited(1, text(name)) + delimited(2, datatype.encode())
    if dims:
        inner += delimited(3, dims)
    if region is not None:
        inner += parameter_entry(4, "shared_memory_region", region.name)
        inner += parameter_entry(4, "shared_memory_byte_size", region.byte_size)
        if region.offset:
            inner += parameter_entry(4, "shared_memory_offset", region.offset)
    return delimited(_OUTPUTS, inner)


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
