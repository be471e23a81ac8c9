"""Input tensors of recognised exports, against what the exporters' own packages compute: Ultralytics, transformers,
torchvision, RF-DETR, PaddleX for PaddleOCR and PaddleDetection, and OpenVINO's Model API."""

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
from edge_server.plugins.vision.layout_recognition import recognise
from edge_server.plugins.vision.layout_search import candidates
from edge_server.plugins.vision.resize import Interpolation
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


NORMALIZATION = """\
  mean:
  - 0.485
  - 0.456
  - 0.406
  std:
  - 0.229
  - 0.224
  - 0.225
"""

PADDLE_OCR = f"""\
PreProcess:
  transform_ops:
  - DecodeImage:
      img_mode: RGB
  - DetResizeForTest:
      resize_long: 960
  - NormalizeImage:
      scale: 1./255.
{NORMALIZATION.replace("  ", "      ")}
PostProcess:
  name: DBPostProcess
"""

PADDLE_DETECTION = f"""\
arch: PicoDet
Preprocess:
- interp: {{interp}}
  keep_ratio: false
  target_size:
  - {{height}}
  - {{width}}
  type: Resize
- is_scale: true
  norm_type: mean_std
  type: NormalizeImage
{NORMALIZATION}
- type: Permute
label_list:
- a
- b
- c
"""


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
    if case == "RF-DETR":
        spec = replace(
            spec, outputs=(OutputSpec("dets", DType.FP32, (300, 4)), OutputSpec("labels", DType.FP32, (300, 91)))
        )
        (match,) = [match for match in candidates(spec, {}) if match.layout == "rf-detr"]
        return replace(spec, recognised=Recognised(match.parameters, {}, ""))
    if case == "PaddleOCR":
        spec = replace(spec, outputs=(OutputSpec("fetch_name_0", DType.FP32, (1, *shape[1:])),))
        metadata = {"inference.yml": PADDLE_OCR}
    elif case.startswith("PaddleDetection"):
        spec = replace(spec, outputs=(OutputSpec("out", DType.FP32, (100, 6)),))
        number = {"linear": 1, "cubic": 2}[case.split()[1]]
        metadata = {"infer_cfg.yml": PADDLE_DETECTION.format(interp=number, height=shape[1], width=shape[2])}
    elif case.startswith("Model API"):
        fit = {"letterbox": "fit_to_window_letterbox"}.get(case.split()[2], case.split()[2])
        info = {
            "model_type": "Classification", "labels": "a b c", "resize_type": fit, "pad_value": "114",
            "reverse_input_channels": "True", "interpolation_mode": "CUBIC" if "CUBIC" in case else "LINEAR",
        }  # fmt: skip
        metadata = {f"model_info/{key}": value for key, value in info.items()}
    elif case.startswith("ultralytics"):
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
        "RT-DETR", "RF-DETR", "PaddleOCR", "PaddleDetection linear", "PaddleDetection cubic", "Model API standard",
        "Model API standard CUBIC", "Model API letterbox", "Model API crop",
    ],
)  # fmt: skip
def test_an_input_is_the_exporters_own_within_one_of_255(folder: Path, case: str) -> None:
    """Processors of Hugging Face use torch's kernel with weights of 16 bits, which of a million numbers rounds a few in
    both directions another way than Pillow."""
    with np.load(folder / "tensors.npz") as tensors:
        expected = {name.partition("/")[2]: tensors[name] for name in tensors.files if name.startswith(f"{case}/")}
    if case == "PaddleOCR":
        # It gives other pictures an input of their own size, where this server fills one size with borders.
        expected = {name: tensor for name, tensor in expected.items() if tensor.shape == (3, 960, 960)}
    assert len(expected) == (2 if case == "PaddleOCR" else 8)
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
            if parameters and declared.interpolation in (Interpolation.LINEAR, Interpolation.CUBIC):
                continue  # it is documented to be another picture then
            difference = np.abs((made - tensor) * unit)
            assert difference.max() < (2.01 if (folder / f"{case}.json").exists() else 1.01), (name, parameters)
            assert (difference > 1.01).mean() < 1e-4, (name, parameters)
