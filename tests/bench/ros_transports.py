"""Age of results and CPU time of `edge-server ros bridge` over DDS and Zenoh: `python tests/bench/ros_transports.py
[--rounds=N] [--frames=N]`, with the extras test, ros and zenoh.

A camera publishes images at 15 Hz, reliably, a server made for the test answers each at once with a box, and the
camera gets the detections. The age is from before an image is encoded until its detections are decoded. Camera, bridge,
server and Zenoh's router run on this machine, the transports in turns. Medians of all rounds, and their range.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from harness import COMMAND, ROOT, cpu_s, ended, markdown

sys.path.append(str(ROOT / "tests/plugins/ros"))
from conftest import ScriptedServer

from edge_server.plugins.ros.messages.message_conversion import ImageMessage, MessageKind
from edge_server.plugins.ros.transports.transport import TRANSPORTS, Qos
from edge_server.protocol.frame_messages import FrameHeader

SIZES = ((640, 480), (1920, 1080))
PERIOD_S = 1 / 15
WARM_UP = 10
ROUTER = "tcp/127.0.0.1:17456"
VARIABLES = {
    "ROS_DOMAIN_ID": "93", "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
    "ZENOH_CONFIG_OVERRIDE": f'connect/endpoints=["{ROUTER}"]',
}  # fmt: skip


@contextlib.contextmanager
def bridging(transport: str, server: ScriptedServer) -> Iterator[int]:
    """Run a bridge meanwhile; yields its process id."""
    words = [
        COMMAND, "ros", "bridge", f"--transport={transport}", "--model=finder", f"--address={server.address}",
        "--detections-topic=/found", "--input-qos=DEFAULT",
    ]  # fmt: skip
    environment = {**os.environ, **VARIABLES}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
    with ended(process):
        yield process.pid


def measure(transport: str, width: int, height: int, frames: int) -> tuple[float, float, float, int]:
    """Return the ages' p50 and p99 in ms, the bridge's CPU time for an answer in ms, and the number of answers."""
    server, ages_ms = ScriptedServer(), []
    camera = importlib.import_module(TRANSPORTS[transport]).open_transport("camera", VARIABLES)

    def take(message: Any) -> None:
        stamp = message.header.stamp
        ages_ms.append((time.time_ns() - stamp.sec * 10**9 - stamp.nanosec) / 1e6)

    camera.advertise("/image", MessageKind.IMAGE, Qos("DEFAULT", 5))
    camera.subscribe("/found", MessageKind.DETECTIONS, Qos(), take)
    is_done = threading.Event()

    def spin() -> None:
        while not is_done.is_set():
            camera.spin(0.02)

    spinner = threading.Thread(target=spin)
    spinner.start()
    data = bytes(width * height * 3)

    def send() -> None:
        stamp = FrameHeader(*divmod(time.time_ns(), 10**9), "camera")
        camera.publish("/image", ImageMessage(stamp, height, width, "bgr8", 3 * width, data))
        time.sleep(PERIOD_S)

    with bridging(transport, server) as process_id:
        while len(ages_ms) < WARM_UP:
            send()
        ages_ms.clear()
        before_s = cpu_s(process_id)
        for _ in range(frames):
            send()
        used_ms = (cpu_s(process_id) - before_s) * 1000
    is_done.set()
    spinner.join()
    camera.close()
    server.stop()
    ordered = sorted(ages_ms)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], used_ms / len(ordered), len(ordered)


def summarize(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main(rounds: int, frames: int) -> None:
    cases = [(transport, *size) for size in SIZES for transport in ("dds", "zenoh")]
    found: dict[tuple[str, int, int], list[tuple[float, float, float, int]]] = {case: [] for case in cases}
    router = [sys.executable, str(ROOT / "tests/plugins/ros/zenoh_router.py"), ROUTER]
    with ended(subprocess.Popen(router, stdout=subprocess.DEVNULL)):
        for _ in range(rounds):
            for case in cases:
                found[case].append(measure(*case, frames))
    rows = [
        [
            transport, f"{width}x{height}", summarize([one[0] for one in results]),
            summarize([one[1] for one in results]), summarize([one[2] for one in results]),
            f"{min(one[3] for one in results)} to {max(one[3] for one in results)} of {frames}",
        ]
        for (transport, width, height), results in found.items()
    ]  # fmt: skip
    print(markdown(["transport", "image", "age p50 ms", "age p99 ms", "CPU ms an answer", "answers"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=100)
    options = parser.parse_args()
    main(options.rounds, options.frames)
