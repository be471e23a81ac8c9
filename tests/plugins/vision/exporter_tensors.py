"""Program of test_exporter_tensors.py for the environment of fetch_exporters.sh: `exporter_tensors.py FOLDER`.

Writes tensors.npz: "CASE/PICTURE" -> what the exporter's own package makes of a picture of the folder, a CHW tensor.
Writes CASE.json for each processor of Hugging Face, its preprocessor_config.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import transformers
from PIL import Image
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


def main(folder: Path) -> None:
    convert: dict[str, Callable[[Any], Any]] = {
        # As ClassificationPredictor.preprocess and BasePredictor.pre_transform of Ultralytics.
        "ultralytics 224": lambda rgb: classify_transforms(224)(Image.fromarray(rgb)).numpy(),
        "ultralytics 320x640": lambda rgb: classify_transforms((320, 640))(Image.fromarray(rgb)).numpy(),
        "ultralytics detect": lambda rgb: LetterBox((640, 640), auto=False)(image=rgb).transpose(2, 0, 1) / 255,
        "torchvision": lambda rgb: ResNet50_Weights.IMAGENET1K_V1.transforms()(Image.fromarray(rgb)).numpy(),
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
