"""Reader of a parsed ModelInferRequest: makes the request for the core, and the plan of the response (which outputs, in
what form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_server.core.device_tensor import DevicePiece
from edge_server.core.request_response import Parameter, Request
from edge_server.core.tensor import BY_NAME, DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.grpc.infer_message import InferMessage
from edge_server.frontends.grpc.typed_contents import tensor_from_contents
from edge_server.frontends.v2.parameters import region_reference, requested_output, split_parameters
from edge_server.frontends.v2.requested_outputs import OutputPlaces, RequestedOutput, pin_places
from edge_server.memory.region_pins import Regions, RequestRegions
from edge_server.protocol.raw_tensors import element_count, tensor_from_raw
from edge_server.record import record

EMPTY_FINAL_KEY = "triton_enable_empty_final_response"
_ALLOWED_RESERVED = (EMPTY_FINAL_KEY,)


@record(slots=True)
class ResponsePlan:
    """Response settings of one request.

    `special` holds the requested outputs with classification or a shared-memory region. `version_text` is the version
    as the client wrote it. `places` is the shared memory for outputs, None for most requests. The creator of the plan
    calls `release` when the request is over.
    """

    model: str = ""
    version_text: str = ""
    version: int | None = None
    request_id: str = ""
    special: Mapping[str, RequestedOutput] | None = None
    wants_empty_final: bool = False
    places: OutputPlaces | None = None

    def release(self) -> None:
        """Release the shared memory for outputs. May be called repeatedly, from any thread."""
        if self.places is not None:
            self.places.release()


def decode_request(
    found: InferMessage, plan: ResponsePlan, regions: Regions, forwarded: Mapping[str, Parameter]
) -> Request:
    """Return the request of a parsed message, and fill in the plan.

    Large tensors are views of the message or of pinned shared memory. Raises InvalidRequest, and the registry's errors
    for a region. After an error nothing stays pinned.
    """
    message = found.message
    request = Request(plan.model, {}, plan.version, plan.request_id, _outputs(message, plan))
    if message.parameters or forwarded:
        set_parameters(request, plan, parameter_values(message.parameters, forwarded))
    pins = RequestRegions(regions)
    try:
        if plan.special:
            request.targets = pin_targets(plan, regions, pins)
        request.inputs = _inputs(found, plan.model, pins)
    except BaseException:
        pins.release()
        plan.release()
        raise
    request.release = pins.release if pins else None
    return request


def set_parameters(request: Request, plan: ResponsePlan, given: dict[str, object]) -> None:
    parameters = split_parameters(given, allow=_ALLOWED_RESERVED)
    plan.wants_empty_final = parameters.custom.pop(EMPTY_FINAL_KEY, False) is True
    request.parameters = parameters.custom
    request.priority = parameters.priority
    request.timeout_us = parameters.timeout_us
    request.deadline_ns = parameters.deadline_ns
    request.sequence = parameters.sequence


def pin_targets(plan: ResponsePlan, regions: Regions, pins: RequestRegions) -> Mapping[str, DevicePiece] | None:
    """Pin the output regions. Return those in GPU memory, or None.

    GPU memory is also pinned with the inputs, because a backend may write to it after the request is over.
    """
    special = plan.special or {}
    if all(item.region is None for item in special.values()):
        return None
    plan.places = pin_places(special.values(), regions)
    targets: dict[str, DevicePiece] = {}
    for name, place in plan.places.pieces.items():
        region = special[name].region
        piece = None if region is None or place.device is None else pins.target(region)
        if piece is not None:
            targets[name] = piece
    return targets or None


def parameter_values(given: Any, forwarded: Mapping[str, Parameter]) -> dict[str, object]:
    """Return an InferParameter map as Python values, with the forwarded headers. The map takes precedence."""
    values: dict[str, object] = dict(forwarded)
    for key in given or ():
        parameter = given[key]
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameter '{key}' has no value")
        values[key] = getattr(parameter, kind)
    return values


def _outputs(message: Any, plan: ResponsePlan) -> tuple[str, ...]:
    names: list[str] = []
    special: dict[str, RequestedOutput] = {}
    for output in message.outputs:
        name = output.name
        names.append(name)
        if output.parameters:
            wanted = requested_output(name, parameter_values(output.parameters, {}))
            if wanted.classification or wanted.region is not None:
                special[name] = wanted
    if len(names) > 1 and len(set(names)) != len(names):
        raise InvalidRequest(f"output '{_first_duplicate(names)}' for model '{plan.model}' is requested more than once")
    if special:
        plan.special = special
    return tuple(names)


def _first_duplicate(names: list[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _inputs(found: InferMessage, model: str, pins: RequestRegions) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    raw = found.raw
    next_raw = 0
    for position, given in enumerate(found.inputs):
        name = given.name
        if name in tensors:
            raise InvalidRequest(f"input '{name}' for model '{model}' is given more than once")
        dtype = _dtype(given, name, model)
        region = (
            region_reference(parameter_values(given.parameters, {}), f"input '{name}'") if given.parameters else None
        )
        has_contents = position in found.contents or given.HasField("contents")
        if has_contents and (len(raw) or region is not None):
            other = "raw_input_contents" if region is None else "shared memory"
            raise InvalidRequest(
                f"contents field must not be specified when using {other} for '{name}' for model '{model}'"
            )
        if region is not None:
            tensors[name] = pins.tensor(name, dtype, tuple(given.shape), region, model=model)
        elif has_contents:
            contents = found.contents.get(position)
            serialized = contents if contents is not None else given.contents.SerializeToString()
            tensors[name] = tensor_from_contents(name, dtype, tuple(given.shape), serialized, model=model)
        elif next_raw < len(raw):
            tensors[name] = tensor_from_raw(name, dtype, tuple(given.shape), raw[next_raw], model=model)
            next_raw += 1
        else:
            tensors[name] = _tensor_without_data(name, dtype, given, model)
    if next_raw != len(raw):
        raise InvalidRequest(
            f"expected {next_raw} raw_input_contents for the inputs of model '{model}', got {len(raw)}"
        )
    return tensors


def _dtype(given: Any, name: str, model: str) -> DType:
    dtype = BY_NAME.get(given.datatype)
    if dtype is None:
        raise InvalidRequest(
            f"inference input '{name}' for model '{model}' has unknown data-type '{given.datatype}'; there are "
            f"{', '.join(BY_NAME)}"
        )
    return dtype


def _tensor_without_data(name: str, dtype: DType, given: Any, model: str) -> Tensor:
    """Return an empty tensor if the shape has no elements: protobuf does not distinguish empty from absent contents.

    Raises InvalidRequest for any other shape.
    """
    shape = tuple(given.shape)
    if element_count(name, shape, model=model) == 0:
        return tensor_from_raw(name, dtype, shape, b"", model=model)
    raise InvalidRequest(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
