"""Box candidates: the result of a head before suppression, in pixels of the network's input; and box formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edge_server.vision.heads.output_parameters import BoxFormat, BoxUnit
from edge_server.vision.heads.output_tensors import Reals

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_CANDIDATES = 2048
"""How many of the best scores are looked at further. A network that finds something everywhere costs no more."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """K finds, best first. `boxes` (K, 4): x_min, y_min, x_max, y_max; `keypoints` (K, points, 3): x, y, score.

    Positions are pixels of the network's input. Numbers may be of any size, and not finite.
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
    """One way to write detections down. Immutable, usable from any thread.

    `ranks`: dimensions of each output, without a batch. `class_part`: which output has the names of the classes.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def class_part(self) -> int: ...

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """Return the expected output shapes if the given ones do not fit, else None. -1 is any number."""
        ...

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        """Return at most MOST_CANDIDATES finds with a score of at least `threshold`. Shapes have been checked."""
        ...


@dataclass(frozen=True, slots=True)
class BoxCode:
    """How a network writes its boxes."""

    format: BoxFormat
    unit: BoxUnit
    size: NetworkSize

    @property
    def pixels(self) -> tuple[float, float]:
        """Pixels of the input in one unit, across and down."""
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
