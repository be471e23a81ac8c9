"""Program of test_exporter_tensors.py for the environment of fetch_exporters.sh: `exporter_tensors.py FOLDER`.

Writes tensors.npz: "CASE/PICTURE" -> what the exporter's own package makes of a picture of the folder, a CHW tensor.
Writes CASE.json for each processor of Hugging Face, its preprocessor_config.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import openvino
import torch
import transformers
from model_api.adapters import OpenvinoAdapter
from openvino import opset13
from paddlex.inference.models.object_detection import processors as paddle_detection
from paddlex.inference.models.text_detection import processors as paddle_ocr
from PIL import Image
from rfdetr import RFDETRNano
from torchvision.models import ResNet50_Weights
from ultralytics.data.augment import LetterBox, classify_transforms


def processors() -> dict[str, Any]:
    """Processors with the values of well-known checkpoints where these are not the class's defaults."""
    return {
        "ViT": transformers.ViTImageProcessor(),
        "Swin": transformers.ViTImageProcessor(resample=3),
        "BEiT": transformers.BeitImageProcessor(),
        "CLIP": transformers.CLIPImageProcessor(),
        "BiT": transformers.BitImageProcessor(),
        "ResNet": transformers.ConvNextImageProcessor(size={"shortest_edge": 224}, crop_pct=0.875),
        "ConvNeXt of 384": transformers.ConvNextImageProcessor(size={"shortest_edge": 384}),
        "PoolFormer": transformers.PoolFormerImageProcessor(),
        "LeViT": transformers.LevitImageProcessor(),
        "MobileNetV2": transformers.MobileNetV2ImageProcessor(),
        "MobileViT": transformers.MobileViTImageProcessor(size={"shortest_edge": 288}, resample=2),
        "EfficientNet": transformers.EfficientNetImageProcessor(size={"height": 224, "width": 224}, resample=0),
        "RT-DETR": transformers.RTDetrImageProcessor(),
    }


class Captured(Exception):
    """Carries the batch that a detector would run."""


class CapturingNetwork(torch.nn.Module):
    def forward(self, batch: torch.Tensor) -> None:
        raise Captured(batch)


class RFDETRInput(RFDETRNano):
    """RF-DETR without its network."""

    def maybe_download_pretrain_weights(self) -> None: ...

    def get_model(self, config: Any, **_: object) -> Any:
        return SimpleNamespace(device=torch.device("cpu"), resolution=config.resolution, model=CapturingNetwork())

    def tensor(self, rgb: Any) -> Any:
        try:
            self.predict(Image.fromarray(rgb))
        except Captured as captured:
            return captured.args[0][0].numpy()


def model_api_input(folder: Path, fit: str, interpolation: str, width: int, height: int) -> Callable[[Any], Any]:
    """Return what Model API puts before a network, here one that adds 0."""
    x = opset13.parameter([1, 3, height, width], np.float32, name="x")
    x.output(0).set_names({"x"})
    file = folder / f"model_api {fit} {interpolation} {width}.xml"
    openvino.save_model(openvino.Model([opset13.add(x, np.float32(0))], [x], "net"), file, compress_to_fp16=False)
    adapter = OpenvinoAdapter(openvino.Core(), str(file))
    adapter.embed_preprocessing("NCHW", fit, interpolation, (width, height), 114, brg2rgb=True)
    # It takes pictures as OpenCV reads them.
    return lambda rgb: next(iter(adapter.infer_sync({"x": np.ascontiguousarray(rgb[None, :, :, ::-1])}).values()))[0]


def paddle_detection_input(interpolation: str) -> Callable[[Any], Any]:
    """Return PaddleDetection's steps Resize, NormalizeImage and Permute, as PaddleX runs them."""
    resize = paddle_detection.Resize([416, 320], interp=interpolation)
    normalize = paddle_detection.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    return lambda rgb: normalize(resize([{"img": rgb}]))[0]["img"].transpose(2, 0, 1)


def paddle_ocr_input(rgb: Any) -> Any:
    """Return the steps of a text detector whose pictures are 960 pixels long."""
    resized, _ = paddle_ocr.DetResizeForTest(limit_side_len=960, limit_type="resize_long")([rgb])
    return paddle_ocr.NormalizeImage(order="hwc")(resized)[0].transpose(2, 0, 1)


def main(folder: Path) -> None:
    convert: dict[str, Callable[[Any], Any]] = {
        # As ClassificationPredictor.preprocess and BasePredictor.pre_transform of Ultralytics.
        "ultralytics 224": lambda rgb: classify_transforms(224)(Image.fromarray(rgb)).numpy(),
        "ultralytics 320x640": lambda rgb: classify_transforms((320, 640))(Image.fromarray(rgb)).numpy(),
        "ultralytics detect": lambda rgb: LetterBox((640, 640), auto=False)(image=rgb).transpose(2, 0, 1) / 255,
        "torchvision": lambda rgb: ResNet50_Weights.IMAGENET1K_V1.transforms()(Image.fromarray(rgb)).numpy(),
        "RF-DETR": RFDETRInput().tensor,
        "PaddleOCR": paddle_ocr_input,
        "PaddleDetection linear": paddle_detection_input("LINEAR"),
        "PaddleDetection cubic": paddle_detection_input("BICUBIC"),
        "Model API standard": model_api_input(folder, "standard", "LINEAR", 416, 320),
        "Model API standard CUBIC": model_api_input(folder, "standard", "CUBIC", 416, 320),
        "Model API letterbox": model_api_input(folder, "fit_to_window_letterbox", "LINEAR", 416, 320),
        "Model API crop": model_api_input(folder, "crop", "LINEAR", 224, 224),
    }
    for name, processor in processors().items():
        with tempfile.TemporaryDirectory() as saved:
            processor.save_pretrained(saved)
            (folder / f"{name}.json").write_text((Path(saved) / "preprocessor_config.json").read_text())
        convert[name] = lambda rgb, by=processor: np.asarray(by(images=rgb, return_tensors="np")["pixel_values"][0])
    tensors = {}
    for path in sorted((*folder.glob("*.png"), *folder.glob("*.jpg"))):
        rgb = np.ascontiguousarray(cv2.imread(str(path))[:, :, ::-1])
        tensors.update({f"{name}/{path.name}": make(rgb).astype(np.float32) for name, make in convert.items()})
    np.savez(folder / "tensors.npz", **tensors)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
