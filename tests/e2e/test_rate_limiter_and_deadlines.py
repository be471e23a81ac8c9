"""Resources shared by models, and deadlines, as clients of a running server see them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.kit.eventually import eventually
from tests.kit.models import identity_config
from tests.kit.server import serve

DELAY_MS = 60
SLOW_MS = 400


def limited(count: int) -> str:
    resources = f'rate_limiter {{ resources [ {{ name: "hands" count: {count} }} ] }}'
    return (
        f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{DELAY_MS}" }} }}\n'
        f"instance_group {{ kind: KIND_CPU count: 2 {resources} }}"
    )


def body(**parameters: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}
    return {"inputs": [tensor], "parameters": parameters}


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    module_repository.add("left", identity_config(batch=1, more=limited(2)))
    module_repository.add("right", identity_config(batch=1, more=limited(2)))
    module_repository.add("greedy", identity_config(batch=1, more=limited(4)))
    module_repository.add("free", identity_config(batch=1))
    slow = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{SLOW_MS}" }} }}'
    module_repository.add("slow", identity_config(batch=1, more=slow))
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    module_repository.add("narrow", identity_config(batch=1, more=f"{slow}\n{queue}"))
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=hands:3", "--exit-on-error=false")
    with serve(module_repository.path, *flags) as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


def compute_ns(server: Any, model: str) -> int:
    return int(server.statistics(model)["inference_stats"]["compute_infer"]["ns"])


def test_two_models_that_share_a_resource_never_run_at_once(server: Any) -> None:
    """Three hands, two for each: one instance of one of the two at a time, of two instances each."""
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda index: server.infer(("left", "right")[index % 2], body()), range(8)))
    took_s = time.monotonic() - begun
    assert [status for status, _ in answers] == [200] * 8
    computing_s = (compute_ns(server, "left") + compute_ns(server, "right")) / 1e9
    assert computing_s >= 8 * DELAY_MS / 1000
    assert took_s >= computing_s, "runs that never overlap take no less than their sum"


def test_a_model_that_needs_more_resources_than_exist_does_not_load_and_names_the_missing_ones(server: Any) -> None:
    index = server.ask("/v2/repository/index", {})[1]
    reason = next(item["reason"] for item in index if item["name"] == "greedy")
    assert "model 'greedy'" in reason
    assert "asks for 4 of resource 'hands'" in reason
    assert "--rate-limit-resource grants 3" in reason
    assert server.infer("free", body())[0] == 200


def test_a_request_that_cannot_meet_its_deadline_is_refused_before_it_runs(server: Any) -> None:
    assert server.infer("slow", body())[0] == 200
    runs = server.statistics("slow")["execution_count"]
    with contextlib.closing(server.connection()) as connection:
        connection.request("POST", "/v2/models/slow/infer", json.dumps(body(edge_deadline_ms=SLOW_MS / 4)))
        reply = connection.getresponse()
        error = json.loads(reply.read())["error"]
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert "model 'slow' takes about" in error
    assert server.statistics("slow")["execution_count"] == runs
    assert server.infer("slow", body(edge_deadline_ms=60_000))[0] == 200


def test_a_deadline_that_passes_in_the_queue_ends_the_wait(server: Any) -> None:
    with ThreadPoolExecutor(5) as pool:
        before = server.statistics("slow")["execution_count"]
        # Three wait: the deadline passes long before its turn comes, also if it takes a while to ask.
        first = [pool.submit(server.infer, "slow", body()) for _ in range(5)]
        assert eventually(lambda: server.read_counters("slow")["nv_inference_pending_request_count"] >= 3)
        status, answer = server.infer("slow", body(edge_deadline_ms=1.4 * SLOW_MS))
        assert [item.result()[0] for item in first] == [200] * 5
    assert status == 503, answer
    assert "timeout expired" in answer["error"] or "takes about" in answer["error"]
    assert server.statistics("slow")["execution_count"] == before + 5


@pytest.mark.parametrize("wrong", [0, -5, "soon", True])
def test_an_invalid_deadline_is_refused(server: Any, wrong: Any) -> None:
    status, answer = server.infer("free", body(edge_deadline_ms=wrong))
    assert status == 400
    assert "edge_deadline_ms" in answer["error"]


def test_a_request_that_cannot_meet_its_grpc_deadline_does_not_run(server: Any) -> None:
    given = triton.InferInput("INPUT0", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[7]], np.int32))
    with triton.InferenceServerClient(server.grpc) as client:
        client.infer("slow", [given])
        before = server.statistics("slow")
        with pytest.raises(InferenceServerException) as caught:
            client.infer("slow", [given], client_timeout=SLOW_MS / 4000)
        assert "takes about" in str(caught.value) or "Deadline Exceeded" in str(caught.value)
        assert client.infer("slow", [given], client_timeout=60).as_numpy("OUTPUT0").tolist() == [[7]]
    assert server.statistics("slow")["execution_count"] == before["execution_count"] + 1
    assert eventually(lambda: int(server.statistics("slow")["inference_stats"]["fail"]["count"]) >= 1)


def test_a_refused_grpc_call_gets_a_time_to_retry(server: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="narrow", raw_input_contents=[np.int32(7).tobytes()])
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
    message = request.SerializeToString()
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        running = [call.future(message) for _ in range(6)]
        errors = [item.exception() for item in running]
    refused = [error for error in errors if error is not None]
    assert 0 < len(refused) < 6
    for error in refused:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
