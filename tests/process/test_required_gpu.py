"""ONNX models whose configuration requires a GPU, on a machine without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.models import add_sub_body
from tests.kit.server import serve_here

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


def test_without_a_gpu_they_are_refused_with_advice_and_other_models_serve(models: Path) -> None:
    with serve_here(models) as server:
        found = reasons(server)
        for name in ("open", "named"):
            assert found[name] == (
                f"model '{name}': instance_group '{name}_0' has kind KIND_GPU but no GPU is available; use KIND_CPU, "
                "or KIND_AUTO to take what there is"
            )
            status, answer = server.infer(name, add_sub_body(1.0))
            absent = f"Request for unknown model: '{name}' has no available versions"
            assert (status, answer["error"]) == (404, f"{absent}: version 1 is UNAVAILABLE ({found[name]})")
        assert found["content"] == ""
        assert server.infer("content", add_sub_body(1.0))[0] == 200
        assert server.ask("/edge/v1/engines")[1]["enabled"] is False
        assert server.get("/v2/health/ready")[0] == 200, "what never served does not count in mode poll"
