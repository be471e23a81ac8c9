"""The simulated arm in real time against a real server: with a slow policy, a busy camera model beside it, and heat."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from cloned_policy import train, write_policy
from simulated_arm import DT_S, Arm, controller, run_loop
from tritonclient.utils import InferenceServerException

from edge_server.client import ActionBroker
from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder
from tests.kit.models import picture_sum_config
from tests.kit.server import serve
from tests.plugins.policies.sampling_policy import train_sampling_policy, write_sampling_policy

client = pytest.importorskip("robot_client", reason="needs msgpack and websockets, of policies")

EXAMPLE = Path(__file__).parents[2] / "docs/examples/robot_arm"
SECONDS = float(os.environ.get("EDGE_TEST_ARM_S", "60"))
"""Of the loop beside a camera and heat; those that look for jerks take a part of it. Ten minutes were run with
EDGE_TEST_ARM_S=600."""

CAMERA = picture_sum_config(stub_delay_ms=15, priority_class="bulk") + "instance_group { count: 1 kind: KIND_CPU }"


class CameraLoad:
    """Threads that ask the camera's model as fast as it answers, and count what they get."""

    def __init__(self, address: str, threads: int = 4) -> None:
        self.answers: Counter[str] = Counter()
        self._address = address
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def __enter__(self) -> CameraLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with contextlib.closing(grpcclient.InferenceServerClient(self._address)) as server:
            picture = infer_input(grpcclient, "IN", np.ones((1, 3, 8, 8), np.float32))
            while not self._is_over.is_set():
                try:
                    server.infer("camera", [picture])
                    self.answers["answered"] += 1
                except InferenceServerException as error:
                    self.answers[error.status()] += 1
                    self._is_over.wait(0.02)


def controller_error_mm(ticks: int) -> float:
    """Return the mean distance of an arm that gets its controller's command at each tick."""
    arm = Arm(1)
    for _ in range(ticks):
        arm.follow(controller(arm.time_s, arm.angles, 1)[0])
    return arm.mean_error_mm()


# A minute and a half in real time.
@pytest.mark.long
def test_a_slow_policy_never_lets_the_loop_run_dry_beside_a_busy_camera_and_heat(
    make_board: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    write_policy(models / "arm", train(), delay_ms=120, count=1)
    model_folder(models / "camera", CAMERA)
    board = make_board("orin_nano_jp6")
    # The policy computes a quarter of the time, more than the fifth that control keeps without a robot's need.
    governor = (f"--sysfs-root={board.root}", "--governor-interval-ms=100")
    rows = []
    with serve(models, "--policy-openpi=127.0.0.1:0", *governor) as server:
        address = re.search(r"openpi (ws://\S+?);", "\n".join(server.banner) + ";")[1] + "/arm"
        with contextlib.closing(client.RobotClient(address)) as robot:
            alone = run_loop(Arm(1), client.ChunkByChunk(robot.infer).step, 10)
            rows.append(("chunk by chunk, alone", alone))
            answers_s: list[float] = []

            def infer(seen: Mapping[str, Any]) -> Any:
                began_s = time.monotonic()
                chunk = robot.infer(seen)["actions"]
                answers_s.append(time.monotonic() - began_s)
                return chunk

            with ActionBroker(infer, dt_s=DT_S) as broker:
                rows.append(("broker, alone", run_loop(Arm(1), broker.step, 5)))
                board.set_temperature("tj-thermal", 98.5)
                broker.reset()
                answers_s.clear()
                with CameraLoad(server.grpc) as load:
                    busy = run_loop(Arm(1), broker.step, SECONDS)
                rows.append(("broker, busy camera and heat", busy))
                counts = broker.counts
        shed = load.answers["StatusCode.RESOURCE_EXHAUSTED"]
        (policy,) = server.ask("/edge/v1/policies")[1]["policies"]
    with capsys.disabled():
        print(f"\n{'loop':30}{'ticks':>7}{'dry':>6}{'error mm':>10}{'largest':>9}")
        for name, arm in rows:
            print(f"{name:30}{arm.ticks:7}{arm.dry_ticks:6}{arm.mean_error_mm():10.1f}{arm.largest_error_mm:9.1f}")
        print(f"{'its controller at each tick':30}{busy.ticks:7}{0:6}{controller_error_mm(busy.ticks):10.1f}")
        median_ms, p99_ms = 1000 * np.percentile(answers_s, [50, 99])
        print(
            f"{len(answers_s)} answers to the busy loop, p50 {median_ms:.1f} ms, p99 {p99_ms:.1f} ms; "
            f"{counts.dry_steps} steps without an action; late chunks, with those of the first loop: {policy['late']}"
        )
        print(f"camera requests: {load.answers['answered']} answered, {shed} refused for heat")
    assert alone.dry_ticks > 30
    assert counts.dry_steps == 0
    assert counts.failures == 0
    assert shed > 0


@pytest.mark.full
def test_a_robot_that_comes_while_the_machine_is_hot_gets_all_its_answers(make_board: Any, tmp_path: Path) -> None:
    write_policy(tmp_path / "models/arm", train(), delay_ms=400)
    board = make_board("orin_nano_jp6")
    # The governor's next step comes after the robot's third observation.
    governor = (f"--sysfs-root={board.root}", "--governor-interval-ms=2000")
    with serve(tmp_path / "models", "--policy-openpi=127.0.0.1:0", *governor) as server:
        address = re.search(r"openpi (ws://\S+?);", "\n".join(server.banner) + ";")[1] + "/arm"
        board.set_temperature("tj-thermal", 103.0)
        assert eventually(lambda: server.ask("/edge/v1/governor")[1]["state"] == "CRITICAL")
        with contextlib.closing(client.RobotClient(address)) as robot:
            for _ in range(4):
                began_s = time.monotonic()
                robot.infer({"observation/state": Arm(1).observe()})
                time.sleep((time.monotonic() - began_s) / 2)  # two thirds of the time, on any machine


@pytest.mark.soak
def test_a_policy_that_continues_its_chunks_moves_the_arm_without_jerks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sampling_policy(tmp_path / "arm", train_sampling_policy())
    document = (Path(__file__).parents[2] / "docs/robots.md").read_text()
    (parameters,) = re.findall(r"```\n(parameters .*policy_previous_input[^`]*)```", document)
    assert parameters in (tmp_path / "arm/config.pbtxt").read_text()
    rows = []
    with serve(tmp_path, "--policy-openpi=127.0.0.1:0") as server:
        address = re.search(r"openpi (ws://\S+?);", "\n".join(server.banner) + ";")[1] + "/arm"
        with contextlib.closing(client.RobotClient(address)) as robot:

            def infer(seen: Mapping[str, Any]) -> Any:
                began_s = time.monotonic()
                chunk = robot.infer(seen)["actions"]
                time.sleep(max(0.0, began_s + 0.12 - time.monotonic()))
                return chunk

            for keys in ({}, {"previous_key": "previous", "frozen_key": "frozen"}):
                for blend_steps in (0, 5):
                    commands: list[Any] = []
                    with ActionBroker(infer, dt_s=DT_S, blend_steps=blend_steps, **keys) as broker:

                        def step(seen: Mapping[str, Any], broker: Any = broker, commands: Any = commands) -> Any:
                            commands.append(broker.step(seen))
                            return commands[-1]

                        arm = run_loop(Arm(1), step, SECONDS / 12)
                        counts = broker.counts
                    assert counts.failures == 0
                    jerk = 1000 * np.abs(np.diff(commands[1:], n=2, axis=0)).max()
                    rows.append((bool(keys), blend_steps, counts.dry_steps, arm.mean_error_mm(), jerk))
    with capsys.disabled():
        print(f"\n{'continues':>10}{'blend':>7}{'dry':>5}{'error mm':>10}{'jerk mrad':>11}")
        for continues, *numbers in rows:
            print("{!s:>10}{:7}{:5}{:10.1f}{:11.1f}".format(continues, *numbers))
    jerks = {(continues, blend_steps): jerk for continues, blend_steps, _, _, jerk in rows}
    assert jerks[True, 5] < jerks[False, 5] / 2
    assert jerks[True, 0] < jerks[False, 5] < jerks[False, 0]


@pytest.mark.full
def test_the_example_shows_both_arms(tmp_path: Path, free_ports: Any) -> None:
    page, policy = free_ports(2)
    process = subprocess.Popen(
        [sys.executable, EXAMPLE, f"--port={page}", f"--policy-port={policy}", "--seconds=6"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout, process.stderr:
        assert process.stdout.readline().startswith("training a policy")
        assert process.stdout.readline() == f"http://127.0.0.1:{page} shows both arms; Ctrl-C ends it\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/", timeout=30) as answer:
            assert "Two arms, one policy" in answer.read().decode()
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/state", timeout=30) as events:
            state = json.loads(events.readline().decode().removeprefix("data: "))
        assert [arm["name"] for arm in state["arms"]] == ["With ActionBroker", "Chunk by chunk"]
        assert [len(arm["points"]) for arm in state["arms"]] == [3, 3]
        lines = process.stdout.read().splitlines()
        assert process.wait(30) == 0, process.stderr.read()
    assert [line.partition(":")[0] for line in lines] == ["With ActionBroker", "Chunk by chunk"]
    dry = [int(re.search(r"(\d+) without a new command", line)[1]) for line in lines]
    assert dry[1] > 5


def test_a_port_that_is_taken_ends_the_example_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = subprocess.run(
            [sys.executable, EXAMPLE, f"--policy-port={port}", "--port=0"], capture_output=True, text=True, timeout=100,
            check=False,
        )  # fmt: skip
    assert found.returncode == 1
    assert f"robot_arm: --policy-openpi=127.0.0.1:{port}: cannot listen" in found.stderr
