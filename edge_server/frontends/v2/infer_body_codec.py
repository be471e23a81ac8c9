"""Codec of HTTP inference bodies: a JSON text, optionally followed by raw tensors.

Formats: KServe v2 REST with Triton's extensions binary_tensor_data, classification, shared memory and parameters.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import field
from typing import TypeAlias

import numpy as np

from edge_server.core.device_tensor import DevicePiece
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Parameter, Request, Response
from edge_server.core.tensor import BY_NAME, DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.json_text import json_string, json_type, parse_object, to_json
from edge_server.frontends.v2.json_tensor_data import json_text_from_tensor, tensor_from_json
from edge_server.frontends.v2.parameters import (
    binary_data_size,
    region_reference,
    requested_output,
    split_parameters,
)
from edge_server.frontends.v2.requested_outputs import RequestedOutput, classify, write_to_region
from edge_server.memory.region_pins import Regions, RegionView, RequestRegions
from edge_server.protocol.raw_tensors import Buffer, raw_from_tensor, tensor_from_raw
from edge_server.record import record

Json: TypeAlias = dict[str, object]

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")

_ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'."
)


@record(slots=True)
class DecodedRequest:
    """A request for the core, and the requested form of its response.

    `outputs` are the outputs requested by name; empty means all. `binary_output` applies to outputs that do not set
    `binary_data`. `output_pins` holds the shared-memory regions of outputs, `output_views` the part of each such
    output. The owner calls `output_pins.release` after the response is sent or discarded.
    """

    request: Request
    outputs: dict[str, RequestedOutput]
    binary_output: bool
    output_pins: RequestRegions
    output_views: dict[str, RegionView] = field(default_factory=dict)


def parse_header_length(text: str) -> int:
    """Return the value of Inference-Header-Content-Length. Raises InvalidRequest when it is not an integer."""
    digits = text.strip()
    if _INTEGER.fullmatch(digits) is None:
        raise InvalidRequest(f"Unable to parse Inference-Header-Content-Length, got: {digits[:64]}")
    return int(digits)


def decode_infer(
    body: Buffer,
    header_length: int | None,
    spec: ModelSpec,
    regions: Regions,
    *,
    version: int | None = None,
    extra: Mapping[str, Parameter] | None = None,
) -> DecodedRequest:
    """Decode one inference body; tensors are views of `body` where possible.

    `header_length` is the byte count of the JSON part. None: the whole body is JSON. 0: there is no JSON, and the body
    is the model's only input. `extra` are parameters from forwarded headers; those of the body take precedence. Raises
    InvalidRequest, and the errors of pinning a shared-memory region. After an error nothing stays pinned.
    """
    view = memoryview(body)
    if header_length == 0:
        return _decode_raw(view, spec, regions, version, extra or {})
    if header_length is not None and not 0 < header_length <= len(view):
        raise InvalidRequest(f"inference header size should be in range (0, {len(view)}), got: {header_length}")
    text = body if header_length in (None, len(view)) else view[:header_length]
    payload = view[len(text) :]
    input_pins, output_pins = RequestRegions(regions), RequestRegions(regions)
    try:
        return _InferBody(parse_object(text, cuts=True), spec).decode(payload, input_pins, output_pins, version, extra)
    except BaseException:
        input_pins.release()
        output_pins.release()
        raise


class _InferBody:
    """Decoder of the JSON members of one inference body."""

    def __init__(self, members: Json, spec: ModelSpec) -> None:
        self._members = members
        self._spec = spec

    def decode(
        self,
        payload: memoryview,
        input_pins: RequestRegions,
        output_pins: RequestRegions,
        version: int | None,
        extra: Mapping[str, Parameter] | None,
    ) -> DecodedRequest:
        """Return the request. `payload` holds the raw tensors."""
        outputs = self._outputs()
        views = {item.name: output_pins.pin_view(item.region) for item in outputs.values() if item.region is not None}
        parameters = split_parameters(_object(self._members, "parameters", "the request"))
        request_id = self._members.get("id", "")
        if not isinstance(request_id, str):
            raise InvalidRequest(f"Unable to parse 'id': expected a string, got {json_type(request_id)}")
        inputs = self._inputs(payload, input_pins)
        # The input pins also hold the GPU memory of outputs: a backend may write to it after the request is over.
        targets: dict[str, DevicePiece] = {}
        for name, view in views.items():
            region = outputs[name].region if view.device is not None else None
            piece = None if region is None else input_pins.target(region)
            if piece is not None:
                targets[name] = piece
        request = Request(
            model=self._spec.name,
            version=version,
            id=request_id,
            inputs=inputs,
            outputs=tuple(outputs),
            parameters={**extra, **parameters.custom} if extra else parameters.custom,
            priority=parameters.priority,
            timeout_us=parameters.timeout_us,
            deadline_ns=parameters.deadline_ns,
            sequence=parameters.sequence,
            targets=targets or None,
            release=input_pins.release if input_pins else None,
        )
        return DecodedRequest(request, outputs, parameters.binary_output, output_pins, views)

    def _inputs(self, payload: memoryview, pins: RequestRegions) -> dict[str, Tensor]:
        if "inputs" not in self._members:
            raise InvalidRequest(
                "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'" + _example(self._spec)
            )
        inputs: dict[str, Tensor] = {}
        used = 0
        for item in _objects(self._members, "inputs"):
            name = _name(item, "inputs")
            if name in inputs:
                raise InvalidRequest(f"input '{name}' for model '{self._spec.name}' is given more than once")
            try:
                inputs[name], size = self._input(name, item, payload[used:], pins)
            except InvalidRequest as error:
                declared = [spec.name for spec in self._spec.inputs]
                if name in declared:
                    raise
                known = ", ".join(f"'{one}'" for one in declared)
                raise InvalidRequest(
                    f"unexpected inference input '{name}' for model '{self._spec.name}', which has {known} "
                    f"({error.message})"
                ) from None
            used += size
        if used != len(payload):
            raise InvalidRequest(
                f"unexpected additional input data for model '{self._spec.name}': {len(payload) - used} bytes are left"
            )
        return inputs

    def _input(self, name: str, item: Json, rest: memoryview, pins: RequestRegions) -> tuple[Tensor, int]:
        """Return the tensor, and the number of bytes of `rest` that it uses."""
        datatype = _member(item, "datatype", f"input '{name}'")
        dtype = BY_NAME.get(datatype) if isinstance(datatype, str) else None
        if dtype is None:
            shown = f"'{datatype[:64]}'" if isinstance(datatype, str) else json_type(datatype)
            raise InvalidRequest(
                f"Unable to parse 'datatype' of input '{name}': {shown} is not a data type; there are "
                f"{', '.join(BY_NAME)}"
            )
        shape = _shape(name, item)
        parameters = _object(item, "parameters", f"input '{name}'")
        size = binary_data_size(parameters)
        region = region_reference(parameters, f"input '{name}'")
        if ("data" in item) + (size is not None) + (region is not None) != 1:
            raise InvalidRequest(f"{_ONE_SOURCE} Got input '{name}' for model '{self._spec.name}'")
        model = self._spec.name
        if region is not None:
            return pins.tensor(name, dtype, shape, region, model=model), 0
        if size is None:
            return tensor_from_json(name, dtype, shape, item["data"], model=model), 0
        if size > len(rest):
            raise InvalidRequest(
                f"unexpected size for input '{name}', expecting {size - len(rest)} additional bytes for model '{model}'"
            )
        return tensor_from_raw(name, dtype, shape, rest[:size], model=model), size

    def _outputs(self) -> dict[str, RequestedOutput]:
        outputs: dict[str, RequestedOutput] = {}
        for item in _objects(self._members, "outputs"):
            name = _name(item, "outputs")
            if name in outputs:
                raise InvalidRequest(f"output '{name}' for model '{self._spec.name}' is requested more than once")
            outputs[name] = requested_output(name, _object(item, "parameters", f"output '{name}'"))
        return outputs


def _example(spec: ModelSpec) -> str:
    """Return an example for an error: a body with the first input of the model; "" for a model without inputs."""
    if not spec.inputs:
        return ""
    first = spec.inputs[0]
    dims = [1 if dim == -1 else dim for dim in first.dims]
    shape = [1, *dims] if spec.max_batch_size > 0 and not first.is_shape_tensor else dims
    item = f'{{"name": "{first.name}", "datatype": "{first.dtype.value}", "shape": {shape}, "data": [...]}}'
    more = ", ..." if len(spec.inputs) > 1 else ""
    return (
        f'; expected {{"inputs": [{item}{more}]}}. The flat object {{"{first.name}": [...]{more}}} is for '
        f"/v2/models/{spec.name}/generate"
    )


def _objects(members: Json, key: str) -> list[Json]:
    value = members.get(key, [])
    if not isinstance(value, list):
        raise InvalidRequest(f"Unable to parse '{key}': expected an array, got {json_type(value)}")
    for item in value:
        if not isinstance(item, dict):
            raise InvalidRequest(f"Unable to parse '{key}': expected objects in the array, got {json_type(item)}")
    return value


def _object(members: Json, key: str, owner: str) -> Json:
    value = members.get(key, {})
    if not isinstance(value, dict):
        raise InvalidRequest(f"Unable to parse '{key}' of {owner}: expected an object, got {json_type(value)}")
    return value


def _member(item: Json, key: str, owner: str) -> object:
    if key not in item:
        raise InvalidRequest(
            f"Unable to parse '{key}' of {owner}: attempt to access non-existing object member '{key}'"
        )
    return item[key]


def _name(item: Json, key: str) -> str:
    value = _member(item, "name", f"an entry of '{key}'")
    if not isinstance(value, str):
        raise InvalidRequest(
            f"Unable to parse 'name' of an entry of '{key}': expected a string, got {json_type(value)}"
        )
    return value


def _shape(name: str, item: Json) -> list[int]:
    value = _member(item, "shape", f"input '{name}'")
    if not isinstance(value, list):
        raise InvalidRequest(f"Unable to parse 'shape' of input '{name}': expected an array, got {json_type(value)}")
    for dim in value:
        if type(dim) is not int:
            raise InvalidRequest(f"Unable to parse 'shape' of input '{name}': expected integers, got {json_type(dim)}")
    return value


def _decode_raw(
    payload: memoryview, spec: ModelSpec, regions: Regions, version: int | None, extra: Mapping[str, Parameter]
) -> DecodedRequest:
    """Decode a body without JSON: the bytes of one item of the model's only input."""
    if len(spec.inputs) != 1:
        raise InvalidRequest(
            f"Raw request must only have 1 input to be deduced, but model '{spec.name}' has {len(spec.inputs)}"
        )
    declared = spec.inputs[0]
    shape = _raw_shape(payload, spec)
    if declared.dtype is DType.BYTES:
        array = np.empty(1, dtype=object)
        array[0] = bytes(payload)
        tensor = Tensor(declared.name, declared.dtype, array.reshape(shape))
    else:
        tensor = tensor_from_raw(declared.name, declared.dtype, shape, payload, model=spec.name)
    request = Request(model=spec.name, version=version, inputs={declared.name: tensor}, parameters=dict(extra))
    return DecodedRequest(request, {}, True, RequestRegions(regions))


def _raw_shape(payload: memoryview, spec: ModelSpec) -> tuple[int, ...]:
    """Return the shape of the only input: a variable dimension follows from the size of the body."""
    declared = spec.inputs[0]
    variable = declared.dims.count(-1)
    if variable > 1:
        raise InvalidRequest(
            f"The shape of the raw input '{declared.name}' can not be deduced because there are more than one "
            f"variable-sized dimension in model '{spec.name}'"
        )
    fixed = math.prod(dim for dim in declared.dims if dim != -1)
    if declared.dtype is DType.BYTES:
        if fixed != 1:
            raise InvalidRequest(
                f"For BYTE datatype raw input '{declared.name}', the model '{spec.name}' must have input shape [1]"
            )
        free = 1
    else:
        row_bytes = fixed * declared.dtype.itemsize
        free = len(payload) // row_bytes if row_bytes else 0
    dims = tuple(free if dim == -1 else dim for dim in declared.dims)
    return (1, *dims) if spec.max_batch_size > 0 else dims


def encode_infer(
    response: Response, decoded: DecodedRequest, spec: ModelSpec
) -> tuple[bytes, list[bytes | memoryview], int | None]:
    """Return the JSON part, the raw tensors behind it, and the length of the JSON part, None without raw bytes.

    The response must have no error. Outputs keep their order. An output with a region is written to it.
    Raises InvalidRequest for an output that cannot be sent in the requested form.
    """
    chunks: list[bytes | memoryview] = []
    parts = [_encode_output(tensor, decoded, spec, chunks) for tensor in response.outputs]
    head = _encoded_model(response.model, response.version)
    if response.request_id:
        head = f'"id":{json_string(response.request_id)},{head}'
    if response.parameters:
        head = f'{head},"parameters":{to_json(dict(response.parameters)).decode("ascii")}'
    text = f'{{{head},"outputs":[{",".join(parts)}]}}'.encode("ascii")
    return text, chunks, len(text) if any(map(len, chunks)) else None


def is_sent_raw(name: str, decoded: DecodedRequest) -> bool:
    """Return whether an output is sent as raw bytes behind the JSON text."""
    wanted = decoded.outputs.get(name)
    return decoded.binary_output if wanted is None or wanted.binary is None else wanted.binary


def response_template(response: Response, decoded: DecodedRequest, mark: str) -> str:
    """Return the JSON text for responses with these types and shapes.

    The text has no id, and contains `mark` instead of each array of numbers.
    """
    parts = []
    for tensor in response.outputs:
        is_raw = is_sent_raw(tensor.name, decoded)
        data = f'"parameters":{{"binary_data_size":{tensor.nbytes}}}' if is_raw else f'"data":{mark}'
        parts.append(f"{{{_encoded_tensor(tensor.name, tensor.dtype, tensor.shape)},{data}}}")
    return f'{{{_encoded_model(response.model, response.version)},"outputs":[{",".join(parts)}]}}'


@functools.lru_cache(maxsize=256)
def _encoded_model(model: str, version: int) -> str:
    return f'"model_name":{json_string(model)},"model_version":"{version}"'


@functools.lru_cache(maxsize=1024)
def _encoded_tensor(name: str, dtype: DType, shape: tuple[int, ...]) -> str:
    return f'"name":{json_string(name)},"datatype":"{dtype.value}","shape":[{",".join(map(str, shape))}]'


def _encode_output(tensor: Tensor, decoded: DecodedRequest, spec: ModelSpec, chunks: list[bytes | memoryview]) -> str:
    """Return the JSON object of an output; append its raw bytes to `chunks`, or write it to its region."""
    wanted = decoded.outputs.get(tensor.name) or RequestedOutput(tensor.name)
    if wanted.classification > 0:
        declared = spec.output(tensor.name)
        labels = declared.labels if declared is not None else ()
        tensor = classify(tensor, wanted.classification, labels, spec.max_batch_size > 0)
    output = _encoded_tensor(tensor.name, tensor.dtype, tensor.shape)
    if wanted.region is not None:
        # No `parameters`, as in Triton: its C++ client expects a binary_data_size in them.
        write_to_region(tensor, wanted.region, decoded.output_views[tensor.name])
        return f"{{{output}}}"
    if is_sent_raw(tensor.name, decoded):
        raw = raw_from_tensor(tensor)
        chunks.append(raw)
        return f'{{{output},"parameters":{{"binary_data_size":{len(raw)}}}}}'
    return f'{{{output},"data":{json_text_from_tensor(tensor)}}}'
