"""The dynamic batcher and its queue policies as clients of a running server see them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.kit.eventually import eventually
from tests.kit.models import identity_config


def delayed(delay_ms: int, more: str) -> str:
    return f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay_ms}" }} }}\n{more}'


GATED = """
import json, pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.gate = pathlib.Path(json.loads(args["model_config"])["parameters"]["gate"]["string_value"])

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        with self.gate.with_suffix(".runs").open("a") as runs:
            print(*[int(values[0, 0]) for values in given], file=runs)
        while not self.gate.exists():
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]) for values in given]
"""
"""Returns its input once a certain file exists. A second file lists its runs, in order."""


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the gates; each bears the name of its model."""
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def server(shared_server: Any, module_repository: Any, gates: Path) -> Iterator[Any]:
    def add(name: str, batching: str, delay_ms: int = 100, **more: Any) -> None:
        module_repository.add(
            name, identity_config(more=delayed(delay_ms, f"dynamic_batching {{ {batching} }}"), **more)
        )

    def add_gated(name: str, batching: str) -> None:
        gate = f'parameters {{ key: "gate" value {{ string_value: "{gates / name}" }} }}'
        config = identity_config(batch=1, more=f"dynamic_batching {{ {batching} }} {gate}").replace(
            "identity", "python"
        )
        folder = module_repository.add(name, config)
        (folder / "1" / "model.py").write_text(GATED)

    add("busy", "max_queue_delay_microseconds: 0", inputs=2)
    add("shapes", "max_queue_delay_microseconds: 100000")
    add("preferred", "preferred_batch_size: [4] max_queue_delay_microseconds: 100000000", delay_ms=0)
    add("ordered", "preserve_ordering: true")
    add_gated("small_queue", "default_queue_policy { max_queue_size: 2 }")
    add_gated("impatient", "default_queue_policy { default_timeout_microseconds: 50000 }")
    add(
        "patient",
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 50000 }",
        delay_ms=200,
        batch=1,
    )
    add_gated("urgent", "priority_levels: 2 default_priority_level: 2")
    add_gated("own_timeout", "default_queue_policy { allow_timeout_override: true }")
    module_repository.add("two_hands", identity_config(more=delayed(150, "instance_group { count: 2 kind: KIND_CPU }")))
    with shared_server(module_repository.path) as server:
        yield server


def body(
    number: int, rows: int = 1, width: int = 1, names: tuple[str, ...] = ("INPUT0",), **more: Any
) -> dict[str, Any]:
    data = [number] * rows * width
    tensors = [{"name": name, "datatype": "INT32", "shape": [rows, width], "data": data} for name in names]
    return {"inputs": tensors, "parameters": more}


def batches(server: Any, model: str) -> dict[int, int]:
    statistics = server.statistics(model)
    return {item["batch_size"]: item["compute_infer"]["count"] for item in statistics["batch_stats"]}


@contextlib.contextmanager
def one_running(server: Any, model: str, gates: Path) -> Iterator[tuple[ThreadPoolExecutor, Any]]:
    """Occupy a gated model with one request; yield a pool for further ones, and the future of the first."""
    with ThreadPoolExecutor(16) as pool:
        try:
            first = pool.submit(server.infer, model, body(0))
            assert eventually((gates / f"{model}.runs").exists)
            yield pool, first
        finally:
            (gates / model).touch()


def test_waiting_requests_run_as_one_batch_and_each_gets_its_own_items(server: Any) -> None:
    names = ("INPUT0", "INPUT1")
    with ThreadPoolExecutor(17) as pool:
        futures = {number: pool.submit(server.infer, "busy", body(number, names=names)) for number in range(17)}
        for number, future in futures.items():
            status, answer = future.result()
            assert status == 200
            assert [item["data"] for item in answer["outputs"]] == [[number], [number]]
    found = batches(server, "busy")
    assert sum(size * count for size, count in found.items()) == 17
    assert max(found) > 1
    assert max(found) <= 8


def test_requests_of_different_sizes_and_shapes_never_mix(server: Any) -> None:
    with ThreadPoolExecutor(12) as pool:
        futures = [
            (number, width, pool.submit(server.infer, "shapes", body(number, rows=1 + number % 2, width=width)))
            for number, width in enumerate([1, 2, 3] * 4)
        ]
        for number, width, future in futures:
            status, answer = future.result()
            assert status == 200, answer
            assert answer["outputs"][0]["shape"] == [1 + number % 2, width]
            assert answer["outputs"][0]["data"] == [number] * width * (1 + number % 2)


def test_a_preferred_size_is_sent_without_waiting_for_the_delay(server: Any) -> None:
    # An unfilled batch would wait for longer than the client does.
    with ThreadPoolExecutor(4) as pool:
        statuses = [answer[0] for answer in pool.map(lambda number: server.infer("preferred", body(number)), range(4))]
    assert statuses == [200] * 4
    assert batches(server, "preferred") == {4: 1}


def test_a_full_queue_refuses_at_once_with_a_message(server: Any, gates: Path) -> None:
    with one_running(server, "small_queue", gates) as (pool, first):
        futures = [pool.submit(server.infer, "small_queue", body(number)) for number in range(1, 12)]
        assert eventually(lambda: sum(future.done() for future in futures) == 9)
        refused = [future.result() for future in futures if future.done()]
    assert all(status == 503 and "Exceeds maximum queue size" in answer["error"] for status, answer in refused)
    assert sorted(future.result()[0] for future in (first, *futures)) == [200] * 3 + [503] * 9
    counters = server.read_counters("small_queue")
    assert counters["nv_inference_request_failure REJECTED"] == 9
    assert counters["nv_inference_request_success"] == 3


def test_a_request_past_its_queue_timeout_is_rejected_under_policy_reject(server: Any, gates: Path) -> None:
    with one_running(server, "impatient", gates) as (pool, first):
        answers = list(pool.map(lambda number: server.infer("impatient", body(number)), range(2)))
    assert first.result()[0] == 200
    assert [status for status, _ in answers] == [503, 503]
    assert all("Request timeout expired" in answer["error"] for _, answer in answers)


def test_a_request_past_its_queue_timeout_is_delayed_under_policy_delay(server: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        statuses = [status for status, _ in pool.map(lambda number: server.infer("patient", body(number)), range(3))]
    assert statuses == [200, 200, 200]


def test_a_request_may_set_its_own_timeout_if_the_policy_allows_it(server: Any, gates: Path) -> None:
    with one_running(server, "own_timeout", gates) as (pool, first):
        answers = list(pool.map(lambda number: server.infer("own_timeout", body(number, timeout=20_000)), range(3)))
    assert first.result()[0] == 200
    assert [status for status, _ in answers] == [503, 503, 503]


def test_a_request_of_higher_priority_overtakes_waiting_ones(server: Any, gates: Path) -> None:
    def waiting() -> float:
        return float(server.read_counters("urgent")["nv_inference_pending_request_count"])

    with one_running(server, "urgent", gates) as (pool, first):
        futures = [pool.submit(server.infer, "urgent", body(number)) for number in range(1, 10)]
        assert eventually(lambda: waiting() == 9)
        futures.append(pool.submit(server.infer, "urgent", body(99, priority=1)))
        assert eventually(lambda: waiting() == 10)
    assert [future.result()[0] for future in (first, *futures)] == [200] * 11
    ran = (gates / "urgent.runs").read_text().split()
    assert ran[:2] == ["0", "99"]
    assert sorted(ran[2:]) == [str(number) for number in range(1, 10)]


def test_preserved_order_answers_everything(server: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: server.infer("ordered", body(number)), range(16)))
    assert [answer["outputs"][0]["data"] for _, answer in answers] == [[number] for number in range(16)]


def test_two_instances_work_at_the_same_time(server: Any) -> None:
    config = server.ask("/v2/models/two_hands/config")[1]
    assert config["instance_group"][0]["count"] == 2
    with ThreadPoolExecutor(4) as pool:
        assert [status for status, _ in pool.map(lambda number: server.infer("two_hands", body(number)), range(4))] == [
            200
        ] * 4


def test_cancelling_a_waiting_request_does_not_disturb_its_batch(server: Any) -> None:
    tensors = []
    for name in ("INPUT0", "INPUT1"):
        tensor = triton.InferInput(name, [1, 1], "INT32")
        tensor.set_data_from_numpy(np.full((1, 1), 7, np.int32))
        tensors.append(tensor)
    before = server.statistics("busy")["inference_stats"]["success"]["count"]
    with triton.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(8) as pool:
        first = [pool.submit(server.infer, "busy", body(number, names=("INPUT0", "INPUT1"))) for number in range(8)]
        cancelled = [client.async_infer("busy", tensors, lambda result, error: None) for _ in range(3)]
        for call in cancelled:
            call.cancel()
        assert [future.result()[0] for future in first] == [200] * 8
        with pytest.raises(InferenceServerException):
            client.infer("busy", tensors, client_timeout=0.001)
        assert client.infer("busy", tensors).as_numpy("OUTPUT0").tolist() == [[7]]
    assert server.statistics("busy")["inference_stats"]["success"]["count"] >= before + 9


def test_the_config_shows_the_batcher_normalised(server: Any) -> None:
    assert server.ask("/v2/models/busy/config")[1]["dynamic_batching"]["preferred_batch_size"] == [8]
    assert server.ask("/v2/models/preferred/config")[1]["dynamic_batching"]["preferred_batch_size"] == [4]
