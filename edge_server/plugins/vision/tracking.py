"""Object tracking in one frame stream (ByteTrack): gives each detected object the same number from frame to frame.

A Kalman filter with constant velocity predicts the box of each track. Boxes with a high score are assigned to the
predictions first; weaker boxes, mostly of hidden objects, then continue tracks that are left. The method is that of
Zhang et al., "ByteTrack: Multi-Object Tracking by Associating Every Detection Box" (ECCV 2022). Steps of time are in
seconds, so dropped frames and changing frame rates only widen the predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Indices: TypeAlias = npt.NDArray[np.intp]

MAX_BOXES = 256
"""Maximum number of tracks, and of boxes of a frame that are tracked, the best ones. It bounds time and memory."""

LOST_S = 1.0
"""A track ends when it has been missed for longer than this, counted from the first frame without it."""

MIN_IOU = 0.1
"""Least overlap of a box and a prediction that belong together."""

_CONFIRMED_AFTER = 2
"""A track gets its id with this many boxes in consecutive frames, so that a flicker takes none."""

# Noise of the filter, as in the reference implementation of the paper: fractions of the size of the box per frame of 30
# a second. There, the size is the height; here, the mean of width and height.
_FPS = 30.0
_POSITION_NOISE = 1 / 20
_SPEED_NOISE = 1 / 160


class ByteTracker:
    """Tracks of one stream. Not thread-safe; frames must come in order.

    `next_id` returns a new id, above 0, for each new track. A box with a score of at least `threshold` is strong:
    it may start a track.
    """

    def __init__(self, next_id: Callable[[], int], threshold: float) -> None:
        self.threshold = threshold
        self._next_id = next_id
        self._ids: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        """0: not confirmed yet."""
        self._hits: Indices = np.empty(0, np.intp)
        """Boxes in consecutive frames."""
        self._missed_s: Floats = np.empty(0)
        """Seconds since the first frame without the track; NaN while it has boxes."""
        self._state: Floats = np.empty((0, 2, 4))
        """Centre x, centre y, width and height in pixels; and their speeds, in pixels a second."""
        self._variance: Floats = np.empty((0, 3))
        """Of a position, of position and speed together, and of a speed: the same for all four."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all tracks, also of those that are missed for a moment."""
        return frozenset(self._ids.tolist()) - {0}

    def update(self, boxes: Floats, scores: Floats, step_s: float) -> list[int]:
        """Return the id of each box's track, 0 for a box without one.

        `boxes` (count, 4) are x_min, y_min, x_max, y_max in pixels, `scores` are 0 to 1, both finite and best first.
        `step_s` is the time since the previous frame, 0 or more.
        """
        ids = [0] * len(boxes)
        boxes, scores = boxes[:MAX_BOXES], scores[:MAX_BOXES]
        measured = np.concatenate(((boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]), axis=1)
        self._predict(step_s)
        strong, weak = np.flatnonzero(scores >= self.threshold), np.flatnonzero(scores < self.threshold)
        centre, half = self._state[:, 0, :2], self._state[:, 0, 2:] / 2
        predicted = np.concatenate((centre - half, centre + half), axis=1)
        overlap = intersection_over_union(predicted, boxes)
        rows, columns = assign(overlap[:, strong])
        columns = strong[columns]
        left = np.setdiff1d(np.arange(len(self)), rows)
        weak_rows, weak_columns = assign(overlap[np.ix_(left, weak)])
        rows = np.concatenate((rows, left[weak_rows]))
        columns = np.concatenate((columns, weak[weak_columns]))

        self._correct(rows, measured[columns])
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if not self._ids[row] and self._hits[row] >= _CONFIRMED_AFTER:
                self._ids[row] = self._next_id()
            ids[column] = int(self._ids[row])
        self._remove_lost(rows, step_s)
        self._start(measured[np.setdiff1d(strong, columns)])
        return ids

    def _predict(self, step_s: float) -> None:
        self._state[:, 0] += step_s * self._state[:, 1]
        position, both, speed = self._variance.T
        noise = np.square(_size(self._state)) * step_s * _FPS
        position += 2 * step_s * both + step_s**2 * speed + noise * _POSITION_NOISE**2
        both += step_s * speed
        speed += noise * (_SPEED_NOISE * _FPS) ** 2

    def _correct(self, rows: Indices, measured: Floats) -> None:
        """Correct the tracks in `rows` by their boxes."""
        state, (position, both, speed) = self._state[rows], self._variance[rows].T
        sum_of_variances = position + np.square(_POSITION_NOISE * _size(state))
        gain, speed_gain = position / sum_of_variances, both / sum_of_variances
        difference = measured - state[:, 0]
        state[:, 0] += gain[:, None] * difference
        state[:, 1] += speed_gain[:, None] * difference
        self._state[rows] = state
        self._variance[rows] = np.stack((position * (1 - gain), both * (1 - gain), speed - speed_gain * both), axis=1)
        self._hits[rows] += 1
        self._missed_s[rows] = np.nan

    def _remove_lost(self, found: Indices, step_s: float) -> None:
        is_found = np.zeros(len(self), bool)
        is_found[found] = True
        # NaN: missed for the first time now.
        self._missed_s[~is_found] = np.nan_to_num(self._missed_s[~is_found] + step_s, nan=0.0)
        # The box of an object that is being hidden shrinks: this must not go on while it is hidden.
        self._state[~is_found, 1, 2:] = 0.0
        kept = is_found | ((self._ids > 0) & (self._missed_s <= LOST_S))
        self._ids, self._hits, self._missed_s = self._ids[kept], self._hits[kept], self._missed_s[kept]
        self._state, self._variance = self._state[kept], self._variance[kept]

    def _start(self, measured: Floats) -> None:
        """Start a track for each box, at rest. Boxes beyond MAX_BOXES tracks start none."""
        new = measured[: MAX_BOXES - len(self)]
        state = np.stack((new, np.zeros_like(new)), axis=1)
        size = _size(state)
        position, speed = np.square(2 * _POSITION_NOISE * size), np.square(10 * _SPEED_NOISE * _FPS * size)
        self._state = np.concatenate((self._state, state))
        self._variance = np.concatenate((self._variance, np.stack((position, np.zeros(len(new)), speed), axis=1)))
        self._ids = np.concatenate((self._ids, np.zeros(len(new), np.uint64)))
        self._hits = np.concatenate((self._hits, np.ones(len(new), np.intp)))
        self._missed_s = np.concatenate((self._missed_s, np.full(len(new), np.nan)))


def _size(state: Floats) -> Floats:
    """Return the mean of width and height of each track's box, at least a pixel: the variances must stay above 0."""
    size: Floats = np.maximum(state[:, 0, 2:].mean(axis=1), 1.0)
    return size


def intersection_over_union(first: Floats, second: Floats) -> Floats:
    """Return the overlap of each box of `first` with each of `second`, 0 to 1. A box without an area overlaps none."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    common = np.prod(np.maximum(high - low, 0.0), axis=2)
    areas = [np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0.0), axis=1) for boxes in (first, second)]
    whole = areas[0][:, None] + areas[1][None, :] - common
    overlap: Floats = np.divide(common, whole, out=np.zeros_like(common), where=common > 0)
    return overlap


def assign(overlap: Floats) -> tuple[Indices, Indices]:
    """Return the rows and columns of the pairs with the greatest sum of overlaps, each at least MIN_IOU."""
    is_possible = overlap >= MIN_IOU
    # Most boxes are apart from all others, and have one possible partner that has no other either.
    is_sure = is_possible & (is_possible.sum(axis=1) == 1)[:, None] & (is_possible.sum(axis=0) == 1)[None, :]
    rows, columns = np.nonzero(is_sure)
    is_open = is_possible & ~is_sure
    open_rows, open_columns = np.flatnonzero(is_open.any(axis=1)), np.flatnonzero(is_open.any(axis=0))
    part = np.where(is_possible, overlap, 0.0)[np.ix_(open_rows, open_columns)]
    is_wide = part.shape[0] <= part.shape[1]
    chosen = _best_columns(part if is_wide else part.T)
    pairs = np.arange(len(chosen)), chosen
    part_rows, part_columns = pairs if is_wide else pairs[::-1]
    is_pair = part[part_rows, part_columns] > 0
    return (
        np.concatenate((rows, open_rows[part_rows[is_pair]])),
        np.concatenate((columns, open_columns[part_columns[is_pair]])),
    )


def _best_columns(value: Floats) -> Indices:
    """Return a different column for each row so that the sum of values is greatest. Needs as many columns as rows.

    The Hungarian method with potentials: each row is added along the shortest augmenting path, at most rows^2 steps.
    """
    row_count, column_count = value.shape
    # Column `column_count` is where a path begins.
    owner = np.full(column_count + 1, -1)
    row_potential, column_potential = np.zeros(row_count), np.zeros(column_count + 1)
    for row in range(row_count):
        column = column_count
        owner[column] = row
        distance = np.full(column_count, np.inf)
        previous = np.full(column_count, column_count)
        is_visited = np.zeros(column_count + 1, bool)
        while owner[column] >= 0:
            is_visited[column] = True
            at = owner[column]
            reduced = -value[at] - row_potential[at] - column_potential[:-1]
            is_nearer = (reduced < distance) & ~is_visited[:-1]
            distance[is_nearer] = reduced[is_nearer]
            previous[is_nearer] = column
            nearest = int(np.where(is_visited[:-1], np.inf, distance).argmin())
            least = distance[nearest]
            row_potential[owner[is_visited]] += least
            column_potential[is_visited] -= least
            distance[~is_visited[:-1]] -= least
            column = nearest
        while column != column_count:
            owner[column] = owner[previous[column]]
            column = int(previous[column])
    chosen = np.empty(row_count, np.intp)
    for column in np.flatnonzero(owner[:-1] >= 0).tolist():
        chosen[owner[column]] = column
    return chosen
