"""Geometry of zones and lines: which points lie in which polygons, and which movements cross which polylines. Pure;
numpy does all points and all shapes at once.

Coordinates are fractions of the picture, x to the right and y down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.plugins.cameras.zones.zone_settings import Points

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]

_EDGE_TOLERANCE = 1e-9
"""A point this near to an edge is on it, in fractions of the picture."""

_END_EXTENSION = 1e-6


class Polygons:
    """Polygons that a point may be in. One that crosses itself is read by the even-odd rule."""

    def __init__(self, polygons: Sequence[Points]) -> None:
        self._starts = np.cumsum([0, *(len(points) for points in polygons)])[:-1]
        first = np.array([point for points in polygons for point in points], float).reshape(-1, 2)
        last = np.array([point for points in polygons for point in (*points[1:], points[0])], float).reshape(-1, 2)
        (self._x, self._y), (last_x, self._last_y) = first.T, last.T
        self._low = np.minimum(first, last).T - _EDGE_TOLERANCE
        self._high = np.maximum(first, last).T + _EDGE_TOLERANCE
        self._wide, self._tall = last_x - self._x, self._last_y - self._y
        # Level edges are never crossed by a level ray.
        self._slope = np.divide(self._wide, self._tall, out=np.zeros_like(self._wide), where=self._tall != 0)
        self._tolerance = _EDGE_TOLERANCE * np.maximum(np.hypot(self._wide, self._tall), _EDGE_TOLERANCE)

    def contain(self, points: Floats) -> npt.NDArray[np.bool_]:
        """Return for each of `points` (count, 2) and each polygon whether the point is in it or on its edge."""
        x, y = points[:, :1], points[:, 1:]
        is_right = x < self._x + (y - self._y) * self._slope
        crosses = ((self._y > y) != (self._last_y > y)) & is_right
        is_on_edge = (
            (np.abs(self._wide * (y - self._y) - self._tall * (x - self._x)) <= self._tolerance)
            & (self._low[0] <= x) & (x <= self._high[0]) & (self._low[1] <= y) & (y <= self._high[1])
        )  # fmt: skip
        is_odd = np.add.reduceat(crosses, self._starts, axis=1, dtype=np.intp) % 2 == 1
        inside: npt.NDArray[np.bool_] = is_odd | np.logical_or.reduceat(is_on_edge, self._starts, axis=1)
        return inside


class Polylines:
    """Polylines that a movement may cross. Their left and right are those of somebody who walks along them."""

    def __init__(self, polylines: Sequence[Points]) -> None:
        counts = [len(points) - 1 for points in polylines]
        self._starts = np.cumsum([0, *counts])[:-1]
        self._polylines = [np.array(points, float) for points in polylines]
        longer = [_extended(points) for points in self._polylines]
        self._first = np.concatenate([points[:-1] for points in longer])
        self._last = np.concatenate([points[1:] for points in longer])

    def crossings(self, before: Floats, after: Floats) -> npt.NDArray[np.intp]:
        """Return for each movement and each polyline the crossings from left to right minus those from right to left.

        `before` and `after` (count, 2) are the ends of the movements. A point on a line counts as right of it, so that
        no crossing is lost or counted twice when a movement ends there.
        """
        first, last = self._first[None], self._last[None]
        before, after = before[:, None], after[:, None]
        was_right = _side(first, last, before) >= 0
        is_right = _side(first, last, after) >= 0
        # Ends of segments are compared in the same way: a corner belongs to one of its two segments.
        passes = (_side(before, after, first) >= 0) != (_side(before, after, last) >= 0)
        signs = np.where(passes, is_right.astype(np.intp) - was_right.astype(np.intp), 0)
        return np.add.reduceat(signs, self._starts, axis=1)

    def distance(self, index: int, point: tuple[float, float], aspect: float) -> float:
        """Return how far a point is from a polyline, in heights of the picture. `aspect` is its width by its height."""
        scale = np.array((aspect, 1.0))
        line, at = self._polylines[index] * scale, np.array(point) * scale
        start, along = line[:-1], np.diff(line, axis=0)
        part = np.clip(((at - start) * along).sum(axis=1) / np.square(along).sum(axis=1), 0.0, 1.0)
        return float(np.sqrt(np.square(start + part[:, None] * along - at).sum(axis=1)).min())


def _extended(points: Floats) -> Floats:
    """Return a polyline with both ends moved outwards a little: who walks along the edge of the picture crosses a line
    that ends there, in both directions."""
    longer: Floats = points.copy()
    for end, next_to_it in ((0, 1), (-1, -2)):
        along = points[end] - points[next_to_it]
        longer[end] += _END_EXTENSION * along / np.hypot(*along)
    return longer


def crosses_itself(points: Points) -> bool:
    """Return whether two sides of a polygon cross each other. Sides that only touch do not."""
    first = np.array(points, float)
    last = np.roll(first, -1, axis=0)
    begins, ends = (_side(first[:, None], last[:, None], point[None]) for point in (first, last))
    is_between = (np.minimum(begins, ends) < -_EDGE_TOLERANCE) & (np.maximum(begins, ends) > _EDGE_TOLERANCE)
    return bool((is_between & is_between.T).any())


def _side(first: Floats, last: Floats, point: Floats) -> Floats:
    """Return above 0 if a point is right of the line from `first` to `last` in the picture, below 0 if it is left."""
    side: Floats = (last[..., 0] - first[..., 0]) * (point[..., 1] - first[..., 1]) - (last[..., 1] - first[..., 1]) * (
        point[..., 0] - first[..., 0]
    )
    return side
