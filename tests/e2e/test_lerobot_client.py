"""LeRobot's own RobotClient, unchanged, with a robot of the test: its loops send observations to the bridge of
docs/examples, and get actions of a policy of this server."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.model_folder import model_folder
from tests.kit.server import serve

PYTHON = os.environ.get("EDGE_TEST_LEROBOT", "")
BRIDGE = Path(__file__).parents[2] / "docs/examples/lerobot_bridge.py"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="needs EDGE_TEST_LEROBOT, see fetch_lerobot.sh"),
]

CONFIG = """
backend: "python"
input { name: "state" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "front" data_type: TYPE_UINT8 dims: [ 48, 64, 3 ] }
input { name: "task" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 10, 2 ] }
parameters { key: "policy_action_key" value { string_value: "action" } }
INPUTS
parameters { key: "policy_dt_ms" value { string_value: "33" } }
"""
WORK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        state, front, task = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("state", "front", "task"))
        assert task[0] == b"pick the cube"
        steps = np.arange(10, dtype=np.float32)[:, None]
        return pb_utils.InferenceResponse([pb_utils.Tensor("action", state + steps + front[0, 0, 0])])
"""
ROBOT = """
import json
import sys
import threading
import time

import numpy as np
from lerobot.async_inference import robot_client
from lerobot.async_inference.configs import RobotClientConfig
from lerobot.robots.config import RobotConfig


class TestRobot:
    observation_features = {"shoulder.pos": float, "elbow.pos": float, "front": (48, 64, 3)}
    action_features = {"shoulder.pos": float, "elbow.pos": float}

    def __init__(self):
        self.actions = []

    def connect(self):
        pass

    disconnect = connect

    def get_observation(self):
        return {"shoulder.pos": 1.5, "elbow.pos": -2.0, "front": np.full((48, 64, 3), 100, np.uint8)}

    def send_action(self, action):
        self.actions.append(action)
        return action


robot = TestRobot()
robot_client.make_robot_from_config = lambda config: robot
config = RobotClientConfig(
    policy_type="act", pretrained_name_or_path="me/act", robot=None, actions_per_chunk=10, task="pick the cube",
    server_address=sys.argv[1], chunk_size_threshold=0.5, fps=30,
)
client = robot_client.RobotClient(config)
assert client.start()
receiver = threading.Thread(target=client.receive_actions, daemon=True)
receiver.start()
loop = threading.Thread(target=client.control_loop, args=("pick the cube",), daemon=True)
loop.start()
time.sleep(4)
client.stop()
print("RESULT", json.dumps(robot.actions))
"""


def openpi_address(server: Any) -> str:
    found = re.search(r"openpi (ws://[\d.:]+)", "\n".join(server.banner))
    assert found
    return found[1]


def test_lerobots_loops_move_a_robot_by_a_policy_of_this_server(tmp_path: Path) -> None:
    pytest.importorskip("msgpack", reason="needs the extra policies")
    document = (Path(__file__).parents[2] / "docs/robots.md").read_text()
    inputs = re.search(r"^parameters .*observation\.images.*$", document, re.MULTILINE)
    assert inputs
    model_folder(tmp_path / "models/act", CONFIG.replace("INPUTS", inputs[0]), {"1/model.py": WORK})
    with (
        serve(tmp_path / "models", "--policy-openpi=127.0.0.1:0") as server,
        subprocess.Popen(
            [PYTHON, BRIDGE, f"--server={openpi_address(server)}", "--listen=127.0.0.1:0"],
            stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        ) as bridge,
    ):  # fmt: skip
        assert bridge.stdout is not None
        try:
            address = bridge.stdout.readline().removeprefix("LeRobot ").strip()
            found = subprocess.run(
                [PYTHON, "-c", ROBOT, address], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
            )
        finally:
            bridge.terminate()
            complaints = bridge.stdout.read()
        assert found.returncode == 0, found.stderr
        assert complaints == ""
    actions = json.loads(found.stdout.partition("RESULT ")[2])
    assert len(actions) > 30, found.stderr
    shoulder = [action["shoulder.pos"] for action in actions]
    assert shoulder[:5] == [101.5, 102.5, 103.5, 104.5, 105.5]
    apart = [action["shoulder.pos"] - action["elbow.pos"] for action in actions]
    assert apart == pytest.approx([3.5] * len(actions), abs=1e-4)
