"""Camera and listener like a node with rmw_zenoh: dds_camera.py's messages and codec over Zenoh, without this package.

usage: zenoh_camera.py DOMAIN IMAGE_TOPIC DETECTIONS_TOPIC COUNT [PICTURE], as of dds_camera.py.
ZENOH_CONFIG_OVERRIDE has the router's address.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import sys
import time

import dds_camera
import numpy as np
import zenoh

IMAGE = "sensor_msgs::msg::dds_::Image_/RIHS01_d31d41a9a4c4bc8eae9be757b0beed306564f7526c88ea6a4588fb9582527d47"
DETECTIONS = (
    "vision_msgs::msg::dds_::Detection2DArray_/RIHS01_214274120007f4a683866481336b70310268cfa107aebe9d594a6acf75bda968"
)
GID = bytes(range(16))


def main(domain: int, image_topic: str, detections_topic: str, count: int, picture: str = "") -> int:
    pixels = np.load(picture) if picture else None
    configuration = zenoh.Config.from_json5('{mode: "peer", listen: {endpoints: ["tcp/localhost:0"]}}')
    configuration.insert_json5("scouting/multicast/enabled", "false")
    configuration.insert_json5("timestamping/enabled", "true")
    key, _, value = os.environ["ZENOH_CONFIG_OVERRIDE"].partition("=")
    configuration.insert_json5(key, value)
    seen: set[int] = set()
    with zenoh.open(configuration) as session:
        token = f"@ros2_lv/{domain}/{session.info.zid()}/0/{{}}/{{}}/%/%/camera"
        mangled = image_topic.replace("/", "%")
        tokens = [
            session.liveliness().declare_token(text)
            for text in (token.format(0, "NN"), f"{token.format(1, 'MP')}/{mangled}/{IMAGE}/2::,5:,:,:,,")
        ]
        reader = session.declare_subscriber(f"{domain}{detections_topic}/{DETECTIONS}", zenoh.handlers.FifoChannel(100))
        writer = session.declare_publisher(f"{domain}{image_topic}/{IMAGE}")
        end = time.monotonic() + dds_camera.LIMIT_S
        number = 0
        while len(seen) < count and time.monotonic() < end:
            number += 1
            data = dds_camera.image(number, pixels, image_topic).serialize(use_version_2=False)
            writer.put(data, attachment=struct.pack("<qqB16s", number, time.time_ns(), 16, GID))
            time.sleep(0.05)
            while (sample := reader.try_recv()) is not None:
                assert len(sample.attachment.to_bytes()) == 33
                found = dds_camera.Detection2DArray.deserialize(sample.payload.to_bytes())
                if found.header.stamp.sec not in seen and len(seen) < count:
                    seen.add(found.header.stamp.sec)
                    print(json.dumps(dataclasses.asdict(found)), flush=True)
        for one in tokens:
            one.undeclare()
    return 0 if len(seen) >= count else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:]))
