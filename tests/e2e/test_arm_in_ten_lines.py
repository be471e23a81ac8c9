"""The commands and the loop of docs/robots.md that bring an exported policy to an arm, as written.

The loop imports openpi's client, which wants numpy 1 and runs in test_openpi_client.py. Here the client of
docs/examples/robot_arm stands for it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.kit.server import COMMAND, serve

client = pytest.importorskip("robot_client", reason="needs msgpack and websockets, of policies")
pytest.importorskip("cv2", reason="needs OpenCV, of the extra vision")

PAGE = Path(__file__).parents[2] / "docs/robots.md"
TICKS = 60

pytestmark = pytest.mark.full


def write_export(path: Path) -> None:
    """Write a policy with LeRobot's names: six joints and a picture in, 20 actions out, each near the joints."""
    inputs = [
        helper.make_tensor_value_info("observation.state", TensorProto.FLOAT, [1, 6]),
        helper.make_tensor_value_info("observation.images.front", TensorProto.FLOAT, [1, 3, 8, 8]),
    ]
    nodes = [
        helper.make_node("ReduceMean", ["observation.images.front"], ["light"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Add", ["observation.state", "light"], ["row"]),
        helper.make_node("Unsqueeze", ["row", "first"], ["rows"]),
        helper.make_node("Add", ["rows", "ramp"], ["action"]),
    ]
    ramp = np.repeat(np.arange(20, dtype=np.float32)[None, :, None], 6, axis=2) / 1000
    constants = {"first": np.array([1]), "ramp": ramp}
    graph = helper.make_graph(
        nodes, "act", inputs, [helper.make_tensor_value_info("action", TensorProto.FLOAT, [1, 20, 6])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


class ArmOfARestartedServer:
    """Six joints that are where the last command put them. Their server ends after some moves, and another one starts
    when the arm has been held for 30 ticks."""

    def __init__(self, run_server: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.moves: list[Any] = []
        self._run_server = run_server
        self.server = contextlib.ExitStack()
        self.server.enter_context(run_server())
        self.held = self.moves_after_restart = 0

    def waits_for_a_command(self) -> bool:
        time.sleep(0.005)
        if len(self.moves) < TICKS:
            return True
        is_held = np.array_equal(self.moves[-1], self.moves[-2])
        self.held += is_held
        if len(self.moves) == TICKS:
            self.server.close()
        elif self.held == 30 and is_held:
            self.server.enter_context(self._run_server())
        elif self.held > 30:
            self.moves_after_restart += not is_held
        return self.moves_after_restart < TICKS and len(self.moves) < 20_000

    def angles(self) -> Any:
        return self.moves[-1] if self.moves else np.zeros(6, np.float32)

    def picture(self) -> Any:
        return np.full((48, 64, 3), 51, np.uint8)

    def move(self, action: Any) -> None:
        self.moves.append(np.asarray(action, np.float32))


def test_the_ten_lines_move_an_arm_and_go_on_after_a_restart_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_ports: Any
) -> None:
    pattern = r"run by tests/e2e/test_arm_in_ten_lines.py -->\n```(?:sh|python)\n(.*?)```"
    commands, loop = re.findall(pattern, PAGE.read_text(), re.DOTALL)
    assert len([line for line in loop.splitlines() if line]) <= 10
    write_export(tmp_path / "act.onnx")
    _, add, start = (shlex.split(line) for line in commands.splitlines())
    done = subprocess.run([COMMAND, *add[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert start[:3] == ["edge-server", "serve", "--model-repository=policies"]

    opened: list[Any] = []

    def connect(address: str) -> Any:
        opened.append(client.RobotClient(address))
        return opened[-1]

    module = ModuleType("openpi_client.websocket_client_policy")
    vars(module)["WebsocketClientPolicy"] = connect
    monkeypatch.setitem(sys.modules, "openpi_client", ModuleType("openpi_client"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (port,) = free_ports(1)
    flags = [flag.replace("0.0.0.0:8010", f"127.0.0.1:{port}") for flag in start[3:]]
    arm = ArmOfARestartedServer(lambda: serve(tmp_path / "policies", *flags))
    with arm.server:
        exec(loop.replace("box:8010", f"127.0.0.1:{port}"), {"arm": arm})
    for one in opened:
        one.close()
    assert (arm.moves_after_restart, len(opened)) == (TICKS, 2)

    session = onnxruntime.InferenceSession(tmp_path / "act.onnx")
    pixels = np.full((1, 3, 8, 8), 51 / 255, np.float32)
    (first,) = session.run(
        None, {"observation.state": np.zeros((1, 6), np.float32), "observation.images.front": pixels}
    )
    np.testing.assert_allclose(arm.moves[0], first[0, 0], atol=1e-5)
