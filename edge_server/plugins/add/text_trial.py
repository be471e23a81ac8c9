"""Trial of a recogniser of text: reads the lines that a detector found in a picture, or the lines of a drawn page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_server.backends.isolation.npz_tensor_files import Tensors
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.decode import decode_image, opencv
from edge_server.plugins.vision.text_reading import decode_lines, line_batches, make_recogniser
from edge_server.protocol.frame_messages import Detection, RotatedBox

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

DRAWN_LINES = ("Gate 12 opens at 06:45", "Emergency stop 4711", "Room B-204")
_WIDTH, _HEIGHT = 640, 640
_LEFT, _STEP, _MARGIN = 40, 160, 8
_SCALE, _THICKNESS = 1.2, 2
_MAX_LINES = 20
"""Maximum number of lines that are read in the trial, the best first."""
_MAX_LINES_BYTES = 16 << 20


class ReadLine(NamedTuple):
    """Text of a line, and the mean probability of its characters."""

    text: str
    score: float


class TextTrial:
    """Lines as inputs of a recogniser. `samples` are the inputs on which to run it; `read` takes its outputs."""

    def __init__(self, spec: ModelSpec, picture: bytes, detections: Sequence[Detection]) -> None:
        """`spec` has the characters as labels. Raises InvalidRequest for a picture that cannot be read, and Unsupported
        without OpenCV."""
        pixels = decode_image(memoryview(picture), as_gray=False, error_prefix=f"model '{spec.name}'")
        # Samples have one row each.
        self._recogniser = replace(make_recogniser(spec), at_once=1)
        self._detections = detections[:_MAX_LINES]
        self._batches = list(line_batches(self._recogniser, pixels, self._detections))

    @property
    def samples(self) -> list[Tensors]:
        return [{tensor.name: tensor.array} for _, tensor in self._batches]

    def read(self, outputs: Sequence[Tensors]) -> list[ReadLine]:
        """Return the lines from top to bottom; empty without outputs. Raises BackendError for outputs of other
        shapes."""
        found: dict[int, ReadLine] = {}
        for (indices, _), arrays in zip(self._batches, outputs, strict=False):
            texts = decode_lines(self._recogniser, arrays, len(indices))
            found.update(zip(indices, (ReadLine(text, score) for text, score in texts), strict=True))
        return [found[index] for index in sorted(found, key=lambda index: self._detections[index].y_min)]


def draw_page() -> bytes:
    """Return a picture of DRAWN_LINES as PNG. Raises Unsupported without OpenCV."""
    cv2 = opencv()
    page = np.full((_HEIGHT, _WIDTH, 3), 245, np.uint8)
    for number, text in enumerate(DRAWN_LINES, 1):
        place = (_LEFT, number * _STEP)
        cv2.putText(page, text, place, cv2.FONT_HERSHEY_SIMPLEX, _SCALE, (25, 20, 20), _THICKNESS, cv2.LINE_AA)
    encoded: bytes = cv2.imencode(".png", page)[1].tobytes()
    return encoded


def drawn_lines() -> tuple[Detection, ...]:
    """Return the lines of `draw_page`. Raises Unsupported without OpenCV."""
    cv2 = opencv()
    found = []
    for number, text in enumerate(DRAWN_LINES, 1):
        (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, _SCALE, _THICKNESS)
        base = number * _STEP
        found.append(_line(_LEFT - _MARGIN, base - height - _MARGIN, _LEFT + width + _MARGIN, base + below))
    return tuple(found)


def whole_picture(picture: bytes) -> tuple[Detection, ...]:
    """Return a line that fills a picture. Raises InvalidRequest and Unsupported."""
    height, width = decode_image(memoryview(picture), as_gray=True, error_prefix="--picture").shape
    return (_line(0, 0, width, height),)


def _line(x_min: float, y_min: float, x_max: float, y_max: float) -> Detection:
    width, height = x_max - x_min, y_max - y_min
    box = RotatedBox(x_min + width / 2, y_min + height / 2, width, height, 0.0)
    return Detection(x_min, y_min, x_max, y_max, 1.0, 0, rotated=box)


def read_text_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a file with a character in each, as the dictionaries of PP-OCR, or with a class name in each.
    Raises InvalidRequest."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_LINES_BYTES + 1)
        lines = content.decode("utf-8-sig").split("\n") if len(content) <= _MAX_LINES_BYTES else []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"'{path}' is no list of characters or class names: {error}") from None
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise InvalidRequest(
            f"'{path}': expected characters or class names, one in each line, given {len(content)} bytes"
        )
    return tuple(line.removesuffix("\r") for line in lines)
