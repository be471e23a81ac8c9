"""YOLO exports in a folder without a configuration: recognised by their metadata, and served with boxes and labels."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest

from edge_server.client import Delivery, FrameStream, Returns
from tests.e2e.yolo_exports import (
    CELLS,
    FOUND,
    NAMES,
    POINTS,
    POLYGONS,
    ROTATED,
    SIDE,
    ULTRALYTICS,
    YOLOV5,
    depth,
    detect,
    export,
    final_obb_rows,
    final_pose_rows,
    final_rows,
    names,
    obb,
    pose,
    prototypes,
    rtdetr,
    rtdetr_rows,
    with_masks,
    with_objectness,
)  # fmt: skip
from tests.kit.model_folder import parameters
from tests.kit.models import Repository
from tests.kit.server import serve_here

EXPORTS: dict[str, tuple[np.ndarray, dict[str, str]]] = {
    "detect": (detect(), {}),
    "transposed": (detect().T, {"head": "Detect"}),
    "end2end": (final_rows(), {"end2end": "True"}),
    "end2end_unstated": (final_rows(), {"version": "8.2.46", "end2end": ""}),
    "rtdetr": (rtdetr(), {"version": "8.3.0", "end2end": ""}),
    "rtdetr_of_2026": (rtdetr_rows(), {"head": "RTDETRDecoder"}),
    "nms": (final_rows(), {"args": "{'batch': 1, 'nms': True}"}),
}
TRACKED = parameters(track="bytetrack")


@pytest.fixture(scope="module")
def server(module_repository: Repository) -> Iterator[Any]:
    add = module_repository.add
    for name, (answer, changed) in EXPORTS.items():
        add(name, model=export(answer, ULTRALYTICS | changed))
    add("onnxruntime", 'backend: "onnxruntime"', model=export(detect(), ULTRALYTICS))
    add("dynamic", model=export(detect(), ULTRALYTICS, is_dynamic=True))
    persons = ULTRALYTICS | {"task": "pose", "names": names(NAMES[:1]), "kpt_shape": "[2, 3]"}
    add("pose", model=export(pose(), persons))
    add("pose_xy", model=export(pose(values=2), persons | {"kpt_shape": "[2, 2]"}))
    add("pose_end2end", model=export(final_pose_rows(), persons | {"end2end": "True"}))
    add("obb", TRACKED, model=export(obb(), ULTRALYTICS | {"task": "obb"}))
    add("obb_end2end", model=export(final_obb_rows(), ULTRALYTICS | {"task": "obb", "end2end": "True"}))
    segment = ULTRALYTICS | {"task": "segment"}
    planes = prototypes()
    add("segment", model=export(with_masks(detect().T).T, segment, planes=planes))
    add("segment_end2end", model=export(with_masks(final_rows()), segment | {"end2end": "True"}, planes=planes))
    add("segment_yolov5", model=export(with_masks(with_objectness()), YOLOV5, planes=planes))
    add("depth", model=export(depth(), ULTRALYTICS | {"task": "depth"}))
    add("yolov5", model=export(with_objectness(), YOLOV5))
    add("classify", model=export(np.array([0.1, 0.2, 0.7]), ULTRALYTICS | {"task": "classify"}))
    with serve_here(module_repository.path) as server:
        yield server


def perceive(server: Any, model: str, picture: bytes) -> Any:
    status, body = server.request("POST", f"/edge/v1/models/{model}/perception", picture)
    assert status == 200, body
    return json.loads(body)


def check_boxes(detections: Any, labels: tuple[str, ...] = NAMES) -> None:
    assert len(detections) == len(FOUND)
    for seen, (box, index, score) in zip(detections, FOUND, strict=True):
        label = index if len(labels) > 1 else 0
        assert (seen["class_index"], seen["label"]) == (label, labels[label])
        assert seen["score"] == pytest.approx(score, abs=1e-3)
        assert [seen[key] for key in ("x_min", "y_min", "x_max", "y_max")] == pytest.approx(box, abs=1)


@pytest.mark.parametrize("model", [*EXPORTS, "onnxruntime", "dynamic", "yolov5"])
def test_boxes_and_labels_of_an_export_without_configuration(server: Any, picture: bytes, model: str) -> None:
    check_boxes(perceive(server, model, picture)["detections"])
    assert "recognised by its metadata: yolo detect, 3 classes" in server.notes(model)


@pytest.mark.parametrize("model", ["pose", "pose_xy", "pose_end2end"])
def test_keypoints_of_a_pose_export(server: Any, picture: bytes, model: str) -> None:
    detections = perceive(server, model, picture)["detections"]
    check_boxes(detections, NAMES[:1])
    for seen, point in zip(detections[0]["keypoints"], POINTS, strict=True):
        score = 1.0 if model == "pose_xy" else point[2]
        assert seen == [pytest.approx(point[0], abs=1), pytest.approx(point[1], abs=1), pytest.approx(score)]
    assert "recognised by its metadata: yolo pose, 1 class, 2 keypoints" in server.notes(model)


@pytest.mark.parametrize("model", ["obb", "obb_end2end"])
def test_oriented_boxes_of_an_obb_export(server: Any, picture: bytes, model: str) -> None:
    detections = perceive(server, model, picture)["detections"]
    for seen, (box, index, score) in zip(detections, ROTATED, strict=True):
        assert (seen["class_index"], seen["label"], seen["score"]) == (index, NAMES[index], pytest.approx(score))
        assert [seen["rotated"][key] for key in ("x", "y", "width", "height", "angle")] == pytest.approx(box, abs=0.01)
    assert "recognised by its metadata: yolo obb, 3 classes" in server.notes(model)


def test_oriented_boxes_of_a_stream_are_tracked(server: Any, picture: bytes) -> None:
    with FrameStream(server.grpc, "obb", delivery=Delivery(depth=8)) as stream:
        results = list(stream.results([picture] * 3))
    for seen, (box, _, _) in zip(results[-1].detections, ROTATED, strict=True):
        rotated = seen.rotated
        assert (rotated.x, rotated.y, rotated.width, rotated.height, rotated.angle) == pytest.approx(box, abs=0.01)
    assert [seen.track_id for seen in results[-1].detections] == [1, 2]


@pytest.mark.parametrize("model", ["segment", "segment_end2end", "segment_yolov5"])
def test_masks_of_a_segmentation_export(server: Any, picture: bytes, model: str) -> None:
    detections = perceive(server, model, picture)["detections"]
    check_boxes(detections)
    for seen, outline in zip(detections, POLYGONS, strict=True):
        (polygon,) = seen["polygons"]
        assert sorted(map(tuple, polygon)) == sorted(outline)


def test_masks_come_in_a_stream_whose_client_wants_them(server: Any, picture: bytes) -> None:
    for returns, has_masks in (
        (Returns(), True),
        (Returns(has_mask=True), True),
        (Returns(has_detections=True), False),
    ):
        with FrameStream(server.grpc, "segment", returns=returns) as stream:
            (result,) = stream.results([picture])
        assert [item.mask is not None for item in result.detections] == [has_masks, has_masks]
    with FrameStream(server.grpc, "segment", returns=Returns(has_annotated_jpeg=True)) as stream:
        (result,) = stream.results([picture])
    cv2 = pytest.importorskip("cv2")
    drawn = cv2.imdecode(np.frombuffer(result.annotated_jpeg, np.uint8), cv2.IMREAD_COLOR)
    # Inside and outside the first mask, both in its box.
    assert np.ptp(drawn[200, 160]) > 30
    assert np.ptp(drawn[200, 80]) < 10


def test_depth_of_an_export_in_metres(server: Any, picture: bytes) -> None:
    seen = perceive(server, "depth", picture)["map"]
    assert (seen["kind"], seen["width"], seen["height"]) == ("metric_depth", 640, 480)
    assert (seen["minimum"], seen["maximum"]) == (pytest.approx(1, abs=0.03), pytest.approx(9, abs=0.03))
    levels = cv2.imdecode(np.frombuffer(base64.b64decode(seen["png"]), np.uint8), cv2.IMREAD_UNCHANGED)
    assert levels.shape == (480, 640)
    assert levels[0, [0, 320, 639]].tolist() == [0, pytest.approx(128, abs=1), 255]
    assert "recognised by its metadata: yolo depth in metres" in server.notes("depth")
    with FrameStream(server.grpc, "depth") as stream:
        (result,) = stream.results([picture])
    assert result.dense_map.values()[100, 320] == pytest.approx(5, abs=0.03)


def test_classes_of_a_classifier(server: Any, picture: bytes) -> None:
    seen = perceive(server, "classify", picture)
    assert [(item["label"], item["score"]) for item in seen["classes"]] == [
        (NAMES[2], pytest.approx(0.7)), (NAMES[1], pytest.approx(0.2)), (NAMES[0], pytest.approx(0.1)),
    ]  # fmt: skip


def test_clients_of_v2_see_the_model_as_its_file_says(server: Any, picture: bytes) -> None:
    config = server.ask("/v2/models/detect/config")[1]
    assert all(key.startswith("edge_") for key in config["parameters"])
    assert config["output"][0]["label_filename"] == ""
    request = {
        "inputs": [{"name": "images", "datatype": "FP32", "shape": [1, 3, SIDE, SIDE], "data": [0.0] * 3 * SIDE**2}],
        "outputs": [{"name": "output0", "parameters": {"classification": 1}}],
    }
    status, answer = server.infer("classify", request)
    assert (status, answer["outputs"][0]["data"]) == (200, ["0.700000:2"])
    status, body = server.request("POST", "/v2/models/detect/infer", picture, {"Content-Type": "image/jpeg"})
    assert status == 200
    (output,) = json.loads(body)["outputs"]
    assert (output["datatype"], output["shape"]) == ("FP32", [1, 4 + len(NAMES), CELLS])


REAL = Path(os.environ.get("EDGE_TEST_YOLO_EXPORT", "/nonexistent"))


@pytest.mark.full
@pytest.mark.skipif(not REAL.is_file(), reason="the network is not here: tests/e2e/fetch_pipeline_models.sh fetches it")
def test_a_real_export_finds_what_its_runtime_finds(repository: Repository) -> None:
    """A face in a picture of the input's size, which needs no resizing."""
    cv2, ort = pytest.importorskip("cv2"), pytest.importorskip("onnxruntime")
    astronaut = pytest.importorskip("skimage.data").astronaut()[:SIDE, 64 : 64 + SIDE]
    session = ort.InferenceSession(REAL, providers=["CPUExecutionProvider"])
    pixels = np.ascontiguousarray(astronaut.transpose(2, 0, 1)[None], np.float32) / 255
    (answer,) = session.run(None, {"images": pixels})[0]
    x, y, width, height, *probabilities = answer[:, answer[4:].max(axis=0).argmax()].tolist()
    expected = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    repository.add("faces", model=onnx.load(REAL))
    with serve_here(repository.path) as server:
        first = perceive(server, "faces", bytes(cv2.imencode(".png", astronaut[:, :, ::-1])[1]))["detections"][0]
        assert "recognised by its metadata: yolo detect, 18 classes" in server.notes("faces")
    assert first["label"] == "FACE_FEMALE"
    assert math.isclose(first["score"], max(probabilities), abs_tol=0.01)
    assert [first[key] for key in ("x_min", "y_min", "x_max", "y_max")] == pytest.approx(expected, abs=1)
