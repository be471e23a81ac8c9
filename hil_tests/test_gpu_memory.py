"""GPU memory of a model is reported, freed when it is unloaded, and limited by --model-load-gpu-limit.

ONNX Runtime with CUDA runs the bundled classifier, whose answers are compared with the CPU's.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GROUP = 'backend: "onnxruntime"\ninstance_group {{ kind: {kind} count: 1 }}\n'


@pytest.fixture
def repository(tmp_path: Path, bundled: Path, hardware: Any) -> Path:
    if not hardware.has_cuda:
        pytest.skip("needs a GPU of NVIDIA")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime-gpu")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs an onnxruntime that was built for CUDA: pip install onnxruntime-gpu")
    source = bundled / "efficientnet_lite0/1/model.onnx"
    for name, kind in (("on_gpu", "KIND_GPU"), ("on_cpu", "KIND_CPU")):
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        shutil.copy(source, folder / "1/model.onnx")
        (folder / "config.pbtxt").write_text(GROUP.format(kind=kind))
    return tmp_path / "models"


def test_gpu_memory_of_a_model_is_measured_and_its_outputs_equal_the_cpus(
    serve: Any, measure: Any, repository: Path
) -> None:
    client = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: pip install tritonclient[grpc]")
    with serve(repository) as server:
        reports = {item["name"]: item for item in server.ask_json("/edge/v1/models")[1]["models"]}
        assert reports["on_gpu"]["device"] == "GPU:0"
        assert reports["on_cpu"]["device"] == "CPU"
        assert reports["on_cpu"]["gpu_bytes"] == {}
        taken = reports["on_gpu"]["gpu_bytes"]["0"]
        assert taken > 10e6, "the weights alone are 18 MB"
        (statistics,) = server.ask_json("/v2/models/on_gpu/stats")[1]["model_stats"]
        assert statistics["memory_usage"] == [{"type": "GPU", "id": 0, "byte_size": taken}]
        measure.value("GPU memory of efficientnet_lite0, onnxruntime with CUDA", taken / 1e6, "MB")
        with client.InferenceServerClient(server.grpc) as asked:
            (given,) = asked.get_model_metadata("on_gpu").inputs
            shape = [1 if size < 0 else size for size in given.shape]
            tensor = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
            wanted = client.InferInput(given.name, shape, given.datatype)
            wanted.set_data_from_numpy(tensor)
            found = {name: _only(asked.infer(name, [wanted])) for name in ("on_gpu", "on_cpu")}
        # TF32 and other orders of summation, in probabilities.
        assert np.abs(found["on_gpu"] - found["on_cpu"]).max() < 5e-3


def test_the_gpu_memory_limit_refuses_gpu_loads_but_not_cpu_loads(serve: Any, repository: Path) -> None:
    with serve(repository, "--model-load-gpu-limit=0:0") as server:
        index = {item["name"]: item for item in server.ask_json("/v2/repository/index", {})[1]}
        assert index["on_cpu"]["state"] == "READY"
        assert "memory limit set for GPU 0 has exceeded, model loading is rejected" in index["on_gpu"]["reason"]


def test_gpu_memory_is_freed_when_the_model_is_unloaded(serve: Any, measure: Any, repository: Path) -> None:
    explicit = ("--model-control-mode=explicit", "--load-model=on_gpu")
    with serve(repository, *explicit) as server:
        used = []
        for _ in range(6):
            assert server.ask_json("/v2/repository/models/on_gpu/unload", {})[0] == 200
            assert server.ask_json("/v2/repository/models/on_gpu/load", {})[0] == 200
            time.sleep(2.0)  # the governor reads the GPU twice a second
            gpus = server.ask_json("/edge/v1/governor")[1]["box"]["gpus"]
            used.append(next((gpu["memory_used_bytes"] for gpu in gpus if gpu["memory_used_bytes"]), 0))
        measure.series(
            "GPU memory in use after each reload", [(float(at), it / 1e6) for at, it in enumerate(used)], "MB"
        )
        if not used[0]:
            pytest.skip("this GPU does not tell how much of its memory is in use")
        (taken,) = server.ask_json("/edge/v1/models")[1]["models"][0]["gpu_bytes"].values()
        assert used[-1] - used[1] < max(taken, 50e6), "each reload leaves something behind"


def _only(answer: Any) -> Any:
    (output,) = answer.get_response().outputs
    return answer.as_numpy(output.name)
