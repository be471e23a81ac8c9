"""Tensors in a client's GPU memory: equal outputs and the gain in speed; refused on an integrated GPU."""

from __future__ import annotations

import ctypes
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SHAPE = (1, 3, 1024, 1024)
CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [1, 3, 1024, 1024] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1, 3, 1024, 1024] }
"""
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED


def is_integrated() -> bool:
    cuda = ctypes.CDLL("libcuda.so.1")
    value, device = ctypes.c_int(), ctypes.c_int()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDeviceGetAttribute(ctypes.byref(value), _INTEGRATED, device) == 0
    return bool(value.value)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "same/1").mkdir(parents=True)
    (tmp_path / "same/config.pbtxt").write_text(CONFIG)
    return tmp_path


def test_a_tensor_in_gpu_memory_comes_back_unchanged(serve: Any, measure: Any, hardware: Any, repository: Path) -> None:
    if not hardware.has_cuda:
        pytest.skip("needs a GPU of NVIDIA")
    if is_integrated():
        pytest.skip("CUDA has no handles on an integrated GPU")
    client = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: pip install tritonclient[grpc]")
    cuda_memory = pytest.importorskip(
        "tritonclient.utils.cuda_shared_memory", reason="needs cuda-python: pip install tritonclient[grpc,cuda]"
    )
    tensor = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    region = cuda_memory.create_shared_memory_region("both", 2 * tensor.nbytes, 0)
    try:
        cuda_memory.set_shared_memory_region(region, [tensor])
        with serve(repository, "--allow-client-shm=true") as server, client.InferenceServerClient(server.grpc) as asked:
            assert "cuda_shared_memory" in asked.get_server_metadata().extensions
            asked.register_cuda_shared_memory("both", cuda_memory.get_raw_handle(region), 0, 2 * tensor.nbytes)
            shared_in = client.InferInput("INPUT0", SHAPE, "FP32")
            shared_in.set_shared_memory("both", tensor.nbytes)
            shared_out = client.InferRequestedOutput("OUTPUT0")
            shared_out.set_shared_memory("both", tensor.nbytes, tensor.nbytes)
            asked.infer("same", [shared_in], outputs=[shared_out])
            answered = cuda_memory.get_contents_as_numpy(region, np.float32, (2, *SHAPE))[1]
            assert np.array_equal(answered, tensor)
            wire = client.InferInput("INPUT0", SHAPE, "FP32")
            wire.set_data_from_numpy(tensor)
            by_memory = _rate(lambda: asked.infer("same", [shared_in], outputs=[shared_out]))
            by_wire = _rate(lambda: asked.infer("same", [wire]))
            asked.unregister_cuda_shared_memory("both")
            assert not asked.get_cuda_shared_memory_status().regions
        measure.value("12 MB tensor there and back, GPU memory", by_memory, "1/s")
        measure.value("12 MB tensor there and back, gRPC", by_wire, "1/s")
    finally:
        cuda_memory.destroy_shared_memory_region(region)


def test_an_integrated_gpu_is_refused_and_the_error_names_the_alternative(
    serve: Any, hardware: Any, repository: Path
) -> None:
    if not hardware.has_cuda or not is_integrated():
        pytest.skip("needs an integrated GPU of NVIDIA")
    body = {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 64}
    with serve(repository, "--allow-client-shm=true") as server:
        request = urllib.request.Request(
            f"http://{server.http}/v2/cudasharedmemory/region/r/register", json.dumps(body).encode(), method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value as refused:
            assert refused.code == 501
            assert "register system shared memory instead" in json.loads(refused.read())["error"]


def _rate(call: Callable[[], object], seconds: float = 10.0) -> float:
    call()
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        call()
        count += 1
    return count / (time.monotonic() - began)
