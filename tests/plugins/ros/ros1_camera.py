"""ROS 1 camera: publishes one image repeatedly, with a new stamp each time, until it gets the order to end.

    python ros1_camera.py TOPIC PICTURE FRAME_ID RATE [--compressed]

PICTURE is an .npy file of uint8 [height, width, 3], published as bgr8 with eight bytes of padding a row, or with
--compressed the bytes of a JPEG. Knows rospy alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

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


def main() -> None:
    topic, picture, frame_id, rate = sys.argv[1:5]
    if "--compressed" in sys.argv:
        message = sensor_msgs.msg.CompressedImage(format="jpeg", data=Path(picture).read_bytes())
    else:
        message = image(Path(picture))
    rospy.init_node("camera", anonymous=True)
    publisher = rospy.Publisher(topic, type(message), queue_size=1)
    ticks = rospy.Rate(float(rate))
    message.header.frame_id = frame_id
    while not rospy.is_shutdown():
        message.header.stamp = rospy.Time.now()
        publisher.publish(message)
        print(f"{message.header.stamp.secs} {message.header.stamp.nsecs}", flush=True)
        try:
            ticks.sleep()
        except rospy.ROSInterruptException:
            return


main()
