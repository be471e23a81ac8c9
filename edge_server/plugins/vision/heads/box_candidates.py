"""Box candidates: the result of a head before suppression, in pixels of the network's input; and box formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edge_server.plugins.vision.heads.output_parameters import BoxFormat, BoxUnit
from edge_server.plugins.vision.heads.output_tensors import Reals

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_CANDIDATES = 2048
"""Maximum number of candidates per frame. It limits the cost of a network that detects something everywhere."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """K candidates, best first. `boxes` (K, 4): x_min, y_min, x_max, y_max; `keypoints` (K, points, 3): x, y, score.

    Positions are pixels of the network's input. Numbers may have any size and may be not finite.
    """

    boxes: npt.NDArray[np.float64]
    scores: Reals
    classes: npt.NDArray[np.int64]
    keypoints: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class NetworkSize:
    """Width and height of the network's input, in pixels."""

    width: int
    height: int


class DetectionHead(Protocol):
    """Reader of one output format of detectors. Immutable and thread-safe.

    `ranks`: number of dimensions of each output, without a batch. `class_part`: index of the output with the labels.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def class_part(self) -> int: ...

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """Return the expected output shapes if the given ones do not match, else None. -1 is any number."""
        ...

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        """Return at most MOST_CANDIDATES candidates with a score of at least `threshold`. The shapes are checked."""
        ...


@dataclass(frozen=True, slots=True)
class BoxCode:
    """Box format and unit of a network."""

    format: BoxFormat
    unit: BoxUnit
    size: NetworkSize

    @property
    def pixels(self) -> tuple[float, float]:
        """Pixels of the input per unit, horizontally and vertically."""
        if self.unit is BoxUnit.PIXELS:
            return 1.0, 1.0
        return float(self.size.width), float(self.size.height)

    def corners(self, boxes: Reals) -> npt.NDArray[np.float64]:
        """Return boxes (K, 4) as x_min, y_min, x_max, y_max in pixels of the input."""
        first, second, third, fourth = np.asarray(boxes, np.float64).T
        if self.format is BoxFormat.CXCYWH:
            columns = (first - third / 2, second - fourth / 2, first + third / 2, second + fourth / 2)
        elif self.format is BoxFormat.XYWH:
            columns = (first, second, first + third, second + fourth)
        elif self.format is BoxFormat.YXYX:
            columns = (second, first, fourth, third)
        else:
            columns = (first, second, third, fourth)
        return np.stack(columns, axis=1) * (self.pixels * 2)
