"""Points in polygons and movements over lines, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.cameras.zones.zone_geometry import Polygons, Polylines, crosses_itself

GRID = 16
"""Coordinates are multiples of 1/16, so that edges and corners are hit often, and are exact as floats."""

coordinates = st.integers(0, GRID).map(lambda value: value / GRID)
points = st.tuples(coordinates, coordinates)
polygons = st.lists(points, min_size=3, max_size=8)

HORSESHOE = ((0.25, 0.25), (0.75, 0.25), (0.75, 0.75), (0.625, 0.75), (0.625, 0.375), (0.375, 0.375), (0.375, 0.75),
             (0.25, 0.75))  # fmt: skip


def contained(polygon, point) -> bool:
    """Even-odd rule with rational numbers; edges belong to the polygon."""
    x, y = map(Fraction, point)
    is_odd = False
    for first, last in zip(polygon, (*polygon[1:], polygon[0]), strict=True):
        (x1, y1), (x2, y2) = map(Fraction, first), map(Fraction, last)
        on_line = (x2 - x1) * (y - y1) == (y2 - y1) * (x - x1)
        if on_line and min(x1, x2) <= x <= max(x1, x2) and min(y1, y2) <= y <= max(y1, y2):
            return True
        if (y1 > y) != (y2 > y) and x < x1 + (y - y1) * (x2 - x1) / (y2 - y1):
            is_odd = not is_odd
    return is_odd


@given(st.lists(polygons, min_size=1, max_size=4), st.lists(points, max_size=8))
def test_any_polygon_contains_what_exact_arithmetic_says(shapes, places):
    found = Polygons(shapes).contain(np.array(places, float).reshape(-1, 2))
    assert found.tolist() == [[contained(shape, place) for shape in shapes] for place in places]


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ((0.5, 0.3125), True), ((0.5, 0.5), False), ((0.3125, 0.625), True), ((0.6875, 0.625), True),
        ((0.5, 0.375), True), ((0.25, 0.25), True), ((0.125, 0.25), False), ((0.5, 0.75), False),
    ],
)  # fmt: skip
def test_a_concave_polygon_leaves_out_its_bay(point, expected):
    assert Polygons([HORSESHOE]).contain(np.array([point])).tolist() == [[expected]]


def test_an_object_at_the_lower_edge_of_the_picture_is_in_a_zone_that_ends_there():
    whole = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
    assert Polygons([whole]).contain(np.array([(0.3, 1.0), (1.0, 1.0), (0.3, 1.001)])).tolist() == [
        [True],
        [True],
        [False],
    ]


@given(polygons, points)
def test_the_direction_and_the_start_of_a_polygon_do_not_matter(shape, place):
    turned, rotated = shape[::-1], shape[2:] + shape[:2]
    found = Polygons([shape, turned, rotated]).contain(np.array([place]))
    assert len(set(found[0].tolist())) == 1


LEVEL = ((0.0, 0.5), (1.0, 0.5))


def crossings(line, path) -> list[int]:
    at = np.array(path, float)
    return Polylines([line]).crossings(at[:-1], at[1:])[:, 0].tolist()


def test_from_left_to_right_is_positive_and_back_is_negative():
    # Along the line to the right of the picture, the lower half is on the right hand.
    assert crossings(LEVEL, [(0.5, 0.4), (0.5, 0.6), (0.2, 0.1)]) == [1, -1]
    assert crossings(LEVEL[::-1], [(0.5, 0.4), (0.5, 0.6), (0.2, 0.1)]) == [-1, 1]


def test_who_passes_beside_the_end_of_a_line_does_not_cross_it():
    assert crossings(((0.4, 0.5), (0.6, 0.5)), [(0.2, 0.4), (0.2, 0.6), (0.8, 0.4)]) == [0, -1]
    assert crossings(((0.4, 0.5), (0.6, 0.5)), [(0.2, 0.4), (0.2, 0.6), (0.9, 0.6), (0.9, 0.4)]) == [0, 0, 0]


@given(st.lists(points, min_size=2, max_size=12))
def test_the_crossings_of_a_line_over_the_whole_picture_are_the_change_of_the_side(path):
    sides = [int(y >= 0.5) for _, y in path]
    line = ((-1.0, 0.5), (2.0, 0.5))
    assert crossings(line, path) == [after - before for before, after in pairwise(sides)]


@given(st.lists(st.tuples(coordinates, st.sampled_from([0.0, 0.25, 0.75, 1.0])), min_size=2, max_size=12))
def test_a_corner_of_a_line_is_crossed_as_the_rest_of_it(path):
    bent = ((-1.0, 0.5), (0.25, 0.5), (0.5, 0.5), (0.75, 0.5), (2.0, 0.5))
    assert crossings(bent, path) == crossings((bent[0], bent[-1]), path)


steps = st.integers(0, GRID)
between = st.tuples(
    steps.map(lambda value: value * 0.05713 + 0.0123), steps.map(lambda value: value * 0.06137 + 0.0041)
)
"""Places of which none is on a line between points of the grid."""


@given(st.lists(points, min_size=3, max_size=8, unique=True), st.lists(between, min_size=2, max_size=8))
def test_a_way_that_ends_where_it_began_crosses_a_closed_line_as_often_out_as_in(loop, path):
    outside = (2.0, 3.0)
    assert sum(crossings((*loop, loop[0]), [outside, *path, outside])) == 0


def test_a_movement_without_length_crosses_nothing():
    assert crossings(LEVEL, [(0.5, 0.5), (0.5, 0.5)]) == [0]


def test_the_distance_is_in_heights_of_the_picture():
    lines = Polylines([LEVEL, ((0.5, 0.0), (0.5, 0.5))])
    assert lines.distance(0, (0.3, 0.6), 2.0) == pytest.approx(0.1)
    assert lines.distance(1, (0.6, 0.2), 2.0) == pytest.approx(0.2)
    assert lines.distance(1, (0.5, 0.7), 2.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("polygon", "does"),
    [
        (HORSESHOE, False),
        (((0, 0), (1, 0), (1, 1), (0, 1)), False),
        (((0, 0), (1, 1), (1, 0), (0, 1)), True),
        (((0.5, 0), (0.8, 1), (0, 0.4), (1, 0.4), (0.2, 1)), True),
        (((0, 0), (0.5, 0), (1, 0), (0.5, 0), (0.5, 1)), False),
    ],
    ids=["horseshoe", "square", "tie", "star", "with a spike along a side"],
)
def test_a_polygon_whose_sides_cross_is_found(polygon, does):
    for shift in range(len(polygon)):
        turned = polygon[shift:] + polygon[:shift]
        assert crosses_itself(turned) == crosses_itself(turned[::-1]) == does
