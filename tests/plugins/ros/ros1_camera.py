"""ROS 1 camera: publishes one image repeatedly, with a new stamp each time, until it gets the order to end.

    python ros1_camera.py TOPIC PICTURE FRAME_ID RATE [--compressed] [--depth]

PICTURE is an .npy file of uint8 [height, width, 3], published as bgr8 with eight bytes of padding a row, or with
--compressed the bytes of a JPEG. With --depth it publishes beside TOPIC `depth`, a wall at 1.5 m, 16UC1 of a quarter of
the size, and `camera_info` with a focal length of 500 pixels. Knows rospy alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import rospy
import sensor_msgs.msg

PADDING = 8


def image(path: Path) -> sensor_msgs.msg.Image:
    pixels = np.load(path)
    height, width, _ = pixels.shape
    rows = np.pad(pixels.reshape(height, width * 3), ((0, 0), (0, PADDING)), constant_values=255)
    return sensor_msgs.msg.Image(
        height=height, width=width, encoding="bgr8", step=width * 3 + PADDING, data=rows.tobytes()
    )


def depth_messages(width: int, height: int) -> dict[str, Any]:
    """Return the further messages of a depth camera, by the last name of their topic."""
    columns, rows = width // 4, height // 4
    wall = np.full((rows, columns), 1500, "<u2").tobytes()
    depth = sensor_msgs.msg.Image(height=rows, width=columns, encoding="16UC1", step=2 * columns, data=wall)
    matrix = [500.0, 0.0, width / 2 - 0.5, 0.0, 500.0, height / 2 - 0.5, 0.0, 0.0, 1.0]
    info = sensor_msgs.msg.CameraInfo(height=height, width=width, distortion_model="plumb_bob", D=[0.0] * 5, K=matrix)
    return {"depth": depth, "camera_info": info}


def main() -> None:
    topic, picture, frame_id, rate = sys.argv[1:5]
    if "--compressed" in sys.argv:
        message = sensor_msgs.msg.CompressedImage(format="jpeg", data=Path(picture).read_bytes())
    else:
        message = image(Path(picture))
    rospy.init_node("camera", anonymous=True)
    messages = {topic: message}
    if "--depth" in sys.argv:
        namespace = topic.rpartition("/")[0]
        more = depth_messages(message.width, message.height)
        messages.update((f"{namespace}/{name}", one) for name, one in more.items())
    publishers = [(rospy.Publisher(name, type(one), queue_size=1), one) for name, one in messages.items()]
    ticks = rospy.Rate(float(rate))
    while not rospy.is_shutdown():
        now = rospy.Time.now()
        for publisher, one in publishers:
            one.header.stamp, one.header.frame_id = now, frame_id
            publisher.publish(one)
        print(f"{message.header.stamp.secs} {message.header.stamp.nsecs}", flush=True)
        try:
            ticks.sleep()
        except rospy.ROSInterruptException:
            return


main()
