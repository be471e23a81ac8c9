"""Gain of dynamic batching: `python tests/bench/batching.py [--rounds=N]`, with the test extra and perf_analyzer.

A dense net whose weights cost more to read than to multiply, served one request at a time and in batches as they
form, under the same load; for comparison the bare runtime with one item and with a batch of the mean size. Printed are
items a second and both gains: the server's must not be less than the bare runtime's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import harness
import numpy as np
import onnx
import onnxruntime
from harness import Load
from onnx import TensorProto, helper, numpy_helper

CONCURRENCY = 16
SIZES = (256, 2048, 2048, 2048, 16)
TENSORS = (
    'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 256 ] }\n'
    'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }\n'
)
CONFIG = (
    f'backend: "onnxruntime"\nmax_batch_size: {CONCURRENCY}\n{TENSORS}instance_group {{ count: 1 kind: KIND_CPU }}\n'
    'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
)
WAYS = {
    "alone": CONFIG.replace(f"max_batch_size: {CONCURRENCY}", "max_batch_size: 1"),
    "batched": CONFIG + "dynamic_batching { }\n",
}
RAW_TURN_S = 1.0


def dense_net() -> bytes:
    """Return an ONNX model of dense layers with ReLU between, float32, any number of rows."""
    random = np.random.default_rng(0)
    nodes, weights, name = [], [], "INPUT0"
    for layer, (wide, high) in enumerate(pairwise(SIZES)):
        last = layer == len(SIZES) - 2
        values = (random.standard_normal((wide, high)) / np.sqrt(wide)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"weights{layer}"))
        made = "OUTPUT0" if last else f"dense{layer}"
        nodes.append(helper.make_node("MatMul", [name, f"weights{layer}"], [made]))
        if not last:
            nodes.append(helper.make_node("Relu", [made], [f"relu{layer}"]))
        name = f"relu{layer}"
    given = helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, ["rows", SIZES[0]])
    answer = helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, ["rows", SIZES[-1]])
    graph = helper.make_graph(nodes, "dense", [given], [answer], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def raw_call(model: bytes, rows: int) -> harness.Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    array = np.random.default_rng(1).random((rows, SIZES[0]), np.float32)
    return lambda: session.run(None, {"INPUT0": array})


def mean_batch(where: harness.Server, model: str) -> float:
    """Return rows per execution since the model was loaded."""
    told = where.get(f"/v2/models/{model}/stats")["model_stats"][0]
    return float(told["inference_count"]) / float(told["execution_count"])


def measure(rounds: int, window_s: float) -> None:
    model = dense_net()
    with tempfile.TemporaryDirectory() as folder:
        for way, config in WAYS.items():
            harness.write_model(Path(folder), way, config, {"model.onnx": model})
        with harness.server(Path(folder), "--log-info=false") as where:
            ways: dict[str, Callable[[], Load]] = {
                way: partial(harness.perf_analyzer, where, way, "grpc", CONCURRENCY, window_s) for way in WAYS
            }
            ways["batched"]()
            rows = max(1, round(mean_batch(where, "batched")))
            for name, count in (("raw 1", 1), ("raw batch", rows)):
                ways[name] = partial(harness.closed_loop, raw_call(model, count), RAW_TURN_S)
            found = harness.in_turns(ways, rounds)
            formed = mean_batch(where, "batched")
    tell(found, rows, formed)


def tell(found: dict[str, list[Load]], rows: int, formed: float) -> None:
    served = [one.rate / other.rate for one, other in zip(found["batched"], found["alone"], strict=True)]
    bare = [rows * one.rate / other.rate for one, other in zip(found["raw batch"], found["raw 1"], strict=True)]
    lines = []
    for way, loads in found.items():
        middle = harness.median_load(loads)
        rate = middle.rate * (rows if way == "raw batch" else 1)
        lines.append([way, f"{rate:.0f}", f"{middle.p50_ms:.2f}", f"{middle.p99_ms:.2f}", f"{middle.cpu_us:.0f}"])
    print(harness.markdown(("way", "rows/s", "p50 ms", "p99 ms", "CPU us a call"), lines))
    of_both = statistics.median(one / other for one, other in zip(served, bare, strict=True))
    print(
        f"\nbatches of {formed:.1f} rows formed at concurrency {CONCURRENCY}; gain {statistics.median(served):.2f} "
        f"served, {statistics.median(bare):.2f} by the bare runtime with {rows} rows; ratio {of_both:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=0.5, help="seconds of one of perf_analyzer's three windows")
    given = parser.parse_args()
    print(harness.machine())
    measure(given.rounds, given.window)


if __name__ == "__main__":
    main()
