"""Settings of zones and lines: parser of the tables `[[sources.zones]]` and `[[sources.lines]]` of the sources file,
and of the JSON of the page, which has the same keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, TypeAlias

from edge_server.plugins.cameras.sources_file_tables import (
    count_up_to,
    number_up_to,
    parse_labels,
    parse_name,
    parse_tables,
    table_key,
)

MAX_ZONES = 32
"""Most zones of a source, and most lines of it."""

MAX_POINTS = 64
MAX_WINDOW = 255
MAX_LOITERING_S = 86_400.0

Points: TypeAlias = tuple[tuple[float, float], ...]

WHOLE_PICTURE: Points = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))


def _points(value: object) -> Points:
    if not isinstance(value, list) or len(value) > MAX_POINTS:
        given = f"{len(value)} points" if isinstance(value, list) else repr(value)[:40]
        raise ValueError(
            f"expected an array of at most {MAX_POINTS} points [x, y] in fractions of the picture, such as "
            f"[[0.1, 0.5], [0.9, 0.5], [0.5, 1.0]], given {given}"
        )
    for point in value:
        is_pair = isinstance(point, list) and len(point) == 2
        if not is_pair or any(type(part) not in (int, float) or not 0 <= part <= 1 for part in point):
            raise ValueError(
                "expected points [x, y] in fractions of the picture, 0 to 1 each, [0, 0] in the upper left corner, "
                f"given {repr(point)[:40]}"
            )
    return tuple((float(x), float(y)) for x, y in value)


_FRAMES = count_up_to(MAX_WINDOW, "number of frames")


@dataclass(frozen=True, slots=True)
class ZoneEntry:
    """A polygon in the picture. An object is where the middle of its box's lower edge is.

    It is in the zone once it was seen there in `inertia` of the last `window` frames (0: as many as `inertia`, so
    consecutive ones), and has left it when the same holds for the outside. Only `classes` count, () for all, and until
    they are in the zone only detections with a score of at least `min_score`. An object that is there for `loitering_s`
    loiters; 0: loitering is not watched.
    """

    what: ClassVar[str] = "zone"
    name: str = table_key(parse_name)
    points: tuple[tuple[float, float], ...] = table_key(_points, WHOLE_PICTURE)
    classes: tuple[str, ...] = table_key(parse_labels, ())
    min_score: float = table_key(number_up_to(1.0), 0.0)
    inertia: int = table_key(_FRAMES, 3)
    window: int = table_key(_FRAMES, 0)
    loitering_s: float = table_key(number_up_to(MAX_LOITERING_S), 0.0)

    def __post_init__(self) -> None:
        if self.window and self.window < self.inertia:
            raise ValueError(f"window: expected at least inertia ({self.inertia}) frames, given {self.window}")
        if not _encloses_area(self.points):
            raise ValueError("points: expected at least 3 points that enclose an area")


@dataclass(frozen=True, slots=True)
class LineEntry:
    """A line of two or more points. Seen from its first point to its last, "in" is from its left to its right."""

    what: ClassVar[str] = "line"
    name: str = table_key(parse_name)
    points: tuple[tuple[float, float], ...] = table_key(_points)
    classes: tuple[str, ...] = table_key(parse_labels, ())

    def __post_init__(self) -> None:
        if len(self.points) < 2 or any(math.dist(*pair) < 1e-3 for pair in pairwise(self.points)):
            raise ValueError("points: expected at least 2 points, each apart from the one before")


def _encloses_area(points: Points) -> bool:
    """Return whether the points do not all lie on one line. Then one triangle of their fan has an area, also where the
    signed area of a polygon that crosses itself is 0."""
    (x0, y0), *others = points or ((0.0, 0.0),)
    return any(abs((x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)) > 1e-6 for (x1, y1), (x2, y2) in pairwise(others))


def parse_zones(value: object) -> tuple[ZoneEntry, ...]:
    """Return the zones of TOML or JSON values. Raises ValueError, which names the zone and the key."""
    return parse_tables(ZoneEntry, value, MAX_ZONES)


def parse_lines(value: object) -> tuple[LineEntry, ...]:
    """Return the lines of TOML or JSON values. Raises ValueError, which names the line and the key."""
    return parse_tables(LineEntry, value, MAX_ZONES)


def entries_as_plain(entries: Sequence[ZoneEntry] | Sequence[LineEntry]) -> list[dict[str, object]]:
    """Return zones or lines as values of TOML and JSON, without keys that have their default."""
    return [
        {item.name: _as_plain(value) for item in fields(entry) if (value := getattr(entry, item.name)) != item.default}
        for entry in entries
    ]


def _as_plain(value: object) -> object:
    return [_as_plain(item) for item in value] if isinstance(value, tuple) else value
