"""Conversion of a response's outputs to those that a gRPC request asked for: classification strings, or data in shared
memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Response
from edge_server.core.tensor import Tensor
from edge_server.frontends.grpc.infer_request import ResponsePlan
from edge_server.frontends.v2.requested_outputs import classify
from edge_server.memory.region_pins import RegionRef

PlacedOutput: TypeAlias = tuple[RegionRef, int]
"""The region of an output, as the request named it, and the number of bytes that were written there."""


def apply_plan(response: Response, plan: ResponsePlan, spec: ModelSpec) -> tuple[Response, dict[str, PlacedOutput]]:
    """Apply the plan to the response. Return the response, and the outputs that were written to shared memory.

    `spec` is the model's, for a response without the one that answered.
    """
    placed: dict[str, PlacedOutput] = {}
    outputs: list[Tensor] = []
    has_classes = False
    for tensor in response.outputs:
        wanted = plan.special.get(tensor.name) if plan.special else None
        if wanted is None:
            outputs.append(tensor)
        elif wanted.classification:
            with_labels = response.spec or spec
            output = with_labels.output(tensor.name)
            labels = output.labels if output is not None else ()
            outputs.append(classify(tensor, wanted.classification, labels, with_labels.max_batch_size > 0))
            has_classes = True
        else:
            outputs.append(tensor)
            if wanted.region is not None and plan.places is not None:
                placed[tensor.name] = wanted.region, plan.places.write(tensor, wanted.region)
    return replace(response, outputs=tuple(outputs)) if has_classes else response, placed
