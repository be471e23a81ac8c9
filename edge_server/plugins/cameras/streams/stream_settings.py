"""Check of the message by which a client opens a frame stream (model, frame rate, priority, wanted results): fills in
the defaults."""

from __future__ import annotations

import dataclasses
import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig, InvalidRequest, Unsupported
from edge_server.plugins.cameras.streams.frame_mailbox import NORMAL_PRIORITY
from edge_server.plugins.vision.image_plan import ImagePlan, required_image_plan
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.protocol.frame_messages import Delivery, Returns, StreamRequest

if TYPE_CHECKING:
    from edge_server.service import InferenceService

MAX_TEXT_LENGTH = 256
"""Maximum length of a stream's id and of a client's name, in characters."""

MAX_DEPTH = 64
MAX_FPS = 1000.0
MIN_FPS = 0.01
MAX_WEIGHT, MIN_WEIGHT = 100.0, 0.01
LAST_PRIORITY = 9
MAX_TOP_K = 10_000


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Checked settings of a stream. `version` None: each frame runs on the newest version that serves."""

    model: str
    version: int | None
    stream_id: str
    returns: Returns
    delivery: Delivery
    client: str


def make_stream_settings(request: StreamRequest, service: InferenceService) -> StreamSettings:
    """Return the settings with every default filled in.

    Raises UnknownModel, NotReady, InvalidRequest for numbers out of range and for results that the model does not
    declare, and Unsupported for decoupled models.
    """
    if request.version < 0:
        raise InvalidRequest(f"model '{request.model[:200]}': expected a version of 0 or more, given {request.version}")
    version = request.version or None
    _check_text("stream_id", request.stream_id)
    _check_text("client", request.client)
    spec = service.find(request.model, version).spec
    frame_plan(spec)
    _check_returns(spec, request.returns)
    return StreamSettings(
        model=request.model,
        version=version,
        stream_id=request.stream_id or f"stream-{secrets.token_hex(6)}",
        returns=request.returns,
        delivery=_checked(request.delivery, request.model),
        client=request.client,
    )


def frame_plan(spec: ModelSpec) -> ImagePlan:
    """Return the plan that turns frames into the model's input.

    Raises InvalidRequest or Unsupported for a model that takes no frames.
    """
    if spec.is_decoupled:
        raise Unsupported(f"model '{spec.name}' is decoupled: a frame stream needs models with one response a request")
    plan = required_image_plan(spec, "frames")
    filled = {plan.input_name, *(one.name for one in plan.constants)}
    others = [item.name for item in spec.inputs if item.name not in filled and not item.is_optional]
    if others:
        raise InvalidRequest(
            f"model '{spec.name}' does not take frames: it needs the inputs {others} besides the image; the parameter "
            "'image_constants' gives inputs a fixed value"
        )
    return plan


def _check_returns(spec: ModelSpec, returns: Returns) -> None:
    for name in returns.tensors:
        if name != "*" and spec.output(name) is None:
            known = ", ".join(f"'{output.name}'" for output in spec.outputs)
            raise InvalidRequest(
                f"model '{spec.name}' has no output '{name[:200]}' to return, expected one of {known} or '*'"
            )
    if returns.top_k > MAX_TOP_K:
        raise _out_of_range(spec.name, "top_k", f"0 to {MAX_TOP_K}", returns.top_k)
    if returns.jpeg_quality > 100:
        raise _out_of_range(spec.name, "jpeg_quality", "0 to 100", returns.jpeg_quality)
    try:
        settled(make_perception_decoder(spec), returns, spec)
    except BadModelConfig as error:
        raise InvalidRequest(f"model '{spec.name}' cannot answer frames: {error.message}") from None


def settled(plan: PerceptionDecoder | None, returns: Returns, spec: ModelSpec) -> Returns:
    """Return the results to send. If the stream chose none: those that the model declares, else its tensors.

    Raises InvalidRequest for results that the model does not declare.
    """
    if plan is not None:
        return plan.settle(returns, model=spec.name, note=spec.unrecognised_note)
    if returns.top_k or returns.has_detections or returns.has_mask or returns.has_map:
        raise InvalidRequest(
            f"model '{spec.name}' cannot answer with classes, detections, a mask or a map: its configuration has no "
            f"parameters that say how its outputs are to be read; ask for tensors{spec.unrecognised_note}"
        )
    return returns if returns.tensors or returns.has_annotated_jpeg else dataclasses.replace(returns, tensors=("*",))


def _checked(delivery: Delivery, model: str) -> Delivery:
    weight, max_fps = delivery.weight or 1.0, delivery.max_fps
    filled = dataclasses.replace(
        delivery, depth=delivery.depth or 1, weight=weight, priority=delivery.priority or NORMAL_PRIORITY
    )
    if not 1 <= filled.depth <= MAX_DEPTH:
        raise _out_of_range(model, "depth", f"1 to {MAX_DEPTH}", delivery.depth)
    if not 1 <= filled.priority <= LAST_PRIORITY:
        raise _out_of_range(model, "priority", f"1 to {LAST_PRIORITY}", delivery.priority)
    if not (math.isfinite(weight) and MIN_WEIGHT <= round(weight, 6) <= MAX_WEIGHT):
        raise _out_of_range(model, "weight", f"{MIN_WEIGHT} to {MAX_WEIGHT}", delivery.weight)
    if max_fps and not (math.isfinite(max_fps) and MIN_FPS <= round(max_fps, 6) <= MAX_FPS):
        raise _out_of_range(model, "max_fps", f"0 for any, or {MIN_FPS} to {MAX_FPS}", max_fps)
    for name in ("max_age_ms", "deadline_ms"):
        if getattr(filled, name) < 0:
            raise _out_of_range(model, name, "0 or more", getattr(filled, name))
    return filled


def _check_text(field: str, text: str) -> None:
    if len(text) > MAX_TEXT_LENGTH or not text.isprintable():
        raise InvalidRequest(
            f"a frame stream's {field} has at most {MAX_TEXT_LENGTH} printable characters, given {text[:80]!r}"
        )


def _out_of_range(model: str, field: str, expected: str, given: object) -> InvalidRequest:
    return InvalidRequest(f"frame stream of model '{model[:200]}': expected {field} {expected}, given {given}")
