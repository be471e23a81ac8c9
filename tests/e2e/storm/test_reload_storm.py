"""Models are added, changed and removed in many ways while eight clients send without a pause: no request is lost."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.e2e.storm.storm import Load, Storm, agree, answered_by_the_wrong_file, refused_while_desired
from tests.kit.eventually import eventually
from tests.kit.models import finish
from tests.kit.server import serve

SEED = int(os.environ.get("EDGE_STORM_SEED", "1"))
STEPS_BETWEEN_LOOKS = 25


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(300)]),
        pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
    ],
)
def test_no_request_fails_and_no_response_is_wrong_while_models_are_reloaded(operations: int, writer: Any) -> None:
    print(f"EDGE_STORM_SEED={SEED} operations={operations}")
    storm = Storm(writer, SEED)
    with serve(writer.path) as server:
        agree(server, writer)
        with Load(server, SEED) as load:
            for number in range(1, operations + 1):
                storm.step()
                time.sleep(storm.chance.uniform(0, 0.25))
                if number % STEPS_BETWEEN_LOOKS == 0:
                    storm.settle_configurations()
                    agree(server, writer, load.answers)
            storm.settle_configurations()
            agree(server, writer, load.answers)
        assert load.errors == []
        assert refused_while_desired(load, writer) == []
        assert answered_by_the_wrong_file(load.answers, writer) == []
        print(f"{len(load.answers)} answers, {len(load.failures)} refusals of what was not desired")
        assert {answer.model for answer in load.answers} >= set(storm.steady)
        server.stop_cleanly()


EXTERNAL_WEIGHTS = 4096


def weights_beside(folder: Path, value: float) -> None:
    """Write y = x + w as an ONNX file whose weights lie in a file of their own."""
    weights = np.full((EXTERNAL_WEIGHTS,), value, np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "beside",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", EXTERNAL_WEIGHTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", EXTERNAL_WEIGHTS])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = finish(graph)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_truncated_weights_end_neither_the_server_nor_the_loaded_version(repository: Any, backend: str) -> None:
    folder = repository.add("beside", f'backend: "{backend}"\nmax_batch_size: 4')
    weights_beside(folder / "1", 3)
    ones = {"name": "x", "datatype": "FP32", "shape": [1, EXTERNAL_WEIGHTS], "data": [1] * EXTERNAL_WEIGHTS}

    def answers() -> set[float]:
        status, answer = server.infer("beside", {"inputs": [ones]})
        assert status == 200, answer
        return set(answer["outputs"][0]["data"])

    with serve(repository.path) as server:
        assert answers() == {4.0}
        (folder / "1" / "weights.bin").write_bytes(b"")
        assert eventually(lambda: "failed" in server.ask("/v2/repository/index", {})[1][0].get("reason", ""))
        assert answers() == {4.0}
        weights_beside(folder / "1", 5)
        assert eventually(lambda: answers() == {6.0})
        assert server.stop() == 0, server.log()[-4000:]
