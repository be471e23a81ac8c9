"""Policy that imitates the arm's controller: trained from examples within seconds, and written as a Python model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from simulated_arm import DT_S, PERIOD_S, controller, joint_angles, observation, target

HORIZON = 50
FEATURES = 400
RIDGE = 1e-4

CONFIG = """\
backend: "python"
input {{ name: "state" data_type: TYPE_FP32 dims: [ 8 ] }}
output {{ name: "action" data_type: TYPE_FP32 dims: [ {horizon}, 2 ] }}
instance_group {{ count: {count} kind: KIND_CPU }}
parameters {{ key: "policy_action_key" value {{ string_value: "actions" }} }}
parameters {{ key: "policy_inputs" value {{ string_value: "state=observation/state" }} }}
parameters {{ key: "policy_dt_ms" value {{ string_value: "{dt_ms:g}" }} }}
"""

MODEL = '''\
"""Policy of the arm: random features and a linear layer. It waits, as a large policy would compute."""

import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        weights = np.load(Path(args["model_repository"]) / args["model_version"] / "weights.npz")
        self.hidden, self.offset, self.out = (weights[name] for name in ("hidden", "offset", "out"))

    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        began_s = time.monotonic()
        state = pb_utils.get_input_tensor_by_name(request, "state").as_numpy()
        features = np.append(np.tanh(state @ self.hidden + self.offset), 1.0)
        action = (features @ self.out).reshape(-1, 2).astype(np.float32)
        time.sleep(max(0.0, DELAY_S - (time.monotonic() - began_s)))
        return pb_utils.InferenceResponse([pb_utils.Tensor("action", action)])
'''


class ClonedPolicy(NamedTuple):
    """Weights: `hidden` (8, features), `offset` (features,), `out` (features + 1, 2 * HORIZON)."""

    hidden: Any
    offset: Any
    out: Any

    def features(self, states):
        found = np.tanh(states @ self.hidden + self.offset)
        return np.concatenate([found, np.ones((*found.shape[:-1], 1))], -1)

    def act(self, state):
        """Return the actions for observations (..., 8): (..., HORIZON, 2)."""
        return (self.features(state) @ self.out).reshape(*state.shape[:-1], HORIZON, 2)


def train(examples=20_000, seed=0):
    """Return a policy that was fitted to the controller's commands at `examples` states near the target's path."""
    random = np.random.default_rng(seed)
    times = random.uniform(0, PERIOD_S, examples)
    angles = joint_angles(target(times))
    speeds = (joint_angles(target(times + 1e-3)) - angles) / 1e-3
    angles = angles + random.normal(scale=0.05, size=angles.shape)
    speeds = speeds + random.normal(scale=0.5, size=speeds.shape)
    states = observation(times, angles, speeds)
    hidden = random.normal(size=(8, FEATURES)) * 0.7 / states.std(axis=0)[:, None]
    policy = ClonedPolicy(hidden, random.uniform(-2, 2, FEATURES) - states.mean(axis=0) @ hidden, None)
    features = policy.features(states)
    wanted = controller(times, angles, HORIZON).reshape(examples, -1)
    out = np.linalg.solve(features.T @ features + RIDGE * np.eye(FEATURES + 1), features.T @ wanted)
    return policy._replace(out=out)


def write_policy(folder, policy, delay_ms, count=1):
    """Write a model folder with a policy that takes at least `delay_ms` for an answer, and `count` instances of it."""
    version = folder / "1"
    version.mkdir(parents=True)
    np.savez(version / "weights.npz", **policy._asdict())
    (version / "model.py").write_text(MODEL.replace("DELAY_S", str(delay_ms / 1000)))
    config = CONFIG.format(horizon=HORIZON, dt_ms=DT_S * 1000, count=count)
    (folder / "config.pbtxt").write_text(config)
