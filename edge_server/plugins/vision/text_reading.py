"""Reading of the lines that a text detector finds: cuts them out of the picture, runs a recogniser on them, and decodes
its scores. Check that there is a recogniser, for the log, `edge-server status` and `edge-server check`.

The recogniser is a model of its own, as in PP-OCR: its input is [3, height, any width], its output gives scores for a
blank and for each character at each step along the line (CTC). Its labels are the characters. An input of any height
gets lines of 48 pixels, as PP-OCR since version 3. A detector serves without its recogniser, since most pictures have
no text and the recogniser may come later.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, InvalidRequest, ServingFault
from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.outputs.output_tensors import as_floats, drop_batch_dim
from edge_server.protocol.frame_messages import Detection

if TYPE_CHECKING:
    import numpy.typing as npt

    from edge_server.service import Handle, InferenceService
    from edge_server.serving.lifecycle.router import Router

    Pixels = npt.NDArray[np.uint8]

_LOG = logging.getLogger(__name__)

_KEY = "detection_text_model"

MAX_AT_ONCE = 8
"""Maximum number of lines in one request to the recogniser."""

MIN_WIDTH, WIDTH_STEP, MAX_WIDTH = 320, 64, 4096
"""Widths of the recogniser's input, in pixels: at least that of its training, few different ones, and bounded."""

_USUAL_HEIGHT = 48
"""Height of a line, in pixels, for a recogniser that takes any."""

MAX_LINE_PIXELS = 1 << 22
"""Maximum number of pixels of a line in the frame; larger ones are not read."""

_TALL = 1.5
"""A line that is this many times as high as wide is turned by a quarter."""


@dataclass(frozen=True, slots=True)
class Recogniser:
    """A recogniser as it is read from its specification. `characters` are those of the scores after the blank."""

    name: str
    input_name: str
    dtype: DType
    height: int
    output_name: str
    output_dtype: DType
    has_batches: bool
    at_once: int
    characters: tuple[str, ...]


def read_text(
    service: InferenceService, model: str, bgr: Pixels, detections: Sequence[Detection], *, priority: int = 0
) -> tuple[Detection, ...]:
    """Return the detections with the text that the recogniser `model` reads in them. *Blocking*.

    `bgr` is the frame, (height, width, 3). Detections without an oriented box, or of no or too many pixels, have no
    text. Raises UnknownModel, NotReady and other errors of the recogniser, and InvalidRequest if the model is none.
    """
    found = list(detections)
    if all(one.rotated is None for one in found):
        return tuple(found)
    handle = service.find(model, None)
    recogniser = make_recogniser(handle.spec)
    for indices, tensor in line_batches(recogniser, bgr, found):
        outputs = {item.name: item.array for item in _run(handle, tensor, priority).outputs}
        for index, (text, score) in zip(indices, decode_lines(recogniser, outputs, len(indices)), strict=True):
            found[index] = replace(found[index], text=text, text_score=score)
    return tuple(found)


def line_batches(
    recogniser: Recogniser, bgr: Pixels, detections: Sequence[Detection]
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield inputs for a recogniser, each with the indices of the detections whose lines are in it.

    Lines of similar lengths go together. Tall ones are turned.
    """
    lines = [(index, line) for index, one in enumerate(detections) if (line := _find_line(one)) is not None]
    lines.sort(key=lambda item: max(item[1].width / item[1].height, item[1].height / item[1].width))
    for start in range(0, len(lines), recogniser.at_once):
        part = lines[start : start + recogniser.at_once]
        yield [index for index, _ in part], _input(recogniser, [_cut(bgr, line) for _, line in part])


class _Line(NamedTuple):
    """Corners (4, 2) of a line in the frame, clockwise from the upper left one of its text, and its size in pixels."""

    corners: npt.NDArray[np.float32]
    width: int
    height: int


def _find_line(found: Detection) -> _Line | None:
    """Return the line in a detection, or None if it has no pixels or too many."""
    box = found.rotated
    if box is None:
        return None
    # Text runs from the two left corners to the two right ones, as PP-OCR assumes.
    corners = np.array(sorted(box.corners()), np.float32)
    left, right = (pair[np.argsort(pair[:, 1])] for pair in (corners[:2], corners[2:]))
    corners = np.array((left[0], right[0], right[1], left[1]))
    width, height = (round(math.dist(corners[0], corners[index])) for index in (1, 3))
    # A frame may be huge, and a box reach out of it.
    return _Line(corners, width, height) if 1 <= width * height <= MAX_LINE_PIXELS else None


def _cut(bgr: Pixels, line: _Line) -> Pixels:
    """Return the straightened pixels of a line."""
    cv2 = opencv()
    corners, width, height = line
    # Transforms are between centres of pixels.
    target = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32) - 0.5
    matrix = cv2.getPerspectiveTransform(corners - 0.5, target)
    pixels: Pixels = cv2.warpPerspective(
        bgr, matrix, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    return np.rot90(pixels) if height >= _TALL * width else pixels


def make_recogniser(spec: ModelSpec) -> Recogniser:
    """Return the recogniser that a model is. Raises InvalidRequest for a model that is none, or without characters."""
    if is_recogniser(spec):
        given, output = spec.inputs[0], spec.outputs[0]
        height = drop_batch_dim(spec, given, 3)[1]
        characters = spec.labels_of(output)
        if characters and drop_batch_dim(spec, output, 2)[1] in (-1, len(characters) + 1):
            has_batches = spec.max_batch_size > 0
            is_open = not has_batches and len(given.dims) == 4 and given.dims[0] == -1
            at_once = min(spec.max_batch_size, MAX_AT_ONCE) if has_batches else MAX_AT_ONCE if is_open else 1
            return Recogniser(
                spec.name, given.name, given.dtype, _USUAL_HEIGHT if height == -1 else height, output.name,
                output.dtype, has_batches or len(given.dims) == 4, at_once, characters,
            )  # fmt: skip
    inputs = ", ".join(f"'{item.name}' {item.dtype.value} {list(item.dims)}" for item in spec.inputs)
    outputs = ", ".join(
        f"'{item.name}' {list(item.dims)} with {len(spec.labels_of(item))} labels" for item in spec.outputs
    )
    raise InvalidRequest(
        f"model '{spec.name}' cannot read text: expected an input FP32 [3, height, -1] and an output [-1, characters + "
        f"1] with a label for each character, given {inputs} and {outputs}"
    )


def is_recogniser(spec: ModelSpec) -> bool:
    """Return whether inputs and outputs are those of a recogniser of text."""
    if len(spec.inputs) != 1 or len(spec.outputs) != 1 or spec.inputs[0].dtype is not DType.FP32:
        return False
    shape, steps = drop_batch_dim(spec, spec.inputs[0], 3), drop_batch_dim(spec, spec.outputs[0], 2)
    return len(shape) == 3 and shape[0] == 3 and shape[1] != 0 and shape[2] == -1 and len(steps) == 2


def _input(recogniser: Recogniser, lines: Sequence[Pixels]) -> Tensor:
    """Return lines of -1 to 1, all of one width: 0 follows the shorter ones."""
    cv2, height = opencv(), recogniser.height
    widths = [min(math.ceil(line.shape[1] / line.shape[0] * height), MAX_WIDTH) for line in lines]
    width = max(MIN_WIDTH, max(widths) + -max(widths) % WIDTH_STEP)
    array = np.zeros((len(lines), 3, height, width), np.float32)
    for item, line, own_width in zip(array, lines, widths, strict=True):
        resized = cv2.resize(line, (own_width, height))
        item[:, :, :own_width] = resized.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1
    return Tensor(recogniser.input_name, recogniser.dtype, array if recogniser.has_batches else array[0])


def _run(handle: Handle, tensor: Tensor, priority: int) -> Response:
    responses: SimpleQueue[Response] = SimpleQueue()
    request = Request(model=handle.spec.name, inputs={tensor.name: tensor}, priority=priority)
    handle.submit(request, responses.put, hold_us=math.inf, may_stand_in=False)
    while (response := responses.get()).is_empty and not response.is_final:
        pass
    if response.error is not None:
        raise response.error
    if response.is_empty:
        raise ServingFault(f"model '{handle.spec.name}' sent no response")
    return response


def decode_lines(
    recogniser: Recogniser, outputs: Mapping[str, npt.NDArray[Any]], count: int
) -> Iterator[tuple[str, float]]:
    """Yield text and score of each line: the characters that are best at a step, but neither blank nor the step before
    again, and the mean of their scores. Raises BackendError for an output of another shape."""
    array = outputs.get(recogniser.output_name)
    if array is None:
        raise BackendError(f"model '{recogniser.name}': expected an output '{recogniser.output_name}'")
    scores = as_floats(array, recogniser.output_dtype)
    scores = scores if recogniser.has_batches else scores[None]
    classes = len(recogniser.characters) + 1
    if scores.ndim != 3 or scores.shape[0] != count or scores.shape[2] != classes:
        raise BackendError(
            f"model '{recogniser.name}', output '{recogniser.output_name}': expected shape "
            f"[{count}, steps, {classes}], given {list(scores.shape)}"
        )
    best, highest = scores.argmax(axis=2), np.nan_to_num(scores.max(axis=2, initial=0.0))
    is_character = best > 0
    is_character[:, 1:] &= best[:, 1:] != best[:, :-1]
    for line, values, is_kept in zip(best, highest, is_character, strict=True):
        text = "".join(recogniser.characters[index - 1] for index in line[is_kept])
        yield text, float(values[is_kept].mean()) if text else 0.0


def find_text_model_problem(router: Router, detector: ModelSpec) -> str:
    """Return why nothing can read the lines that a model finds; "" if something can, or if it names no recogniser.

    A recogniser that is being loaded, or that a request would load, is no problem.
    """
    name = detector.all_parameters.get(_KEY, "")
    if not name:
        return ""
    serving = router.ready_versions(name)
    if serving:
        try:
            make_recogniser(serving[0].spec)
        except InvalidRequest as error:
            return f"its lines are not read: {_KEY}: {error.message}"
        return ""
    entries = [entry for entry in router.index() if entry.name == name]
    if router.offered_versions(name) or any(entry.state == "LOADING" for entry in entries):
        return ""
    reason = next((entry.reason for entry in reversed(entries) if entry.reason), "")
    state = f"does not serve: {reason}" if reason else "is not loaded"
    return f"its lines are not read: {_KEY} names model '{name}', which {state}"


class TextModelLog:
    """Logs problems with recognisers when they come and when they are gone. Thread-safe."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.Lock()
        self._logged: dict[str, str] = {}

    def update(self, detectors: list[ModelSpec]) -> None:
        """Log what has changed, given all serving detectors that name a recogniser."""
        with self._lock:
            found = {spec.name: find_text_model_problem(self._router, spec) for spec in detectors}
            for name, problem in found.items():
                if problem and problem != self._logged.get(name):
                    _LOG.warning("model '%s': %s", name, problem)
                elif not problem and self._logged.get(name):
                    _LOG.info("model '%s': its lines are read now", name)
            self._logged = found
