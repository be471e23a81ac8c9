"""Camera and listener by zenoh-ros2-sdk, run by the Python of fetch_zenoh_sdk.sh, without this package.

usage: zenoh_sdk_camera.py DOMAIN PORT FOLDER COUNT. PORT is the router's. FOLDER gets the definitions of the messages,
which the SDK would clone. Publishes images until COUNT annotated ones came back, and prints a JSON object: stamps of
these, and the topics that the SDK sees with the number of their publishers and subscribers.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import zenoh_ros2_sdk as sdk

DEFINITIONS = {
    "builtin_interfaces/msg/Time": "int32 sec\nuint32 nanosec\n",
    "std_msgs/msg/Header": "builtin_interfaces/Time stamp\nstring frame_id\n",
    "sensor_msgs/msg/Image": (
        "std_msgs/Header header\nuint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\n"
        "uint8[] data\n"
    ),
    "sensor_msgs/msg/CompressedImage": "std_msgs/Header header\nstring format\nuint8[] data\n",
}
LIMIT_S = 60.0
HANG_S = 90.0
"""When the traces of all threads are printed, if the program has not ended: one of the SDK may keep it from its end."""


def main(domain: int, port: int, folder: Path, count: int) -> int:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    for name, text in DEFINITIONS.items():
        path = folder / f"{name}.msg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sdk.ZenohSession.get_instance("127.0.0.1", port)
    sdk.get_registry(str(folder))
    ends: dict[str, Any] = {"domain_id": domain, "router_ip": "127.0.0.1", "router_port": port}
    stamps: list[int] = []
    listener = sdk.ROS2Subscriber(
        "/drawn", "sensor_msgs/msg/CompressedImage", lambda message: stamps.append(message.header.stamp.sec), **ends
    )
    camera = sdk.ROS2Publisher("/camera/image_raw", "sensor_msgs/msg/Image", **ends)
    time_class = sdk.get_message_class("builtin_interfaces/msg/Time")
    header_class = sdk.get_message_class("std_msgs/msg/Header")
    end_s, number = time.monotonic() + LIMIT_S, 0
    while len(stamps) < count and time.monotonic() < end_s:
        number += 1
        header = header_class(stamp=time_class(sec=number, nanosec=7), frame_id="camera_optical")
        pixels = np.full(48 * 64 * 3, number % 256, np.uint8)
        camera.publish(header=header, height=48, width=64, encoding="rgb8", is_bigendian=0, step=64 * 3, data=pixels)
        time.sleep(0.05)
    # A query may miss some, or the topic, for a moment: while sessions connect, and on a busy machine.
    seen: dict[str, list[int]] = {}
    while time.monotonic() < end_s and (not seen or min(map(min, seen.values())) == 0):
        for name in ("/camera/image_raw", "/drawn"):
            info = sdk.get_topic_info(name, **ends)
            seen[name] = [info.publisher_count, info.subscriber_count] if info is not None else [0, 0]
    print(json.dumps({"stamps": stamps, "topics": seen}), flush=True)
    camera.close()
    listener.close()
    return 0 if len(stamps) >= count else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
