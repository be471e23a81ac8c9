"""A server that loses its GPU: reported by a runtime's error or by NVML, with stub drivers.

The runtime is a backend of another package, which computes on the host and, on a "GPU", raises what onnxruntime raises
once a file is there. Server, driver bindings, NVML's and repository are the true ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder
from tests.kit.server import serve
from tests.memory import fake_cuda
from tests.plugins.governor import fake_nvml

pytestmark = pytest.mark.full

UUID = "GPU-10101010-1010-1010-1010-101010101010"
"""What the driver's double reports for its GPU 0."""

BACKEND = """
import os

import numpy as np

from edge_server.backends.base import Backend, Session, SessionInfo
from edge_server.errors import BackendError


class Doubling(Session):
    def __init__(self, device_id):
        self.device_id = device_id
        self.info = SessionInfo("doubling 1", "CPU" if device_id is None else f"GPU:{device_id}", "f32")

    def run(self, inputs, outputs):
        if self.device_id is not None and os.path.exists(os.environ["BROKEN_GPU"]):
            raise BackendError("doubling failed: CUDA failure 700: an illegal memory access was encountered ; GPU=0")
        return {"OUT": np.array(inputs["IN"]) * 2}

    def close(self):
        pass


class DoublingBackend(Backend):
    name = "doubling"
    default_filename = ""
    runs_on_gpu = True

    def __init__(self, name):
        self.name = name

    def inspect(self, file, parameters):
        return None

    def open(self, job):
        with open(os.environ["FAKE_CUDA_STATE"]) as state:
            lines = dict(line.strip().split("=") for line in state)
        if job.device_id is not None:
            lines["used"] = int(lines["used"]) + (64 << 20)
            with open(os.environ["FAKE_CUDA_STATE"], "w") as state:
                state.write("".join(f"{key}={value}\\n" for key, value in lines.items()))
        return Doubling(job.device_id)
"""
CONFIG = """
backend: "doubling"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [2] }
output { name: "OUT" data_type: TYPE_FP32 dims: [2] }
"""
BODY = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


class GpuMachine:
    """A machine with one GPU: the environment of a process, and the switch that breaks the GPU."""

    def __init__(self, folder: Path) -> None:
        libraries = folder / "libraries"
        libraries.mkdir()
        fake_nvml.build(libraries)
        self.nvml = fake_nvml.FakeNvml(folder / "nvml")
        self.nvml.add_gpu(uuid=UUID)
        package = folder / "packages"
        model_folder(
            package / "doubling-1.dist-info",
            files={
                "METADATA": "Metadata-Version: 2.1\nName: doubling\nVersion: 1\n",
                "entry_points.txt": "[edge_server.backends]\ndoubling = doubling:DoublingBackend\n",
            },
        )
        (package / "doubling.py").write_text(BACKEND)
        self.broken = folder / "broken"
        self.environment = {
            **fake_cuda.FakeCuda(libraries).environment(),
            "FAKE_NVML_STATE": str(self.nvml.state),
            "PYTHONPATH": str(package),
            "BROKEN_GPU": str(self.broken),
        }


@pytest.fixture
def machine(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path)


def states(server: Any) -> dict[str, str]:
    return {name: item["state"] for name, item in server.index().items()}


def devices(server: Any) -> dict[str, str]:
    return {item["name"]: item["device"] for item in server.ask("/edge/v1/models")[1]["models"]}


def test_after_a_gpu_loss_kind_gpu_fails_and_a_model_without_kind_uses_the_cpu(
    repository: Any, machine: GpuMachine
) -> None:
    repository.add("any", CONFIG)
    repository.add("gpu_only", CONFIG + "instance_group { kind: KIND_GPU }")
    repository.add("host", CONFIG + "instance_group { kind: KIND_CPU }")
    with serve(repository.path, "--governor=false", environment=machine.environment) as server:
        assert devices(server) == {"any": "GPU:0", "gpu_only": "GPU:0", "host": "CPU"}
        (statistics,) = server.ask("/v2/models/any/stats")[1]["model_stats"]
        assert statistics["memory_usage"] == [{"type": "GPU", "id": 0, "byte_size": 64 << 20}]
        assert server.infer("any", BODY)[1]["outputs"][0]["data"] == [2, 4]
        assert server.get("/v2/health/ready")[0] == 200
        machine.broken.touch()
        status, answer = server.infer("gpu_only", BODY)
        assert status == 500, answer
        assert "illegal memory access" in answer["error"]
        assert eventually(lambda: devices(server) == {"any": "CPU", "host": "CPU"}), devices(server)
        assert eventually(lambda: states(server)["gpu_only"] == "UNAVAILABLE")
        assert server.infer("any", BODY)[1]["outputs"][0]["data"] == [2, 4]
        assert server.infer("host", BODY)[0] == 200
        assert server.get("/v2/models/any/ready")[0] == 200
        assert server.get("/v2/models/gpu_only/ready")[0] == 400
        assert server.get("/v2/health/ready")[0] == 400
        lost = "GPU 0 is lost to this process: doubling failed: CUDA failure 700"
        assert lost in server.index()["gpu_only"]["reason"]
        assert server.process.poll() is None, "it goes on serving what it can"
        assert server.stop() == 0


def test_a_gpu_lost_by_nvml_ends_the_process_with_its_exit_code(repository: Any, machine: GpuMachine) -> None:
    repository.add("gpu_only", CONFIG + "instance_group { kind: KIND_GPU }")
    flags = ("--exit-on-gpu-loss=true", "--governor-interval-ms=100")
    with serve(repository.path, *flags, environment=machine.environment) as server:
        assert server.infer("gpu_only", BODY)[0] == 200
        machine.nvml.lose(0)
        assert server.process.wait(30) == 79
        assert "GPU 0 is lost to this process: NVML" in server.log()
        assert "GPU_LOST" in server.log()
