"""Request of a question to a vision-language model, and the text of its responses.

The tensors are named as in Triton's vLLM backend (triton-inference-server/vllm_backend, docs): the inputs `text_input`
and `image`, the file of a JPEG, and the output `text_output`. `sampling_parameters` and `exclude_input_in_output` are
sent to models that have them.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.priority_class import PriorityClass
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.plugins.cameras.questions.question import QuestionEntry
from edge_server.plugins.vision.draw import annotated_jpeg
from edge_server.plugins.vision.perception_decoder import Perception
from edge_server.protocol.frame_messages import Detection

if TYPE_CHECKING:
    import numpy.typing as npt

PROMPT, IMAGE, TEXT = "text_input", "image", "text_output"
SAMPLING, WITHOUT_PROMPT = "sampling_parameters", "exclude_input_in_output"

MAX_PICTURE_SIDE = 1280
"""Longest side of a picture in pixels; larger ones are reduced. Models reduce further, each to its own size."""

MARGIN = 0.25
"""Fraction of an object's width and height that is added on each side of it."""


def model_problem(spec: ModelSpec) -> str:
    """Return why a model cannot be asked about pictures, "" if it can."""
    for kind, name, items in (
        ("input", PROMPT, spec.inputs), ("input", IMAGE, spec.inputs), ("output", TEXT, spec.outputs)
    ):  # fmt: skip
        found = next((item for item in items if item.name == name), None)
        if found is None:
            given = ", ".join(f"'{item.name}'" for item in items)
            hint = "; it takes no pictures" if name == IMAGE else ""
            return f"model '{spec.name}' has no {kind} '{name}' of texts or bytes{hint}; its {kind}s are {given}"
        if found.dtype is not DType.BYTES:
            return f"model '{spec.name}', {kind} '{name}': expected the type BYTES, given {found.dtype.value}"
    known = {PROMPT, IMAGE, SAMPLING, WITHOUT_PROMPT}
    for item in spec.inputs:
        if not item.is_optional and item.name not in known:
            return f"model '{spec.name}' needs the input '{item.name}', which a question does not have"
    return ""


def question_jpeg(bgr: npt.NDArray[np.uint8], entry: QuestionEntry, detection: Detection | None) -> bytes:
    """Return the JPEG of a frame, 8-bit BGR (height, width, 3), or of the object in it. Raises EdgeServerError."""
    if entry.crop and detection is not None:
        height, width = bgr.shape[:2]
        wide, high = (detection.x_max - detection.x_min) * MARGIN, (detection.y_max - detection.y_min) * MARGIN
        left, top = max(0, math.floor(detection.x_min - wide)), max(0, math.floor(detection.y_min - high))
        left, top = min(left, width - 1), min(top, height - 1)
        right, bottom = (
            max(left + 1, math.ceil(detection.x_max + wide)),
            max(top + 1, math.ceil(detection.y_max + high)),
        )
        bgr = bgr[top:bottom, left:right]
    return annotated_jpeg(bgr, Perception(), max_side=MAX_PICTURE_SIDE)


def make_request(spec: ModelSpec, prompt: str, jpeg: bytes, max_tokens: int) -> Request:
    """Return the request of a question to a model without `model_problem`."""
    inputs = {item.name: item for item in spec.inputs}
    tensors = [_texts(spec, inputs[PROMPT], prompt.encode()), _texts(spec, inputs[IMAGE], jpeg)]
    if SAMPLING in inputs:
        tensors.append(_texts(spec, inputs[SAMPLING], json.dumps({"max_tokens": max_tokens}).encode()))
    if WITHOUT_PROMPT in inputs:
        item = inputs[WITHOUT_PROMPT]
        tensors.append(Tensor(item.name, DType.BOOL, np.ones(_shape(spec, item), np.bool_)))
    # The least important work: of the lowest class for the governor, and last in a queue with priorities.
    levels = 0 if spec.dynamic_batching is None else spec.dynamic_batching.priority_levels
    priority = max(PriorityClass.BULK, levels)
    return Request(spec.name, {tensor.name: tensor for tensor in tensors}, outputs=(TEXT,), priority=priority)


def response_text(response: Response) -> str:
    """Return the part of the answer that a response has."""
    tensor = next((output for output in response.outputs if output.name == TEXT), None)
    if tensor is None:
        return ""
    return "".join(item.decode(errors="replace") for item in tensor.array.ravel().tolist())


def _texts(spec: ModelSpec, item: InputSpec, value: bytes) -> Tensor:
    array = np.empty(_shape(spec, item), object)
    array.fill(value)
    return Tensor(item.name, DType.BYTES, array)


def _shape(spec: ModelSpec, item: InputSpec) -> tuple[int, ...]:
    """Return the shape of one element: 1 for each dimension, after that of a batch of one."""
    return (1,) * (len(item.dims) + (spec.max_batch_size > 0))
