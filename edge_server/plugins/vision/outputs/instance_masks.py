"""Masks of objects, of instance segmentation: decoder that sums prototype masks with the coefficients of each object
and scales the sum to the frame's pixels in the object's box, and outlines of masks as polygons.

A pixel belongs to the object if the sum at its centre, interpolated linearly, is above 0 (a probability above 0.5).
Ultralytics' process_mask_native computes the same in two steps of interpolation, which differ by less than a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.errors import BackendError
from edge_server.plugins.vision.decode import opencv
from edge_server.plugins.vision.outputs.box_candidates import NetworkSize
from edge_server.plugins.vision.outputs.output_tensors import FloatArray, OutputTensor
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import ObjectMask
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_MASKS = 100
"""Maximum number of masks per frame. Weaker detections get none."""

MAX_PIXELS = 1 << 26
"""Maximum number of pixels of all masks of a frame: 8 MB, 72 objects that fill a frame of 1280x720."""


MAX_OUTLINES = 8
"""Maximum number of polygons of an object, the largest ones."""

MAX_OUTLINE_POINTS = 128
"""Maximum number of points of an object: its JSON stays below 1.5 KB."""


@record(frozen=True, slots=True)
class ObjectMaskDecoder:
    """Decodes masks from the output with the prototypes, (`coefficient_count`, height, width) over the network's input
    of `size`. Immutable and thread-safe."""

    tensor: OutputTensor
    coefficient_count: int
    size: NetworkSize

    def check_shape(self, shape: tuple[int, ...]) -> str | None:
        """Return the expected shape if `shape` is another, else None. -1 is any number."""
        is_match = len(shape) == 3 and shape[0] in (-1, self.coefficient_count) and 0 not in shape
        return None if is_match else f"[{self.coefficient_count}, height, width]"

    def decode(
        self,
        outputs: Mapping[str, npt.NDArray[Any]],
        item: int | None,
        fit: FittedPicture,
        boxes: npt.NDArray[np.float64],
        coefficients: FloatArray,
        *,
        model: str,
    ) -> list[ObjectMask | None]:
        """Return the mask of each box, None for a box that holds no pixel or is beyond the limits.

        `boxes` (K, 4) are corners within the frame, best first; `coefficients` are (K, `coefficient_count`). Raises
        BackendError for prototypes of another shape than declared.
        """
        prototypes = self.tensor.select_floats(outputs, item, model=model)
        expected = self.check_shape(prototypes.shape)
        if expected is not None:
            raise BackendError(
                f"model '{model}', output '{self.tensor.name}': expected {expected}, given {list(prototypes.shape)}"
            )
        masks: list[ObjectMask | None] = [None] * len(boxes)
        pixel_count = 0
        corners = np.ceil(boxes[:MAX_MASKS]).astype(int).tolist()
        for index, (left, top, right, bottom) in enumerate(corners):
            pixel_count += (right - left) * (bottom - top)
            if pixel_count > MAX_PIXELS:
                break
            if right > left and bottom > top:
                area = (left, top, right - left, bottom - top)
                masks[index] = self._mask(prototypes, coefficients[index], fit, area)
        return masks

    def _mask(
        self, prototypes: FloatArray, coefficients: FloatArray, fit: FittedPicture, area: tuple[int, int, int, int]
    ) -> ObjectMask:
        """Return the mask of `area`: column, row, width and height in the frame."""
        cv2 = opencv()
        left, top, width, height = area
        rows, columns = prototypes.shape[1:]
        x_scale, x_first = _positions(left, fit.scale_x, fit.offset_x, columns / self.size.width)
        y_scale, y_first = _positions(top, fit.scale_y, fit.offset_y, rows / self.size.height)
        # Only the prototypes under the box are summed. Beyond the edge, the nearest one continues.
        x_range = _range(x_first, x_first + x_scale * (width - 1), columns)
        y_range = _range(y_first, y_first + y_scale * (height - 1), rows)
        part = prototypes[:, y_range, x_range]
        total = coefficients.astype(np.float32) @ part.reshape(len(part), -1).astype(np.float32, copy=False)
        to_prototypes = np.array(((x_scale, 0, x_first - x_range.start), (0, y_scale, y_first - y_range.start)))
        scaled = cv2.warpAffine(
            total.reshape(part.shape[1:]),
            to_prototypes,
            (width, height),
            flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
        return ObjectMask(left, top, width, height, np.packbits(scaled > 0).tobytes())


def _positions(first: int, scale: float, offset: float, prototypes_per_pixel: float) -> tuple[float, float]:
    """Return the prototypes per pixel of the frame, and the position of the pixel `first` among them.

    Both are measured from centre to centre. `scale` and `offset` are those of FittedPicture.
    """
    step = scale * prototypes_per_pixel
    return step, (first + 0.5) * step + offset * prototypes_per_pixel - 0.5


def _range(first: float, last: float, count: int) -> slice:
    """Return the neighbours on both sides of all positions from `first` to `last`, at least one of `count`."""
    start = min(max(math.floor(first), 0), count - 1)
    return slice(start, min(max(math.floor(last) + 2, start + 1), count))


def outline_polygons(mask: ObjectMask) -> list[list[list[int]]]:
    """Return the outer outlines of the connected parts of an object, the largest first: points [x, y] of the frame.

    Points lie on corners of pixels. An outline is simplified by at most a pixel, or as far as MAX_OUTLINE_POINTS needs
    it. Holes are omitted. Raises ValueError for a mask with data of another size.
    """
    cv2 = opencv()
    # A corner of pixels belongs to the object if one of its four pixels does, so that outlines enclose whole pixels.
    corners = cv2.dilate(np.pad(mask.pixels().view(np.uint8), ((0, 1), (0, 1))), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(corners, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(mask.x, mask.y))
    parts = sorted(contours, key=cv2.contourArea, reverse=True)[:MAX_OUTLINES]
    # Just small enough to keep the four corners of a single pixel.
    tolerance = 0.7
    while True:
        polygons = [cv2.approxPolyDP(part, tolerance, True).reshape(-1, 2) for part in parts]
        polygons = [polygon for polygon in polygons if len(polygon) > 2]
        if sum(map(len, polygons)) <= MAX_OUTLINE_POINTS:
            break
        tolerance *= 1.5
    return [polygon.tolist() for polygon in polygons]
