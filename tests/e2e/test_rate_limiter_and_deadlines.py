"""Resources shared by models, and deadlines, as clients of a running server see them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.kit.models import identity_config
from tests.kit.server import serve

SLOW_MS = 400


def body(**parameters: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}
    return {"inputs": [tensor], "parameters": parameters}


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    group = 'instance_group { kind: KIND_CPU count: 2 rate_limiter { resources [ { name: "hands" count: 4 } ] } }'
    module_repository.add("greedy", identity_config(batch=1, more=group))
    module_repository.add("free", identity_config(batch=1))
    slow = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{SLOW_MS}" }} }}'
    module_repository.add("slow", identity_config(batch=1, more=slow))
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    module_repository.add("narrow", identity_config(batch=1, more=f"{slow}\n{queue}"))
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=hands:3", "--exit-on-error=false")
    with serve(module_repository.path, *flags) as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


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
