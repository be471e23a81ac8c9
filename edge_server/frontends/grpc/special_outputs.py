"""Responses with classification outputs or with outputs in shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.core.request_response import Response
from edge_server.core.tensor import Tensor
from edge_server.frontends.grpc.infer_request import ResponsePlan
from edge_server.frontends.v2.requested_outputs import RequestedOutput, classify
from edge_server.memory.region_pins import RegionRef

if TYPE_CHECKING:
    from edge_server.service import InferenceService


def apply_plan(
    response: Response, plan: ResponsePlan, service: InferenceService
) -> tuple[Response, dict[str, RegionRef]]:
    """Apply the plan to the response. Return the response, and the regions of outputs written to shared memory."""
    placed: dict[str, RegionRef] = {}
    outputs: list[Tensor] = []
    has_classes = False
    for tensor in response.outputs:
        wanted = plan.special.get(tensor.name) if plan.special else None
        if wanted is None:
            outputs.append(tensor)
        elif wanted.classification:
            outputs.append(_classes(tensor, wanted, response, service))
            has_classes = True
        else:
            outputs.append(tensor)
            if wanted.region is not None and plan.places is not None:
                size = plan.places.write(tensor, wanted.region)
                region = wanted.region
                placed[tensor.name] = region if size == region.byte_size else replace(region, byte_size=size)
    return replace(response, outputs=tuple(outputs)) if has_classes else response, placed


def _classes(tensor: Tensor, wanted: RequestedOutput, response: Response, service: InferenceService) -> Tensor:
    spec = response.spec or service.model_spec(response.model, response.version)
    output = spec.output(tensor.name)
    labels = output.labels if output is not None else ()
    return classify(tensor, wanted.classification, labels, spec.max_batch_size > 0)
