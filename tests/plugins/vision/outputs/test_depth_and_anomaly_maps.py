"""Maps with a number for each pixel: depth and anomaly, in the size of the frame."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BadModelConfig, InvalidRequest
from edge_server.plugins.vision.perception_decoder import Perception, make_perception_decoder
from edge_server.plugins.vision.resize import FittedPicture
from edge_server.protocol.frame_messages import Returns

METRIC = {"depth_output": "depth", "depth_kind": "metric"}
ANOMALY = {"anomaly_output": "anomaly_map", "anomaly_score_output": "pred_score"}
PICTURES = given(
    mode=st.sampled_from(["stretch", "letterbox", "crop"]),
    picture=st.tuples(st.integers(8, 300), st.integers(8, 300)),
)


def decode(spec: ModelSpec, fit: FittedPicture, item: int | None = 0, **outputs: np.ndarray) -> Perception:
    decoder = make_perception_decoder(spec)
    assert decoder is not None
    assert set(decoder.output_names(decoder.what)) <= set(outputs)
    return decoder.decode(outputs, item, fit, decoder.what, model="net")


def slope(fit: FittedPicture, side: int) -> np.ndarray:
    """A network's map of side x side pixels that is 2 x + 3 y + 5 in pixels of the frame."""
    scale = 64 / side
    columns, rows = (np.arange(side) + 0.5) * scale, (np.arange(side) + 0.5) * scale
    x, y = fit.to_original(columns, rows)
    return (2 * x[None, :] + 3 * y[:, None] + 5).astype(np.float32)


@PICTURES
@pytest.mark.parametrize("side", [16, 64])
def test_each_pixel_of_the_frame_has_the_depth_at_its_centre(make_model, make_fit, mode, picture, side) -> None:
    fit = make_fit(mode, *picture)
    seen = decode(make_model(METRIC, {"depth": (1, side, side)}), fit, depth=slope(fit, side)[None, None])
    found = seen.dense_map
    assert found is not None
    assert (found.kind, found.encoding, found.width, found.height) == ("metric_depth", "32FC1", *picture)
    values = found.values()
    x, y = np.arange(picture[0]) + 0.5, np.arange(picture[1]) + 0.5
    to_input = x * fit.scale_x + fit.offset_x, y * fit.scale_y + fit.offset_y
    # At the edge there is nothing to interpolate with.
    margin = 32 / side
    columns, rows = ((positions > margin) & (positions < 64 - margin) for positions in to_input)
    # OpenCV interpolates at 32nds of a pixel.
    tolerance = (2 / fit.scale_x + 3 / fit.scale_y) * 64 / side / 32 + 0.01
    expected = (2 * x[None, :] + 3 * y[:, None] + 5)[np.ix_(rows, columns)]
    # pytest.approx would compare the pixels one by one in Python.
    np.testing.assert_allclose(values[np.ix_(rows, columns)], expected, rtol=0, atol=tolerance)
    unseen = (to_input[0] < 0) | (to_input[0] >= 64)
    assert np.isnan(values[:, unseen]).all()
    if np.isfinite(values).any():
        assert (found.minimum, found.maximum) == (np.nanmin(values), np.nanmax(values))


def test_a_frame_of_the_inputs_size_keeps_the_numbers(make_model, make_fit) -> None:
    depth = np.random.default_rng(0).uniform(0.5, 9, (64, 64)).astype(np.float32)
    spec = make_model(METRIC | {"depth_scale": "0.001"}, {"depth": (64, 64)})
    found = decode(spec, make_fit("stretch", 64, 64), depth=depth[None] * 1000).dense_map
    assert found.values() == pytest.approx(depth, rel=1e-6)


def test_it_agrees_with_opencvs_resizing(make_model, make_fit) -> None:
    depth = cv2.GaussianBlur(np.random.default_rng(0).uniform(0.5, 9, (64, 64)).astype(np.float32), (9, 9), 3)
    found = decode(make_model(METRIC, {"depth": (1, 64, 64)}), make_fit("stretch", 640, 480), depth=depth[None, None])
    expected = cv2.resize(depth, (640, 480), interpolation=cv2.INTER_LINEAR)
    assert np.abs(found.dense_map.values() - expected).max() < 0.02


@pytest.mark.parametrize("kind", ["relative", "inverse"])
def test_depth_without_a_unit_is_spread_over_16_bits(make_model, make_fit, kind) -> None:
    depth = np.linspace(-3, 7, 64 * 64, dtype=np.float32).reshape(64, 64)
    depth[0, 0] = np.nan
    spec = make_model({"depth_output": "depth", "depth_kind": kind}, {"depth": (1, 64, 64)})
    found = decode(spec, make_fit("stretch", 64, 64), depth=depth[None, None]).dense_map
    assert (found.kind, found.encoding, len(found.data)) == (f"{kind}_depth", "mono16", 2 * 64 * 64)
    levels = np.frombuffer(found.data, "<u2").reshape(64, 64)
    assert (levels[0, 0], levels.min(), levels[-1, -1]) == (0, 0, 65535)
    assert found.values()[1:] == pytest.approx(depth[1:], abs=10 / 65535)


def test_inverse_depth_is_assumed(make_model, make_fit) -> None:
    spec = make_model({"depth_output": "depth"}, {"depth": (1, 8, 8), "other": (3,)})
    found = decode(spec, make_fit("stretch", 64, 64), depth=np.ones((1, 1, 8, 8), np.float32)).dense_map
    assert (found.kind, found.minimum, found.maximum) == ("inverse_depth", 1, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, 0.0])
@pytest.mark.parametrize("parameters", [METRIC, {"depth_output": "depth"}])
def test_constant_outputs_give_valid_maps(make_model, make_fit, parameters, value) -> None:
    spec = make_model(parameters, {"depth": (1, 16, 16)})
    found = decode(spec, make_fit("letterbox", 64, 48), depth=np.full((1, 1, 16, 16), value, np.float32)).dense_map
    assert np.isfinite((found.minimum, found.maximum)).all()
    assert found.values().shape == (48, 64)


def test_a_model_without_batches_may_have_a_leading_1_or_2(make_model, make_fit) -> None:
    depth = np.arange(64, dtype=np.float32).reshape(8, 8)
    for dims in ((8, 8), (1, 8, 8), (1, 1, 8, 8), (1, 8, 8, 1)):
        spec = make_model(METRIC, {"depth": dims}, max_batch_size=0)
        found = decode(spec, make_fit("stretch", 8, 8), None, depth=depth.reshape(dims)).dense_map
        assert (found.minimum, found.maximum) == (0, 63)


def anomaly_outputs() -> dict[str, np.ndarray]:
    """Two regions, of which one has two values, and weak values around."""
    values = np.full((1, 1, 32, 32), 0.2, np.float32)
    values[..., 4:8, 4:10] = 0.7
    values[..., 20:24, 16:20] = 0.6
    values[..., 22, 17] = 0.95
    return {"anomaly_map": values, "pred_score": np.array([[0.875]], np.float32)}


@pytest.fixture
def inspection(make_model: Any) -> Any:
    def make(**parameters: str) -> ModelSpec:
        return make_model(ANOMALY | parameters, {"anomaly_map": (1, 32, 32), "pred_score": (1,), "pred_label": (1,)},
                          dtypes={"pred_label": DType.BOOL})  # fmt: skip

    return make


def test_anomalous_regions_are_detections_and_the_frame_has_a_score(inspection, make_fit) -> None:
    seen = decode(inspection(), make_fit("stretch", 640, 320), **anomaly_outputs())
    found = seen.dense_map
    assert (found.kind, found.encoding, found.score) == ("anomaly", "mono16", 0.875)
    assert found.maximum == pytest.approx(0.95, abs=0.08), "a peak of one pixel is lower between pixels"
    boxes = [(one.x_min, one.y_min, one.x_max, one.y_max) for one in seen.detections]
    assert boxes == [(320, 200, 400, 240), (80, 40, 200, 80)]
    assert [one.score for one in seen.detections] == pytest.approx([0.95, 0.7])
    assert [one.label for one in seen.detections] == ["anomaly", "anomaly"]


def test_values_that_are_no_numbers_are_no_anomaly(inspection, make_fit) -> None:
    outputs = anomaly_outputs()
    outputs["anomaly_map"][..., 0, :3] = np.nan, np.inf, -np.inf
    outputs["pred_score"][:] = np.nan
    seen = decode(inspection(), make_fit("stretch", 640, 320), **outputs)
    assert [one.score for one in seen.detections] == pytest.approx([0.95, 0.7])
    assert (seen.dense_map.score, seen.dense_map.minimum) == (0, pytest.approx(0.2))


def test_regions_lie_within_a_letterboxed_frame(inspection, make_fit) -> None:
    seen = decode(inspection(anomaly_threshold="0"), make_fit("letterbox", 100, 50), **anomaly_outputs())
    [found] = seen.detections
    assert (found.x_min, found.y_min, found.x_max, found.y_max) == (0, 0, 100, 50)


def test_a_higher_threshold_leaves_less(inspection, make_fit) -> None:
    seen = decode(inspection(anomaly_threshold="0.9"), make_fit("stretch", 640, 320), **anomaly_outputs())
    [found] = seen.detections
    assert (found.x_min, found.y_min, found.x_max, found.y_max) == (340, 220, 360, 230)
    assert decode(inspection(anomaly_threshold="1"), make_fit("stretch", 64, 64), **anomaly_outputs()).detections == ()


def test_without_an_output_for_it_the_score_is_the_maximum(make_model, make_fit) -> None:
    spec = make_model({"anomaly_output": "anomaly_map"}, {"anomaly_map": (1, 32, 32), "other": (3,)})
    found = decode(spec, make_fit("stretch", 64, 64), anomaly_map=anomaly_outputs()["anomaly_map"]).dense_map
    assert found.score == pytest.approx(0.95)


def test_a_map_of_noise_has_at_most_100_regions(inspection, make_fit) -> None:
    outputs = anomaly_outputs() | {"anomaly_map": np.indices((1, 1, 32, 32)).sum(axis=0) % 2 * np.float32(1)}
    outputs["anomaly_map"][..., 1::2, :] = 0
    found = decode(inspection(), make_fit("stretch", 320, 320), **outputs).detections
    assert len(found) == 100


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"depth_output": "other"}, "expected a map"),
        ({"depth_output": "missing"}, "parameter 'depth_output': expected one of 'depth', 'other'"),
        ({"depth_output": "depth", "depth_kind": "far"}, "'depth_kind': expected one of metric, relative, inverse"),
        ({"depth_output": "depth", "depth_scale": "2"}, "'depth_scale': expected depth_kind metric beside it"),
        (METRIC | {"depth_scale": "0"}, "'depth_scale': expected a number above 0"),
        ({"anomaly_output": "depth", "depth_output": "depth"}, "'depth_output': expected it to be left out"),
        ({"anomaly_output": "depth", "anomaly_score_output": "no"}, "'anomaly_score_output': expected one of"),
        ({"depth_outputs": "depth"}, "did you mean 'depth_output'"),
    ],
)
def test_a_wrong_declaration_is_refused(make_model, parameters, message) -> None:
    with pytest.raises(BadModelConfig) as caught:
        make_perception_decoder(make_model(parameters, {"depth": (1, 8, 8), "other": (3, 8, 8)}))
    assert message in str(caught.value)


def test_other_shapes_than_declared_are_an_error_of_the_model(make_model, inspection, make_fit) -> None:
    spec = make_model(METRIC, {"depth": (1, -1, -1)})
    with pytest.raises(BackendError, match=r"output 'depth': expected a map \[1, height, width\], given shape \[3, 8,"):
        decode(spec, make_fit("stretch", 64, 64), depth=np.zeros((1, 3, 8, 8), np.float32))
    outputs = anomaly_outputs() | {"pred_score": np.zeros((1, 2), np.float32)}
    with pytest.raises(BackendError, match="'pred_score': expected one score"):
        decode(inspection(), make_fit("stretch", 64, 64), **outputs)


def test_a_frame_that_is_too_long_for_a_map_is_refused(make_model, make_fit) -> None:
    spec, depth = make_model(METRIC, {"depth": (1, 8, 8)}), np.ones((1, 1, 8, 8), np.float32)
    assert decode(spec, make_fit("stretch", 32766, 1), depth=depth).dense_map.width == 32766
    with pytest.raises(InvalidRequest, match="sides of at most 32766 pixels for a map, given 32767x1"):
        decode(spec, make_fit("stretch", 32767, 1), depth=depth)


def test_a_map_is_returned_if_it_is_asked_for(make_model, inspection) -> None:
    depth = make_perception_decoder(make_model(METRIC, {"depth": (1, 8, 8)}))
    assert depth.settle(Returns(), model="net") == Returns(has_map=True)
    with pytest.raises(InvalidRequest, match="cannot answer with detections"):
        depth.settle(Returns(has_detections=True), model="net")
    anomaly = make_perception_decoder(inspection())
    assert anomaly.settle(Returns(), model="net") == Returns(has_map=True, has_detections=True)
    assert anomaly.settle(Returns(has_detections=True), model="net") == Returns(has_detections=True)
    other = make_perception_decoder(make_model({"class_output": "out"}, {"out": (5,)}))
    with pytest.raises(InvalidRequest, match="cannot answer with a map: its configuration has no parameter 'depth_out"):
        other.settle(Returns(has_map=True), model="net")
