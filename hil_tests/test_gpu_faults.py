"""A kernel that writes to address 0 breaks the process's CUDA context: what is served afterwards, and the exit code."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MODEL = "efficientnet_lite0"

BREAKER = '''
import ctypes

import triton_python_backend_utils as pb_utils

PTX = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry write_to_null()
{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    mov.u64 %rd1, 0;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


class TritonPythonModel:
    def execute(self, requests):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context, module, function = (ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3)))
        steps = (
            lambda: cuda.cuInit(0),
            lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
            lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
            lambda: cuda.cuCtxSetCurrent(context),
            lambda: cuda.cuModuleLoadData(ctypes.byref(module), PTX),
            lambda: cuda.cuModuleGetFunction(ctypes.byref(function), module, b"write_to_null"),
            lambda: cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None),
        )
        for number, step in enumerate(steps):
            assert step() == 0, f"step {number}"
        code = cuda.cuCtxSynchronize()
        answer = pb_utils.Tensor("CODE", __import__("numpy").array([code], "int32"))
        return [pb_utils.InferenceResponse([answer]) for _ in requests]
'''
BREAKER_CONFIG = """
backend: "python"
instance_group { kind: KIND_CPU }
input { name: "GO" data_type: TYPE_INT32 dims: [1] }
output { name: "CODE" data_type: TYPE_INT32 dims: [1] }
"""
GO = {"inputs": [{"name": "GO", "datatype": "INT32", "shape": [1], "data": [1]}]}


@pytest.fixture
def repository(tmp_path: Path, bundled: Path, hardware: Any) -> Path:
    if not hardware.has_cuda:
        pytest.skip("needs a GPU of NVIDIA")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime-gpu")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs an onnxruntime that was built for CUDA: pip install onnxruntime-gpu")
    source = bundled / MODEL / "1/model.onnx"
    for name, group in (("gpu_only", "instance_group { kind: KIND_GPU count: 1 }"), ("anywhere", "")):
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        shutil.copy(source, folder / "1/model.onnx")
        (folder / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{group}\n')
    folder = tmp_path / "models/breaker"
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").write_text(BREAKER)
    (folder / "config.pbtxt").write_text(BREAKER_CONFIG)
    return tmp_path / "models"


def eventually(is_so: Callable[[], bool], timeout_s: float = 120) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(0.1)
    return False


def devices(server: Any) -> dict[str, str]:
    return {item["name"]: item["device"] for item in server.ask_json("/edge/v1/models")[1]["models"]}


def picture(server: Any, model: str) -> dict[str, np.ndarray]:
    name = server.get(f"/v2/models/{model}")["inputs"][0]["name"]
    return {name: np.random.default_rng(2).standard_normal((1, 3, 224, 224)).astype(np.float32)}


def test_after_a_broken_context_models_move_to_the_processor_or_fail_with_the_reason(
    serve: Any, measure: Any, repository: Path
) -> None:
    with serve(repository) as server:
        assert devices(server) == {"gpu_only": "GPU:0", "anywhere": "GPU:0", "breaker": "CPU"}
        given = picture(server, "anywhere")
        (before,) = server.infer("anywhere", given).values()
        status, answer = server.ask_json("/v2/models/breaker/infer", GO)
        assert (status, answer["outputs"][0]["data"]) == (200, [700]), "CUDA_ERROR_ILLEGAL_ADDRESS"
        began_s = time.monotonic()
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.infer("gpu_only", given)
        with caught.value as refused:
            assert refused.code == 500
            assert "illegal memory access" in json.loads(refused.read())["error"]
        assert eventually(lambda: devices(server) == {"anywhere": "CPU", "breaker": "CPU"}), server.log()[-3000:]
        measure.value("until the model answers on the processor", time.monotonic() - began_s, "s")
        (after,) = server.infer("anywhere", given).values()
        assert np.abs(before - after).max() < 5e-3
        reasons = {item["name"]: item.get("reason", "") for item in server.ask_json("/v2/repository/index", {})[1]}
        assert "GPU 0 is lost to this process" in reasons["gpu_only"]
        assert server.ask_json("/v2/models/gpu_only/ready")[0] == 400
        assert server.process.poll() is None


def test_with_exit_on_gpu_loss_a_broken_context_ends_the_process_with_79(serve: Any, repository: Path) -> None:
    with serve(repository, "--exit-on-gpu-loss=true") as server:
        given = picture(server, "gpu_only")
        server.infer("gpu_only", given)
        assert server.ask_json("/v2/models/breaker/infer", GO)[0] == 200
        with pytest.raises(OSError, match=r"500|closed|reset"):
            server.infer("gpu_only", given)
        assert server.process.wait(60) == 79, server.log()[-3000:]
