"""The node: a camera topic in, perception topics out, computed by an edge_server over its frame stream.

Everything is decided by parameters, which config/params.yaml lists. The work is done by `edge_server.ros.bridge`; here
is only what ROS adds: parameters, the log, signals.
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

from edge_server.core.frame import Delivery
from edge_server.errors import EdgeServerError
from edge_server.ros.bridge import Bridge, BridgeParameters
from edge_server.ros.rclpy_transport import RclpyTransport

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
    """Declare every parameter; return the server's address and what the bridge is told.

    They are read once, so ROS refuses to change them later. Raises InvalidRequest for values out of range.
    """
    fixed = ParameterDescriptor(read_only=True)
    given = {name: node.declare_parameter(name, value, fixed).value for name, value in DEFAULTS.items()}
    limits = {field.name for field in dataclasses.fields(Delivery)}
    delivery = Delivery(**{name: value for name, value in given.items() if name in limits})
    rest = {name: value for name, value in given.items() if name not in limits}
    return rest.pop("server_address"), BridgeParameters(**rest, delivery=delivery)


class RosLog(logging.Handler):
    """Hands Python's log lines to ROS. rclpy wants a line of code of its own for each severity."""

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
    """Bridge until SIGINT or SIGTERM. Raises EdgeServerError for what waiting cannot mend."""
    address, parameters = read_parameters(node)
    bridge = Bridge(parameters, RclpyTransport(node=node), parameters.open_stream(address))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: bridge.stop())
    bridge.run()


def main(args: Sequence[str] | None = None) -> int:
    # The context must outlive the last result: the bridge ends first, then ROS.
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
