"""Metadata that an exporter wrote into a model's file, read to recognise YOLO exports."""

from __future__ import annotations

from collections.abc import Iterable

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.recognition import recognise

_KEYS = ("stride", "task", "names", "imgsz", "end2end", "kpt_shape", "args", "version", "head")
_OUTPUTS = ((6, 84), (6, -1), (300, 6), (300, 12), (252, 7), (11, -1), (2,), (84, 6), (9, -1), (300, 10))


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
    yield ("\0" + "32\ndetect\n" + "[" * 400).encode()


def check(data: bytes) -> None:
    texts = data[1:].decode("utf-8", "replace").split("\n")
    metadata = dict(zip(_KEYS, texts, strict=False))
    if metadata.get("task") == "":
        del metadata["task"]
    dims = _OUTPUTS[data[0] % len(_OUTPUTS)] if data else (6, 84)
    size = (3, -1, -1) if -1 in dims else (3, 64, 64)
    spec = ModelSpec(
        name="net", backend="onnxruntime", platform="", max_batch_size=4, instance_groups=(),
        inputs=(InputSpec("images", DType.FP32, size),), outputs=(OutputSpec("output0", DType.FP32, dims),),
    )  # fmt: skip
    found = recognise(spec, metadata)
    if found is not None:
        assert found.note.isprintable(), found.note
        assert len(found.note) < 400, found.note
        assert bool(found.labels) == bool(found.parameters), found
        assert all(label.isprintable() for labels in found.labels.values() for label in labels), found
