"""Memory of a server stays flat over many reloads of a model.

Each reload gives the model's file other content, loads it through the API beside the old one, and asks it once. The
resident megabytes after each tenth reload are printed.
"""

from __future__ import annotations

import os
import statistics

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.kit.models import Repository, finish
from tests.kit.server import serve

RELOADS = int(os.environ.get("EDGE_MEMORY_RELOADS", "150"))
CONTENTS = 10
"""Different ones: OpenVINO opens each in a child process first, which takes a second."""
WEIGHTS = 256
"""The model is a dense layer of this many inputs and outputs: 256 KiB of weights, so that one leaked copy per reload
would be visible."""
GROWTH_LIMIT_MB = 8.0
"""Permitted growth in the second half. One copy kept per reload adds 20 MB to half of 150, and 130 MB to half of
1,000."""


def dense_model(generation: int) -> bytes:
    weights = np.full((WEIGHTS, WEIGHTS), generation / 1024, np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WEIGHTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WEIGHTS])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    return finish(graph).SerializeToString()


@pytest.mark.soak
@pytest.mark.timeout(60 + RELOADS)
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_the_second_half_of_many_reloads_adds_no_memory(repository: Repository, backend: str) -> None:
    folder = repository.add("dense", f'backend: "{backend}"\nmax_batch_size: 4\n')
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, WEIGHTS], "data": [1.0] * WEIGHTS}
    curve = []
    flags = ("--model-control-mode=explicit", "--allow-grpc=false", "--allow-metrics=false", "--log-info=false")
    with serve(repository.path, *flags) as server:
        for number in range(1, RELOADS + 1):
            generation = number % CONTENTS + 1
            (folder / ".ready").write_bytes(dense_model(generation))
            (folder / ".ready").rename(folder / "1/model.onnx")
            assert server.ask("/v2/repository/models/dense/load", {})[0] == 200
            status, answer = server.infer("dense", {"inputs": [tensor]})
            assert (status, answer["outputs"][0]["data"][0]) == (200, WEIGHTS * generation / 1024)
            if number % 10 == 0:
                curve.append(round(server.resident_bytes() / 1e6, 1))
    print(curve)
    # The last tenth beside the tenth that follows the middle.
    tenth, middle = max(len(curve) // 10, 1), len(curve) // 2
    growth_mb = statistics.median(curve[-tenth:]) - statistics.median(curve[middle : middle + tenth])
    assert growth_mb < GROWTH_LIMIT_MB, curve
