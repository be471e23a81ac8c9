"""ONNX models whose configuration requires a GPU, on machines without one, or without one that every runtime can
use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.models import add_sub_body
from tests.kit.server import serve

pytestmark = pytest.mark.full

GPU = "max_batch_size: 4\ninstance_group { kind: KIND_GPU }\n"


@pytest.fixture
def models(repository: Any) -> Path:
    """One model without a configured runtime, one with it, and one that accepts a CPU."""
    repository.add_sub("open", GPU)
    repository.add_sub("named", f'backend: "onnxruntime"\n{GPU}')
    repository.add_sub("content", "max_batch_size: 4\n")
    return Path(repository.path)


def reasons(server: Any) -> dict[str, str]:
    """Return why models do not serve, "" for those that do."""
    index = server.index().items()
    return {name: "" if item["state"] == "READY" else item.get("reason", item["state"]) for name, item in index}


def test_with_a_gpu_they_wait_for_their_engine_and_an_unsuitable_runtime_reports_it(
    models: Path, fake_gpu: Any, tmp_path: Path
) -> None:
    """The onnxruntime of the tests computes on the CPU only."""
    there = fake_gpu.environment(tmp_path / "engines")
    with serve(models, f"--engine-cache-dir={tmp_path / 'engines'}", environment=there) as server:
        lacks = "is to run on GPU 0, but this onnxruntime has no CUDA: onnxruntime-gpu has; KIND_CPU runs it on the CPU"
        assert reasons(server)["named"] == f"model 'named': instance 'named_0_0_0' {lacks}"
        assert eventually(lambda: reasons(server)["open"] == "", 100.0), (reasons(server), server.log())
        # Until then the reasons of every runtime were reported, the engine's among them.
        told = next(line for line in server.log().splitlines() if "model 'open' version 1 failed to load" in line)
        assert lacks in told
        assert "there is no tensorrt_rtx engine yet that matches its file" in told
        status, answer = server.infer("open", add_sub_body(1.0))
        assert (status, answer["outputs"][0]["data"]) == (200, [2.0] * 16)
        assert server.ask("/v2/models/open/config")[1]["instance_group"][0]["kind"] == "KIND_GPU"
