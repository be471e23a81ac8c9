"""Recognition of YOLO exports: class names as literals, and parameters beside those that a configuration states.

Served models: test_yolo_exports.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec, Recognised
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.plugins.vision.exporters.ultralytics import read_names, read_pair
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.layout_recognition import recognise
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.plugins.vision.plugin import PLUGIN
from edge_server.plugins.vision.resize import FitMode

METADATA = {"stride": "32", "task": "detect", "names": "{0: 'a', 1: 'b'}", "imgsz": "[320, 640]"}


def spec(parameters: dict[str, str] | None = None, **changed: Any) -> ModelSpec:
    made: dict[str, Any] = {
        "name": "net", "backend": "onnxruntime", "platform": "", "max_batch_size": 4, "instance_groups": (),
        "inputs": (InputSpec("images", DType.FP32, (3, -1, -1)),),
        "outputs": (OutputSpec("output0", DType.FP32, (6, -1)),),
        "parameters": parameters or {},
    }  # fmt: skip
    return ModelSpec(**made | changed)


def recognised(parameters: dict[str, str] | None = None, **changed: str) -> Recognised:
    found = recognise(spec(parameters), METADATA | changed)
    assert found is not None
    return found


@given(names=st.lists(st.text(max_size=20), min_size=1, max_size=20), is_list=st.booleans())
def test_names_are_those_that_python_reads(names: list[str], is_list: bool) -> None:
    text = str(names) if is_list else str(dict(enumerate(names)))
    assert read_names(text) == tuple("".join(c if c.isprintable() else " " for c in name) for name in names)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("[640, 480]", (640, 480)),
        ("(17,3)", (17, 3)),
        ("640", (640, 640)),
        ("[640]", None),
        ("[-1, 2]", None),
        ("", None),
    ],
)
def test_pairs_of_numbers(text: str, pair: tuple[int, int] | None) -> None:
    assert read_pair(text) == pair


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "{0: 1}", "{0: 'a'", "{0: 'a' 1: 'b'}", "{0: 'a', 0: 'b'}", "{1: 'a'}", "['a', 0: 'b']",
        "{0: 'a' + 'b'}", "{0: '\\x'}", "{0: '\\N{NO SUCH NAME}'}", "{99999: 'a'}", "{" * 1000 + "}" * 1000,
        "{0: " + "'\\'" * 300_000 + "}", "{0: '" + "a\\" * 500_000 + "'}", "{" + " " * 1_000_000 + "}",
        "{0:" + " " * 1_000_000 + "}", "[" + "'a'," * 200_000 + "]",
    ],
    ids=lambda text: repr(text[:12]) + str(len(text)),
)  # fmt: skip
def test_names_that_are_no_literals_are_not_believed(text: str) -> None:
    began_s = time.process_time()
    found = recognised(names=text)
    assert (found.parameters, found.labels) == ({}, {})
    assert "but nothing is recognised: expected " in found.note
    assert len(found.note) < 300
    assert time.process_time() - began_s < 2


def test_an_export_of_several_pictures_says_its_batch_and_how_to_export_it() -> None:
    inputs = (InputSpec("images", DType.FP32, (4, 3, 640, 640)),)
    outputs = (OutputSpec("output0", DType.FP32, (4, 6, 8400)),)
    found = recognise(spec(max_batch_size=0, inputs=inputs, outputs=outputs), METADATA | {"batch": "4"})
    assert found is not None
    assert "it was exported with batch=4, and each request would need 4 pictures: export it again " in found.note
    assert found.note.endswith("with batch=1, or with dynamic=True")


def test_open_sizes_come_from_the_metadata() -> None:
    plan = make_image_plan(spec(recognised=recognised()))
    assert plan is not None
    assert (plan.rule.mode, plan.item_shape, plan.pad) == (FitMode.LETTERBOX, (3, 320, 640), (114, 114, 114))


@pytest.mark.parametrize(
    ("stated", "absent"),
    [
        ({"image_fit": "stretch"}, {"image_fit", "image_pad_value"}),
        ({"keep_aspect_ratio": "false"}, {"image_fit", "image_pad_value"}),
        ({"image_scale": "1", "image_mean": "127"}, {"image_scale"}),
        ({"image_interpolation": "area"}, set()),
        ({"image_pad_value": "0", "track": "bytetrack"}, set()),
    ],
)
def test_stated_parameters_win(stated: dict[str, str], absent: set[str]) -> None:
    found = recognised(stated)
    assert recognised().parameters.keys() - found.parameters.keys() == absent
    made = spec(stated, recognised=found)
    assert {key: made.all_parameters[key] for key in stated} == stated


@pytest.mark.parametrize(
    "stated",
    [
        {"detection_head": "yolov8"},
        {"detection_head": "rtdetr"},
        {"class_output": "output0"},
        {"mask_output": "out"},
        {"image_top_k": "5"},
    ],
)
def test_a_stated_head_leaves_nothing_to_recognise(stated: dict[str, str]) -> None:
    assert recognise(spec(stated), METADATA) is None


def test_a_stated_head_that_metadata_and_shapes_disprove_is_refused_with_the_right_one() -> None:
    known_sizes = (OutputSpec("output0", DType.FP32, (6, 4200)),)
    with pytest.raises(BadModelConfig, match=r"'net', .* expected yolov8, as .* \(yolo detect, 2 .*, given 'yolov5'"):
        recognise(spec({"detection_head": "yolov5"}, outputs=known_sizes), METADATA)
    assert recognise(spec({"detection_head": "yolo11"}, outputs=known_sizes), METADATA) is None
    open_sizes = (OutputSpec("output0", DType.FP32, (-1, -1)),)
    assert recognise(spec({"detection_head": "yolov5"}, outputs=open_sizes), METADATA) is None


@pytest.mark.parametrize("head", ["ssd", "nms_inside"])
def test_a_stated_head_of_several_outputs_is_refused_for_a_yolo_that_has_one(head: str) -> None:
    with pytest.raises(BadModelConfig, match=rf"expected yolov8, as metadata and shapes .*, given '{head}'"):
        recognise(spec({"detection_head": head}), METADATA)


def test_a_wrong_parameter_beside_a_recognised_head_is_refused_for_its_value() -> None:
    with pytest.raises(BadModelConfig, match="parameter 'track': expected bytetrack, given 'bytetrak'"):
        recognise(spec({"track": "bytetrak"}), METADATA)


def test_other_metadata_do_not_concern_it() -> None:
    assert PLUGIN.recognisers[0](spec(), {"names": "{0: 'a'}", "task": "detect"}) is None
    assert recognise(spec(), {"stride": "32"}) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"inputs": ()}, "expected one input, given 0"),
        ({"outputs": ()}, "expected one output, given 0"),
        ({"inputs": (InputSpec("images", DType.UINT8, (3, 320, 640)),)}, "given 'images' UINT8 [3, 320, 640]"),
        (
            {"inputs": (InputSpec("images", DType.FP32, (3, 640, 640)),)},
            "the metadata state an input of 640x320, the input is [3, 640, 640]",
        ),
        (
            {"outputs": (OutputSpec("output0", DType.FP32, (6, 300)),)},
            "300 boxes, expected one of 17000, 4200, 1000",
        ),
        ({"outputs": (OutputSpec("output0", DType.BYTES, (6, -1)),)}, "expected numbers, given BYTES"),
    ],
)
def test_a_model_that_does_not_fit_says_why(changed: dict[str, Any], reason: str) -> None:
    found = recognise(spec(**changed), METADATA)
    assert found is not None
    assert not found.parameters
    assert reason in found.note


@pytest.mark.parametrize("stated", [{"keep_aspect_ratio": "false"}, {"image_fit": "stretch"}])
def test_a_stated_fit_wins_over_that_of_a_classifier(stated: dict[str, str]) -> None:
    classifier = spec(stated, outputs=(OutputSpec("output0", DType.FP32, (2,)),))
    found = recognise(classifier, METADATA | {"task": "classify"})
    assert found is not None
    assert found.parameters["class_output"] == "output0"
    assert "image_fit" not in found.parameters


def test_an_output_without_room_for_boxes_beside_the_batch_names_the_batches() -> None:
    stated = {"detection_head": "yolov10", "network_image_width": "64", "network_image_height": "64"}
    rows = spec(stated, outputs=(OutputSpec("output0", DType.FP32, (6,)),))
    with pytest.raises(BadModelConfig, match=r"given 'output0' \[6\]; if the first .* expected max_batch_size 0 and"):
        make_perception_decoder(rows)
