"""Models of the benchmarks, as this server and as Triton serve them, and the call of the bare runtime."""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import harness
import networks
import numpy as np
import onnx
from onnx import TensorProto, helper

BUNDLED = harness.ROOT / "model_repository/efficientnet_lite0"
FRAME = (480, 640, 3)
_NETWORKS = {"mobilenet_v2": networks.mobilenet_v2, "resnet18": networks.resnet18}
NETWORKS = (*_NETWORKS, *(f"{name}_openvino" for name in _NETWORKS))
"""Models of `write_for_triton` that read a picture; those whose names end otherwise run in ONNX Runtime."""

_SMALL = "max_batch_size: 0\ninstance_group { count: 1 kind: KIND_CPU }\n"
_BATCH_OF_ONE = "max_batch_size: 1\ninstance_group { count: 1 kind: KIND_CPU }\n"
_ONE = (
    'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }\n'
    'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }\n'
)
_TWO = _ONE + _ONE.replace("INPUT0", "INPUT1").replace("OUTPUT0", "OUTPUT1")
_FRAME = (
    'input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ 480, 640, 3 ] }\n'
    'output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ 3 ] }\n'
)
_NETWORK = (
    'input { name: "input" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }\n'
    'output { name: "logits" data_type: TYPE_FP32 dims: [ 1000 ] }\n'
)

_MODEL_PY = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            arrays = [tensor.as_numpy() for tensor in request.inputs()]
            {compute}
            tensors = [pb_utils.Tensor(f"OUTPUT{{index}}", array) for index, array in enumerate(results)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
_PYTHON = {
    "identity_python": (_ONE, "results = arrays"),
    "add_sub_python": (_TWO, "results = [arrays[0] + arrays[1], arrays[0] - arrays[1]]"),
    "frame_python": (_FRAME, "results = [arrays[0][0, 0].copy()]"),
}


def _parameter(key: str, value: object) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def python_model(kind: str) -> tuple[str, dict[str, bytes]]:
    """Return the configuration and the files of a Python model."""
    tensors, compute = _PYTHON[kind]
    return f'backend: "python"\n{_SMALL}{tensors}', {"model.py": _MODEL_PY.format(compute=compute).encode()}


def write_for_triton(here: Path, there: Path, models: Iterable[str]) -> None:
    """Write models for this server and for Triton, of the same name and runtime.

    Configured are the runtime, one instance, and of networks threads and precision: the other settings are each
    server's defaults.
    """
    cores = len(os.sched_getaffinity(0))
    made = {
        "identity": (f'backend: "identity"\n{_SMALL}{_ONE}', None),
        "add_sub": (f'backend: "onnxruntime"\n{_SMALL}{_TWO}{_parameter("intra_op_thread_count", 1)}', add_sub),
        "frame": (f'backend: "onnxruntime"\n{_SMALL}{_FRAME}{_parameter("intra_op_thread_count", 1)}', _first_pixel),
    }
    onnxruntime = f'backend: "onnxruntime"\n{_BATCH_OF_ONE}{_NETWORK}{_parameter("intra_op_thread_count", cores)}'
    openvino = f'backend: "openvino"\ndefault_model_filename: "model.onnx"\n{_BATCH_OF_ONE}{_NETWORK}'
    openvino += _parameter("INFERENCE_NUM_THREADS", cores) + _parameter("INFERENCE_PRECISION_HINT", "f32")
    for name, network in _NETWORKS.items():
        made[name] = (onnxruntime, partial(_serialised, network))
        made[f"{name}_openvino"] = (openvino, partial(_serialised, network))
    for name in dict.fromkeys(models):
        for repository in (here, there):
            if name in _PYTHON:
                harness.write_model(repository, name, *python_model(name))
            else:
                config, model = made[name]
                harness.write_model(repository, name, config, {} if model is None else {"model.onnx": model()})


def write_classifier(repository: Path, runtime: str) -> str:
    """Write the bundled classifier for one runtime, one instance, without batching; return its name."""
    name = f"classifier_{runtime}"
    shutil.copytree(BUNDLED, repository / name)
    config = (BUNDLED / "config.pbtxt").read_text().replace('name: "efficientnet_lite0"', f'name: "{name}"', 1)
    config += f'\nbackend: "{runtime}"\ninstance_group {{ count: 1 kind: KIND_CPU }}\n'
    (repository / name / "config.pbtxt").write_text(config)
    return name


def raw_call(array: np.ndarray) -> harness.Call:
    """Return one inference of the bundled classifier by ONNX Runtime alone, with the settings of the server."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.spin_duration_us", "30")
    model = (BUNDLED / "1/model.onnx").read_bytes()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"input": array})


def picture() -> np.ndarray:
    return np.random.default_rng(0).random((1, 3, 224, 224), np.float32)


def write_picture(folder: Path) -> Path:
    """Write the picture as perf_analyzer reads inputs, and return the file."""
    file = folder / "picture.json"
    file.write_text(json.dumps({"data": [{"input": {"b64": base64.b64encode(picture().tobytes()).decode()}}]}))
    return file


@functools.cache
def _serialised(network: Callable[[], onnx.ModelProto]) -> bytes:
    return network().SerializeToString()


def add_sub() -> bytes:
    given = [helper.make_tensor_value_info(f"INPUT{at}", TensorProto.FLOAT, [16]) for at in (0, 1)]
    made = [helper.make_tensor_value_info(f"OUTPUT{at}", TensorProto.FLOAT, [16]) for at in (0, 1)]
    names = ["INPUT0", "INPUT1"]
    nodes = [helper.make_node("Add", names, ["OUTPUT0"]), helper.make_node("Sub", names, ["OUTPUT1"])]
    return _finish(helper.make_graph(nodes, "add_sub", given, made))


def _first_pixel() -> bytes:
    given = [helper.make_tensor_value_info("INPUT0", TensorProto.UINT8, FRAME)]
    made = [helper.make_tensor_value_info("OUTPUT0", TensorProto.UINT8, [3])]
    place = helper.make_tensor("place", TensorProto.INT64, [2], [0, 0])
    node = helper.make_node("GatherND", ["INPUT0", "place"], ["OUTPUT0"])
    return _finish(helper.make_graph([node], "first_pixel", given, made, [place]))


def _finish(graph: onnx.GraphProto) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()
