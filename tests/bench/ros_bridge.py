"""Age and loss of `edge-server ros bridge` beside a plain rclpy relay: `python tests/bench/ros_bridge.py jazzy|kilted
[--rounds=N] [--seconds=N]`, with the extras test and ros, and EDGE_TEST_RCLPY of tests/plugins/ros/fetch_rclpy.sh.

A camera node (rclpy, Fast DDS) sends pictures, and hears a vision_msgs/Classification for each: from the bridge, over
both of its transports, and a server with a network of microseconds; and from a relay node in plain rclpy that answers
each picture at once, without a server. All in turns, on one machine, over the loopback interface and the shared memory
of Fast DDS where both sides have it. Age: from the picture's stamp to the answer's arrival at the camera's node. Prints
the sum of sent pictures and answers of all rounds, ages over all rounds, and the median of the CPU time for a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from harness import COMMAND, ROOT, Server, cpu_s, ended, server
from onnx import TensorProto, helper

CAMERA = ROOT / "tests/plugins/ros/live/rclpy_camera.py"
CASES = (
    (100, 100, 30, "SENSOR_DATA"),
    (640, 480, 30, "SENSOR_DATA"),
    (640, 480, 30, "DEFAULT"),
    (1920, 1080, 15, "SENSOR_DATA"),
    (1920, 1080, 15, "DEFAULT"),
)
QOS = {"SENSOR_DATA": "best effort", "DEFAULT": "reliable"}
NODES = ("dds", "rclpy", "relay")
UNCOUNTED = 5
"""First pictures of a turn that do not count: connections grow, code is loaded."""
DOMAIN = "93"

TINY = """
name: "tiny"
backend: "onnxruntime"
max_batch_size: 1
input { name: "input" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 64, 64 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
parameters { key: "image_fit" value { string_value: "stretch" } }
"""

RELAY = """
import sys
import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from vision_msgs.msg import Classification, ObjectHypothesis

rclpy.init()
node = rclpy.create_node("relay")
publisher = node.create_publisher(Classification, "/kind", 10)

def answer(picture):
    publisher.publish(Classification(header=picture.header, results=[ObjectHypothesis(class_id="0", score=1.0)]))

reliability = ReliabilityPolicy.RELIABLE if sys.argv[1] == "DEFAULT" else ReliabilityPolicy.BEST_EFFORT
node.create_subscription(Image, "/image", answer, QoSProfile(depth=1, reliability=reliability))
rclpy.spin(node)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distribution", choices=("jazzy", "kilted"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args(arguments)
    python = Path(os.environ["EDGE_TEST_RCLPY"]) / options.distribution / "bin/python"
    turns: dict[tuple[Any, str], list[Turn]] = {(case, node): [] for case in CASES for node in NODES}
    with tiny_server() as running:
        for _ in range(options.rounds):
            for case in CASES:
                for node in NODES:
                    turns[case, node].append(measure(python, running, node, case, options.seconds))
    print("| Peer | Size, rate | Pictures are | Answers by | Sent | Answered | Age p50, ms | p99 | CPU ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    names = {"dds": "bridge, `dds`", "rclpy": "bridge, `rclpy`", "relay": "plain relay"}
    for (width, height, rate, qos), node in turns:
        found = turns[(width, height, rate, qos), node]
        sent, ages = sum(turn.sent for turn in found), sorted(age for turn in found for age in turn.ages_ms)
        p50, p99 = (f"{ages[int(len(ages) * share)]:.1f}" if ages else "-" for share in (0.5, 0.99))
        cpu_ms = statistics.median(turn.cpu_ms for turn in found)
        row = options.distribution.capitalize(), f"{width}x{height}, {rate}/s", QOS[qos], names[node]
        print(f"| {' | '.join(row)} | {sent} | {len(ages)} | {p50} | {p99} | {cpu_ms:.1f} |", flush=True)
    return 0


class Turn:
    """What one turn showed: pictures that count, ages of their answers, CPU time of the bridge or relay for each."""

    def __init__(self, heard: dict[str, Any], cpu_seconds: float) -> None:
        self.sent = heard["sent"] - UNCOUNTED
        self.ages_ms = [age for number, age, _, _ in heard["answers"]["/kind"] if number > UNCOUNTED]
        self.cpu_ms = cpu_seconds * 1000 / heard["sent"]


@contextlib.contextmanager
def tiny_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as home:
        version = Path(home) / "tiny/1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(TINY)
        (version.parent / "labels.txt").write_text("red\ngreen\nblue\n")
        onnx.save(tiny_classifier(), version / "model.onnx")
        with server(Path(home)) as running:
            yield running


def tiny_classifier() -> onnx.ModelProto:
    """Return a network whose scores are the means of the colours."""
    picture = helper.make_tensor_value_info("input", TensorProto.FLOAT, ("batch", 3, 64, 64))
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ("batch", 3))
    nodes = [
        helper.make_node("GlobalAveragePool", ["input"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["scores"]),
    ]
    graph = helper.make_graph(nodes, "tiny", [picture], [scores])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(python: Path, where: Server, node: str, case: tuple[int, int, int, str], seconds: float) -> Turn:
    width, height, rate, qos = case
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROS_", "CYCLONEDDS_"))}
    environment = {**kept, "ROS_DOMAIN_ID": DOMAIN, "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    bridge = [
        "ros", "bridge", "--model=tiny", f"--address={where.grpc}", "--image-topic=/image",
        "--classification-topic=/kind", f"--input-qos={qos}", f"--transport={node}",
    ]  # fmt: skip
    command, own = [str(COMMAND), *bridge], environment
    if node == "rclpy":
        own = {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [str(python), "-m", "edge_server", *bridge]
    elif node == "relay":
        command = [str(python), "-c", RELAY, qos]
    with subprocess.Popen(command, env=own, stderr=subprocess.DEVNULL) as process, ended(process):
        spec = {
            "image_topic": "/image", "image_qos": qos, "width": width, "height": height, "period_s": 1 / rate,
            "answers": {"/kind": ["Classification", "DEFAULT"]}, "settles": True, "count": 0,
            "limit_s": seconds,
        }  # fmt: skip
        camera = [str(python), str(CAMERA), json.dumps(spec)]
        with subprocess.Popen(camera, env=environment, stdout=subprocess.PIPE) as heard, ended(heard):
            assert heard.stdout is not None
            heard.stdout.readline()
            before = cpu_s(process.pid)
            result = json.loads(heard.stdout.read())
            return Turn(result, cpu_s(process.pid) - before)


if __name__ == "__main__":
    sys.exit(main())
