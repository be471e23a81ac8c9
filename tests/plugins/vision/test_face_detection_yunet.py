"""The bundled face detector in the runtimes themselves, beside OpenCV's own reader of the same file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from edge_server.core.model_spec import ModelSpec
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.perception_decoder import PerceptionDecoder, make_perception_decoder
from edge_server.plugins.vision.resize import Color, FittedPicture
from edge_server.protocol.frame_messages import Detection

pytestmark = pytest.mark.full

data = pytest.importorskip("skimage.data")

NAME = "face_detection_yunet"


@pytest.fixture(scope="module")
def folder(repository_root: Path) -> Path:
    return repository_root / "model_repository" / NAME


@pytest.fixture(scope="module")
def spec(bundled: Callable[[str], ModelSpec]) -> ModelSpec:
    return bundled(NAME)


@pytest.fixture(scope="module")
def images(spec: ModelSpec) -> ImagePlan:
    plan = make_image_plan(spec)
    assert plan is not None
    return plan


@pytest.fixture(scope="module")
def perception(spec: ModelSpec) -> PerceptionDecoder:
    plan = make_perception_decoder(spec)
    assert plan is not None
    return plan


def onnxruntime_outputs(path: Path) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda array: dict(zip(names, session.run(names, {"input": array}), strict=True))


def openvino_outputs(path: Path) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    openvino = pytest.importorskip("openvino")
    # In f32: on some processors OpenVINO would choose bf16 by itself, which is not comparable this closely.
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(array: np.ndarray) -> dict[str, np.ndarray]:
        results = compiled(array)
        # OpenVINO keeps several names for one output; the file's own is among them.
        return {name: results[output] for output in compiled.outputs for name in output.get_names()}

    return run


@pytest.fixture(scope="module", params=[onnxruntime_outputs, openvino_outputs], ids=["onnxruntime", "openvino"])
def run(request: Any, folder: Path) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    made: Callable[[np.ndarray], dict[str, np.ndarray]] = request.param(folder / "1/model.onnx")
    return made


def opencv_faces(path: Path, array: np.ndarray) -> np.ndarray:
    """Rows of OpenCV: left, top, width, height, five landmarks, score; in pixels of the input."""
    picture = np.ascontiguousarray(array[0].transpose(1, 2, 0)).astype(np.uint8)
    return cv2.FaceDetectorYN.create(str(path), "", (640, 640), 0.6, 0.3).detect(picture)[1]


def several_astronauts() -> np.ndarray:
    """Four faces of different sizes in one picture of 1280x720."""
    astronaut = data.astronaut()
    canvas = np.full((720, 1280, 3), 128, np.uint8)
    for left, top, side in ((0, 0, 512), (520, 10, 256), (800, 300, 400), (560, 400, 200)):
        canvas[top : top + side, left : left + side] = cv2.resize(astronaut, (side, side), interpolation=cv2.INTER_AREA)
    return canvas


PICTURES = {
    "square": lambda: data.astronaut(),
    "wide": lambda: data.astronaut()[:300],
    "tall": lambda: data.astronaut()[:, 60:330],
    "four faces": several_astronauts,
}


def corners(found: Detection) -> tuple[float, float, float, float]:
    return found.x_min, found.y_min, found.x_max, found.y_max


def in_frame(row: np.ndarray, fit: FittedPicture) -> tuple[float, float, float, float]:
    left, top, width, height = row[:4].tolist()
    return (*fit.to_original(left, top), *fit.to_original(left + width, top + height))


@pytest.mark.skipif(not hasattr(cv2, "FaceDetectorYN"), reason="this OpenCV was built without FaceDetectorYN")
@pytest.mark.parametrize("name", PICTURES)
def test_faces_and_landmarks_equal_those_of_opencv(images, perception, run, folder, name) -> None:
    tensor, fit = images.fit(PICTURES[name](), Color.RGB, model=NAME)
    found = perception.decode(run(tensor.array), None, fit, perception.what, model=NAME).detections
    expected = opencv_faces(folder / "1/model.onnx", tensor.array)
    assert len(found) == len(expected) == (4 if name == "four faces" else 1)
    for face, row in zip(found, expected[np.argsort(-expected[:, 14])], strict=True):
        assert corners(face) == pytest.approx(in_frame(row, fit), abs=0.5)
        assert face.score == pytest.approx(float(row[14]), abs=0.01)
        assert face.label == "face"
        for keypoint, x, y in zip(face.keypoints, row[4:14:2].tolist(), row[5:14:2].tolist(), strict=True):
            assert (keypoint.x, keypoint.y) == pytest.approx(fit.to_original(x, y), abs=0.5)


def test_the_astronauts_face_is_at_its_true_position(images, perception, run) -> None:
    tensor, fit = images.fit(data.astronaut(), Color.RGB, model=NAME)
    [face] = perception.decode(run(tensor.array), None, fit, perception.what, model=NAME).detections
    assert face.score > 0.9
    assert corners(face) == pytest.approx((179, 63, 270, 174), abs=3)
    right_eye, left_eye, nose, right_mouth, left_mouth = face.keypoints
    assert right_eye.x < nose.x < left_eye.x
    assert right_eye.y < nose.y < right_mouth.y
    assert right_mouth.x < left_mouth.x


@pytest.mark.parametrize("name", ["coffee", "rocket"])
def test_no_face_is_found_in_an_image_without_faces(images, perception, run, name) -> None:
    tensor, fit = images.fit(getattr(data, name)(), Color.RGB, model=NAME)
    assert perception.decode(run(tensor.array), None, fit, perception.what, model=NAME).detections == ()


def test_declared_names_and_dims_match_the_file(spec, folder) -> None:
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(folder / "1/model.onnx").graph
    dims = {value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in graph.output}
    assert {output.name: output.dims for output in spec.outputs} == dims


def test_the_files_match_their_provenance(folder) -> None:
    text = (folder / "PROVENANCE.md").read_text()
    for name in ("1/model.onnx", "labels.txt"):
        stated = re.search(rf"`([0-9a-f]{{64}})` \| `{name}`", text)
        assert stated is not None
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == stated[1]
    assert "Copyright (c) 2020 Shiqi Yu" in (folder / "LICENSE").read_text()
