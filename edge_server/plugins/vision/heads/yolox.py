"""YOLOX head for undecoded outputs: offsets and logarithms of sizes, in cells of each grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.heads.box_candidates import Candidates, NetworkSize
from edge_server.plugins.vision.heads.grid_cells import cell_count, cells
from edge_server.plugins.vision.heads.output_parameters import Activation
from edge_server.plugins.vision.heads.output_tensors import Reals
from edge_server.plugins.vision.heads.yolo import with_objectness

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class YoloxGrid:
    """[A, 5 + C]: box, objectness, classes; one grid after the other, each row by row."""

    size: NetworkSize
    strides: tuple[int, ...]
    activation: Activation
    ranks: tuple[int, ...] = (2,)
    class_part: int = 0
    _cells: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _scales: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grids = [cells(self.size, stride) for stride in self.strides]
        scales = [np.full((len(grid), 1), float(stride)) for grid, stride in zip(grids, self.strides, strict=True)]
        object.__setattr__(self, "_cells", np.concatenate(grids))
        object.__setattr__(self, "_scales", np.concatenate(scales))

    def problem(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape = shapes[0]
        count = sum(cell_count(self.size, stride) for stride in self.strides)
        is_sound = len(shape) == 2 and shape[0] in (-1, count) and (shape[1] == -1 or shape[1] >= 6)
        grids = ", ".join(str(stride) for stride in self.strides)
        return None if is_sound else f"[{count}, 5 + classes] for grids {grids} over the input"

    def candidates(self, parts: Sequence[Reals], threshold: float) -> Candidates:
        rows = parts[0]
        chosen, scores = with_objectness(rows[:, 4], rows[:, 5:], self.activation, threshold)
        kept, scale = rows[chosen].astype(np.float64), self._scales[chosen]
        centre = (kept[:, :2] + self._cells[chosen]) * scale
        half = np.exp(kept[:, 2:4]) * scale / 2
        boxes = np.concatenate((centre - half, centre + half), axis=1)
        return Candidates(boxes, scores, kept[:, 5:].argmax(axis=1))
