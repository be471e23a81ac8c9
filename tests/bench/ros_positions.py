"""Cost of positions from a depth topic in `edge-server ros bridge`: `python tests/bench/ros_positions.py [--rounds=N]
[--frames=N]`, with the extras test and ros.

First errors in rendered scenes, where camera and depth are exact: 200 objects at 0.5 to 4 m. Noise is 10 mm in depth,
40 % holes, and 10 % of the pixels up to 3 m too far, as at edges. Then the steps that come with `--detections3d-topic`,
on one thread: reading a depth image, placing 20 boxes, and encoding the message. At last the CPU time of the whole
bridge for a frame, over DDS on the loopback interface, with `--detections-topic` alone and with positions besides, in
turns. A server made for the test answers every frame with 20 boxes at once; the depth image has the resolution of the
frame, 16UC1. Medians of all rounds, and their range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import COMMAND, ROOT, cpu_s, ended, markdown

sys.path += map(str, (ROOT / "tests/plugins/ros", ROOT / "tests/plugins/ros/depth"))
from conftest import ScriptedServer
from cyclonedds.domain import DomainParticipant
from cyclonedds.pub import DataWriter
from cyclonedds.topic import Topic
from dds_camera import Time
from dds_depth_camera import CameraInfo, camera_info
from test_object_positions import box_around, depth_image, error_mm, place, render_plane, render_sphere

from edge_server.plugins.ros.depth.camera_model import CameraModel
from edge_server.plugins.ros.depth.object_positions import detections3d_message, read_depth_image
from edge_server.plugins.ros.messages.message_conversion import ImageMessage, MessageKind, detections_message
from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.transports.dds_transport import DdsTransport
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.protocol.frame_messages import Detection, Frame, FrameHeader, FrameResult, StreamRequest

SIZES = ((640, 480), (1920, 1080))
WARM_UP = 10
DOMAIN = 94
LOOPBACK = (
    "<CycloneDDS><Domain><General><Interfaces><NetworkInterface name='lo' multicast='false'/></Interfaces>"
    "<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>"
    "<Peers><Peer Address='127.0.0.1'/></Peers></Discovery></Domain></CycloneDDS>"
)
LENS = (-0.1, 0.02, 0.001, 0.0, 0.0, 0.0, 0.0, 0.0)


def find_boxes(width: int, height: int) -> tuple[Detection, ...]:
    """Return 20 boxes of about a fifth of the frame's width."""
    places = np.random.default_rng(1).random((20, 2)) * (width * 0.75, height * 0.6)
    return tuple(Detection(x, y, x + width * 0.22, y + height * 0.35, 0.5, 1, "cup") for x, y in places.tolist())


def make_depth(width: int, height: int, stamp: FrameHeader) -> ImageMessage:
    """Return a depth image of noise between 0.5 and 5 m, with a tenth of holes."""
    rng = np.random.default_rng(2)
    depth = rng.integers(500, 5000, (height, width), np.uint16)
    depth[rng.random((height, width)) < 0.1] = 0
    return ImageMessage(stamp, height, width, "16UC1", 2 * width, depth.tobytes())


def measure_accuracy() -> str:
    rng = np.random.default_rng(3)
    errors: dict[str, list[float]] = {}
    while len(errors.get("flat, 16UC1", ())) < 200:
        z = rng.uniform(0.5, 4)
        truth, half = (rng.uniform(-0.4, 0.4) * z, rng.uniform(-0.3, 0.3) * z, z), rng.uniform(0.03, 0.1) * z
        found = box_around(truth, half, half)
        if min(found.x_min, found.y_min) < 0 or found.x_max > 640 or found.y_max > 480:
            continue
        depths = render_plane(0, 6.0)
        depths[int(found.y_min) : int(found.y_max) + 1, int(found.x_min) : int(found.x_max) + 1] = z
        noisy = depths + rng.normal(0, 0.01, depths.shape)
        noisy[rng.random(depths.shape) < 0.4] = np.nan
        noisy += np.where(rng.random(depths.shape) < 0.1, rng.uniform(0, 3, depths.shape), 0)
        slope = rng.uniform(-0.7, 0.7)
        scenes = {
            "flat, 16UC1": depth_image(depths, "16UC1"),
            "flat, 32FC1": depth_image(depths),
            "flat, with noise": depth_image(noisy, "16UC1"),
            "inclined by up to 35 degrees": depth_image(render_plane(slope, z - slope * truth[0])),
        }
        for name, image in scenes.items():
            errors.setdefault(name, []).append(error_mm(place(image, found)[0], truth))
        sphere = np.nan_to_num(render_sphere(truth, half), nan=6.0)
        nearest = z * (1 - half / np.linalg.norm(truth))
        behind = (place(depth_image(sphere), found)[0].z - nearest) / half
        errors.setdefault("sphere: behind its nearest point, % of its radius", []).append(100 * behind)
    rows = [[name, f"{statistics.median(found):.2f}", f"{max(found):.2f}"] for name, found in errors.items()]
    return markdown(["Object", "Error (mm), median", "Error (mm), largest"], rows)


def step_ms(step: Callable[[], Any]) -> str:
    times = []
    for _ in range(300):
        began_ns = time.thread_time_ns()
        step()
        times.append((time.thread_time_ns() - began_ns) / 1e6)
    return f"{statistics.median(times):.3f}"


def measure_steps() -> str:
    types, rows = MessageTypes(), []
    for width, height in SIZES:
        message = make_depth(width, height, FrameHeader(1))
        received = types.decode(types.encode(message), MessageKind.IMAGE.value)
        result = FrameResult(FrameHeader(1), width=width, height=height, detections=find_boxes(width, height))
        camera = CameraModel(width, height, 0.8 * width, 0.8 * width, width / 2, height / 2)
        depth = read_depth_image(received)
        placed = detections3d_message(result, depth, camera)
        steps: tuple[Callable[[], Any], ...] = (
            lambda received=received: read_depth_image(received),
            lambda result=result, depth=depth, camera=camera: detections3d_message(result, depth, camera),
            lambda result=result, depth=depth, camera=camera: detections3d_message(
                result, depth, camera._replace(distortion=LENS)
            ),
            lambda placed=placed: types.encode(placed),
            lambda result=result: types.encode(detections_message(result)),
        )
        rows.append([f"{width}x{height}", *map(step_ms, steps)])
    heads = ["Frame", "read", "20 boxes", "20 boxes, distorted lens", "encode", "for comparison: the 2D message"]
    return markdown([*heads[:1], *(f"{head} (ms)" for head in heads[1:])], rows)


class BoxServer(ScriptedServer):
    """Answers every frame with 20 boxes."""

    def _answer(self, request: StreamRequest, frame: Frame) -> FrameResult:
        boxes = find_boxes(frame.width, frame.height)
        return FrameResult(frame.header, width=frame.width, height=frame.height, detections=boxes)


class DepthCamera:
    """Publishes frames, depth and calibration over DDS, and counts the messages that come back."""

    def __init__(self) -> None:
        self.transport = DdsTransport(DOMAIN, configuration=LOOPBACK)
        self.answers = {"/found": 0, "/found3d": 0}
        for topic in ("/camera/image_raw", "/camera/depth"):
            self.transport.advertise(topic, MessageKind.IMAGE, Qos("DEFAULT", 5))
        for topic, kind in (("/found", MessageKind.DETECTIONS), ("/found3d", MessageKind.DETECTIONS_3D)):
            self.transport.subscribe(topic, kind, Qos(), lambda _, topic=topic: self._count(topic))
        participant = DomainParticipant(DOMAIN)
        self._infos = DataWriter(participant, Topic(participant, "rt/camera/camera_info", CameraInfo))
        self._number = 0

    def _count(self, topic: str) -> None:
        self.answers[topic] += 1

    def play(self, width: int, height: int, count: int, topics: tuple[str, ...]) -> None:
        """Send frames until `count` answers have come on each topic."""
        start, end_s = dict(self.answers), time.monotonic() + 60
        picture, depth = bytes(3 * width * height), make_depth(width, height, FrameHeader()).data
        while any(self.answers[topic] - start[topic] < count for topic in topics):
            assert time.monotonic() < end_s, self.answers
            self._number += 1
            header = FrameHeader(self._number, 0, "camera")
            self._infos.write(camera_info(Time(self._number, 0), width, height))
            self.transport.publish("/camera/depth", ImageMessage(header, height, width, "16UC1", 2 * width, depth))
            self.transport.publish("/camera/image_raw", ImageMessage(header, height, width, "bgr8", 3 * width, picture))
            next_s = time.monotonic() + 1 / 15
            while (left_s := next_s - time.monotonic()) > 0:
                self.transport.spin(left_s)


def bridge_ms(camera: DepthCamera, address: str, size: tuple[int, int], frames: int, has_positions: bool) -> float:
    """Return the CPU time of a bridge for a frame, in milliseconds."""
    flags = ["--detections3d-topic=/found3d", "--depth-topic=/camera/depth"] if has_positions else []
    topics = ("/found", "/found3d") if has_positions else ("/found",)
    environment = {**os.environ, "ROS_DOMAIN_ID": str(DOMAIN), "CYCLONEDDS_URI": LOOPBACK}
    process = subprocess.Popen(
        [COMMAND, "ros", "bridge", "--model=finder", f"--address={address}", "--image-topic=/camera/image_raw",
         "--input-qos=DEFAULT", "--detections-topic=/found", *flags],
        env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with ended(process):
        camera.play(*size, WARM_UP, topics)
        before, began_s = camera.answers["/found"], cpu_s(process.pid)
        camera.play(*size, frames, topics)
        return (cpu_s(process.pid) - began_s) * 1000 / (camera.answers["/found"] - before)


def measure_bridge(rounds: int, frames: int) -> str:
    server, camera, rows = BoxServer(), DepthCamera(), []
    for size in SIZES:
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for has_positions, times in found.items():
                times.append(bridge_ms(camera, server.address, size, frames, has_positions))
        cells = [f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})" for times in found.values()]
        rows.append([f"{size[0]}x{size[1]}", *cells])
    camera.transport.close()
    server.stop()
    return markdown(["Frame", "2D alone (ms)", "2D and positions (ms)"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=60)
    options = parser.parse_args()
    print(measure_accuracy(), measure_steps(), measure_bridge(options.rounds, options.frames), sep="\n\n")
