"""JSON parts of binary inference bodies, remembered: a client's repeat byte for byte but for the id and the tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from edge_server.core.message import Parameter, Request, SequenceStep
from edge_server.core.model import ModelSpec
from edge_server.core.tensor import DType, Tensor
from edge_server.frontends.v2.json_codec import DecodedRequest, decode_infer
from edge_server.frontends.v2.json_text import parse_object
from edge_server.frontends.v2.outputs import RequestedOutput
from edge_server.frontends.v2.parameters import DEADLINE_KEY
from edge_server.frontends.v2.regions import Pins, Regions
from edge_server.protocol.raw import Buffer, tensor_from_raw
from edge_server.records import dataclass

MAX_KEPT = 256
MAX_KEPT_BYTES = 2048
"""How many headers are remembered, and how long one may be: a client that never repeats itself costs no more memory."""

_ID = re.compile(rb'\{"id":"([0-9A-Za-z_.:-]{0,64})",')
_PLAIN = frozenset(DType) - {DType.BOOL, DType.BYTES}


@dataclass(frozen=True, slots=True)
class _Part:
    """An input's bytes within the tensors that follow the header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    end: int
    is_plain: bool
    """Whether any bytes of that size are such a tensor."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A header that was read, and found right, before. Nothing of it depends on a model or on the time."""

    parts: tuple[_Part, ...]
    size: int
    wanted: dict[str, RequestedOutput]
    outputs: tuple[str, ...]
    binary_output: bool
    parameters: Mapping[str, Parameter]
    priority: int
    timeout_us: int
    sequence: SequenceStep | None


class HeaderCache:
    """Decodes inference bodies as `decode_infer` does, by what is kept of headers seen before. Used by one thread."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._nothing_pinned = Pins(regions)
        self._known: dict[bytes, _Known] = {}
        self._seen: set[int] = set()

    def decode(
        self,
        body: Buffer,
        header_length: int | None,
        spec: ModelSpec,
        *,
        version: int | None = None,
        extra: Mapping[str, Parameter] | None = None,
    ) -> DecodedRequest:
        """See `decode_infer`."""
        # Parameters that came as HTTP headers are joined in one place, which few requests need.
        if extra or header_length is None or not 0 < header_length <= MAX_KEPT_BYTES or header_length > len(body):
            return decode_infer(body, header_length, spec, self._regions, version=version, extra=extra)
        view = memoryview(body)
        text = bytes(view[:header_length])
        request_id = ""
        match = _ID.match(text)
        if match is not None:
            request_id = match.group(1).decode("ascii")
            text = b"{" + text[match.end() :]
        known = self._known.get(text)
        if known is not None and known.size == len(view) - header_length:
            return self._assemble(known, view[header_length:], spec.name, request_id, version)
        decoded = decode_infer(body, header_length, spec, self._regions, version=version)
        if known is None:
            self._remember(text, decoded)
        return decoded

    def _assemble(
        self,
        known: _Known,
        payload: memoryview,
        model: str,
        request_id: str,
        version: int | None,
    ) -> DecodedRequest:
        inputs: dict[str, Tensor] = {}
        for part in known.parts:
            data = payload[part.start : part.end]
            if part.is_plain:
                array = np.frombuffer(data, part.dtype.numpy).reshape(part.shape)
                inputs[part.name] = Tensor(part.name, part.dtype, array if array.flags.aligned else array.copy())
            else:
                inputs[part.name] = tensor_from_raw(part.name, part.dtype, part.shape, data, model=model)
        request = Request(
            model=model,
            version=version,
            id=request_id,
            inputs=inputs,
            outputs=known.outputs,
            parameters=dict(known.parameters),
            priority=known.priority,
            timeout_us=known.timeout_us,
            sequence=known.sequence,
        )
        return DecodedRequest(request, known.wanted, known.binary_output, self._nothing_pinned)

    def _remember(self, text: bytes, decoded: DecodedRequest) -> None:
        """Keep what `text`, without its id, was decoded to, from the second time on: what never repeats is not kept."""
        mark = hash(text)
        if mark not in self._seen:
            if len(self._seen) >= 4 * MAX_KEPT:
                self._seen.clear()
            self._seen.add(mark)
            return
        known = _known(text, decoded)
        if known is None:
            return
        if len(self._known) >= MAX_KEPT:
            del self._known[next(iter(self._known))]
        self._known[text] = known


def _known(text: bytes, decoded: DecodedRequest) -> _Known | None:
    members = parse_object(text)
    parameters = members.get("parameters", {})
    # With an id elsewhere than in front, each of the client's headers is another.
    if "id" in members or not isinstance(parameters, dict) or DEADLINE_KEY in parameters or decoded.output_places:
        return None
    parts: list[_Part] = []
    start = 0
    items = members["inputs"]
    assert isinstance(items, list), "it was decoded"
    for item in items:
        size = item.get("parameters", {}).get("binary_data_size")
        tensor = decoded.request.inputs[item["name"]]
        if type(size) is not int or "data" in item:
            return None
        # No view of no bytes: numpy makes none.
        is_plain = tensor.dtype in _PLAIN and size > 0
        parts.append(_Part(tensor.name, tensor.dtype, tensor.shape, start, start + size, is_plain))
        start += size
    request = decoded.request
    return _Known(
        tuple(parts),
        start,
        decoded.outputs,
        request.outputs,
        decoded.binary_output,
        {key: request.parameters[key] for key in parameters if key in request.parameters},
        request.priority,
        request.timeout_us,
        request.sequence,
    )
