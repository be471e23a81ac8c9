"""Tensors in system shared memory: the same outputs as over the network, and the gain in speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import shared_memory
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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "same/1").mkdir(parents=True)
    (tmp_path / "same/config.pbtxt").write_text(CONFIG)
    return tmp_path


def test_a_tensor_in_shared_memory_comes_back_unchanged(
    serve: Any, measure: Any, hardware: Any, repository: Path
) -> None:
    client = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: pip install tritonclient[grpc]")
    tensor = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    region = shared_memory.SharedMemory(create=True, size=2 * tensor.nbytes)
    try:
        view = np.ndarray(SHAPE, np.float32, region.buf)
        view[:] = tensor
        with serve(repository, "--allow-client-shm=true") as server, client.InferenceServerClient(server.grpc) as asked:
            asked.register_system_shared_memory("both", f"/{region.name.lstrip('/')}", 2 * tensor.nbytes)
            shared_in = client.InferInput("INPUT0", SHAPE, "FP32")
            shared_in.set_shared_memory("both", tensor.nbytes)
            shared_out = client.InferRequestedOutput("OUTPUT0")
            shared_out.set_shared_memory("both", tensor.nbytes, tensor.nbytes)
            asked.infer("same", [shared_in], outputs=[shared_out])
            answered = np.ndarray(SHAPE, np.float32, region.buf, tensor.nbytes)
            assert np.array_equal(answered, tensor)
            wire = client.InferInput("INPUT0", SHAPE, "FP32")
            wire.set_data_from_numpy(tensor)
            seconds = 1.0 if hardware.is_short else 10.0
            by_memory = rate(lambda: asked.infer("same", [shared_in], outputs=[shared_out]), seconds)
            by_wire = rate(lambda: asked.infer("same", [wire]), seconds)
            asked.unregister_system_shared_memory("both")
        measure.value("12 MB tensor there and back, shared memory", by_memory, "1/s")
        measure.value("12 MB tensor there and back, gRPC", by_wire, "1/s")
        del view, answered
    finally:
        region.close()
        region.unlink()


def rate(call: Callable[[], object], seconds: float) -> float:
    count, began_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began_s) < seconds or count < 2:
        call()
        count += 1
    return count / took_s
