"""`edge-server optimize` with runtimes that list more devices than the CPU. Only the lists are doubles.

Behind "GPU" there is nothing: the real OpenVINO fails to compile for it. Behind "NPU" its CPU computes, asked as an NPU
would be. ONNX Runtime's real build is without what it is made to list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper

pytestmark = pytest.mark.full

pytest.importorskip("openvino")
pytest.importorskip("onnxruntime")

COMMAND = Path(sys.executable).parent / "edge-server"
QUICK = ("--runs=10", "--seconds=1", "--samples=2")

DOUBLE = """
    # Each library, once it is imported, tells of more than there is.
    import importlib.abc
    import importlib.util
    import os
    import sys
    import time


    def openvino(library):
        class Core(library.Core):
            @property
            def available_devices(self):
                if "CRASH" in os.environ:
                    os.write(2, b"the driver is on fire\\n")
                    os.abort()
                if "HANG" in os.environ:
                    time.sleep(3600)
                return [*super().available_devices, "GPU", "NPU"]

            def get_property(self, device, *names):
                if names == ("OPTIMIZATION_CAPABILITIES",) and device in ("GPU", "NPU"):
                    return ["FP16", "INT8", "EXPORT_IMPORT"]
                return super().get_property("CPU" if device in ("GPU", "NPU") else device, *names)

            def compile_model(self, model, device, properties):
                if device == "CPU" and "NO_CPU" in os.environ:
                    raise RuntimeError("no CPU today")
                if device != "NPU":
                    return super().compile_model(model, device, properties)
                assert all(port.get_partial_shape().is_static for port in model.inputs), "shapes of any size"
                assert properties["INFERENCE_PRECISION_HINT"] == "f16"
                return super().compile_model(model, "CPU", {})

        library.Core = Core


    def onnxruntime(library):
        listed = library.get_available_providers()
        library.get_available_providers = lambda: ["CUDAExecutionProvider", "DnnlExecutionProvider", *listed]


    class Finder(importlib.abc.MetaPathFinder):
        changes = {"openvino": openvino, "onnxruntime": onnxruntime}

        def find_spec(self, name, path, target=None):
            if name not in self.changes:
                return None
            change = self.changes.pop(name)
            spec = importlib.util.find_spec(name)
            self.changes[name] = change
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                change(module)

            spec.loader.exec_module = exec_module
            return spec


    sys.meta_path.insert(0, Finder())
    if "THEN" in os.environ:
        with open(os.environ["THEN"]) as file:
            exec(compile(file.read(), file.name, "exec"))
"""


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH whose start-up module changes the libraries' lists."""
    site = tmp_path_factory.mktemp("devices")
    (site / "sitecustomize.py").write_text(textwrap.dedent(DOUBLE))
    return site


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """FP32 [batch, 8] -> FP32 [batch, 4], batches of up to 4."""
    folder = tmp_path / "models" / "net"
    (folder / "1").mkdir(parents=True)
    weights = numpy_helper.from_array(np.arange(32, dtype=np.float32).reshape(8, 4), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [weights],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "1" / "model.onnx").write_bytes(made.SerializeToString())
    (folder / "config.pbtxt").write_text("max_batch_size: 4")
    return folder


def environment(site: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
    return {**kept, "PYTHONPATH": str(site), **more}


def optimize(folder: Path, site: Path, *words: str, **more: str) -> dict[str, Any]:
    command = [str(COMMAND), "optimize", str(folder), "--json", *QUICK, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(site, **more))
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "by_title": {one["title"]: one for one in answer["candidates"]}}


def test_a_device_that_fails_is_a_row_with_its_reason_and_a_server_opens_the_one_that_works(
    double: Path, model: Path, start_server: Callable[..., str]
) -> None:
    found = optimize(model, double, "--runtimes=openvino", "--precisions=f16", "--write=found", NO_CPU="1")
    gpu = found["by_title"]["openvino f16 on GPU"]
    assert (gpu["result"], gpu["latency_ms"]) == ("not opened", [])
    assert gpu["reason"].startswith("model 'net' version 1, file 'model.onnx': ")
    assert found["by_title"]["openvino f32"]["reason"].endswith("no CPU today")
    npu = found["by_title"]["openvino f16 on NPU"]
    assert (npu["reason"], npu["device"]) == ("", "NPU")
    assert [item["rows"] for item in npu["latency_ms"]] == [1, 4]
    assert found["chosen"] == "openvino f16 on NPU"
    client = tritonclient.http.InferenceServerClient(
        start_server(model.parent, "--model-config-name=found", environment=environment(double, NO_CPU="1"))
    )
    stated = {key: value["string_value"] for key, value in client.get_model_config("net")["parameters"].items()}
    assert (stated["TARGET_DEVICE"], stated["precision"]) == ("NPU", "f16")
    given = np.random.default_rng(1).random((3, 8), np.float32)
    tensor = tritonclient.http.InferInput("x", [3, 8], "FP32")
    tensor.set_data_from_numpy(given)
    weights = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_allclose(client.infer("net", [tensor]).as_numpy("y"), given @ weights, rtol=1e-2)
    client.close()


def test_a_configured_device_combination_is_tried_with_its_single_devices(double: Path, model: Path) -> None:
    with (model / "config.pbtxt").open("a") as config:
        config.write('\nparameters { key: "TARGET_DEVICE" value { string_value: "MULTI:GPU,CPU" } }')
    found = optimize(model, double, "--runtimes=openvino")
    assert found["by_title"]["openvino on MULTI:GPU,CPU"]["result"] == "not opened"
    assert found["by_title"]["openvino f32"]["device"] == "CPU"


@pytest.mark.parametrize(("way", "message"), [("CRASH", "was ended by SIGABRT"), ("HANG", "took longer than 8 s")])
def test_a_driver_that_crashes_or_hangs_only_loses_its_devices(
    double: Path, model: Path, way: str, message: str
) -> None:
    found = optimize(model, double, "--runtimes=openvino", "--timeout=8", **{way: "1"})
    (line,) = [line for line in found["left_out"] if line.startswith("openvino on anything but the CPU: ")]
    assert message in line
    assert found["by_title"]["openvino f32"]["reason"] == ""


def test_a_listed_provider_that_does_not_start_is_a_row(double: Path, model: Path, fake_gpu: Any) -> None:
    there = fake_gpu.environment()
    path = os.pathsep.join([str(double), there.pop("PYTHONPATH")])
    start = Path(path.split(os.pathsep)[1]) / "sitecustomize.py"
    found = optimize(model, double, "--runtimes=onnxruntime", **there, PYTHONPATH=path, THEN=str(start))
    for title, provider in (("f32 by dnnl", "DnnlExecutionProvider"), ("f32 on GPU", "CUDAExecutionProvider")):
        one = found["by_title"][f"onnxruntime {title}"]
        assert one["result"] == "not opened"
        assert f"lists {provider} but could not start it here" in one["reason"]
    assert found["chosen"] == found["reference"] == "onnxruntime f32"
