"""Camera and listener like another ROS 2 program: cyclonedds with its own codec, without this package.

usage: dds_camera.py DOMAIN IMAGE_TOPIC DETECTIONS_TOPIC COUNT [PICTURE]. Publishes images with a stamp of their own
until COUNT different detections messages have come back, and prints each as a line of JSON. PICTURE is an .npy file of
uint8 [height, width, 3], rgb; without it images are 64 x 48 and every byte is their number. Rows are padded. Exit code
1 when the messages do not come within a minute, or within EDGE_TEST_CAMERA_LIMIT_S.
"""

# No `from __future__ import annotations`: cyclonedds reads the annotations of these classes.

import dataclasses
import json
import os
import sys
import time

import numpy as np
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, float64, int32, sequence, uint8, uint32
from cyclonedds.pub import DataWriter
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic

HEIGHT, WIDTH, PADDING = 48, 64, 4
LIMIT_S = float(os.environ.get("EDGE_TEST_CAMERA_LIMIT_S", "60"))


@dataclasses.dataclass
class Time(IdlStruct, typename="builtin_interfaces.msg.dds_.Time_"):
    sec: int32
    nanosec: uint32


@dataclasses.dataclass
class Header(IdlStruct, typename="std_msgs.msg.dds_.Header_"):
    stamp: Time
    frame_id: str


@dataclasses.dataclass
class Image(IdlStruct, typename="sensor_msgs.msg.dds_.Image_"):
    header: Header
    height: uint32
    width: uint32
    encoding: str
    is_bigendian: uint8
    step: uint32
    data: sequence[uint8]


@dataclasses.dataclass
class Point(IdlStruct, typename="geometry_msgs.msg.dds_.Point_"):
    x: float64
    y: float64
    z: float64


@dataclasses.dataclass
class Quaternion(IdlStruct, typename="geometry_msgs.msg.dds_.Quaternion_"):
    x: float64
    y: float64
    z: float64
    w: float64


@dataclasses.dataclass
class Pose(IdlStruct, typename="geometry_msgs.msg.dds_.Pose_"):
    position: Point
    orientation: Quaternion


@dataclasses.dataclass
class PoseWithCovariance(IdlStruct, typename="geometry_msgs.msg.dds_.PoseWithCovariance_"):
    pose: Pose
    covariance: array[float64, 36]


@dataclasses.dataclass
class ObjectHypothesis(IdlStruct, typename="vision_msgs.msg.dds_.ObjectHypothesis_"):
    class_id: str
    score: float64


@dataclasses.dataclass
class ObjectHypothesisWithPose(IdlStruct, typename="vision_msgs.msg.dds_.ObjectHypothesisWithPose_"):
    hypothesis: ObjectHypothesis
    pose: PoseWithCovariance


@dataclasses.dataclass
class Point2D(IdlStruct, typename="vision_msgs.msg.dds_.Point2D_"):
    x: float64
    y: float64


@dataclasses.dataclass
class Pose2D(IdlStruct, typename="vision_msgs.msg.dds_.Pose2D_"):
    position: Point2D
    theta: float64


@dataclasses.dataclass
class BoundingBox2D(IdlStruct, typename="vision_msgs.msg.dds_.BoundingBox2D_"):
    center: Pose2D
    size_x: float64
    size_y: float64


@dataclasses.dataclass
class Detection2D(IdlStruct, typename="vision_msgs.msg.dds_.Detection2D_"):
    header: Header
    results: sequence[ObjectHypothesisWithPose]
    bbox: BoundingBox2D
    id: str


@dataclasses.dataclass
class Detection2DArray(IdlStruct, typename="vision_msgs.msg.dds_.Detection2DArray_"):
    header: Header
    detections: sequence[Detection2D]


def image(number: int, pixels: np.ndarray | None, topic: str) -> Image:
    """Return an image; its frame_id is "camera_optical" for the topic "/camera/image_raw"."""
    if pixels is None:
        pixels = np.full((HEIGHT, WIDTH, 3), number % 256, np.uint8)
    height, width, _ = pixels.shape
    rows = np.pad(pixels.reshape(height, width * 3), ((0, 0), (0, PADDING)), constant_values=number % 256)
    header = Header(Time(number, 500 + number), f"{topic.split('/')[1]}_optical")
    return Image(header, height, width, "rgb8", 0, width * 3 + PADDING, rows.ravel().tolist())


def main(domain: int, image_topic: str, detections_topic: str, count: int, picture: str = "") -> int:
    pixels = np.load(picture) if picture else None
    participant = DomainParticipant(domain)
    cdr = Policy.DataRepresentation(use_cdrv0_representation=True)
    sensor = Qos(Policy.Reliability.BestEffort, Policy.Durability.Volatile, Policy.History.KeepLast(5), cdr)
    reliable = Qos(Policy.Reliability.Reliable(100_000_000), Policy.History.KeepLast(10), cdr)
    writer = DataWriter(participant, Topic(participant, f"rt{image_topic}", Image), qos=sensor)
    reader = DataReader(participant, Topic(participant, f"rt{detections_topic}", Detection2DArray), qos=reliable)
    end = time.monotonic() + LIMIT_S
    seen: set[int] = set()
    number = 0
    while len(seen) < count and time.monotonic() < end:
        number += 1
        writer.write(image(number, pixels, image_topic))
        time.sleep(0.05)
        for found in reader.take(16):
            # The last `take` can return more messages than are still needed.
            if isinstance(found, Detection2DArray) and found.header.stamp.sec not in seen and len(seen) < count:
                seen.add(found.header.stamp.sec)
                print(json.dumps(dataclasses.asdict(found)), flush=True)
    return 0 if len(seen) >= count else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:]))
