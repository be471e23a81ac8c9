"""Input tensors of recognised exports, against what Ultralytics, transformers and torchvision themselves compute."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec, Recognised
from edge_server.core.tensor import DType
from edge_server.plugins.vision.image_parameters import read_declaration
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.layout_search import candidates
from edge_server.plugins.vision.recognition import recognise
from edge_server.protocol.frame_messages import Frame, FrameHeader

PYTHON = os.environ.get("EDGE_TEST_EXPORTERS", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="needs EDGE_TEST_EXPORTERS, see fetch_exporters.sh"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, the exporters' tensors of them, and descriptions of processors."""
    folder = tmp_path_factory.mktemp("tensors")
    photos = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")
    stripes = np.zeros((400, 400, 3), np.uint8)
    stripes[:, 1::2] = 255
    pictures = {
        "stripes.png": stripes,
        "noise.png": np.random.default_rng(5).integers(0, 256, (720, 1280, 3), np.uint8),
        "small.png": photos.chelsea()[:150, :201],
        "cat.png": photos.chelsea(),
        "astronaut.png": photos.astronaut(),
        "coffee.jpg": photos.coffee(),
        "rocket.jpg": np.asarray(Image.fromarray(photos.rocket()).resize((1600, 1200))),
        "tall.jpg": np.ascontiguousarray(photos.rocket().transpose(1, 0, 2)),
    }
    for name, pixels in pictures.items():
        Image.fromarray(pixels).save(folder / name, **({"quality": 92} if name.endswith("jpg") else {}))
    program = Path(__file__).with_name("exporter_tensors.py")
    environment = {**os.environ, "YOLO_CONFIG_DIR": str(folder), "HF_HUB_OFFLINE": "1", "YOLO_OFFLINE": "True"}
    done = subprocess.run([PYTHON, program, folder], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def classifier(height: int, width: int) -> ModelSpec:
    return ModelSpec(
        name="net", backend="onnxruntime", platform="", max_batch_size=1, instance_groups=(),
        inputs=(InputSpec("pixels", DType.FP32, (3, height, width)),),
        outputs=(OutputSpec("logits", DType.FP32, (3,)),),
    )  # fmt: skip


def recognised(folder: Path, case: str, shape: tuple[int, ...]) -> ModelSpec:
    """Return a model of that exporter with the parameters that its metadata give."""
    spec = classifier(*shape[1:])
    if case == "torchvision":
        (match,) = [match for match in candidates(spec, {}) if match.layout == "class-logits"]
        return replace(spec, recognised=Recognised(match.parameters, {}, ""))
    if case.startswith("ultralytics"):
        metadata = {"names": "{0: 'a', 1: 'b', 2: 'c'}", "imgsz": str(list(shape[1:]))}
        if case == "ultralytics detect":
            spec = replace(spec, outputs=(OutputSpec("out", DType.FP32, (7, 8400)),))
            metadata |= {"task": "detect", "stride": "32"}
        else:
            metadata |= {"task": "classify", "stride": "1"}
    else:
        detector = {"architectures": ["RTDetrForObjectDetection"], "model_type": "rt_detr"}
        if case == "RT-DETR":
            outputs = (OutputSpec("logits", DType.FP32, (300, 3)), OutputSpec("pred_boxes", DType.FP32, (300, 4)))
            spec = replace(spec, outputs=outputs)
        config: dict[str, Any] = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
        config = (detector if case == "RT-DETR" else config) | {"id2label": {"0": "a", "1": "b", "2": "c"}}
        metadata = {
            "config.json": json.dumps(config),
            "preprocessor_config.json": (folder / f"{case}.json").read_text(),
        }
    found = recognise(spec, metadata)
    assert found is not None
    assert found.parameters, found.note
    return replace(spec, recognised=found)


@pytest.mark.parametrize(
    "case",
    [
        "ultralytics 224", "ultralytics 320x640", "ultralytics detect", "torchvision", "ViT", "Swin", "BEiT", "CLIP",
        "BiT", "ResNet", "ConvNeXt of 384", "PoolFormer", "LeViT", "MobileNetV2", "MobileViT", "EfficientNet",
        "RT-DETR",
    ],
)  # fmt: skip
def test_an_input_is_the_exporters_own_within_one_of_255(folder: Path, case: str) -> None:
    """Processors of Hugging Face use torch's kernel with weights of 16 bits, which of a million numbers rounds a few in
    both directions another way than Pillow."""
    with np.load(folder / "tensors.npz") as tensors:
        expected = {name.partition("/")[2]: tensors[name] for name in tensors.files if name.startswith(f"{case}/")}
    assert len(expected) == 8
    spec = recognised(folder, case, next(iter(expected.values())).shape)
    declared = read_declaration("net", spec.all_parameters)
    # From the network's numbers back to those of a picture.
    unit = (np.array(declared.stddev) / declared.scale).reshape(-1, 1, 1)
    for parameters in ({}, {"image_decode": "fast"}):
        plan = make_image_plan(replace(spec, parameters=parameters))
        assert plan is not None
        for name, tensor in expected.items():
            frame = Frame(FrameHeader(), format="jpeg", data=(folder / name).read_bytes())
            made = np.empty(plan.item_shape, np.float32)
            plan.write(plan.read_frame(frame, memoryview(frame.data), model="net"), made, model="net")
            if parameters and case == "ultralytics detect":
                continue  # with image_interpolation linear, it is documented to be another picture
            difference = np.abs((made - tensor) * unit)
            assert difference.max() < (2.01 if (folder / f"{case}.json").exists() else 1.01), (name, parameters)
            assert (difference > 1.01).mean() < 1e-4, (name, parameters)
