"""Policy of the simulated arm that samples, as diffusion and flow policies do, and can continue a chunk.

It was trained from demonstrations that waver, each in another way. So two chunks for the same state differ: a sample is
the mean of the demonstrations and a random sum of their main ways to waver. With the first actions of a chunk given as
fixed, it draws its sample from those that go on like them (the posterior of a Gaussian), as real-time chunking does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from cloned_policy import HORIZON, ClonedPolicy, train
from onnx import TensorProto, helper, numpy_helper
from simulated_arm import DT_S

_WAVER_RAD = 0.06
_WAVES = 4
_NOISE_RAD = 0.002
"""How far the given actions may be from a sample that goes on like them."""

_FADING_STEPS = 4.0

CONFIG = """
backend: "onnxruntime"
instance_group {{ count: 1 kind: KIND_CPU }}
parameters {{ key: "policy_action_key" value {{ string_value: "actions" }} }}
parameters {{ key: "policy_inputs" value {{ string_value: "state=observation/state" }} }}
parameters {{ key: "policy_dt_ms" value {{ string_value: "{dt_ms:g}" }} }}
parameters {{ key: "policy_previous_input" value {{ string_value: "previous" }} }}
parameters {{ key: "policy_frozen_input" value {{ string_value: "frozen" }} }}
"""


class SamplingPolicy(NamedTuple):
    """`ways` (ways to waver, 2 * HORIZON), scaled so that their factors have a variance of 1. `gains`
    (HORIZON + 1, 2 * HORIZON, ways): by the number of fixed actions, the factors for their distance from a sample."""

    mean: ClonedPolicy
    ways: Any
    gains: Any
    dice: Any
    """(8, ways): makes the random factors of a state, so that a run can be repeated."""

    def act(self, state: Any, previous: Any, frozen: int) -> Any:
        """Return a chunk (HORIZON, 2), whose first `frozen` actions are those of `previous`, of the same shape."""
        mean = self.mean.act(state).ravel()
        factors = np.sqrt(2) * np.sin(state @ self.dice)
        distance = previous.ravel() - mean - factors @ self.ways
        chunk = (mean + (factors + distance @ self.gains[frozen]) @ self.ways).reshape(HORIZON, 2)
        last = max(frozen - 1, 0)
        steps = np.arange(HORIZON)[:, None]
        fading = np.exp(-(steps - last) / _FADING_STEPS) * (frozen > 0)
        return np.where(steps < frozen, previous, chunk + fading * (previous[last] - chunk[last]))


def train_sampling_policy(examples: int = 2000, seed: int = 0) -> SamplingPolicy:
    """Return a policy that was fitted to demonstrations that waver."""
    random = np.random.default_rng(seed)
    mean = train(seed=seed)
    # What is left of a demonstration without the mean: slow waves of random sizes and phases, for each joint.
    times = np.arange(HORIZON) / HORIZON
    sizes = random.normal(scale=_WAVER_RAD / np.sqrt(_WAVES), size=(examples, _WAVES, 1, 2))
    phases = random.uniform(0, 2 * np.pi, size=(examples, _WAVES, 1, 2))
    speeds = random.uniform(0.3, 1.5, size=(examples, _WAVES, 1, 2))
    waver = (sizes * np.sin(2 * np.pi * speeds * times[:, None] + phases)).sum(1).reshape(examples, -1)
    _, scales, directions = np.linalg.svd(waver, full_matrices=False)
    is_main = scales > 0.01 * scales[0]
    ways = directions[is_main] * scales[is_main, None] / np.sqrt(examples)
    gains = np.zeros((HORIZON + 1, 2 * HORIZON, len(ways)))
    for frozen in range(1, HORIZON + 1):
        known = ways[:, : 2 * frozen]
        precision = np.eye(len(ways)) + known @ known.T / _NOISE_RAD**2
        gains[frozen, : 2 * frozen] = np.linalg.solve(precision, known).T / _NOISE_RAD**2
    return SamplingPolicy(mean, ways, gains, random.normal(scale=300, size=(8, len(ways))))


def write_sampling_policy(folder: Path, policy: SamplingPolicy) -> None:
    """Write the policy as a model folder, with an ONNX file: inputs state (8), previous (HORIZON, 2), frozen (1)."""
    numbers = {
        "hidden": policy.mean.hidden, "offset": policy.mean.offset, "out": policy.mean.out, "ways": policy.ways,
        "gains": policy.gains, "dice": policy.dice, "root": np.sqrt(2.0), "one": np.ones(1),
        "steps": np.arange(HORIZON)[:, None], "rate": np.float64(-1 / _FADING_STEPS),
    }  # fmt: skip
    constants = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in numbers.items()]
    shapes = {"flat": [2 * HORIZON], "chunk": [HORIZON, 2], "first": [0], "one_step": [1]}
    constants += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in shapes.items()]
    nodes = [
        helper.make_node(kind, inputs.split(), [output], **attributes)
        for kind, inputs, output, attributes in (
            ("MatMul", "state hidden", "projected", {}),
            ("Add", "projected offset", "shifted", {}),
            ("Tanh", "shifted", "tanh", {}),
            ("Concat", "tanh one", "features", {"axis": 0}),
            ("MatMul", "features out", "mean", {}),
            ("MatMul", "state dice", "angles", {}),
            ("Sin", "angles", "sines", {}),
            ("Mul", "sines root", "factors", {}),
            ("MatMul", "factors ways", "wavering", {}),
            ("Reshape", "previous flat", "flat_previous", {}),
            ("Add", "mean wavering", "sample", {}),
            ("Sub", "flat_previous sample", "distance", {}),
            ("Gather", "gains frozen", "gain_row", {"axis": 0}),
            ("Squeeze", "gain_row first", "gain", {}),
            ("MatMul", "distance gain", "correction", {}),
            ("MatMul", "correction ways", "corrected", {}),
            ("Add", "sample corrected", "going_on", {}),
            ("Reshape", "going_on chunk", "rows", {}),
            ("Sub", "frozen one_step", "before", {}),
            ("Max", "before first", "last", {}),
            ("Gather", "previous last", "last_previous", {"axis": 0}),
            ("Gather", "rows last", "last_row", {"axis": 0}),
            ("Sub", "last_previous last_row", "gap", {}),
            ("Cast", "last", "last_number", {"to": TensorProto.FLOAT}),
            ("Cast", "frozen", "frozen_number", {"to": TensorProto.FLOAT}),
            ("Sub", "steps last_number", "since", {}),
            ("Mul", "since rate", "exponent", {}),
            ("Exp", "exponent", "fading", {}),
            ("Min", "frozen_number one", "has_frozen", {}),
            ("Mul", "fading has_frozen", "weight", {}),
            ("Mul", "weight gap", "faded", {}),
            ("Add", "rows faded", "free", {}),
            ("Less", "steps frozen_number", "is_frozen", {}),
            ("Where", "is_frozen previous free", "action", {}),
        )
    ]
    inputs = [
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [8]),
        helper.make_tensor_value_info("previous", TensorProto.FLOAT, [HORIZON, 2]),
        helper.make_tensor_value_info("frozen", TensorProto.INT64, [1]),
    ]
    output = helper.make_tensor_value_info("action", TensorProto.FLOAT, [HORIZON, 2])
    graph = helper.make_graph(nodes, "arm", inputs, [output], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1/model.onnx")
    (folder / "config.pbtxt").write_text(CONFIG.format(dt_ms=DT_S * 1000))
