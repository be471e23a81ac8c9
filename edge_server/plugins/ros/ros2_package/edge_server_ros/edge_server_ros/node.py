"""ROS 2 node: sends a camera topic to an edge_server, and publishes its results as topics.

All settings are parameters; config/params.yaml lists them. `edge_server.plugins.ros.bridge` does the work. This file
adds ROS parameters, the ROS log, and signals.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Sequence
from typing import Any

import rclpy
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.signals import SignalHandlerOptions

from edge_server.errors import EdgeServerError
from edge_server.plugins.ros.bridge import Bridge, BridgeParameters
from edge_server.plugins.ros.transports.rclpy_transport import RclpyTransport
from edge_server.protocol.frame_messages import Delivery

DEFAULTS: dict[str, Any] = {
    "server_address": "127.0.0.1:8001",
    "model_name": "efficientnet_lite0",
    "model_version": 0,
    "stream_id": "",
    "image_topic": "image",
    "image_is_compressed": False,
    "detections_topic": "detections_output",
    "classification_topic": "",
    "annotated_topic": "",
    "mask_topic": "",
    "map_topic": "",
    "detections3d_topic": "",
    "depth_topic": "",
    "camera_info_topic": "",
    "depth_tolerance_ms": 50,
    "image_is_rectified": False,
    "input_qos": "SENSOR_DATA",
    "output_qos": "DEFAULT",
    "input_queue_size": 1,
    "output_queue_size": 10,
    "top_k": 5,
    "jpeg_quality": 0,
    "class_id_is_number": False,
    "stamp_tells_age": False,
    "depth": 1,
    "max_age_ms": 0,
    "deadline_ms": 0,
    "max_fps": 0.0,
    "weight": 1.0,
    "priority": 0,
}


def read_parameters(node: Any) -> tuple[str, BridgeParameters]:
    """Declare all parameters; return the server's address and the parameters of the bridge.

    They are read once and are read-only in ROS. Raises InvalidRequest for values out of range.
    """
    fixed = ParameterDescriptor(read_only=True)
    given = {name: node.declare_parameter(name, value, fixed).value for name, value in DEFAULTS.items()}
    limits = {field.name for field in dataclasses.fields(Delivery)}
    delivery = Delivery(**{name: value for name, value in given.items() if name in limits})
    rest = {name: value for name, value in given.items() if name not in limits}
    return rest.pop("server_address"), BridgeParameters(**rest, delivery=delivery)


class RosLog(logging.Handler):
    """Passes Python's log lines to ROS. rclpy requires a separate line of code for each severity."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(text)
        else:
            self._logger.info(text)


def run(node: Any) -> None:
    """Run the bridge until SIGINT or SIGTERM. Raises EdgeServerError for a permanent error."""
    address, parameters = read_parameters(node)
    bridge = Bridge(parameters, RclpyTransport(node=node), parameters.open_stream(address))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: bridge.stop())
    bridge.run()


def main(args: Sequence[str] | None = None) -> int:
    # The context must exist until the last result: the bridge ends first, then ROS.
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node("edge_server")
    log = logging.getLogger("edge_server")
    log.setLevel(logging.INFO)
    log.addHandler(RosLog(node.get_logger()))
    try:
        run(node)
    except EdgeServerError as error:
        node.get_logger().fatal(error.message)
        return 1
    finally:
        node.destroy_node()
        rclpy.shutdown()
    return 0
