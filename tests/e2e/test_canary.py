"""Canaries of models with sequences, on the installed server."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.kit.eventually import eventually
from tests.kit.models import finish
from tests.kit.server import serve


def table_model(values: list[float]) -> onnx.ModelProto:
    """y = values[index]: an index beyond the table fails at run time, in the runtime."""
    table = onnx.numpy_helper.from_array(np.array(values, np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "index"], ["y"], axis=0)],
        "table",
        [helper.make_tensor_value_info("index", TensorProto.INT64, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [table],
    )
    return finish(graph)


SEQUENCES = """
backend: "BACKEND"
max_batch_size: 16
version_policy { all {} }
input { name: "index" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "canary_share" value { string_value: "0.5" } }
parameters { key: "canary_min_requests" value { string_value: "20" } }
parameters { key: "canary_max_p99_ratio" value { string_value: "1000000" } }
sequence_batching {
  max_sequence_idle_microseconds: 600000000
  STRATEGY
  STATE
}
"""
STATE = """
  state { input_name: "sum" output_name: "new_sum" data_type: TYPE_FP32 dims: [ 1 ]
          initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
"""
OLDEST = "oldest { max_candidate_sequences: 16 }"
STATEFUL = {
    "direct": ("onnxruntime", "direct {}", STATE),
    "oldest": ("onnxruntime", OLDEST, STATE),
    "python": ("python", OLDEST, ""),
}
"""Model -> backend, strategy and state."""

RUNNING_SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        id, index = request.correlation_id(), int(pb_utils.get_input_tensor_by_name(request, "index").as_numpy()[0, 0])
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[id] = 0
        self.sums[id] += VALUES[index]
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[self.sums[id]]], np.float32))])
"""


def running_sum(values: list[float]) -> onnx.ModelProto:
    """y = the sum of values[index] of a sequence."""
    model = table_model(values)
    graph = model.graph
    graph.node[0].output[0] = "value"
    graph.node.append(helper.make_node("Add", ["value", "sum"], ["y"]))
    graph.node.append(helper.make_node("Identity", ["y"], ["new_sum"]))
    graph.input.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["batch", 1]))
    graph.output.append(helper.make_tensor_value_info("new_sum", TensorProto.FLOAT, ["batch", 1]))
    return model


def index_body(index: int) -> dict[str, Any]:
    return {"inputs": [{"name": "index", "datatype": "INT64", "shape": [1, 1], "data": [index]}]}


def shares(server: Any, model: str) -> dict[int, float]:
    rows = server.ask(f"/edge/v1/versions?model={model}")[1]
    rows = rows["versions"] if isinstance(rows, dict) else rows
    return {int(row["version"]): row["share"] for row in rows if row["state"] == "READY"}


def write_whole(folder: Path, version: int, model: onnx.ModelProto | str) -> None:
    """Move a version into place in one step, as an updater does."""
    staging = folder.parent / ".staging"
    staging.mkdir()
    if isinstance(model, str):
        (staging / "model.py").write_text(model)
    else:
        (staging / "model.onnx").write_bytes(model.SerializeToString())
    os.replace(staging, folder / str(version))


def summing(name: str, values: list[float]) -> onnx.ModelProto | str:
    """Return the file of a model of STATEFUL."""
    return RUNNING_SUM.replace("VALUES", repr(values)) if name == "python" else running_sum(values)


def step(server: Any, model: str, id: int, flags: str = "", index: int = 0) -> tuple[str, float] | str:
    """Send a request of a sequence; flags are "+" for its start, "-" for its end. Return the version and the sum, or
    the error."""
    parameters = {"sequence_id": id, "sequence_start": "+" in flags, "sequence_end": "-" in flags}
    status, answer = server.infer(model, {**index_body(index), "parameters": parameters})
    return (answer["model_version"], answer["outputs"][0]["data"][0]) if status == 200 else answer["error"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", STATEFUL)
def test_a_sequence_stays_on_the_version_on_which_it_began_whatever_becomes_of_the_canary(
    server: Any, module_repository: Any, model: str
) -> None:
    folder = module_repository.path / model
    assert step(server, model, 1, "+") == ("1", 1.0)
    write_whole(folder, 2, summing(model, [100.0]))
    assert eventually(lambda: shares(server, model) == {1: 0.5, 2: 0.5})

    # The share counts beginnings of sequences. One that is older than the canary goes on.
    assert step(server, model, 1) == ("1", 2.0)
    begun = {id: step(server, model, id, "+") for id in range(10, 18)}
    assert Counter(begun.values()) == {("1", 1.0): 4, ("2", 100.0): 4}
    for number in (2, 3):
        for id, (version, first) in begun.items():
            assert step(server, model, id) == (version, number * first)
    assert step(server, model, 1) == ("1", 3.0)
    # A client that begins anew with the same id leaves no second sequence behind.
    again = [step(server, model, 30, "+") for _ in range(4)]
    assert Counter(again) == {("1", 1.0): 2, ("2", 100.0): 2}
    version, first = again[-1]
    assert step(server, model, 30, "-") == (version, 2 * first)
    assert "START flag" in step(server, model, 30)

    # It is taken back: only its table is too short for this index.
    old = [id for id, (version, _) in begun.items() if version == "1"]
    new = [id for id, (version, _) in begun.items() if version == "2"]
    for id in new[:2]:
        assert isinstance(step(server, model, id, index=1), str)
    assert eventually(lambda: shares(server, model) == {1: 1.0, 2: 0.0})
    assert {step(server, model, id, "+") for id in range(40, 44)} == {("1", 1.0)}
    assert {step(server, model, id) for id in new} == {("2", 400.0)}
    assert {step(server, model, id) for id in old} == {("1", 4.0)}

    # The version before it goes, and with it the sequences there.
    shutil.move(folder / "1", module_repository.path / f".{model}")
    assert eventually(lambda: shares(server, model) == {2: 1.0})
    assert {step(server, model, id) for id in new} == {("2", 500.0)}
    assert "START flag" in step(server, model, old[0])
    assert step(server, model, old[0], "+") == ("2", 100.0)


def test_a_pin_promotes_a_canary_and_its_sequences_go_on(server: Any, module_repository: Any) -> None:
    write_whole(module_repository.path / "pinned", 2, summing("pinned", [100.0]))
    assert eventually(lambda: shares(server, "pinned") == {1: 0.5, 2: 0.5})
    begun = {id: step(server, "pinned", id, "+") for id in range(1, 5)}
    assert Counter(begun.values()) == {("1", 1.0): 2, ("2", 100.0): 2}
    assert server.ask("/edge/v1/models/pinned/rollback", {"version": 2})[0] == 200
    assert eventually(lambda: shares(server, "pinned") == {2: 1.0})
    for id, (version, _) in begun.items():
        answer = step(server, "pinned", id)
        assert answer == ("2", 200.0) if version == "2" else "START flag" in answer
    # The pin is needed until the version before is removed.
    shutil.move(module_repository.path / "pinned" / "1", module_repository.path / ".pinned")
    status, found = server.ask("/edge/v1/models/pinned/unpin", {})
    assert (status, found["serves"]) == (200, 2)
    assert shares(server, "pinned") == {2: 1.0}
    assert {step(server, "pinned", id) for id, (version, _) in begun.items() if version == "2"} == {("2", 300.0)}


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    """A server that watches its folder, with a model for each test."""
    for name, (backend, strategy, state) in {**STATEFUL, "pinned": STATEFUL["direct"]}.items():
        config = SEQUENCES.replace("BACKEND", backend).replace("STRATEGY", strategy).replace("STATE", state)
        folder = module_repository.add(name, config)
        shutil.rmtree(folder / "1", ignore_errors=True)
        write_whole(folder, 1, summing(name, [1.0, 1.0]))
    with serve(module_repository.path, "--repository-poll-secs=0.1") as running:
        yield running
