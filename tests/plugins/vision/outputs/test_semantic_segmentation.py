"""Masks in the frame's own pixels, against a loop over every pixel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BadModelConfig
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.protocol.frame_messages import Mask, Returns

WISH = Returns(has_mask=True)
WIDTH, HEIGHT = 24, 16
SIZE = (WIDTH, HEIGHT)

inputs = given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["stretch", "letterbox", "crop"]),
    picture=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)


def by_loops(classes: list[list[int]], fit: Any, unseen: int = 0) -> list[list[int]]:
    """`classes` covers the network's input, whatever its own size."""
    rows, columns = len(classes), len(classes[0])
    made = []
    for y in range(fit.height):
        line = []
        for x in range(fit.width):
            input_x, input_y = fit.to_input(x + 0.5, y + 0.5)
            if 0 <= input_x < WIDTH and 0 <= input_y < HEIGHT:
                line.append(classes[int(input_y * (rows / HEIGHT))][int(input_x * (columns / WIDTH))])
            else:
                line.append(unseen)
        made.append(line)
    return made


def array(mask: Mask | None) -> np.ndarray:
    assert mask is not None
    kind = {"mono8": np.dtype("u1"), "mono16": np.dtype("<u2")}[mask.encoding]
    return np.frombuffer(mask.data, kind).reshape(mask.height, mask.width)


@inputs
@pytest.mark.parametrize(("shape", "layout"), [((5, 16, 24), "planar"), ((8, 12, 5), "packed"), ((5, 7, 9), "planar")])
def test_each_pixel_has_its_highest_scoring_class(make_model, make_fit, shape, layout, seed, mode, picture) -> None:
    scores = np.random.default_rng(seed).integers(0, 6, shape).astype(np.float32)
    planes = scores if layout == "planar" else scores.transpose(2, 0, 1)
    classes = [
        [max(range(5), key=lambda c: planes[c][y][x]) for x in range(planes.shape[2])] for y in range(planes.shape[1])
    ]
    spec = make_model({"mask_output": "out", "mask_unseen": "7"}, {"out": shape}, size=SIZE)
    fit = make_fit(mode, *picture, size=SIZE)
    mask = make_perception_decoder(spec).decode({"out": scores[None]}, 0, fit, WISH, model="net").mask
    assert mask.encoding == "mono8"
    assert array(mask).tolist() == by_loops(classes, fit, 7)


@inputs
@pytest.mark.parametrize(("activation", "threshold"), [("none", 0.3), ("sigmoid", 0.3), ("sigmoid", 0.5)])
def test_one_class_is_compared_with_a_threshold(
    make_model, make_fit, activation, threshold, seed, mode, picture
) -> None:
    scores = np.random.default_rng(seed).normal(0, 1, (1, 16, 24)).astype(np.float32)
    parameters = {"mask_output": "out", "mask_activation": activation, "mask_threshold": str(threshold)}
    classes = [
        [int((1 / (1 + math.exp(-value)) if activation == "sigmoid" else value) >= threshold) for value in line]
        for line in scores[0].tolist()
    ]
    fit = make_fit(mode, *picture, size=SIZE)
    plan = make_perception_decoder(make_model(parameters, {"out": (1, 16, 24)}, size=SIZE))
    mask = plan.decode({"out": scores[None]}, 0, fit, WISH, model="net").mask
    assert array(mask).tolist() == by_loops(classes, fit)


@inputs
@pytest.mark.parametrize(("dims", "batch"), [((16, 24), 4), ((1, 16, 24), 4), ((1, 16, 24), 0), ((1, 1, 16, 24), 0)])
@pytest.mark.parametrize("highest", [20, 300])
def test_classes_chosen_inside_the_network(make_model, make_fit, dims, batch, highest, seed, mode, picture) -> None:
    classes = np.random.default_rng(seed).integers(0, highest, (16, 24))
    classes[0, 0] = highest
    spec = make_model(
        {"mask_output": "out"}, {"out": dims}, size=SIZE, max_batch_size=batch, dtypes={"out": DType.INT64}
    )
    given_array = classes.reshape((1, *dims) if batch else dims)
    fit = make_fit(mode, *picture, size=SIZE)
    mask = make_perception_decoder(spec).decode({"out": given_array}, 0 if batch else None, fit, WISH, model="net").mask
    assert mask.encoding == ("mono8" if highest < 256 else "mono16")
    assert array(mask).tolist() == by_loops(classes.tolist(), fit)


def mask_of(made_model: Any, values: np.ndarray, fit: Any) -> Any:
    return make_perception_decoder(made_model).decode({"out": values}, 0, fit, WISH, model="net").mask


@pytest.mark.parametrize(
    ("stated", "dtype", "dims", "first", "expected"),
    [
        # An index that is none becomes class 0.
        ({"mask_layout": "index"}, DType.FP32, (), (-1, np.nan, np.inf, 70000, 2.0), [0, 0, 0, 0, 2, 3]),
        # The bits of BF16 are numbers.
        ({"mask_layout": "index"}, DType.BF16, (), (1, 2, 7), [1, 2, 7, 3]),
        # NaN never wins.
        ({"mask_output": "out"}, DType.FP32, (3,), ((np.nan, 0.1), (0.5, np.nan), (1.0, 0.2)), [2, 2, 1]),
    ],
)
def test_the_class_of_each_pixel(make_model, make_fit, stated, dtype, dims, first, expected) -> None:
    values = np.full((1, *dims, 16, 24), 3.0, np.float32)
    if dims:
        values[0] = np.array([np.nan, 0.0, 0.0])[:, None, None]
    values[0, ..., 0, : np.array(first).shape[-1]] = first
    if dtype is DType.BF16:
        values = (values.view(np.uint32) >> 16).astype("<u2")
    spec = make_model(stated, {"out": (*dims, 16, 24)}, size=SIZE, dtypes={"out": dtype})
    mask = mask_of(spec, values, make_fit("stretch", *SIZE, size=SIZE))
    assert array(mask)[0, : len(expected)].tolist() == expected


def test_more_than_256_classes_need_two_bytes(make_model, make_fit) -> None:
    scores = np.zeros((1, 300, 16, 24), np.float32)
    scores[0, 299] = 1
    spec = make_model({"mask_layout": "planar"}, {"out": (300, -1, -1)}, size=SIZE, labels={"out": ("a", "b")})
    mask = mask_of(spec, scores, make_fit("stretch", *SIZE, size=SIZE))
    assert (mask.encoding, mask.labels) == ("mono16", ("a", "b"))
    assert set(array(mask).ravel().tolist()) == {299}
    assert mask.data.nbytes == 2 * WIDTH * HEIGHT


def test_a_mask_unseen_class_above_255_widens_the_mask_if_used(make_model, make_fit) -> None:
    spec = make_model({"mask_unseen": "999"}, {"out": (2, 16, 24)}, size=SIZE)
    outputs = {"out": np.zeros((1, 2, 16, 24), np.float32)}
    plan = make_perception_decoder(spec)
    whole = plan.decode(outputs, 0, make_fit("stretch", 50, 50, size=SIZE), WISH, model="net").mask
    cut = plan.decode(outputs, 0, make_fit("crop", 50, 50, size=SIZE), WISH, model="net").mask
    assert (whole.encoding, cut.encoding) == ("mono8", "mono16")
    assert set(array(cut).ravel().tolist()) == {0, 999}


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 0, 16, 24), (1, 2, 3, 4, 5)])
def test_an_output_of_another_shape_is_an_error_that_names_it(make_model, make_fit, shape) -> None:
    plan = make_perception_decoder(make_model({"mask_output": "out"}, {"out": (3, 16, 24)}, size=SIZE))
    with pytest.raises(BackendError, match="'net', output 'out'"):
        plan.decode({"out": np.zeros(shape, np.float32)}, 0, make_fit("stretch", 5, 5, size=SIZE), WISH, model="net")


@pytest.mark.parametrize("dims", [(-1, -1, -1), (16, 16, 16), (5,), (2, 3, 4, 5, 6)])
def test_ambiguous_dims_are_refused(make_model, dims) -> None:
    with pytest.raises(BadModelConfig, match="mask_layout"):
        make_perception_decoder(make_model({"mask_output": "out"}, {"out": dims}, size=SIZE))
