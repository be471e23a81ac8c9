"""Age of results and CPU time of `edge-server ros bridge` over DDS and Zenoh: `python tests/bench/ros_transports.py
[--rounds=N] [--frames=N]`, with the extras test, ros and zenoh.

A camera publishes images at 15 Hz, reliably, a server made for the test answers each at once with a box, and the
camera gets the detections. The age is from before an image is encoded until its detections are decoded. Camera, bridge,
server and Zenoh's router run on this machine, the transports in turns. The last cases have four cameras with one
bridge, and with a bridge each. Medians of all rounds, and their range.
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
from typing import Any, NamedTuple

from harness import COMMAND, ROOT, cpu_s, ended, markdown, memory_mb

sys.path.append(str(ROOT / "tests/plugins/ros"))
from conftest import ScriptedServer

from edge_server.plugins.ros.messages.message_conversion import ImageMessage, MessageKind
from edge_server.plugins.ros.transports.transport import TRANSPORTS, Qos
from edge_server.protocol.frame_messages import FrameHeader

CAMERAS = 4
SIZES = ((640, 480), (1920, 1080))
PERIOD_S = 1 / 15
WARM_UP = 10
ROUTER = "tcp/127.0.0.1:17456"
VARIABLES = {
    "ROS_DOMAIN_ID": "93", "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
    "ZENOH_CONFIG_OVERRIDE": f'connect/endpoints=["{ROUTER}"]',
}  # fmt: skip


class Case(NamedTuple):
    """What is measured: each of `cameras` sends images of this size, and `bridges` share the cameras."""

    transport: str
    width: int
    height: int
    cameras: int = 1
    bridges: int = 1


class Turn(NamedTuple):
    """One measurement. CPU time is the bridges' for an answer, memory that of all bridges together."""

    p50_ms: float
    p99_ms: float
    cpu_ms: float
    memory_mb: float
    answers: int


@contextlib.contextmanager
def bridging(case: Case, server: ScriptedServer) -> Iterator[list[int]]:
    """Run the bridges meanwhile; yields their process ids."""
    processes = []
    with contextlib.ExitStack() as stack:
        for number in range(case.bridges):
            images = [f"--image-topic=/camera{camera}/image" for camera in range(number, case.cameras, case.bridges)]
            words = [
                COMMAND, "ros", "bridge", f"--transport={case.transport}", "--model=finder",
                f"--address={server.address}", *images, "--detections-topic=found", "--input-qos=DEFAULT",
            ]  # fmt: skip
            process = subprocess.Popen(words, env={**os.environ, **VARIABLES}, stderr=subprocess.DEVNULL)
            stack.enter_context(ended(process))
            processes.append(process)
        yield [process.pid for process in processes]


def measure(case: Case, frames: int) -> Turn:
    """Send `frames` images from each camera, after a warm-up."""
    server = ScriptedServer()
    ages_ms: list[list[float]] = [[] for _ in range(case.cameras)]
    camera = importlib.import_module(TRANSPORTS[case.transport]).open_transport("camera", VARIABLES)

    def take(message: Any) -> None:
        stamp = message.header.stamp
        ages_ms[int(message.header.frame_id)].append((time.time_ns() - stamp.sec * 10**9 - stamp.nanosec) / 1e6)

    for number in range(case.cameras):
        camera.advertise(f"/camera{number}/image", MessageKind.IMAGE, Qos("DEFAULT", 5))
        camera.subscribe(f"/camera{number}/found", MessageKind.DETECTIONS, Qos(), take)
    is_done = threading.Event()

    def spin() -> None:
        while not is_done.is_set():
            camera.spin(0.02)

    spinner = threading.Thread(target=spin)
    spinner.start()
    data = bytes(case.width * case.height * 3)

    def send() -> None:
        for number in range(case.cameras):
            stamp = FrameHeader(*divmod(time.time_ns(), 10**9), str(number))
            image = ImageMessage(stamp, case.height, case.width, "bgr8", 3 * case.width, data)
            camera.publish(f"/camera{number}/image", image)
            time.sleep(PERIOD_S / case.cameras)

    with bridging(case, server) as process_ids:
        while min(map(len, ages_ms)) < WARM_UP:
            send()
        for ages in ages_ms:
            ages.clear()
        before_s = sum(map(cpu_s, process_ids))
        for _ in range(frames):
            send()
        used_ms = (sum(map(cpu_s, process_ids)) - before_s) * 1000
        used_mb = sum(memory_mb(process_id)["Pss"] for process_id in process_ids)
    is_done.set()
    spinner.join()
    camera.close()
    server.stop()
    ordered = sorted(age for ages in ages_ms for age in ages)
    count = len(ordered)
    return Turn(ordered[count // 2], ordered[count * 99 // 100], used_ms / count, used_mb, count)


def summarize(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main(rounds: int, frames: int) -> None:
    cases = [Case(transport, *size) for size in SIZES for transport in ("dds", "zenoh")]
    cases += [Case("dds", *SIZES[0], CAMERAS, bridges) for bridges in (1, CAMERAS)]
    found: dict[Case, list[Turn]] = {case: [] for case in cases}
    router = [sys.executable, str(ROOT / "tests/plugins/ros/zenoh_router.py"), ROUTER]
    with ended(subprocess.Popen(router, stdout=subprocess.DEVNULL)):
        for _ in range(rounds):
            for case in cases:
                found[case].append(measure(case, frames))
    rows = [
        [
            f"{case.transport}, {case.cameras} / {case.bridges}", f"{case.width}x{case.height}",
            *(summarize([turn[column] for turn in turns]) for column in range(4)),
            f"{min(turn.answers for turn in turns)} of {frames * case.cameras}",
        ]
        for case, turns in found.items()
    ]  # fmt: skip
    heads = ["cameras / bridges", "image", "age p50 ms", "age p99 ms", "CPU ms an answer", "memory MB", "answers"]
    print(markdown(heads, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=100)
    options = parser.parse_args()
    main(options.rounds, options.frames)
