"""Metadata of Hugging Face, PaddleDetection, OpenVINO and TFLite: what they make of a model, and hostile texts."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.exporters.exported_metadata import UnfitMetadataError
from edge_server.plugins.vision.exporters.simple_yaml import parse_yaml
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.layout_recognition import recognise
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.plugins.vision.plugin import METADATA_KEYS

NAMES = ("person", "cup", "it's \u00e9")
CONFIG = {
    "architectures": ["DFineForObjectDetection"],
    "model_type": "d_fine",
    "id2label": {"0": NAMES[0], "1": NAMES[1], "2": NAMES[2]},
}
PROCESSOR = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
    "size": {"height": 320, "width": 640},
}
PADDLE = """mode: paddle
arch: YOLO
Preprocess:
- interp: 2
  keep_ratio: false
  target_size:
  - 320
  - 640
  type: Resize
- mean:
  - 0.485
  - 0.456
  - 0.406
  norm_type: mean_std
  std: [0.229, 0.224, 0.225]
  type: NormalizeImage
- type: Permute
label_list:
- person
- "cup"
- 'it''s \u00e9'
NMS:
  name: MultiClassNMS
"""
MODEL_INFO = {
    "model_info/model_type": "YOLO", "model_info/labels": "person traffic_light", "model_info/pad_value": "114",
    "model_info/reverse_input_channels": "YES", "model_info/scale_values": "255.0",
    "model_info/resize_type": "fit_to_window_letterbox",
}  # fmt: skip
ULTRALYTICS_FILE = {
    "stride": 32, "task": "detect", "names": {"0": NAMES[0], "1": NAMES[1], "2": NAMES[2]}, "imgsz": [320, 640],
    "args": {"nms": False}, "end2end": False, "head": "Detect",
}  # fmt: skip
METADATA_YAML = """description: Ultralytics YOLO11n model
stride: 32
task: detect
imgsz:
- 320
- 640
names:
  0: person
  1: cup
  2: it's \u00e9
args:
  nms: false
end2end: false
"""


TFLITE = {
    "inputs": [{"type": "FP32", "content": "image", "color": "rgb", "mean": [127.5], "std": [1.0, 2.0, 4.0]}],
    "outputs": [{"type": "FP32", "content": "feature", "axis_labels": "labels.txt"}],
}


def of_tflite(of_input: dict[str, Any] | None = None, of_output: dict[str, Any] | None = None) -> dict[str, str]:
    described = {
        "inputs": [TFLITE["inputs"][0] | (of_input or {})], "outputs": [TFLITE["outputs"][0] | (of_output or {})]
    }  # fmt: skip
    return {"tflite_metadata": json.dumps(described), "packed/labels.txt": "\r\n".join(NAMES) + "\n"}


def network(
    outputs: dict[str, tuple[int, ...]],
    image: tuple[int, ...] = (3, 320, 640),
    others: dict[str, int] | None = None,
    dtype: DType = DType.FP32,
) -> ModelSpec:
    return ModelSpec(
        name="net", backend="onnxruntime", platform="", max_batch_size=1, instance_groups=(),
        inputs=(
            InputSpec("image", dtype, image),
            *(InputSpec(name, DType.FP32, (count,)) for name, count in (others or {}).items()),
        ),
        outputs=tuple(OutputSpec(name, dtype, dims) for name, dims in outputs.items()),
    )  # fmt: skip


def of_hugging_face(config: dict[str, Any] | None = None, processor: dict[str, Any] | None = None) -> dict[str, str]:
    return {
        "config.json": json.dumps(CONFIG | (config or {})),
        "preprocessor_config.json": json.dumps(PROCESSOR | (processor or {})),
    }


DETR = {"logits": (300, 3), "pred_boxes": (300, 4)}
RECOGNISED: dict[str, tuple[ModelSpec, dict[str, str], dict[str, str], tuple[str, ...]]] = {
    "D-FINE": (
        network(DETR), of_hugging_face(),
        {"detection_head": "detr", "detection_outputs": "pred_boxes,logits", "image_fit": "stretch"}, NAMES,
    ),
    "D-FINE of any size": (
        network(DETR, (3, -1, -1)), of_hugging_face(),
        {"network_image_width": "640", "network_image_height": "320"}, NAMES,
    ),
    "DETR": (
        network({"logits": (100, 4), "pred_boxes": (100, 4)}),
        of_hugging_face(
            {"model_type": "detr"},
            {"size": {"shortest_edge": 800, "longest_edge": 1333}, "do_normalize": True, "image_mean": [0.5, 0.4, 0.3],
             "image_std": [0.2, 0.2, 0.1]},
        ),
        {"detection_activation": "softmax", "detection_background": "3", "image_mean": "0.5,0.4,0.3",
         "image_fit": "letterbox", "image_stddev": "0.2,0.2,0.1"}, NAMES,
    ),
    "ViT": (
        network({"logits": (3,)}),
        of_hugging_face({"architectures": ["ViTForImageClassification"], "model_type": "vit"}),
        {"class_output": "logits", "class_activation": "softmax"}, NAMES,
    ),
    "classifier with a crop": (
        network({"logits": (3,)}, (3, 224, 224)),
        of_hugging_face(
            {"architectures": ["ResNetForImageClassification"], "model_type": "resnet"},
            {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}},
        ),
        {"image_fit": "crop", "image_resize": "256"}, NAMES,
    ),
    "PP-YOLOE with NMS": (
        network({"rows": (-1, 6), "count": (1,)}, others={"scale_factor": 2, "im_shape": 2}),
        {"infer_cfg.yml": PADDLE},
        {"detection_columns": "class,score,box", "detection_outputs": "rows", "image_input": "image",
         "image_constants": "scale_factor=1,1;im_shape=320,640", "image_mean": "0.485,0.456,0.406",
         "image_scale": "1/255"}, NAMES,
    ),
    "PP-YOLOE without NMS": (
        network({"boxes": (4200, 4), "scores": (3, 4200)}, others={"scale_factor": 2}), {"infer_cfg.yml": PADDLE},
        {"detection_head": "ppyoloe", "detection_outputs": "boxes,scores"}, NAMES,
    ),
    "OpenVINO": (
        network({"out": (6, 4200)}), MODEL_INFO,
        {"detection_head": "yolov8", "image_color": "rgb", "image_stddev": "255.0", "image_fit": "letterbox",
         "image_pad_value": "114"}, ("person", "traffic_light"),
    ),
    "OpenVINO with another resize": (
        network({"out": (6, 4200)}),
        MODEL_INFO | {"model_info/resize_type": "crop", "model_info/interpolation_mode": "CUBIC"},
        {"image_fit": "crop", "image_crop_offset": "before", "image_interpolation": "cubic"},
        ("person", "traffic_light"),
    ),
    "OpenVINO boxes": (
        network({"boxes": (100, 5), "labels": (100,)}), MODEL_INFO | {"model_info/model_type": "ssd"},
        {"detection_head": "nms_inside", "detection_outputs": "boxes,labels"}, ("person", "traffic_light"),
    ),
    "metadata.yaml": (
        network({"out": (7, 4200)}), {"metadata.yaml": METADATA_YAML}, {"detection_head": "yolov8"}, NAMES
    ),
    "engine": (
        network({"out": (7, 4200)}), {"metadata.json": json.dumps(ULTRALYTICS_FILE)}, {"detection_head": "yolov8"},
        NAMES,
    ),
    "TFLite": (
        network({"out": (7, 4200)}, (320, 640, 3)), {"packed/metadata.json": json.dumps(ULTRALYTICS_FILE)},
        {"detection_head": "yolov8", "detection_box_unit": "normalized"}, NAMES,
    ),
    "classifier of TFLite Support": (
        network({"scores": (3,)}, (320, 640, 3)), of_tflite(),
        {"class_output": "scores", "image_scale": "1", "image_mean": "127.5", "image_stddev": "1.0,2.0,4.0"}, NAMES,
    ),
    "quantized classifier of TFLite Support": (
        network({"scores": (3,)}, (320, 640, 3), dtype=DType.UINT8),
        of_tflite({"type": "UINT8"}, {"type": "UINT8", "scale": 0.25, "zero_point": 0}),
        {"class_output": "scores", "image_scale": "1", "class_scale": "0.25"}, NAMES,
    ),
    "faces of MediaPipe": (
        network({"regressors": (896, 16), "classificators": (896, 1)}, (128, 128, 3)),
        {"tflite_metadata": json.dumps(TFLITE | {"outputs": [{"name": "regressors"}, {"name": "classificators"}]})},
        {"detection_head": "blazeface", "detection_outputs": "regressors,classificators", "image_mean": "127.5",
         "image_fit": "letterbox"}, ("face",),
    ),
    "segmentation of TFLite Support": (
        network({"map": (160, 320, 3)}, (320, 640, 3)), of_tflite({}, {"content": "image"}),
        {"mask_output": "map", "mask_layout": "packed", "image_mean": "127.5"}, NAMES,
    ),
}  # fmt: skip


VIT = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
SQUARE, CUT = {"height": 224, "width": 224}, {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "ViT of 2021": ({"feature_extractor_type": "ViTFeatureExtractor", "size": 224, "resample": 2},
        {"image_fit": "stretch", "image_interpolation": "linear_antialias"}),
    "Swin": ({"image_processor_type": "ViTImageProcessor", "size": SQUARE, "resample": 3},
        {"image_fit": "stretch", "image_interpolation": "cubic_antialias"}),
    "ResNet": ({"feature_extractor_type": "ConvNextFeatureExtractor", "size": 224, "crop_pct": 0.875, "resample": 3},
        {"image_fit": "crop", "image_resize": "256", "image_crop_offset": "down"}),
    "ConvNeXt without crop_pct": ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}},
        {"image_fit": "crop", "image_resize": "256"}),
    "ConvNeXt of 384": (
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}, "crop_pct": 0.875},
        {"image_fit": "stretch"}),
    "PoolFormer": (
        {"image_processor_type": "PoolFormerImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 0.9, **CUT},
        {"image_fit": "crop", "image_resize": "248", "image_crop_offset": "down"}),
    "LeViT": ({"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 224}, **CUT},
        {"image_fit": "crop", "image_resize": "256"}),
    "MobileViT": ({"image_processor_type": "MobileViTImageProcessor", "size": {"shortest_edge": 288},
         "do_flip_channel_order": True, **CUT, "do_normalize": None}, {"image_color": "bgr", "image_resize": "288"}),
    "without normalising": ({"size": SQUARE, "do_normalize": False}, {"image_scale": "1/255"}),
    "EfficientNet": ({"image_processor_type": "EfficientNetImageProcessor", "size": SQUARE, "resample": 0,
         "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 0.5], "include_top": True},
        {"image_interpolation": "nearest", "image_stddev": "0.25,0.0625,0.25"}),
}  # fmt: skip
"""Files of exports of Hugging Face and what they mean by the code of its processors (transformers/models)."""


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_of_hugging_face_is_read_as_its_class_computes(name: str) -> None:
    processor, expected = PROCESSORS[name]
    side = 384 if "384" in name else 224
    found = recognise(network({"logits": (3,)}, (3, side, side)), of_hugging_face(VIT, processor))
    assert found is not None
    assert found.parameters.items() >= expected.items(), found
    assert ("image_mean" in found.parameters) == bool(processor.get("do_normalize"))


def test_an_export_of_paddle_without_a_step_that_normalises_has_no_mean() -> None:
    text = PADDLE.replace("norm_type: mean_std", "norm_type: none")
    found = recognise(network({"boxes": (4200, 4), "scores": (3, 4200)}), {"infer_cfg.yml": text})
    assert found is not None
    assert found.parameters["detection_head"] == "ppyoloe"
    assert not {"image_mean", "image_stddev"} & found.parameters.keys()


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"resample": 1}, "expected resample out of 0, 2, 3, given '1'"),
        ({"resample": True}, "expected resample out of 0, 2, 3"),
        ({"size": {"height": 256, "width": 256}, **CUT}, "expected a crop of a picture that keeps its shape"),
        ({"image_processor_type": "PerceiverImageProcessor", **CUT}, "cuts a picture before it is resized"),
        ({"rescale_offset": True}, "expected rescale_offset false"),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0}, "expected crop_pct from 0.1 to 1"),
    ],
)
def test_a_processor_whose_steps_are_not_offered_is_not_recognised(processor: dict[str, Any], expected: str) -> None:
    found = recognise(network({"logits": (3,)}, (3, 224, 224)), of_hugging_face(VIT, processor))
    assert found is not None
    assert not found.parameters
    assert expected in found.note


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("[224, 224]", {"image_fit": "crop", "image_resize": "224", "image_interpolation": "linear_antialias"}),
        ("[320, 640]", {"image_fit": "stretch", "image_interpolation": "linear_antialias"}),
        ("", {"image_fit": "crop", "image_interpolation": "linear_antialias"}),
    ],
)
def test_a_classifier_of_ultralytics_is_resized_as_its_transforms_do(size: str, expected: dict[str, str]) -> None:
    side = (320, 640) if "640" in size else (224, 224)
    metadata = {"task": "classify", "names": "{0: 'a', 1: 'b'}", "stride": "1", "imgsz": size}
    found = recognise(network({"out": (2,)}, (3, *side)), metadata)
    assert found is not None
    image = {key: value for key, value in found.parameters.items() if key in ("image_fit", "image_resize",
                                                                             "image_interpolation")}  # fmt: skip
    assert image == expected


@pytest.mark.parametrize(("width", "height"), [(400, 400), (640, 480)])
def test_fine_stripes_reach_a_classifier_of_ultralytics_as_pillow_averages_them(
    encode: Callable[..., bytes], width: int, height: int
) -> None:
    stripes = np.zeros((height, width, 3), np.uint8)
    stripes[:, 1::2] = 255
    spec = network({"out": (2,)}, (3, 224, 224))
    metadata = {"task": "classify", "names": "{0: 'a', 1: 'b'}", "stride": "1", "imgsz": "[224, 224]"}
    plan = make_image_plan(dataclasses.replace(spec, recognised=recognise(spec, metadata)))
    assert plan is not None
    made = plan.tensor(encode(stripes, "PNG"), model="net").array.reshape(3, 224, 224)
    longer = width * 224 // height
    small = Image.fromarray(stripes).resize((longer, 224), Image.Resampling.BILINEAR)
    left = round((longer - 224) / 2)
    expected = np.asarray(small.crop((left, 0, left + 224, 224))).transpose(2, 0, 1) / 255
    assert np.abs(made - expected).max() < 1.01 / 255


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_model_is_recognised_by_the_metadata_beside_it(name: str) -> None:
    spec, metadata, expected, labels = RECOGNISED[name]
    found = recognise(spec, metadata)
    assert found is not None
    assert METADATA_KEYS & metadata.keys()
    assert found.parameters.items() >= expected.items(), found
    assert set(found.labels.values()) == {labels}
    assert found.note.startswith("recognised by its metadata: ")


def test_labels_of_metadata_are_those_of_a_mask() -> None:
    spec, metadata, _, labels = RECOGNISED["segmentation of TFLite Support"]
    decoder = make_perception_decoder(dataclasses.replace(spec, recognised=recognise(spec, metadata)))
    assert decoder is not None
    assert decoder.mask is not None
    assert decoder.mask.labels == labels


UNFIT: dict[str, tuple[dict[str, str], str]] = {
    "no JSON": ({"config.json": "ForObjectDetection {"}, "config.json: expected JSON"),
    "nested JSON": ({"config.json": "ForObjectDetection" + "[" * 200_000}, "config.json: expected JSON"),
    "nested JSON without an end": ({"config.json": '{"ForObjectDetection":' + "[" * 200_000}, "expected JSON"),
    "no preprocessor": ({"config.json": of_hugging_face()["config.json"]}, "expected preprocessor_config.json"),
    "another model": (of_hugging_face({"model_type": "x" * 9000}), "expected model_type out of detr"),
    "labels with a gap": (of_hugging_face({"id2label": {"0": "a", "7": "b"}}), "expected names for 0, 1, 2"),
    "labels as numbers": (of_hugging_face({"id2label": {"0": 1}}), "expected id2label as"),
    "other labels": (of_hugging_face({"id2label": {"0": "a"}}), "expected [boxes, 4], [boxes, 1] for 1 names"),
    "a huge size": (of_hugging_face({}, {"size": {"height": 10**9, "width": 1}}), "expected 1 to 16384 pixels"),
    "a mean of NaN": (
        of_hugging_face({}, {"do_normalize": True, "image_mean": float("nan"), "image_std": 1}), "expected a number"
    ),
    "a huge mean": (of_hugging_face({}, {"do_normalize": True, "image_mean": 10**400}), "expected a number"),
    "a border of OpenVINO": (MODEL_INFO | {"model_info/pad_value": "\x07" * 90_000}, "expected 1 numbers as pad_value"),
    "a mean of OpenVINO": (MODEL_INFO | {"model_info/mean_values": "1 2 \x00"}, "expected 3 numbers as mean_values"),
    "a size that is a list": (
        {"infer_cfg.yml": PADDLE.replace("interp: 2", "interp: [2]").replace("  - 640", "  - nan")},
        "expected 2 numbers as target_size",
    ),
    "two means": (of_hugging_face({}, {"do_normalize": True, "image_mean": [1, 2]}), "expected one or three numbers"),
    "a deviation of 0": (
        of_hugging_face({}, {"do_normalize": True, "image_mean": 0.5, "image_std": 0}), "expected numbers other than 0"
    ),
    "a step of PaddleDetection": ({"infer_cfg.yml": PADDLE.replace("Permute", "Warp")}, "given ''Warp''"),
    "a ratio that is kept": ({"infer_cfg.yml": PADDLE.replace("false", "true")}, "expected keep_ratio false"),
    "no label list": ({"infer_cfg.yml": "arch: YOLO"}, "expected label_list"),
    "OpenVINO's other type": (MODEL_INFO | {"model_info/model_type": "MaskRCNN"}, "expected model_type out of"),
    "OpenVINO's labels": (MODEL_INFO | {"model_info/labels": ""}, "expected names"),
    "OpenVINO's nearest pixels": (
        MODEL_INFO | {"model_info/interpolation_mode": "NEAREST"}, "expected interpolation_mode out of LINEAR, CUBIC"
    ),
    "labels of TFLite Support": (of_tflite({}, {"axis_labels": "a.txt"}), "expected labels in the packed file 'a.txt'"),
    "other tensors of TFLite Support": ({"tflite_metadata": '{"inputs": [1]}'}, "expected a list of inputs"),
    "gray of TFLite Support": (of_tflite({"color": "gray"}), "expected an input of RGB"),
    "no mean of TFLite Support": (of_tflite({"mean": []}), "expected one or three numbers as mean of the input"),
    "scores of TFLite Support": (of_tflite({}, {"type": "UINT8", "zero_point": 3}), "expected scores with zero point"),
    "TFLite with NMS": ({"packed/metadata.json": json.dumps(ULTRALYTICS_FILE | {"end2end": True})}, "without NMS"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_metadata_that_do_not_fit_say_why(name: str) -> None:
    metadata, reason = UNFIT[name]
    began_s = time.process_time()
    found = recognise(network(DETR), metadata)
    assert found is not None
    assert (found.parameters, found.labels) == ({}, {})
    assert "but nothing is recognised: " in found.note
    assert reason in found.note
    assert len(found.note) < 400
    assert found.note.isprintable()
    assert time.process_time() - began_s < 2


PADDLE_DETECTOR = """Global:
  model_name: PP-OCRv5_mobile_det
Hpi:
  backend_configs:
    paddle_infer: &id001
      x: {}
PreProcess:
  transform_ops:
  - DecodeImage:
      channel_first: false
      img_mode: BGR
  - DetLabelEncode: null
  - DetResizeForTest:
      resize_long: 900
  - NormalizeImage:
      mean:
      - 0.485
      - 0.456
      - 0.406
      order: hwc
      scale: 1./255.
      std: [0.229, 0.224, 0.225]
  - ToCHWImage: null
PostProcess:
  name: DBPostProcess
  thresh: 0.3
  box_thresh: 0.6
  unclip_ratio: 1.5
"""
PADDLE_READER = """PostProcess:
  name: CTCLabelDecode
  character_dict:
  - \u3000
  - '!'
  - \'\'\'\'
  - "\\u00e9"
  - '"'
  - '-'
"""
_MAP = {"fetch_name_0": (1, -1, -1)}
_SCORES = {"fetch_name_0": (-1, 8)}


def test_a_text_detector_of_paddleocr_states_its_input_and_decoding() -> None:
    found = recognise(network(_MAP, image=(3, -1, -1)), {"inference.yml": PADDLE_DETECTOR})
    assert found is not None
    assert found.note == "recognised by its metadata: PaddleOCR text detector"
    assert found.parameters == {
        "detection_head": "dbnet", "detection_score_threshold": "0.6", "detection_unclip_ratio": "1.5",
        "image_color": "bgr", "image_fit": "letterbox", "image_scale": "1/255", "image_mean": "0.485,0.456,0.406",
        "image_stddev": "0.229,0.224,0.225", "network_image_width": "928", "network_image_height": "928",
            "image_interpolation": "linear",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("resize_long: 900", "resize_long: 1e9", "expected resize_long of 32 to 16384"),
        ("resize_long: 900", "resize_long: nan", "expected 1 numbers as inference.yml: resize_long"),
        ("scale: 1./255.", "scale: 7", "expected scale 1./255. or null"),
        ("      - 0.406\n", "", "expected 3 numbers as mean"),
        ("box_thresh: 0.6", "box_thresh: [0.6]", "expected 1 numbers as inference.yml: box_thresh"),
        ("img_mode: BGR", "img_mode: CMYK", "image_color"),
    ],
)
def test_a_text_detector_with_other_values_is_not_recognised(old: str, new: str, reason: str) -> None:
    found = recognise(network(_MAP, image=(3, -1, -1)), {"inference.yml": PADDLE_DETECTOR.replace(old, new)})
    assert found is not None
    assert "its metadata are those of PaddleOCR, but nothing is recognised: " in found.note
    assert reason in found.note


def test_the_characters_of_paddleocr_are_labels_with_a_space_at_the_end() -> None:
    found = recognise(network(_SCORES), {"inference.yml": PADDLE_READER})
    assert found is not None
    assert found.labels == {"fetch_name_0": (" ", "!", "'", "é", '"', "-", " ")}
    assert found.note == "recognised by its metadata: text of 7 characters"


def test_characters_of_another_number_are_no_labels() -> None:
    assert recognise(network({"fetch_name_0": (-1, 9)}), {"inference.yml": PADDLE_READER}) is None
    bad = recognise(network(_SCORES), {"inference.yml": PADDLE_READER.replace("u00e9", "Uffffffff")})
    assert bad is not None
    assert "expected a character" in bad.note


def test_files_of_language_models_do_not_concern_it() -> None:
    config = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    assert recognise(network(DETR), {"config.json": config}) is None


def test_files_of_other_programs_do_not_concern_it() -> None:
    files = {"metadata.yaml": "- [[conda", "packed/metadata.json": "{", "preprocessor_config.json": "{"}
    assert recognise(network(DETR), files) is None


@pytest.mark.parametrize(("name", "is_recognised"), [("ViT", True), ("D-FINE", False)])
def test_the_best_classes_of_a_configuration_leave_only_a_classifier(name: str, is_recognised: bool) -> None:
    spec, metadata, _, _ = RECOGNISED[name]
    found = recognise(dataclasses.replace(spec, parameters={"image_top_k": "3"}), metadata)
    assert (found is not None) == is_recognised


def test_yaml_gives_mappings_and_lists() -> None:
    text = "a:\n- 1\n- b: 'x # y'\n  c: [1, two]\n-\n  d: e # f\ng: {}\nh:\n  i: \"j\"\n  2: k\n"
    assert parse_yaml(text) == {
        "a": ["1", {"b": "x # y", "c": ["1", "two"]}, {"d": "e"}], "g": "", "h": {"i": "j", "2": "k"}
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "a", "a: 1\na: 2", "a: &x 1", "a: !!python/object 1", "a: |\n  text", "a: [[1]]", "- 1\n- 2", "a: 1\n   b: 2",
        "\n".join(" " * depth + "a:" for depth in range(1000)), "a: 1\n" * 30_000, "a: [1", "\ta: 1\n b: 2",
        "'" * 100_000, "a" * 1_000_000, "- " * 100_000,
    ],
    ids=lambda text: repr(text[:12]) + str(len(text)),
)  # fmt: skip
def test_other_yaml_is_refused(text: str) -> None:
    began_s = time.process_time()
    with pytest.raises(UnfitMetadataError, match=r"^expected "):
        parse_yaml(text)
    assert time.process_time() - began_s < 2
