"""ROS 2 over DDS: what is DDS's own, in discovery and in the messages about silent topics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.ros.conftest import wait_until

pytestmark = [pytest.mark.full]


IMAGE_HASH = "RIHS01_d31d41a9a4c4bc8eae9be757b0beed306564f7526c88ea6a4588fb9582527d47"
DETECTIONS_HASH = "RIHS01_214274120007f4a683866481336b70310268cfa107aebe9d594a6acf75bda968"
POSITIONS_HASH = "RIHS01_793f5eab9595ac1c0da07873cc859db42eae51f0ee76056db8562515d830e018"
"""As rosidl's generators compute them from the packages of ROS 2 Jazzy."""


def test_discovery_announces_names_types_and_type_hashes_of_ros(dds: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISCOVERY, dds.environment["ROS_DOMAIN_ID"]],
        env={**os.environ, **dds.environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout)) == [
        ["rt/found", "vision_msgs::msg::dds_::Detection2DArray_", f"typehash={DETECTIONS_HASH};"],
        ["rt/found3d", "vision_msgs::msg::dds_::Detection3DArray_", f"typehash={POSITIONS_HASH};"],
        ["rt/image", "sensor_msgs::msg::dds_::Image_", f"typehash={IMAGE_HASH};"],
    ]


DISCOVERY = """
import json, sys, time
from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication
from cyclonedds.domain import DomainParticipant
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.plugins.ros.transports.dds_transport import DdsTransport
from edge_server.plugins.ros.messages.message_conversion import MessageKind

transport = DdsTransport(int(sys.argv[1]))
transport.advertise("/found", MessageKind.DETECTIONS, Qos())
transport.advertise("/found3d", MessageKind.DETECTIONS_3D, Qos())
transport.advertise("image", MessageKind.IMAGE, Qos("SENSOR_DATA", 5))
watcher = DomainParticipant(int(sys.argv[1]))
reader = BuiltinDataReader(watcher, BuiltinTopicDcpsPublication)
seen, end = {}, time.monotonic() + 20
while len(seen) < 3 and time.monotonic() < end:
    for sample in reader.take(20):
        if getattr(sample, "topic_name", "").startswith("rt/"):
            data = [policy.data for policy in sample.qos if type(policy).__name__ == "Userdata"]
            seen[sample.topic_name] = (sample.topic_name, sample.type_name, data[0].decode() if data else "")
print(json.dumps(list(seen.values())))
# Before the interpreter ends: Cyclone DDS deletes a reader with the help of a thread that may have ended by then, and
# waits for ever.
del reader, watcher
transport.close()
"""


def test_a_silent_topic_is_explained_by_domain_or_interface(
    scripted: Callable[..., Any], dds: Any, tmp_path: Path
) -> None:
    server = scripted()
    domain = int(dds.environment["ROS_DOMAIN_ID"])
    cases = {
        "domain": ({"ROS_DOMAIN_ID": str(domain + 100)}, f"no other node is seen in ROS domain {domain + 100}"),
        # The camera is on the loopback interface.
        "interface": ({"CYCLONEDDS_URI": "", "ROS_AUTOMATIC_DISCOVERY_RANGE": "SYSTEM_DEFAULT"},
                      f"another DDS program of this machine is in domain {domain} and is not reached, so its network "
                      "interface is another one"),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        # It sends until it is ended: no detections come.
        camera = dds.start_camera(1)
        stack.callback(camera.communicate)
        stack.callback(camera.kill)
        for name, (variables, _) in cases.items():
            stack.enter_context(dds.bridging(server.address, tmp_path / name, environment=variables))
        for name, (_, expected) in cases.items():
            wait_until(lambda name=name, expected=expected: expected in (tmp_path / name).read_text(), name)
    found = (tmp_path / "domain").read_text()
    used = re.search(r"programs on this machine use domain ([0-9, ]+): expected the same ROS_DOMAIN_ID", found)
    assert used is not None, found
    assert str(domain) in used[1].split(", ")
