"""Depth camera and listener like another ROS 2 program: cyclonedds with its own codec, without this package.

usage: dds_depth_camera.py DOMAIN NAMESPACE POSITIONS_TOPIC COUNT PICTURE DEPTH. Publishes NAMESPACE/image_raw from
PICTURE, an .npy file as dds_camera.py reads it, NAMESPACE/depth from DEPTH, an .npy file of uint16 [height, width] in
millimetres, 10 ms older and sent after the picture, and NAMESPACE/camera_info, until COUNT Detection3DArray messages
have come back. Prints each as a line of JSON. Exit code 1 when they do not come within a minute.
"""

# No `from __future__ import annotations`: cyclonedds reads the annotations of these classes.

import dataclasses
import json
import sys
import time

import numpy as np
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, float64, sequence, uint32
from cyclonedds.pub import DataWriter
from cyclonedds.qos import Policy, Qos
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from dds_camera import Header, Image, ObjectHypothesisWithPose, Pose, Time

LIMIT_S = 60.0
FOCAL_LENGTH = 240.0


@dataclasses.dataclass
class RegionOfInterest(IdlStruct, typename="sensor_msgs.msg.dds_.RegionOfInterest_"):
    x_offset: uint32
    y_offset: uint32
    height: uint32
    width: uint32
    do_rectify: bool


@dataclasses.dataclass
class CameraInfo(IdlStruct, typename="sensor_msgs.msg.dds_.CameraInfo_"):
    header: Header
    height: uint32
    width: uint32
    distortion_model: str
    d: sequence[float64]
    k: array[float64, 9]
    r: array[float64, 9]
    p: array[float64, 12]
    binning_x: uint32
    binning_y: uint32
    roi: RegionOfInterest


@dataclasses.dataclass
class Vector3(IdlStruct, typename="geometry_msgs.msg.dds_.Vector3_"):
    x: float64
    y: float64
    z: float64


@dataclasses.dataclass
class BoundingBox3D(IdlStruct, typename="vision_msgs.msg.dds_.BoundingBox3D_"):
    center: Pose
    size: Vector3


@dataclasses.dataclass
class Detection3D(IdlStruct, typename="vision_msgs.msg.dds_.Detection3D_"):
    header: Header
    results: sequence[ObjectHypothesisWithPose]
    bbox: BoundingBox3D
    id: str


@dataclasses.dataclass
class Detection3DArray(IdlStruct, typename="vision_msgs.msg.dds_.Detection3DArray_"):
    header: Header
    detections: sequence[Detection3D]


def image(stamp: Time, pixels: np.ndarray, encoding: str) -> Image:
    height, width = pixels.shape[:2]
    data = pixels.view(np.uint8).ravel()
    return Image(Header(stamp, "camera_optical"), height, width, encoding, 0, len(data) // height, data.tolist())


def camera_info(stamp: Time, width: int, height: int) -> CameraInfo:
    k = [FOCAL_LENGTH, 0.0, width / 2 - 0.5, 0.0, FOCAL_LENGTH, height / 2 - 0.5, 0.0, 0.0, 1.0]
    region = RegionOfInterest(0, 0, 0, 0, False)
    header = Header(stamp, "camera_optical")
    return CameraInfo(header, height, width, "plumb_bob", [0.0] * 5, k, [0.0] * 9, [0.0] * 12, 0, 0, region)


def main(domain: int, namespace: str, positions_topic: str, count: int, picture: str, depth: str) -> int:
    pixels, depths = np.load(picture), np.load(depth)
    participant = DomainParticipant(domain)
    cdr = Policy.DataRepresentation(use_cdrv0_representation=True)
    sensor = Qos(Policy.Reliability.BestEffort, Policy.Durability.Volatile, Policy.History.KeepLast(5), cdr)
    reliable = Qos(Policy.Reliability.Reliable(100_000_000), Policy.History.KeepLast(10), cdr)

    def writer(name: str, kind: type, qos: Qos) -> DataWriter:
        return DataWriter(participant, Topic(participant, f"rt{namespace}/{name}", kind), qos=qos)

    images, depth_images = writer("image_raw", Image, sensor), writer("depth", Image, sensor)
    infos = writer("camera_info", CameraInfo, reliable)
    reader = DataReader(participant, Topic(participant, f"rt{positions_topic}", Detection3DArray), qos=reliable)
    end = time.monotonic() + LIMIT_S
    seen: set[int] = set()
    number = 0
    while len(seen) < count and time.monotonic() < end:
        number += 1
        stamp = Time(number, 20_000_000)
        infos.write(camera_info(stamp, pixels.shape[1], pixels.shape[0]))
        images.write(image(stamp, pixels, "rgb8"))
        depth_images.write(image(Time(number, 10_000_000), depths, "16UC1"))
        time.sleep(0.05)
        for found in reader.take(16):
            if isinstance(found, Detection3DArray) and found.header.stamp.sec not in seen and len(seen) < count:
                seen.add(found.header.stamp.sec)
                print(json.dumps(dataclasses.asdict(found)), flush=True)
    return 0 if len(seen) >= count else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6]))
