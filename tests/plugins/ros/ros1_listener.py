"""ROS 1 node that prints each message of a topic as a line of JSON.

    python ros1_listener.py TOPIC TYPE MD5SUM

It subscribes with the type and checksum that the released package has, so a publisher whose checksum differs is refused
by rospy, and reads the messages by the definition that came with the connection. Knows rospy and genpy alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import genpy
import genpy.dynamic
import rospy

CLASSES: dict[str, Any] = {}


def plain(value: Any) -> Any:
    """Return a message as dictionaries, lists and numbers."""
    if isinstance(value, genpy.Message):
        return {name: plain(getattr(value, name)) for name in value.__slots__}
    if isinstance(value, genpy.Time):
        return [value.secs, value.nsecs]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return len(value) if isinstance(value, bytes) else value


def show(message: rospy.AnyMsg) -> None:
    header = message._connection_header
    name = header["type"]
    if name not in CLASSES:
        CLASSES[name] = genpy.dynamic.generate_dynamic(name, header["message_definition"])[name]
    print(json.dumps(plain(CLASSES[name]().deserialize(message._buff))), flush=True)


def main() -> None:
    topic, name, checksum = sys.argv[1:]
    kind = type("Released", (rospy.AnyMsg,), {"_type": name, "_md5sum": checksum})
    rospy.init_node("listener", anonymous=True)
    rospy.Subscriber(topic, kind, show, queue_size=10)
    rospy.spin()


main()
