"""Metadata that an exporter wrote into a model's file or beside it, read to recognise its layout."""

from __future__ import annotations

import json
from collections.abc import Iterable

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.layout_recognition import recognise

_FILES = (
    "config.json",
    "preprocessor_config.json",
    "infer_cfg.yml",
    "metadata.yaml",
    "packed/metadata.json",
    "tflite_metadata",
    "packed/labels.txt",
    "inference.yml",
)
_MODEL_INFO = ("model_type", "labels", "resize_type", "mean_values", "scale_values", "pad_value")
_KEYS = ("stride", "task", "names", "imgsz", "end2end", "kpt_shape", "args", "version", "head")
_ONE = ((6, 84), (6, -1), (300, 6), (300, 12), (252, 7), (11, -1), (2,), (84, 6), (9, -1), (300, 10))
_OUTPUTS = (*({"output0": dims} for dims in _ONE), {"pred_boxes": (9, 4), "logits": (9, 3)})


def seeds() -> Iterable[bytes]:
    names = "{0: 'a', 1: \"b\\n\"}"
    yield "\n".join(("\0" + "32", "detect", names, "[64, 64]")).encode()
    yield "\n".join(("\1" + "32", "detect", "['a', 'b']", "64", "False")).encode()
    yield "\n".join(("\2" + "32", "detect", names, "[64, 64]", "True", "", "{'nms': True}", "8.2.1")).encode()
    yield "\n".join(("\2" + "32", "detect", names, "[64, 64]", "False", "", "", "8.4.1", "RTDETRDecoder")).encode()
    yield "\n".join(("\3" + "32", "pose", "{0: 'a'}", "(64, 64)", "True", "[2, 3]")).encode()
    yield "\n".join(("\5" + "32", "pose", "{0: 'a'}", "(64, 64)", "False", "[2, 3]")).encode()
    yield "\n".join(("\7" + "32", "detect", names, "[64, 64]", "False", "", "", "8.4.1", "Detect")).encode()
    yield "\n".join(("\x08" + "32", "pose", "{0: 'a'}", "(64, 64)", "False", "[2, 2]")).encode()
    yield "\n".join(("\x09" + "32", "pose", "{0: 'a'}", "(64, 64)", "True", "[2, 2]")).encode()
    yield "\n".join(("\6" + "1", "classify", names, "[64, 64]")).encode()
    config = {"architectures": ["DetrForObjectDetection"], "model_type": "detr", "id2label": {"0": "a", "1": "b"}}
    processor = {"size": {"height": 64, "width": 64}, "image_mean": [0, 0, 0], "image_std": 1}
    yield b"\x4a" + json.dumps(config).encode() + b"\x1e" + json.dumps(processor).encode()
    steps = "Preprocess:\n- type: Resize\n  keep_ratio: false\n  target_size: [64, 64]\n  interp: 2\n"
    yield ("\x42" + f"\x1e\x1earch: 'YOLO'\nlabel_list:\n- a\n{steps}").encode()
    yield ("\x40" + f"\x1e\x1e\x1estride: 32\ntask: detect\nimgsz: 64\nnames:\n  0: a\n  1: {names[1:3]}").encode()
    packed = {"stride": 32, "task": "detect", "names": {"0": "a", "1": "b"}, "imgsz": [64, 64]}
    yield b"\x40\x1e\x1e\x1e\x1e" + json.dumps(packed).encode()
    lite = {
        "inputs": [{"name": "images", "type": "FP32", "content": "image", "color": "rgb", "mean": [127.5], "std": [1]}],
        "outputs": [{"name": "output0", "type": "UINT8", "axis_labels": "labels.txt", "scale": 0.5, "zero_point": 0}],
    }
    yield b"\x46" + b"\x1e" * 5 + json.dumps(lite).encode() + b"\x1ea\nb"
    decoder = "PostProcess:\n  name: DBPostProcess\n  box_thresh: 0.6\nPreProcess:\n  transform_ops:\n"
    yield b"\x40" + b"\x1e" * 7 + f"{decoder}  - DetResizeForTest:\n      resize_long: 96".encode()
    reader = 'PostProcess:\n  name: CTCLabelDecode\n  character_dict:\n  - a\n  - "\\u3000"'
    yield b"\x40" + b"\x1e" * 7 + reader.encode()
    yield b"\x80" + "\n".join(("YOLO", "a b", "crop", "1 2 3", "255", "114")).encode()
    yield ("\0" + "32\ndetect\n" + "[" * 400).encode()


def check(data: bytes) -> None:
    choice = data[0] if data else 0
    text = data[1:].decode("utf-8", "replace")
    if choice & 0x40:
        metadata = {key: part for key, part in zip(_FILES, text.split("\x1e"), strict=False) if part}
    elif choice & 0x80:
        metadata = {f"model_info/{key}": part for key, part in zip(_MODEL_INFO, text.split("\n"), strict=False)}
    else:
        metadata = dict(zip(_KEYS, text.split("\n"), strict=False))
    if metadata.get("task") == "":
        del metadata["task"]
    outputs = _OUTPUTS[(choice & 0x3F) % len(_OUTPUTS)]
    size = (3, -1, -1) if any(-1 in dims for dims in outputs.values()) else (3, 64, 64)
    spec = ModelSpec(
        name="net", backend="onnxruntime", platform="", max_batch_size=4, instance_groups=(),
        inputs=(InputSpec("images", DType.FP32, size),),
        outputs=tuple(OutputSpec(name, DType.FP32, dims) for name, dims in outputs.items()),
    )  # fmt: skip
    found = recognise(spec, metadata)
    if found is not None:
        assert found.note.isprintable(), found.note
        assert len(found.note) < 400, found.note
        is_text = "inference.yml" in metadata  # has one of them
        assert bool(found.labels) == bool(found.parameters) or is_text, found
        assert all(label.isprintable() for labels in found.labels.values() for label in labels), found
