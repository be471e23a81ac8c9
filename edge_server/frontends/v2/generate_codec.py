"""Converter between the JSON of Triton's generate endpoints and requests or responses: each tensor is one member of a
JSON object.

A member with the name of an input holds that input; all other members are request parameters. The protocol has only
one row, no binary data and no choice of outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.request_response import Parameter, Request, Response
from edge_server.core.tensor import Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.json_text import json_type, parse_object
from edge_server.frontends.v2.json_tensor_data import OtherElementCount, json_from_tensor, tensor_from_json
from edge_server.frontends.v2.parameters import split_parameters
from edge_server.protocol.raw_tensors import Buffer


def decode_generate(
    body: Buffer, spec: ModelSpec, *, version: int | None = None, extra: Mapping[str, Parameter] | None = None
) -> Request:
    """Return the request of a generate body. Raises InvalidRequest.

    The list's length decides the first variable dimension of an input. The other dimensions are those of the
    configuration, with a batch of one.
    """
    members = parse_object(body)
    declared = {item.name: item for item in spec.inputs}
    # Keep the order of the body: Python models see it.
    inputs = {
        name: _input_tensor(declared[name], members.pop(name), spec) for name in list(members) if name in declared
    }
    request_id = members.pop("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequest(f"Unable to parse 'id': expected a string, got {json_type(request_id)}")
    nested = members.pop("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidRequest(f"Unable to parse 'parameters': expected an object, got {json_type(nested)}")
    if isinstance(members.get("inputs"), list):
        example = ", ".join(f'"{item.name}": [...]' for item in spec.inputs)
        raise InvalidRequest(
            "invalid value type for 'inputs' parameter: a list of inputs is a body for "
            f"/v2/models/{spec.name}/infer; expected {{{example}}}"
        )
    try:
        parameters = split_parameters({**nested, **members})
    except InvalidRequest as error:
        # Often the wrong parameter is an input with a misspelt name.
        missing = [item.name for item in spec.inputs if not item.is_optional and item.name not in inputs]
        if not missing:
            raise
        raise InvalidRequest(f"{error.message}; missing required input(s) {missing}") from None
    return Request(
        model=spec.name,
        version=version,
        id=request_id,
        inputs=inputs,
        parameters={**(extra or {}), **parameters.custom},
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        deadline_ns=parameters.deadline_ns,
        sequence=parameters.sequence,
    )


def _input_tensor(item: InputSpec, value: object, spec: ModelSpec) -> Tensor:
    """Return the tensor of one input; a value that is not a list is one element."""
    data = value if isinstance(value, list) else [value]
    dims = list(item.dims)
    if -1 in dims:
        free_axis = dims.index(-1)
        dims = [1 if dim == -1 else dim for dim in dims]
        others = math.prod(dims)
        dims[free_axis] = len(data) // others if others else 0
    shape = [1, *dims] if spec.max_batch_size > 0 else dims
    try:
        return tensor_from_json(item.name, item.dtype, shape, data, model=spec.name)
    except OtherElementCount as error:
        if spec.max_batch_size == 0:
            raise
        raise InvalidRequest(f"{error.message}; generate takes one row, /v2/models/{spec.name}/infer several") from None


def encode_generate(response: Response) -> dict[str, object]:
    """Return the flat object of a response without an error; outputs of one element are scalars.

    Raises InvalidRequest for outputs that JSON cannot represent.
    """
    members: dict[str, object] = {"model_name": response.model, "model_version": str(response.version)}
    if response.request_id:
        members["id"] = response.request_id
    if response.parameters:
        members["parameters"] = dict(response.parameters)
    for tensor in response.outputs:
        elements = json_from_tensor(tensor)
        members[tensor.name] = elements[0] if len(elements) == 1 else elements
    return members
