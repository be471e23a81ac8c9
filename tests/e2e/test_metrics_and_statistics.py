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

import edge_server
from tests.kit.models import identity_config
from tests.kit.server import serve

COUNTERS = {
    "nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count",
    "nv_inference_request_duration_us", "nv_inference_queue_duration_us", "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us", "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count", "nv_model_load_duration_secs",
}  # fmt: skip
REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


@pytest.fixture(scope="module")
def server(shared_server: Any, module_repository: Any) -> Iterator[Any]:
    repository = module_repository
    for name in ("quiet", "counted", "mixed", "other_wire"):
        repository.add(name, identity_config("FP32", more='metric_tags { key: "site" value: "hall 3" }'))
    repository.add("batched", identity_config("FP32", more="dynamic_batching { max_queue_delay_microseconds: 2000 }"))
    repository.add_sub("real", 'backend: "onnxruntime"')
    repository.add_sub("real_openvino", 'backend: "openvino"')
    repository.add(
        "broken",
        identity_config("FP32").replace('"identity"', '"stub"')
        + 'parameters { key: "stub_fail" value { string_value: "true" } }'
        + 'parameters { key: "warmup_probe" value { string_value: "false" } }',
    )
    with shared_server(repository.path) as server:
        yield server


def body(rows: int = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [rows, 2], "data": [0.5] * 2 * rows}]}


def test_a_model_without_requests_has_every_series_at_zero(server: Any) -> None:
    counters = server.read_counters("quiet")
    assert set(counters) >= COUNTERS
    for name in COUNTERS - {"nv_model_load_duration_secs"}:
        assert counters[name] == 0, name
    for reason in REASONS:
        assert counters[f"nv_inference_request_failure {reason}"] == 0
    assert server.statistics("quiet")["inference_stats"]["success"] == {"count": 0, "ns": 0}


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


def test_durations_are_microseconds_in_metrics_and_nanoseconds_in_statistics(server: Any) -> None:
    server.infer("counted", body())
    counters, stats = server.read_counters("counted"), server.statistics("counted")["inference_stats"]
    for metric, name in (
        ("nv_inference_request_duration_us", "success"),
        ("nv_inference_queue_duration_us", "queue"),
        ("nv_inference_compute_infer_duration_us", "compute_infer"),
    ):
        assert abs(counters[metric] - stats[name]["ns"] / 1000) <= 1, metric
    parts = sum(stats[part]["ns"] for part in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < parts <= stats["success"]["ns"]


def test_http_and_grpc_requests_are_counted_together(server: Any) -> None:
    tensor = triton.InferInput("INPUT0", [2, 2], "FP32")
    tensor.set_data_from_numpy(np.zeros((2, 2), np.float32))
    with triton.InferenceServerClient(server.grpc) as client:
        for _ in range(7):
            client.infer("other_wire", [tensor])
        for _ in range(3):
            server.infer("other_wire", body())
        found = client.get_inference_statistics("other_wire").model_stats[0]
    assert (found.inference_stats.success.count, found.inference_count, found.execution_count) == (10, 17, 10)
    assert server.statistics("other_wire")["inference_count"] == 17
    assert server.read_counters("other_wire")["nv_inference_count"] == 17


def test_a_request_the_backend_fails_counts_as_failed_for_that_reason(server: Any) -> None:
    for _ in range(5):
        assert server.infer("broken", body())[0] == 500
    counters, stats = server.read_counters("broken"), server.statistics("broken")["inference_stats"]
    assert counters["nv_inference_request_failure BACKEND"] == stats["fail"]["count"] == 5
    assert counters["nv_inference_request_success"] == stats["success"]["count"] == 0


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


def test_the_time_of_the_last_inference_is_in_milliseconds_since_the_epoch(server: Any) -> None:
    server.infer("counted", body())
    assert server.statistics("counted")["last_inference"] > 1_600_000_000_000
    assert server.statistics("quiet")["last_inference"] == 0


def test_statistics_of_all_models_contain_each_once(server: Any) -> None:
    status, answer = server.ask("/v2/models/stats")
    assert status == 200
    names = [item["name"] for item in answer["model_stats"]]
    assert len(names) == len(set(names))
    assert {"quiet", "counted", "batched", "real", "real_openvino", "broken"} <= set(names)


def test_statistics_of_an_absent_model_are_refused_by_name(server: Any) -> None:
    for path in ("/v2/models/nobody/stats", "/v2/models/quiet/versions/9/stats"):
        status, answer = server.ask(path)
        assert status == 400
        assert "is not available" in answer["error"]


def test_metric_tags_become_labels(server: Any) -> None:
    line = next(
        line
        for line in server.read_metrics().splitlines()
        if line.startswith("nv_inference_count{") and '"quiet"' in line
    )
    assert '_site="hall 3"' in line
    assert 'version="1"' in line


def test_the_page_has_metrics_of_host_process_and_build(server: Any) -> None:
    page = server.read_metrics()
    for name in ("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"):
        assert re.search(rf"^{name} \d", page, re.MULTILINE), name
    assert re.search(r"^process_resident_memory_bytes \d", page, re.MULTILINE)
    assert f'version="{edge_server.__version__}"' in next(line for line in page.splitlines() if "build_info{" in line)


def test_runtime_device_and_precision_in_force_are_on_the_page(server: Any) -> None:
    lines = [line for line in server.read_metrics().splitlines() if 'precision="' in line]
    onnxruntime, openvino = (next(line for line in lines if f'"{name}"' in line) for name in ("real", "real_openvino"))
    assert 'device="CPU"' in onnxruntime
    assert 'runtime="onnxruntime ' in onnxruntime
    assert 'runtime="openvino ' in openvino
    assert 'precision="f32"' in openvino


def test_the_page_is_prometheus_text(server: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name for family in text_string_to_metric_families(server.read_metrics())}
    assert {"nv_inference_count", "nv_inference_request_failure", "nv_cpu_utilization"} <= families


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
