"""The metrics page and the statistics, over HTTP and gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.kit.infer_input import infer_input
from tests.kit.models import identity_config

REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"


@pytest.fixture(scope="module")
def server(shared_server: Any, module_repository: Any) -> Iterator[Any]:
    module_repository.add("other_wire", identity_config("FP32"))
    with shared_server(module_repository.path) as server:
        yield server


def test_each_metric_of_the_page_is_in_the_reference_with_its_kind_and_meaning(server: Any) -> None:
    page = server.read_metrics()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    meanings = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    reference = REFERENCE.read_text()
    assert "nv_inference_count" in kinds
    for name, kind in kinds.items():
        if not name.startswith("process_"):
            assert f"| `{name}` | {kind} | {meanings[name]} |" in reference


def test_http_and_grpc_requests_are_counted_together(server: Any) -> None:
    tensor = infer_input(triton, "INPUT0", np.zeros((2, 2), np.float32))
    given = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}
    with triton.InferenceServerClient(server.grpc) as client:
        for _ in range(7):
            client.infer("other_wire", [tensor])
        for _ in range(3):
            server.infer("other_wire", {"inputs": [given]})
        found = client.get_inference_statistics("other_wire").model_stats[0]
    assert (found.inference_stats.success.count, found.inference_count, found.execution_count) == (10, 17, 10)
    assert server.statistics("other_wire")["inference_count"] == 17
    assert server.read_counters("other_wire")["nv_inference_count"] == 17
