"""The response cache as clients see it: equal requests over HTTP and gRPC, counts, metrics, reloads, Redis."""

from __future__ import annotations

import urllib.request
import uuid
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.infer_input import infer_input
from tests.kit.server import serve_here

CACHED = 'backend: "onnxruntime"\nresponse_cache { enable: true }'
LABELLED = """
backend: "identity" max_batch_size: 4 response_cache { enable: true }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] label_filename: "labels.txt" }
"""


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Any:
    module_repository.add_sub("add_sub", CACHED)
    module_repository.add_sub("plain", 'backend: "onnxruntime" max_batch_size: 4')
    (module_repository.add("labelled", LABELLED) / "labels.txt").write_text("cat\ndog\nhen\nowl\n")
    with serve_here(module_repository.path, cache_config="local,size=16777216", allow_client_shm=True) as started:
        yield started


def inputs(module: Any, value: float, names: tuple[str, str] = ("INPUT0", "INPUT1")) -> list[Any]:
    made = []
    for name, array in zip(names, (np.full((1, 16), value, np.float32), np.ones((1, 16), np.float32)), strict=True):
        made.append(infer_input(module, name, array))
    return made


def counts(server: Any, model: str) -> dict[str, int]:
    client = httpclient.InferenceServerClient(server.http)
    (found,) = client.get_inference_statistics(model)["model_stats"]
    client.close()
    parts = found["inference_stats"]
    return {name: parts[name]["count"] for name in parts} | {"executions": found["execution_count"]}


def metrics(server: Any) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as reply:
        page = reply.read().decode()
    return {
        (sample.name.removesuffix("_total"), sample.labels.get("model", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_http_and_grpc_share_cached_responses(server: Any) -> None:
    http, grpc = httpclient.InferenceServerClient(server.http), grpcclient.InferenceServerClient(server.grpc)
    before = counts(server, "add_sub")
    results = [http.infer("add_sub", inputs(httpclient, 41.0), request_id="one")]
    results += [http.infer("add_sub", inputs(httpclient, 41.0), request_id="two")]
    results += [grpc.infer("add_sub", inputs(grpcclient, 41.0), request_id="three")]
    for result in results:
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.full((1, 16), 42, np.float32))
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), np.full((1, 16), 40, np.float32))
    assert [results[0].get_response()["id"], results[1].get_response()["id"]] == ["one", "two"]
    assert results[2].get_response().id == "three"
    after = counts(server, "add_sub")
    gained = {name: after[name] - before[name] for name in after}
    assert (gained["success"], gained["queue"], gained["cache_hit"], gained["cache_miss"]) == (3, 3, 2, 1)
    assert (gained["executions"], gained["compute_infer"], gained["fail"]) == (1, 1, 0)
    found = grpc.get_inference_statistics("add_sub").model_stats[0].inference_stats
    assert (found.cache_hit.count, found.cache_miss.count) == (after["cache_hit"], after["cache_miss"])
    http.close()
    grpc.close()


def test_classification_and_raw_outputs_share_a_cached_response(server: Any) -> None:
    client = httpclient.InferenceServerClient(server.http)
    item = infer_input(httpclient, "INPUT0", np.array([[0.1, 0.2, 0.9, 0.3]], np.float32))
    before = counts(server, "labelled")
    for _ in range(2):
        asked = [httpclient.InferRequestedOutput("OUTPUT0", class_count=1)]
        assert client.infer("labelled", [item], outputs=asked).as_numpy("OUTPUT0")[0, 0].endswith(b":2:hen")
        np.testing.assert_allclose(client.infer("labelled", [item]).as_numpy("OUTPUT0")[0, 2], 0.9, rtol=1e-6)
    assert counts(server, "labelled")["executions"] - before["executions"] == 1
    client.close()


def test_a_hit_is_written_into_the_clients_shared_memory(server: Any) -> None:
    client = httpclient.InferenceServerClient(server.http)
    key = f"/edge_cached_out_{uuid.uuid4().hex}"
    region = shm.create_shared_memory_region("cached_out", key, 64)
    try:
        client.register_system_shared_memory("cached_out", key, 64)
        for _ in range(2):
            shm.set_shared_memory_region(region, [np.zeros((1, 16), np.float32)])
            asked = httpclient.InferRequestedOutput("OUTPUT0")
            asked.set_shared_memory("cached_out", 64)
            client.infer("add_sub", inputs(httpclient, 5.0), outputs=[asked])
            np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, (1, 16)), 6)
        client.unregister_system_shared_memory("cached_out")
    finally:
        shm.destroy_shared_memory_region(region)
    client.close()


def test_the_metrics_cover_each_cached_model_and_the_cache(server: Any) -> None:
    client = httpclient.InferenceServerClient(server.http)
    for _ in range(2):
        client.infer("add_sub", inputs(httpclient, 1234.0))
    client.close()
    found, counted = metrics(server), counts(server, "add_sub")
    assert found["nv_cache_num_hits_per_model", "add_sub"] == counted["cache_hit"] > 0
    assert found["nv_cache_num_misses_per_model", "add_sub"] == counted["cache_miss"] > 0
    assert found["nv_cache_miss_duration_per_model", "add_sub"] > 0
    assert ("nv_cache_num_hits_per_model", "plain") not in found
    assert found["nv_inference_request_success", "add_sub"] == counted["success"]
    assert found["nv_inference_count", "add_sub"] == counted["cache_miss"]
    assert 0 < found["nv_cache_util", ""] < 1
    assert found["nv_cache_num_entries", ""] > 0
    assert found["nv_cache_num_lookups", ""] == found["nv_cache_num_hits", ""] + found["nv_cache_num_misses", ""]
