"""Differences of outputs: what is relative to what, and what can never be equal."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.core.output_difference import OutputDifference, compare_arrays, compare_outputs


def test_differences_are_the_largest_of_any_output_and_relative_to_its_magnitude() -> None:
    one = [{"a": np.array([[1.0, -4.0]], "f4"), "n": np.array([[1, 2, 3, 4]])}]
    two = [{"a": np.array([[1.5, -4.0]], "f4"), "n": np.array([[1, 2, 3, 5]])}]
    apart = compare_outputs(one, two)
    assert apart.absolute == 1.0
    assert apart.relative == 0.25  # a quarter of the whole numbers; of `a` it is an eighth
    assert apart.top1 == 1.0
    assert compare_outputs(one, one) == OutputDifference(0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (np.zeros((1, 3), "f4"), np.zeros((1, 4), "f4")),
        (np.zeros((1, 3), "f4"), np.full((1, 3), np.nan, "f4")),
        (np.full((1, 3), np.inf, "f4"), np.zeros((1, 3), "f4")),
        (np.array([[np.nan, np.inf]], "f4"), np.array([[np.inf, np.nan]], "f4")),
        (np.zeros((1, 3), "f4"), np.zeros((1, 3), "f2")),
    ],
)
def test_another_shape_or_type_and_non_finite_values_are_infinitely_apart(
    expected: np.ndarray, found: np.ndarray
) -> None:
    assert compare_outputs([{"a": expected}], [{"a": found}]).relative == float("inf")


def test_equal_non_finite_and_empty_outputs_are_equal() -> None:
    both = [{"a": np.array([[np.nan, np.inf, 1.0]], "f4"), "b": np.zeros((1, 0), "f4")}]
    assert compare_outputs(both, both).relative == 0.0


def test_best_classes_are_compared_per_sample_and_for_vectors_only() -> None:
    one = [{"s": np.array([[0.1, 0.9]], "f4")}, {"s": np.array([[0.8, 0.2]], "f4")}]
    two = [{"s": np.array([[0.2, 0.8]], "f4")}, {"s": np.array([[0.4, 0.6]], "f4")}]
    assert compare_outputs(one, two).top1 == 0.5
    boxes = [{"boxes": np.ones((1, 50, 4), "f4")}]
    assert compare_outputs(boxes, boxes).top1 is None


def test_bit_patterns_of_bfloat16_are_compared_as_numbers() -> None:
    one, two = (np.array([[value]], np.float32).view(np.uint32) >> 16 for value in (2.0, 2.5))
    apart = compare_outputs([{"a": one.astype(np.uint16)}], [{"a": two.astype(np.uint16)}], frozenset({"a"}))
    assert (apart.absolute, apart.relative) == (0.5, 0.25)


def test_whole_numbers_are_compared_in_all_their_bits() -> None:
    expected, found = np.array([2**60, 1]), np.array([2**60 + 1, 1])
    assert compare_arrays(expected, found).relative == 0.5
