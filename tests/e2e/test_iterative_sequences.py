"""Models that reschedule requests, through the installed server: shared batches, cancel, HTTP streams, metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.server import serve
from tests.kit.together import together
from tests.kit.triton_stream import TritonStream, is_final

CONFIG = """
backend: "python"
max_batch_size: 4
model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
instance_group { count: 1 kind: KIND_CPU }
sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 4 } }
"""
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        time.sleep(0.001)
        for request in requests:
            id = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.left[id] = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0, 0])
            else:
                self.left[id] -= 1
            sender = request.get_response_sender()
            out = pb_utils.Tensor("OUT", np.array([[self.left[id]]], np.int32))
            sender.send(pb_utils.InferenceResponse([out]))
            if self.left[id] > 1:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
APART = parameters(isolation="process")


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    for name, more in (("countdown", ""), ("countdown_apart", APART), ("busy", "")):
        module_repository.add(name, CONFIG + more)
        (module_repository.path / name / "1" / "model.py").write_text(MODEL)
    with serve(module_repository.path) as process:
        yield process


class Client(TritonStream):
    """A stream of counts."""

    def ask(self, model: str, value: int) -> None:
        given = infer_input(grpcclient, "IN", np.array([[value]], np.int32))
        self.send(model, [given], enable_empty_final_response=True)

    def read(self) -> int | None:
        """Return the next count; None once the stream of responses is closed."""
        result = self.result()
        return None if is_final(result) else int(result.as_numpy("OUT")[0, 0])

    def read_all(self) -> list[int]:
        return list(iter(self.read, None))

    def leave(self) -> None:
        self.close(cancels=True)


@pytest.mark.parametrize("model", ["countdown", "countdown_apart"])
def test_clients_that_join_at_any_time_share_batches_and_get_their_own_streams(server: Any, model: str) -> None:
    found: dict[int, list[int]] = {}

    def run(value: int) -> None:
        client = Client(server.grpc)
        client.ask(model, value)
        found[value] = client.read_all()
        client.leave()

    values = [150, 151, 152, 153, 20, 21, 22, 1]
    together(run, values)
    assert found == {value: list(range(value, 0, -1)) for value in values}
    statistics = server.statistics(model)
    assert (statistics["inference_stats"]["success"]["count"], int(statistics["inference_count"])) == (8, 8)
    batches = {int(one["batch_size"]): int(one["compute_infer"]["count"]) for one in statistics["batch_stats"]}
    assert sum(size * count for size, count in batches.items()) == sum(values)
    assert sum(batches.values()) == int(statistics["execution_count"]) < sum(values)
    assert max(batches) > 1


def test_generate_stream_sends_one_event_per_run(server: Any) -> None:
    done = subprocess.run(
        ["curl", "-sSN", "-d", '{"IN": 3}', server.url("/v2/models/countdown/generate_stream")],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    events = [json.loads(line.removeprefix("data: ")) for line in done.stdout.splitlines() if line]
    assert [event["OUT"] for event in events] == [3, 2, 1]


def test_cancelling_frees_the_slot_for_the_waiting_request(server: Any) -> None:
    endless = [Client(server.grpc) for _ in range(4)]
    for client in endless:
        client.ask("busy", 2_000_000_000)
        assert client.read() == 2_000_000_000
    late = Client(server.grpc)
    late.ask("busy", 2)

    def counts() -> tuple[float, float]:
        found = server.read_counters("busy")
        return found["edge_sequences_live"], found["edge_sequences_waiting"]

    assert eventually(lambda: counts() == (4, 1))
    command = [sys.executable, "-m", "edge_server", "status", "--url", server.url("")]
    status = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "busy version 1: sequences: 4 live, 1 waiting for a slot\n" in status
    assert "countdown version 1: sequences" not in status
    endless.pop().leave()
    assert late.read_all() == [2, 1]
    assert eventually(lambda: counts() == (3, 0))
    for client in (*endless, late):
        client.leave()
    assert eventually(lambda: counts() == (0, 0))
