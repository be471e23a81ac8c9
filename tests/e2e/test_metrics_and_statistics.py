"""Counters: after N requests the metrics and the statistics agree with N, exactly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.infer_input import infer_input
from tests.kit.models import identity_config
from tests.kit.server import serve

REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"


@pytest.fixture(scope="module")
def server(shared_server: Any, module_repository: Any) -> Iterator[Any]:
    repository = module_repository
    for name in ("counted", "mixed", "other_wire"):
        repository.add(name, identity_config("FP32"))
    repository.add("batched", identity_config("FP32", more="dynamic_batching { max_queue_delay_microseconds: 2000 }"))
    with shared_server(repository.path) as server:
        yield server


def body(rows: int = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [rows, 2], "data": [0.5] * 2 * rows}]}


def test_each_metric_of_the_page_is_in_the_reference_with_its_kind_and_meaning(server: Any) -> None:
    page = server.read_metrics()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    meanings = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    reference = REFERENCE.read_text()
    assert "nv_inference_count" in kinds
    for name, kind in kinds.items():
        if not name.startswith("process_"):
            assert f"| `{name}` | {kind} | {meanings[name]} |" in reference


@pytest.mark.parametrize("model", ["counted", "batched"])
def test_metrics_and_statistics_count_concurrent_requests_exactly(server: Any, model: str) -> None:
    sizes = [1 + number % 3 for number in range(120)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda rows: server.infer(model, body(rows))[0], sizes))
    assert statuses == [200] * 120
    counters, statistics = server.read_counters(model), server.statistics(model)
    stats = statistics["inference_stats"]
    assert counters["nv_inference_request_success"] == stats["success"]["count"] == 120
    assert counters["nv_inference_count"] == statistics["inference_count"] == sum(sizes)
    assert counters["nv_inference_exec_count"] == statistics["execution_count"]
    assert statistics["execution_count"] == sum(item["compute_infer"]["count"] for item in statistics["batch_stats"])
    assert sum(item["batch_size"] * item["compute_infer"]["count"] for item in statistics["batch_stats"]) == sum(sizes)
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert stats[part]["count"] == 120, part
    assert stats["fail"]["count"] == 0
    assert counters["nv_inference_pending_request_count"] == 0
    if model == "counted":
        assert statistics["execution_count"] == 120


def test_http_and_grpc_requests_are_counted_together(server: Any) -> None:
    tensor = infer_input(triton, "INPUT0", np.zeros((2, 2), np.float32))
    with triton.InferenceServerClient(server.grpc) as client:
        for _ in range(7):
            client.infer("other_wire", [tensor])
        for _ in range(3):
            server.infer("other_wire", body())
        found = client.get_inference_statistics("other_wire").model_stats[0]
    assert (found.inference_stats.success.count, found.inference_count, found.execution_count) == (10, 17, 10)
    assert server.statistics("other_wire")["inference_count"] == 17
    assert server.read_counters("other_wire")["nv_inference_count"] == 17


def test_requests_refused_before_the_queue_are_not_counted(server: Any) -> None:
    wrong = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [99, 2], "data": [0.5] * 198}]}
    with ThreadPoolExecutor(4) as pool:
        statuses = list(
            pool.map(lambda number: server.infer("mixed", wrong if number % 4 == 0 else body())[0], range(40))
        )
    assert statuses.count(200) == 30
    counters = server.read_counters("mixed")
    failures = sum(counters[f"nv_inference_request_failure {reason}"] for reason in REASONS)
    assert counters["nv_inference_request_success"] == 30
    assert failures == server.statistics("mixed")["inference_stats"]["fail"]["count"]
    # As with Triton, a request that never reached the model's queue is not one of the model's failures.
    assert failures == 0


@pytest.fixture(scope="module")
def latency_server(module_repository: Any, server: Any) -> Iterator[Any]:
    flags = ("histogram_latencies=true", "summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001")
    given = [f"--metrics-config={flag}" for flag in (*flags, "counter_latencies=false")]
    with serve(module_repository.path, *given) as running:
        yield running


def test_latencies_are_histograms_and_summaries_in_place_of_counters(latency_server: Any) -> None:
    for _ in range(5):
        latency_server.infer("mixed", body())
    page = latency_server.read_metrics()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert not [name for name in families if name.endswith("_duration_us")]
    first = families["nv_inference_first_response_histogram_ms"]
    found = {
        (sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value
        for sample in first.samples
        if sample.labels["model"] == "mixed"
    }
    assert [found["bucket", edge] for edge in ("500", "2000", "5000", "+Inf")] == [5] * 4
    assert (found["count", None], found["sum", None] > 0) == (5, True)
    summary = families["nv_inference_request_summary_us"]
    values = {
        sample.labels.get("quantile"): sample.value
        for sample in summary.samples
        if sample.labels["model"] == "mixed" and not sample.name.endswith("_count")
    }
    assert 0 < values["0.5"] <= values["0.99"] <= values[None]
    reference = REFERENCE.read_text()
    for family in (first, summary):
        assert f"| `{family.name}` | {family.type} | {family.documentation} |" in reference
