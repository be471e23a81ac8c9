"""Adapters of detection heads to an output whose dimensions or columns have another order."""

from __future__ import annotations

from collections.abc import Sequence

from edge_server.plugins.vision.outputs.box_candidates import Candidates, DetectionHead
from edge_server.plugins.vision.outputs.output_parameters import Column
from edge_server.plugins.vision.outputs.output_tensors import FloatArray
from edge_server.record import record


@record(frozen=True, slots=True)
class _Adapter(DetectionHead):
    """Base of adapters, with the ranks and labels of the adapted head."""

    head: DetectionHead

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.head.ranks

    @property
    def labels_index(self) -> int:
        return self.head.labels_index


@record(frozen=True, slots=True)
class Transposed(_Adapter):
    """Reads the first output with its two dimensions swapped, such as [A, 4 + C] with a head for [4 + C, A]."""

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        expected = self.head.check_shapes([shapes[0][::-1], *shapes[1:]])
        return None if expected is None else f"{expected} with swapped dimensions"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        return self.head.decode([arrays[0].T, *arrays[1:]], threshold)


@record(frozen=True, slots=True)
class ReorderedColumns(_Adapter):
    """Reads rows of box, score and class in the order of `columns`. What follows them stays where it is.

    Rows of another image than 0, the only one, are omitted.
    """

    columns: tuple[Column, ...]

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        shape, extra = shapes[0], Column.IMAGE in self.columns
        inner = (shape[0], shape[1] - extra if shape[1] != -1 else -1) if len(shape) == 2 else shape
        expected = self.head.check_shapes([inner, *shapes[1:]])
        order = ", ".join(column.value for column in self.columns)
        return None if expected is None else f"{expected}, in the order {order}"

    def decode(self, arrays: Sequence[FloatArray], threshold: float) -> Candidates:
        return self.head.decode([self.reorder(arrays[0]), *arrays[1:]], threshold)

    def reorder(self, rows: FloatArray) -> FloatArray:
        """Return box, score, class and what follows them, of the rows of image 0."""
        starts: dict[Column, int] = {}
        at = 0
        for column in self.columns:
            starts[column] = at
            at += 4 if column is Column.BOX else 1
        if Column.IMAGE in starts:
            rows = rows[rows[:, starts[Column.IMAGE]] == 0]
        box = starts[Column.BOX]
        order = [*range(box, box + 4), starts[Column.SCORE], starts[Column.CLASS], *range(at, rows.shape[1])]
        return rows[:, order]
