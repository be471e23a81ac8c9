"""Results as lines for people and for programs."""

from __future__ import annotations

import json
import math

import numpy as np

from edge_server.core.tensor import DType, Tensor
from edge_server.plugins.cameras.commands.result_lines import drop_as_json, result_in_words
from edge_server.plugins.cameras.sinks.result_json import MAX_ELEMENTS, result_as_json
from edge_server.protocol.frame_messages import (
    ClassScore,
    DenseMap,
    Detection,
    DropReason,
    FrameDropped,
    FrameHeader,
    FrameResult,
    FrameTimes,
    Keypoint,
    Mask,
    ObjectMask,
    RotatedBox,
)

HEADER = FrameHeader(12, 34, "front", 5)


def told(result: FrameResult) -> dict[str, object]:
    """Return what a reader of the JSON line gets; NaN is no JSON."""
    line = json.dumps(result_as_json("cam", result, 0.0123), allow_nan=False)
    return json.loads(line)  # type: ignore[no-any-return]


def test_classes_are_named_with_their_scores() -> None:
    result = FrameResult(HEADER, classes=(ClassScore(967, 0.948, "espresso"), ClassScore(4, 0.01)))
    assert result_in_words(result) == "espresso 0.95, class 4 0.01"
    assert told(result)["classes"] == [
        {"index": 967, "score": 0.948, "label": "espresso"},
        {"index": 4, "score": 0.01, "label": ""},
    ]


def test_detections_are_counted_by_kind_with_the_best_score_of_each() -> None:
    boxes = [Detection(1, 2, 30, 40, score, 0, "person") for score in (0.5, 0.875, 0.6)]
    cycle = Detection(0, 0, 5, 5, 0.7, 1, keypoints=(Keypoint(1, 2, 0.5),), track_id=9)
    result = FrameResult(HEADER, detections=(*boxes, cycle))
    assert result_in_words(result) == "3 person 0.88, 1 class 1 0.70"
    first, *_, last = told(result)["detections"]  # type: ignore[misc]
    assert first == {"box": [1, 2, 30, 40], "score": 0.5, "class_index": 0, "label": "person"}
    assert (last["keypoints"], last["track_id"]) == ([[1, 2, 0.5]], 9)  # type: ignore[index]


def test_only_a_late_result_says_so() -> None:
    assert told(FrameResult(HEADER, is_late=True))["is_late"] is True
    assert "is_late" not in told(FrameResult(HEADER))


def test_an_oriented_box_has_its_centre_size_and_angle() -> None:
    box = Detection(0, 20, 30, 60, 0.75, 3, "ship", rotated=RotatedBox(12, 40, 50, 20, 1 / 3))
    [found] = told(FrameResult(HEADER, detections=(box,)))["detections"]  # type: ignore[misc]
    assert found["rotated"] == {"x": 12, "y": 40, "width": 50, "height": 20, "angle": 0.3333333}


def test_a_map_is_printed_as_its_range_or_score_without_its_pixels() -> None:
    depth = DenseMap("metric_depth", 2, 3, "32FC1", bytes(24), 0.25, 7.125)
    result = FrameResult(HEADER, dense_map=depth)
    assert result_in_words(result) == "metric depth 0.25 to 7.12 m"
    assert told(result)["map"] == {"kind": "metric_depth", "height": 2, "width": 3, "minimum": 0.25, "maximum": 7.125}
    assert "detections" not in told(result)
    anomaly = DenseMap("anomaly", 2, 3, "mono16", bytes(12), 0.0, 0.75, 0.875)
    result = FrameResult(HEADER, dense_map=anomaly, detections=(Detection(0, 0, 1, 1, 0.75, 0, "anomaly"),))
    assert result_in_words(result) == "1 anomaly 0.75; anomaly of the picture 0.88"
    assert told(result)["map"]["score"] == 0.875  # type: ignore[index]


def test_an_image_without_detections_has_an_empty_list() -> None:
    assert result_in_words(FrameResult(HEADER)) == "nothing found"
    assert told(FrameResult(HEADER))["detections"] == []


def test_a_mask_is_printed_as_the_fraction_of_each_class() -> None:
    pixels = bytes([0] * 50 + [1] * 30 + [7] * 20)
    result = FrameResult(HEADER, mask=Mask(10, 10, "mono8", pixels, ("road", "sky")))
    assert result_in_words(result) == "road 50%, sky 30%, class 7 20%"
    assert told(result)["mask"] == {"height": 10, "width": 10, "shares": {"road": 0.5, "sky": 0.3, "class 7": 0.2}}
    wide = np.array([300] * 4, "<u2").tobytes()
    assert result_in_words(FrameResult(HEADER, mask=Mask(2, 2, "mono16", wide))) == "class 300 100%"


def test_masks_of_objects_are_a_fraction_of_the_picture_and_polygons() -> None:
    masks = [ObjectMask(2, 0, 8, 5, b"\xff" * 5), ObjectMask(0, 8, 10, 1, b"\xff\xc0"), None]
    found = tuple(Detection(0, 0, 10, 10, 0.5, 0, "cup", mask=mask) for mask in masks)
    result = FrameResult(HEADER, height=10, width=10, detections=found)
    assert result_in_words(result) == "3 cup 0.50 on 50% of the picture"
    first, _, last = told(result)["detections"]  # type: ignore[misc]
    assert first["polygons"] == [[[2, 0], [2, 5], [10, 5], [10, 0]]]  # type: ignore[index]
    assert "polygons" not in last


def test_texts_that_were_read_are_quoted() -> None:
    found = (
        Detection(0, 0, 9, 9, 0.8, 0, "line", text="Exit", text_score=0.9),
        Detection(0, 20, 9, 29, 0.7, 0, "line"),
    )
    result = FrameResult(HEADER, detections=found)
    assert result_in_words(result) == "2 line 0.80: 'Exit'"
    first, last = told(result)["detections"]  # type: ignore[misc]
    assert (first["text"], first["text_score"]) == ("Exit", 0.9)  # type: ignore[index]
    assert "text" not in last


def test_small_tensors_are_printed_with_their_values() -> None:
    array = np.array([[1.5, math.nan, math.inf]], np.float32)
    tensors = (
        Tensor("scores", DType.FP32, array),
        Tensor("texts", DType.BYTES, np.array([b"a", b"\xff"], object)),
        Tensor("brain", DType.BF16, np.array([0x3FC0], np.uint16)),
        Tensor("large", DType.UINT8, np.zeros(MAX_ELEMENTS + 1, np.uint8)),
    )
    result = FrameResult(HEADER, tensors=tensors)
    scores, texts, brain, large = told(result)["tensors"]  # type: ignore[misc]
    assert scores == {"name": "scores", "datatype": "FP32", "shape": [1, 3], "data": [1.5, None, None]}
    assert texts["data"] == ["a", "\ufffd"]  # type: ignore[index]
    assert brain["data"] == [1.5]  # type: ignore[index]
    assert large == {"name": "large", "datatype": "UINT8", "shape": [MAX_ELEMENTS + 1]}
    assert result_in_words(FrameResult(HEADER, tensors=tensors[:1])) == "scores FP32[1, 3]"


def test_an_error_is_printed_instead_of_a_result() -> None:
    result = FrameResult(HEADER, error_code="INVALID_ARG", error="frame 5: too small")
    assert result_in_words(result) == "INVALID_ARG: frame 5: too small"
    line = told(result)
    assert line["error"] == {"code": "INVALID_ARG", "message": "frame 5: too small"}
    assert "detections" not in line


def test_a_line_has_the_frame_its_age_and_the_drops_before_it() -> None:
    times = FrameTimes(10, 20, 30, 40, 50)
    line = told(
        FrameResult(HEADER, times, {DropReason.NEWER: 2}, model="m", version=3, runtime="openvino", height=4, width=6)
    )
    assert (line["kind"], line["stream"], line["seq"], line["frame_id"]) == ("result", "cam", 5, "front")
    assert (line["stamp"], line["age_ms"]) == ({"sec": 12, "nanosec": 34}, 12.3)
    assert line["dropped"] == {"newer": 2}
    assert line["times"] == {
        "received_unix_ns": 10, "taken_us": 20, "queued_us": 30, "started_us": 40, "finished_us": 50,
    }  # fmt: skip
    assert (line["model"], line["version"], line["height"], line["width"]) == ("m", 3, 4, 6)
    assert "governor" not in line


def test_a_drop_names_frame_and_reason() -> None:
    notice = FrameDropped(HEADER, DropReason.MAX_AGE, "waited 120 ms")
    assert drop_as_json("cam", notice) == {
        "kind": "dropped", "stream": "cam", "seq": 5, "reason": "max-age", "detail": "waited 120 ms",
    }  # fmt: skip
