"""Episodes of a robot, with a server in this process: what ends them, and what does not."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_server
from edge_server.plugins.policies import robot_session

client = pytest.importorskip("robot_client", reason="needs msgpack and websockets, of policies")

COUNTER = """
backend: "python"
max_batch_size: 4
input { name: "pause" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 1, 1 ] }
parameters { key: "policy_action_key" value { string_value: "action" } }
sequence_batching { control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } } }
"""
COUNT = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    count = 0

    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        start, pause = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("START", "pause"))
        if pause < 0:
            raise pb_utils.TritonModelException("no joints")
        time.sleep(pause.item())
        self.count = 1 if start else self.count + 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("action", np.float32([[[self.count]]]))])
"""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield a server in this process, and a robot connected to its model."""
    (folder / "counter/1").mkdir(parents=True)
    (folder / "counter/1/model.py").write_text(COUNT)
    (folder / "counter/config.pbtxt").write_text(COUNTER)
    with edge_server.Server(folder, policy_openpi="127.0.0.1:0") as server:
        (address,) = [text for text in server._core.plugins.addresses() if text.startswith("openpi")]  # type: ignore[union-attr]
        with contextlib.closing(client.RobotClient(address.partition(" ")[2])) as arm:
            yield server, arm


def test_an_episode_ends_by_a_pause_after_an_answer_and_not_by_a_slow_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robot_session, "EPISODE_GAP_S", 1.0)
    with serve(tmp_path) as (_, arm):

        def count(pause_s: float) -> Any:
            return arm.infer({"pause": np.float32([pause_s])})["action"].item()

        assert count(0.0) == 1
        assert count(1.3) == 2
        assert count(0.0) == 3
        time.sleep(1.3)
        assert count(0.0) == 1


@pytest.mark.parametrize(
    ("wrong", "message"), [({"pause": np.float32([-1])}, "no joints"), ({"pause": np.zeros(2)}, "expected shape")]
)
def test_a_robot_that_gets_no_answers_reserves_nothing_until_it_gets_one(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with serve(tmp_path) as (server, arm):
        needs = []
        for _ in range(11):
            with pytest.raises(RuntimeError, match=message):
                arm.infer(wrong)
            needs.append(server._core.plugins.control_need())
        assert needs == [math.inf] * 9 + [0.0] * 2
        arm.infer({"pause": np.float32([0])})
        assert 0 < server._core.plugins.control_need() < math.inf
