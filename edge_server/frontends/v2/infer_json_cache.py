"""Cache of decoded HTTP inference requests: an equal JSON text is recognised by its bytes and not parsed again.

A client's requests often have the same JSON text, except for the id and the tensor data. The cache keeps the decoded
text without both, and the serving core's decisions for such requests (RequestMemo). The data follows the JSON text as
raw bytes, or is in the text as arrays of numbers. The cache splits such a text at the arrays, and compares only the
text around them: if that text is valid with one array, it is valid with any other.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from edge_server.core.decode_cache import MAX_KEY_BYTES, DecodeCache
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Parameter, Request, RequestMemo, Response, SequenceStep
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.json_number_arrays import LARGE_BYTES
from edge_server.frontends.json_text import format_numbers, parse_numbers, parse_object
from edge_server.frontends.v2.infer_body_codec import (
    DecodedRequest,
    decode_infer,
    encode_infer,
    is_sent_raw,
    response_template,
)
from edge_server.frontends.v2.json_tensor_data import (
    FLOATS,
    LARGEST_FP32,
    MAX_ONE_THREAD_LENGTH,
    array_from_list,
    integer_range,
    json_text_from_tensor,
)
from edge_server.frontends.v2.parameters import DEADLINE_KEY
from edge_server.frontends.v2.requested_outputs import RequestedOutput
from edge_server.memory.region_pins import Regions, RequestRegions
from edge_server.protocol.raw_tensors import Buffer, raw_from_tensor, tensor_from_raw
from edge_server.record import record

_MAX_SEEN = 1024
"""Maximum number of JSON texts that were seen once and are not cached yet."""

_COPY_BELOW_BYTES = 1024
"""Below this size, a copy of an array is cheaper than a view of its memory."""

_ID = re.compile(rb'\{"id":\s?"([0-9A-Za-z_.:-]{1,64})",')
"""Id at the start of a text. Triton's C++ client sends an empty one if its caller gave none: that stays in the text."""
_PLAIN = frozenset(DType) - {DType.BOOL, DType.BYTES}
_NUMBERS: dict[DType, frozenset[type]] = {
    dtype: frozenset((int, float) if dtype in FLOATS else (int,)) for dtype in _PLAIN - {DType.FP16, DType.BF16}
}
"""Number types that a JSON array can contain, and the types that Python's parser returns for them."""

_DATA_KEY = b'"data":'
_WHITESPACE = b" \t\r\n"
_WHITESPACE_RUN = re.compile(rb"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_PLACEHOLDER = f"data {secrets.token_hex(16)} "
"""Placeholder of an array, followed by its index, in the check of a split text. Random, so that no client can send
it."""


@record(frozen=True, slots=True)
class _CachedInput:
    """An input. `start` and `end` are the offsets of its raw bytes behind the JSON text."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    count: int
    start: int
    end: int
    is_plain: bool
    """Whether any bytes of this size are a valid tensor."""
    limits: tuple[int, int] | None
    """Lowest and highest integer; None for floating point."""


class _CachedRequest(NamedTuple):
    """The decoded content of a JSON text without id and data."""

    parts: tuple[_CachedInput, ...]
    size: int
    fixed_texts: tuple[bytes, ...]
    """The text between each array of numbers and the next one, or the end; empty for raw data."""
    wanted: dict[str, RequestedOutput]
    outputs: tuple[str, ...]
    binary_output: bool
    parameters: Mapping[str, Parameter]
    priority: int
    timeout_us: int
    sequence: SequenceStep | None
    memo: RequestMemo


class _CachedOutput(NamedTuple):
    """Output `position` of a cached response; `is_raw`: it is sent as raw bytes, `nbytes` of them."""

    position: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    is_raw: bool
    nbytes: int


class _CachedResponse(NamedTuple):
    """The JSON text of a generation's responses, valid while the outputs have these types and shapes."""

    spec: ModelSpec
    version: int
    outputs: tuple[_CachedOutput, ...]
    """In the order of the response."""
    fixed_texts: tuple[bytes, ...]
    """The text before, between and behind the arrays of numbers, without the first character: the id replaces it."""


class InferJsonCache:
    """Decodes inference bodies like `decode_infer`, and encodes responses like `encode_infer`. For one thread."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._nothing_pinned = RequestRegions(regions)
        self._requests: DecodeCache[tuple[str, int | None, bytes], _CachedRequest] = DecodeCache()
        self._seen: set[int] = set()

    def decode_and_store(
        self, body: Buffer, header_length: int | None, spec: ModelSpec, version: int | None
    ) -> DecodedRequest:
        """Decode a body that `lookup` does not know, and cache its JSON text. Raises as `decode_infer` does."""
        decoded = decode_infer(body, header_length, spec, self._regions, version=version)
        self._store(body, header_length, decoded)
        return decoded

    def lookup(self, body: Buffer, header_length: int | None, model: str, version: int | None) -> DecodedRequest | None:
        """Return the request with its memo if its JSON text is cached and its data are valid, else None."""
        if header_length is None:
            if len(body) > LARGE_BYTES:
                return None
            text, request_id = _split_id(bytes(body))
            start = text.find(_DATA_KEY) + len(_DATA_KEY)
            cached = self._requests.get((model, version, text[:start])) if start >= len(_DATA_KEY) else None
            inputs = None if cached is None else _from_numbers(cached, text, start, model)
        elif 0 < header_length <= MAX_KEY_BYTES:
            text, request_id = _split_id(bytes(body[:header_length]))
            cached = self._requests.get((model, version, text))
            if cached is None or cached.fixed_texts or cached.size != len(body) - header_length:
                return None
            inputs = _from_raw(cached, body, header_length, model)
        else:
            return None
        if cached is None or inputs is None:
            return None
        # By position, which takes half the time.
        request = Request(
            model, inputs, version, request_id, cached.outputs, dict(cached.parameters), cached.priority,
            cached.timeout_us, cached.sequence, None, 0, None, None, cached.memo,
        )  # fmt: skip
        return DecodedRequest(request, cached.wanted, cached.binary_output, self._nothing_pinned)

    def encode(
        self, response: Response, decoded: DecodedRequest, spec: ModelSpec
    ) -> tuple[bytes, list[bytes | memoryview], int | None]:
        """Encode a response; see `encode_infer`."""
        memo, request_id = decoded.request.memo, response.request_id
        if memo is None or response.parameters or request_id != decoded.request.id:
            return encode_infer(response, decoded, spec)
        cached = memo.front_end
        if (
            type(cached) is not _CachedResponse
            or cached.spec is not response.spec
            or cached.version != response.version
            or len(cached.outputs) != len(response.outputs)
        ):
            memo.front_end = _new_cached_response(response, decoded, spec)
            return encode_infer(response, decoded, spec)
        chunks: list[bytes | memoryview] = []
        texts = [b'{"id":"%b",' % request_id.encode("ascii") if request_id else b"{", cached.fixed_texts[0]]
        following = 1
        for known in cached.outputs:
            tensor = response.outputs[known.position]
            array = tensor.array
            if tensor.name != known.name or tensor.dtype is not known.dtype or array.shape != known.shape:
                memo.front_end = _new_cached_response(response, decoded, spec)
                return encode_infer(response, decoded, spec)
            if not known.is_raw:
                # As in json_text_from_tensor, which also writes NaN and infinities ("n").
                numbers = format_numbers(array.reshape(-1).tolist())
                numbers = json_text_from_tensor(tensor) if "n" in numbers else numbers
                texts += (numbers.encode("ascii"), cached.fixed_texts[following])
                following += 1
            elif known.nbytes < _COPY_BELOW_BYTES:
                chunks.append(array.tobytes())
            else:
                # As in raw_from_tensor, which copies an array that is not contiguous.
                is_contiguous = array.flags.c_contiguous and array.ndim
                chunks.append(array.data.cast("B") if is_contiguous else raw_from_tensor(tensor))
        text = b"".join(texts)
        return text, chunks, len(text) if chunks else None

    def _store(self, body: Buffer, header_length: int | None, decoded: DecodedRequest) -> None:
        """Cache a JSON text when it comes for the second time."""
        view = memoryview(body)
        if len(view) > LARGE_BYTES if header_length is None else not 0 < header_length <= MAX_KEY_BYTES:
            return
        text, _ = _split_id(bytes(view[:header_length]))
        begin = text if header_length is not None else text[: text.find(_DATA_KEY) + len(_DATA_KEY)]
        key = decoded.request.model, decoded.request.version, begin
        # Texts that differ only behind the first array share an entry, which the first of them keeps: otherwise two
        # clients could replace each other's text with each request.
        if len(begin) > MAX_KEY_BYTES or key in self._requests:
            return
        key_hash = hash(key)
        if key_hash not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen.add(key_hash)
            return
        fixed_texts: tuple[bytes, ...] = ()
        if header_length is None:
            fixed_texts = _split_at_arrays(text)
            if not fixed_texts or sum(map(len, fixed_texts)) > MAX_KEY_BYTES:
                return
            text, fixed_texts = fixed_texts[0], fixed_texts[1:]
        cached = _new_cached_request(text, fixed_texts, decoded)
        if cached is None:
            return
        octets = 2 * (len(begin) + sum(map(len, fixed_texts)))
        self._requests.add(key, cached, octets=octets, items=len(cached.parts) + len(cached.outputs))


def _split_id(text: bytes) -> tuple[bytes, str]:
    """Return the text without the id at its start, and the id."""
    match = _ID.match(text)
    return (text, "") if match is None else (b"{" + text[match.end() :], match[1].decode("ascii"))


def _from_raw(cached: _CachedRequest, body: Buffer, offset: int, model: str) -> dict[str, Tensor]:
    """Return the tensors of the raw bytes behind a text of `offset` bytes."""
    inputs: dict[str, Tensor] = {}
    for part in cached.parts:
        start, end = offset + part.start, offset + part.end
        if not part.is_plain:
            data = memoryview(body)[start:end]
            inputs[part.name] = tensor_from_raw(part.name, part.dtype, part.shape, data, model=model)
            continue
        array = None if end - start < _COPY_BELOW_BYTES else np.ndarray(part.shape, part.dtype.numpy, body, start)
        if array is None or not array.flags.aligned:
            # A new bytes object is aligned.
            array = np.ndarray(part.shape, part.dtype.numpy, bytes(body[start:end]))
        inputs[part.name] = Tensor(part.name, part.dtype, array)
    return inputs


def _from_numbers(cached: _CachedRequest, text: bytes, start: int, model: str) -> dict[str, Tensor] | None:
    """Return the tensors of a text whose first array begins at `start`; None if anything else differs."""
    inputs: dict[str, Tensor] = {}
    last = len(cached.fixed_texts) - 1
    for index, (part, fixed_text) in enumerate(zip(cached.parts, cached.fixed_texts, strict=True)):
        end = text.find(fixed_text, start) if index < last else len(text) - len(fixed_text)
        if end < start or (index == last and not text.endswith(fixed_text)):
            return None
        data = text[start:end].strip(_WHITESPACE)
        start = end + len(fixed_text)
        if data.count(b"[") + data.count(b"{") != 1:
            return None
        try:
            values = parse_numbers(data)
        except ValueError:
            return None
        if type(values) is not list or len(values) != part.count:
            return None
        if not _NUMBERS[part.dtype].issuperset(map(type, values)):
            return None
        if part.limits is not None:
            if min(values) < part.limits[0] or max(values) > part.limits[1]:
                return None
            array = np.array(values, part.dtype.numpy)
        elif len(values) > MAX_ONE_THREAD_LENGTH:
            array = array_from_list(part.name, part.dtype, values, model)
        else:
            try:
                array = np.array(values, np.float64)
            except OverflowError:
                return None
            # Infinities, NaN and numbers near the limit are rare: the full decoder checks them.
            if not array.dot(array) < LARGEST_FP32**2:
                return None
            if part.dtype is DType.FP32:
                array = array.astype(np.float32)
        inputs[part.name] = Tensor(part.name, part.dtype, array.reshape(part.shape))
    return inputs


def _split_at_arrays(text: bytes) -> tuple[bytes, ...]:
    """Return the text around the flat data arrays of the inputs; () if an input has another kind of data."""
    fixed_texts: list[bytes] = []
    pieces: list[str] = []
    begin = 0
    try:
        decoded = text.decode("ascii")
        while (start := text.find(_DATA_KEY, begin)) >= 0:
            start += len(_DATA_KEY)
            spaces = _WHITESPACE_RUN.match(text, start)
            assert spaces is not None
            value, end = _DECODER.raw_decode(decoded, spaces.end())
            fixed_texts.append(text[begin:start])
            if type(value) is not list or sum(map(len, fixed_texts)) > MAX_KEY_BYTES:
                return ()
            pieces += (decoded[begin:start], f'"{_PLACEHOLDER}{len(pieces) // 2}"')
            begin = end
        fixed_texts.append(text[begin:])
        # A string can look like the start of an array: check that each placeholder is the data of one input.
        members = parse_object("".join((*pieces, decoded[begin:])).encode("ascii"))
    except (ValueError, RecursionError, InvalidRequest):
        return ()
    items = members.get("inputs")
    assert isinstance(items, list), "the text was decoded before"
    expected = [f"{_PLACEHOLDER}{index}" for index in range(len(pieces) // 2)]
    return tuple(fixed_texts) if expected and [item.get("data") for item in items] == expected else ()


def _new_cached_request(text: bytes, fixed_texts: tuple[bytes, ...], decoded: DecodedRequest) -> _CachedRequest | None:
    """Return the cache entry of a text, or None if such texts cannot be decoded without the parser."""
    members = parse_object(b"[]".join((text, *fixed_texts)))
    parameters = members.get("parameters", {})
    # An id that is not at the start makes each text of a client different.
    if members.get("id") or not isinstance(parameters, dict) or DEADLINE_KEY in parameters or decoded.output_views:
        return None
    parts: list[_CachedInput] = []
    start = 0
    items = members["inputs"]
    assert isinstance(items, list), "the text was decoded before"
    for item in items:
        tensor = decoded.request.inputs[item["name"]]
        size = item.get("parameters", {}).get("binary_data_size")
        if tensor.dtype not in _NUMBERS if fixed_texts else type(size) is not int or "data" in item:
            return None
        size = size or 0
        # numpy cannot make a view of zero bytes.
        is_plain = tensor.dtype in _PLAIN and size > 0
        count = math.prod(tensor.shape)
        if fixed_texts and not count:
            return None
        limits = None if tensor.dtype in FLOATS or not fixed_texts else integer_range(tensor.dtype)
        parts.append(
            _CachedInput(tensor.name, tensor.dtype, tensor.shape, count, start, start + size, is_plain, limits)
        )
        start += size
    request = decoded.request
    return _CachedRequest(
        tuple(parts),
        start,
        fixed_texts,
        decoded.outputs,
        request.outputs,
        decoded.binary_output,
        {key: request.parameters[key] for key in parameters if key in request.parameters},
        request.priority,
        request.timeout_us,
        request.sequence,
        RequestMemo(),
    )


def _new_cached_response(response: Response, decoded: DecodedRequest, spec: ModelSpec) -> _CachedResponse | None:
    """Return the cache entry of a response's text, or None if the text depends on more than types and shapes."""
    outputs = response.outputs
    if response.spec is None or decoded.output_views or any(item.classification for item in decoded.outputs.values()):
        return None
    for item in outputs:
        is_cacheable = item.dtype in (_PLAIN if is_sent_raw(item.name, decoded) else _NUMBERS)
        if not is_cacheable or type(item) is not Tensor or not item.array.size:
            return None
    text = response_template(response, decoded, _PLACEHOLDER)
    return _CachedResponse(
        response.spec,
        response.version,
        tuple(
            _CachedOutput(position, item.name, item.dtype, item.shape, is_sent_raw(item.name, decoded), item.nbytes)
            for position, item in enumerate(outputs)
        ),
        tuple(text[1:].encode("ascii").split(_PLACEHOLDER.encode("ascii"))),
    )
