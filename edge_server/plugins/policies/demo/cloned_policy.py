"""Policy that imitates the arm's controller: trained from examples within seconds, and written as a model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_server.plugins.policies.demo.arm import DT_S, PERIOD_S, Array, controller, joint_angles, observation, target

HORIZON = 50
_FEATURES = 400
_RIDGE = 1e-4

_CONFIG = """\
backend: "python"
input {{ name: "state" data_type: TYPE_FP32 dims: [ 8 ] }}
output {{ name: "action" data_type: TYPE_FP32 dims: [ {horizon}, 2 ] }}
instance_group {{ count: {count} kind: KIND_CPU }}
parameters {{ key: "policy_action_key" value {{ string_value: "actions" }} }}
parameters {{ key: "policy_inputs" value {{ string_value: "state=observation/state" }} }}
parameters {{ key: "policy_dt_ms" value {{ string_value: "{dt_ms:g}" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "{delay_ms:g}" }} }}
"""

_MODEL = '''\
"""Policy of the arm: random features and a linear layer. It waits, as a large policy would compute."""

import json
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        weights = np.load(Path(args["model_repository"]) / args["model_version"] / "weights.npz")
        self.hidden, self.offset, self.out = (weights[name] for name in ("hidden", "offset", "out"))
        parameters = json.loads(args["model_config"])["parameters"]
        self.delay_s = float(parameters["delay_ms"]["string_value"]) / 1000

    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        began_s = time.monotonic()
        state = pb_utils.get_input_tensor_by_name(request, "state").as_numpy()
        features = np.append(np.tanh(state @ self.hidden + self.offset), 1.0)
        action = (features @ self.out).reshape(-1, 2).astype(np.float32)
        time.sleep(max(0.0, self.delay_s - (time.monotonic() - began_s)))
        return pb_utils.InferenceResponse([pb_utils.Tensor("action", action)])
'''


class ClonedPolicy(NamedTuple):
    """Weights: `hidden` (8, features), `offset` (features,), `out` (features + 1, 2 * HORIZON)."""

    hidden: Array
    offset: Array
    out: Array

    def act(self, state: Array) -> Array:
        """Return the actions for observations (..., 8): (..., HORIZON, 2)."""
        return (_features(state, self.hidden, self.offset) @ self.out).reshape(*state.shape[:-1], HORIZON, 2)


def train(examples: int = 20_000, seed: int = 0) -> ClonedPolicy:
    """Return a policy that was fitted to the controller's commands at `examples` states near the target's path."""
    random = np.random.default_rng(seed)
    times = random.uniform(0, PERIOD_S, examples)
    angles = joint_angles(target(times))
    speeds = (joint_angles(target(times + 1e-3)) - angles) / 1e-3
    angles = angles + random.normal(scale=0.05, size=angles.shape)
    speeds = speeds + random.normal(scale=0.5, size=speeds.shape)
    states = observation(times, angles, speeds)
    scale = states.std(axis=0)
    hidden = random.normal(size=(8, _FEATURES)) * 0.7 / scale[:, None]
    offset = random.uniform(-2, 2, _FEATURES) - states.mean(axis=0) @ hidden
    features = _features(states, hidden, offset)
    wanted = controller(times, angles, HORIZON).reshape(examples, -1)
    out = np.linalg.solve(features.T @ features + _RIDGE * np.eye(_FEATURES + 1), features.T @ wanted)
    return ClonedPolicy(hidden, offset, out)


def write_policy(folder: Path, policy: ClonedPolicy, delay_ms: float, count: int = 1) -> None:
    """Write a model folder with a policy that takes at least `delay_ms` for an answer, and `count` instances of it."""
    version = folder / "1"
    version.mkdir(parents=True)
    np.savez(version / "weights.npz", **policy._asdict())
    (version / "model.py").write_text(_MODEL)
    (folder / "config.pbtxt").write_text(
        _CONFIG.format(horizon=HORIZON, dt_ms=DT_S * 1000, delay_ms=delay_ms, count=count)
    )


def _features(states: Array, hidden: Array, offset: Array) -> Array:
    found = np.tanh(states @ hidden + offset)
    return np.concatenate([found, np.ones((*found.shape[:-1], 1))], -1)
