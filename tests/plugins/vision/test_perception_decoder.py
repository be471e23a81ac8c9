"""Declarations of outputs, classes, and the results that a stream may request."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.config.model_parameters import default_text, settings_of
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BadModelConfig, InvalidRequest
from edge_server.plugins.vision import image_parameters
from edge_server.plugins.vision.outputs.output_parameters import DECLARATIONS, read_declaration
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.protocol.frame_messages import ClassScore, Returns


def classes(plan: Any, values: Any, top_k: int, fit: Any, row: int | None = 0) -> tuple[ClassScore, ...]:
    array = np.asarray(values, np.float32)[None]
    return plan.decode({"out": array}, row, fit, Returns(top_k=top_k), model="net").classes


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=30),
    top_k=st.integers(1, 40),
    activation=st.sampled_from(["none", "sigmoid"]),
)
def test_classes_are_sorted_by_score_and_then_by_index(make_model, make_fit, values, top_k, activation) -> None:
    plan = make_perception_decoder(make_model({"class_activation": activation}, {"out": (len(values),)}))
    scored = []
    for index, value in enumerate(values):
        if activation == "sigmoid" and not math.isnan(value):
            with np.errstate(over="ignore"):
                value = float(1 / (1 + np.exp(-np.float32(value))))
        if math.isfinite(value):
            scored.append((index, value))
    expected = sorted(scored, key=lambda pair: -pair[1])[:top_k]
    found = classes(plan, values, top_k, make_fit("stretch", 5, 5))
    assert [(one.index, one.score) for one in found] == expected


def test_softmax_turns_logits_into_probabilities(make_model, make_fit) -> None:
    spec = make_model({"class_activation": "softmax"}, {"out": (3, 1, 1)}, labels={"out": ("ant", "bee")})
    found = classes(make_perception_decoder(spec), [[[1.0]], [[3.0]], [[2.0]]], 3, make_fit("stretch", 5, 5))
    powers = [math.exp(value) for value in (3.0, 2.0, 1.0)]
    assert [(one.index, one.label) for one in found] == [(1, "bee"), (2, ""), (0, "ant")]
    assert [one.score for one in found] == pytest.approx([power / sum(powers) for power in powers], abs=1e-6)


def test_integer_outputs_of_quantised_classifiers_are_scores_too(make_model, make_fit) -> None:
    plan = make_perception_decoder(make_model({"class_output": "out"}, {"out": (3,)}, dtypes={"out": DType.UINT8}))
    outputs = {"out": np.array([[7, 255, 0]], np.uint8)}
    found = plan.decode(outputs, 0, make_fit("stretch", 5, 5), Returns(top_k=2), model="net").classes
    assert found == (ClassScore(1, 255.0), ClassScore(0, 7.0))


def test_a_scale_makes_scores_of_integers_probabilities(make_model, make_fit) -> None:
    parameters = {"class_scale": "0.00390625"}
    plan = make_perception_decoder(make_model(parameters, {"out": (3,)}, dtypes={"out": DType.UINT8}))
    outputs = {"out": np.array([[64, 192, 0]], np.uint8)}
    found = plan.decode(outputs, 0, make_fit("stretch", 5, 5), Returns(top_k=2), model="net").classes
    assert found == (ClassScore(1, 0.75), ClassScore(0, 0.25))


def test_labels_on_a_single_vector_declare_a_classifier(make_model) -> None:
    plan = make_perception_decoder(make_model({}, {"out": (3,)}, labels={"out": ("a", "b", "c")}))
    assert plan.what == Returns(top_k=5)
    assert plan.labels == ("a", "b", "c")
    assert make_perception_decoder(make_model({}, {"out": (3,)})) is None
    assert make_perception_decoder(make_model({}, {"out": (3, 8, 8)}, labels={"out": ("a", "b", "c")})) is None


def test_image_top_k_declares_the_number_of_classes_returned(make_model) -> None:
    assert make_perception_decoder(make_model({"image_top_k": "3"}, {"out": (10,)})).what == Returns(top_k=3)


def test_image_top_k_with_several_outputs_applies_to_image_bodies_only(make_model) -> None:
    outputs = {"color": (3,), "kind": (4,)}
    assert make_perception_decoder(make_model({"image_top_k": "3"}, outputs)) is None
    plan = make_perception_decoder(make_model({"image_top_k": "3"}, outputs, labels={"kind": ("a", "b", "c", "d")}))
    assert plan.output_names(plan.what) == ("kind",)
    with pytest.raises(BadModelConfig, match="'class_output': expected one of 'color', 'kind', given nothing"):
        make_perception_decoder(make_model({"class_activation": "softmax"}, outputs))


def test_the_bundled_classifier_declares_classes(bundled: Any) -> None:
    plan = make_perception_decoder(bundled("efficientnet_lite0"))
    assert plan.what == Returns(top_k=5)
    assert plan.labels[967] == "espresso"


EVERYTHING = {"detection_head": "ssd", "detection_outputs": "boxes,scores", "class_output": "c", "mask_output": "m"}
OUTPUTS = {"boxes": (4, 4), "scores": (4, 2), "c": (3,), "m": (2, 16, 16), "other": (1,)}


def test_a_stream_selects_among_the_declared_results(make_model, make_fit) -> None:
    plan = make_perception_decoder(make_model(EVERYTHING, OUTPUTS))
    assert plan.what == Returns(top_k=5, has_detections=True, has_mask=True)
    outputs = {name: np.full((1, *dims), 0.5, np.float32) for name, dims in OUTPUTS.items()}
    fit = make_fit("stretch", 40, 30)
    all_of_it = plan.decode(outputs, 0, fit, plan.what, model="net")
    assert (len(all_of_it.classes), all_of_it.mask.width, all_of_it.detections) == (3, 40, ())
    nothing = plan.decode(outputs, 0, fit, Returns(tensors=("other",)), model="net")
    assert (nothing.classes, nothing.detections, nothing.mask) == ((), (), None)


def test_only_outputs_needed_for_the_requested_results_are_named(make_model) -> None:
    plan = make_perception_decoder(make_model(EVERYTHING, OUTPUTS))
    assert plan.output_names(Returns(top_k=1)) == ("c",)
    assert plan.output_names(Returns(has_detections=True)) == ("boxes", "scores")
    assert plan.output_names(plan.what) == ("c", "boxes", "scores", "m")


def test_without_a_selection_all_declared_results_are_returned(make_model) -> None:
    plan = make_perception_decoder(make_model(EVERYTHING, OUTPUTS))
    wish = Returns(has_annotated_jpeg=True, jpeg_quality=70)
    settled = plan.settle(wish, model="net")
    assert settled == replace(plan.what, has_annotated_jpeg=True, jpeg_quality=70)
    assert plan.settle(Returns(tensors=("*",)), model="net") == Returns(tensors=("*",))


@pytest.mark.parametrize(
    ("wish", "noun"),
    [(Returns(has_detections=True), "detections"), (Returns(has_mask=True), "a mask")],
)
def test_requesting_an_undeclared_result_is_refused_with_the_missing_key(make_model, wish, noun) -> None:
    plan = make_perception_decoder(make_model({"image_top_k": "1"}, {"out": (3,)}))
    with pytest.raises(InvalidRequest, match=f"'net' cannot answer with {noun}: .* 'detection_head'|'mask_output'"):
        plan.settle(wish, model="net")


def test_outputs_without_batching_may_have_a_leading_dimension_of_one(make_model, make_fit) -> None:
    fit = make_fit("stretch", 64, 64)
    row = np.array([[32, 32, 8, 8, 1, 0.5]], np.float32)
    for dims in ((1, 6), (1, 1, 6), (-1, 1, 6)):
        plan = make_perception_decoder(make_model({"detection_head": "yolov5"}, {"out": dims}, max_batch_size=0))
        array = row if len(dims) == 2 else row[None]
        assert len(plan.decode({"out": array}, None, fit, plan.what, model="net").detections) == 1


@pytest.mark.parametrize(
    "outputs",
    [{}, {"out": np.zeros((1, 9))}, {"out": np.zeros((1, 9, 4))}, {"out": np.zeros((0, 9, 6))}, {"out": np.zeros(())}],
)
def test_outputs_that_are_not_as_declared_are_errors_that_name_the_model(make_model, make_fit, outputs) -> None:
    plan = make_perception_decoder(make_model({"detection_head": "yolov5"}, {"out": (-1, -1)}))
    with pytest.raises(BackendError, match=r"model 'net'.*out"):
        plan.decode(outputs, 0, make_fit("stretch", 5, 5), plan.what, model="net")


WRONG = [
    ({"detection_hed": "yolov5"}, "did you mean 'detection_head'"),
    ({"class_actvation": "none"}, "did you mean 'class_activation'"),
    ({"class_zzzzzzzzzzzzzz": "1"}, "'class_zzzzzzzzzzzzzz': expected one of those in docs/reference/model-"),
    ({"detection_head": "yolov99"}, "'detection_head': did you mean 'yolov8'\\? Expected one of .*, given 'yolov99'"),
    ({"detection_max": "5"}, "'detection_max': expected detection_head beside it, given '5'"),
    ({"track": "bytetrak"}, "'track': expected bytetrack, given 'bytetrak'"),
    ({"detection_head": "yolov5", "detection_strides": "8"}, "has no use for it"),
    ({"detection_head": "yolov10", "detection_iou_threshold": "0.5"}, "has no use for it"),
    ({"detection_head": "yolov5", "detection_score_threshold": "1.5"}, "a number from 0 to 1"),
    ({"detection_head": "yolov5", "detection_score_threshold": "nan"}, "a number from 0 to 1"),
    ({"detection_head": "yolov5", "detection_iou_threshold": "x"}, "a number from 0 to 1"),
    ({"detection_head": "yolov5", "detection_max": "1001"}, "a whole number from 1 to 1000"),
    ({"detection_head": "yolov5", "detection_max": "+5"}, "a whole number from 1 to 1000"),
    ({"detection_head": "yolov5", "detection_class_agnostic": "maybe"}, "true or false"),
    ({"detection_head": "yolov5", "detection_outputs": "out,,"}, "different names"),
    ({"detection_head": "yolov5", "detection_outputs": "nothing"}, "named in parameter 'detection_outputs'"),
    ({"detection_head": "yunet", "detection_strides": "8,0"}, "whole numbers from 1 to 1024"),
    ({"detection_head": "ssd", "detection_variances": "0.1"}, "two numbers above 0"),
    ({"detection_head": "ssd", "detection_variances": "0.1,-1"}, "two numbers above 0"),
    ({"detection_head": "ssd"}, "2 or 3 of its outputs"),
    ({"detection_head": "yunet"}, "12 of its outputs"),
    ({"detection_head": "yolov8", "detection_keypoints": "9"}, r"\[4 \+ classes \+ 3 \* 9 keypoints, boxes\]"),
    ({"class_output": "nothing"}, "parameter 'class_output': expected one of 'out', given 'nothing'"),
    ({"mask_activation": "softmax"}, "none or sigmoid"),
    ({"mask_threshold": "2"}, "a number from 0 to 1"),
    ({"mask_unseen": "65536"}, "a whole number from 0 to 65535"),
]


@pytest.mark.parametrize(("parameters", "message"), WRONG)
def test_an_invalid_declaration_is_refused_with_model_key_and_expected(make_model, parameters, message) -> None:
    with pytest.raises(BadModelConfig, match=message) as caught:
        make_perception_decoder(make_model(parameters, {"out": (20, 6)}))
    assert "model 'net'" in caught.value.message


def test_detections_require_an_image_input(make_model) -> None:
    spec = make_model({"detection_head": "yolov5"}, {"out": (20, 6)})
    bare = replace(spec, parameters={"detection_head": "yolov5"})
    with pytest.raises(BadModelConfig, match=r"'detection_head': expected parameters 'image_\.\.\.'"):
        make_perception_decoder(bare)


def test_outputs_without_numbers_are_refused(make_model) -> None:
    with pytest.raises(BadModelConfig, match="output 'out': expected numbers, given BYTES"):
        make_perception_decoder(make_model({"class_output": "out"}, {"out": (3,)}, dtypes={"out": DType.BYTES}))


DEFAULTS = {
    key: default_text(setting)
    for declaration in (image_parameters.Declaration, *DECLARATIONS)
    for key, setting in settings_of(declaration).items()
}
BESIDE = {
    "image_resize": {"image_fit": "crop"},
    "image_crop_offset": {"image_fit": "crop"},
    "image_pad_value": {"image_fit": "letterbox"},
    "image_mean": {"image_scale": "1"},
    "image_stddev": {"image_scale": "1"},
    "detection_unclip_ratio": {"detection_head": "dbnet"},
    "detection_track_threshold": {"detection_head": "ssd", "track": "bytetrack"},
    "detection_keypoints": {"detection_head": "yolov8"},
    "detection_mask_coefficients": {"detection_head": "yolov8"},
    "detection_keypoint_values": {"detection_head": "yolov8"},
    "detection_transposed": {"detection_head": "yolov8"},
    "detection_columns": {"detection_head": "yolov10"},
    "detection_bins": {"detection_head": "nanodet"},
    "depth_kind": {"depth_output": "out"},
    "depth_scale": {"depth_kind": "metric"},
    "anomaly_threshold": {"anomaly_output": "out"},
    "deepstack": {"detection_head": "ssd"},
    "class_activation": {"class_output": "out"},
    "class_scale": {"class_output": "out"},
}
"""Key -> what stands beside it. Other keys of detections and masks need a head or an output."""


@pytest.mark.parametrize("key", [key for key, text in DEFAULTS.items() if " " not in text])
def test_the_documented_default_of_a_key_is_in_force(key: str) -> None:
    beside = BESIDE.get(key)
    if beside is None:
        beside = {"detection_head": "ssd"} if key.startswith("detection_") else {"mask_output": "out"}
    default = DEFAULTS[key]
    for read in (image_parameters.read_declaration, read_declaration):
        assert read("m", beside | {key: default}) == read("m", beside)


def test_a_model_without_output_declarations_has_no_plan(make_model, repository_root: Path) -> None:
    assert make_perception_decoder(make_model({}, {"out": (3,)})) is None
    assert make_perception_decoder(make_model({"note": "nothing"}, {"one": (3,), "two": (3,)})) is None


@pytest.mark.parametrize("activation", ["none", "sigmoid", "softmax"])
def test_without_classes_there_is_no_best_class(make_model, make_fit, activation) -> None:
    plan = make_perception_decoder(make_model({"class_activation": activation}, {"out": (-1,)}))
    assert classes(plan, [], 3, make_fit("stretch", 5, 5)) == ()
