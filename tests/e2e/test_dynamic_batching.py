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
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import identity_config

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
    def add_gated(name: str, batching: str) -> None:
        gate = parameters(gate=gates / name)
        config = identity_config(batch=1, more=f"dynamic_batching {{ {batching} }} {gate}").replace(
            "identity", "python"
        )
        module_repository.add(name, config, files={"1/model.py": GATED})

    delay = parameters(execute_delay_ms="100")
    module_repository.add("busy", identity_config(inputs=2, more=f"{delay} dynamic_batching {{ }}"))
    add_gated("small_queue", "default_queue_policy { max_queue_size: 2 }")
    add_gated("urgent", "priority_levels: 2 default_priority_level: 2")
    with shared_server(module_repository.path) as server:
        yield server


def body(number: int, names: tuple[str, ...] = ("INPUT0",), **more: Any) -> dict[str, Any]:
    tensors = [{"name": name, "datatype": "INT32", "shape": [1, 1], "data": [number]} for name in names]
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


def test_cancelling_a_waiting_request_does_not_disturb_its_batch(server: Any) -> None:
    tensors = []
    for name in ("INPUT0", "INPUT1"):
        tensors.append(infer_input(triton, name, np.full((1, 1), 7, np.int32)))
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
