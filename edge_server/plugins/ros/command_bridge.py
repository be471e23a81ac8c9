"""`edge-server ros bridge`: send camera topics through a model and publish the results, until stopped."""

from __future__ import annotations

import argparse
import importlib
import signal
from collections.abc import Sequence

from edge_server.cli.http_client import server_url
from edge_server.cli.options import CommandParser
from edge_server.config import LogConfig
from edge_server.config.setting_sources import process_environment
from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.bridge import Bridge
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.plugins.ros.command import add_model_options
from edge_server.plugins.ros.diagnostics import Diagnostics
from edge_server.plugins.ros.model_service import ModelService
from edge_server.plugins.ros.transports.ros2_environment import choose_transport
from edge_server.plugins.ros.transports.transport import QOS_PROFILES, TRANSPORTS, Transport, topic_beside
from edge_server.telemetry.log import setup_logging

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TOPICS = {
    "detections": "vision_msgs/Detection2DArray",
    "classification": "vision_msgs/Classification",
    "annotated": "sensor_msgs/CompressedImage, the frame with the results drawn in,",
    "mask": "sensor_msgs/Image of class numbers, or of the numbers of objects",
    "map": "sensor_msgs/Image of depth or anomaly, 32FC1 in metres or mono16,",
    "detections3d": "vision_msgs/Detection3DArray, detections with their position in the camera's optical frame,",
    "vision-info": "vision_msgs/VisionInfo of the model, transient local,",
    "label-info": "vision_msgs/LabelInfo, the labels of the model, transient local,",
    "diagnostics": "diagnostic_msgs/DiagnosticArray once a second",
}

_OWN_TOPICS = ("image_topic", "diagnostics_topic")
"""Topics that are not one beside each image topic."""


def run(arguments: Sequence[str]) -> int:
    """Bridge until SIGINT or SIGTERM, or until ROS ends; return the exit code."""
    options = _parser().parse_args(arguments)
    options.image_topic = options.image_topic or ["/image"]
    cameras = [_parameters(options, topic) for topic in options.image_topic]
    setup_logging(LogConfig())
    # Signals are blocked until the handler, which calls `stop`, is installed.
    signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    environment = process_environment()
    module = importlib.import_module(TRANSPORTS[choose_transport(options.transport, environment)])
    transport: Transport = module.open_transport(options.node_name, environment)
    diagnostics = None
    if options.diagnostics_topic:
        diagnostics = Diagnostics(
            options.diagnostics_topic, options.node_name, options.address, options.http_url or "",
            names_cameras=len(cameras) > 1,
        )  # fmt: skip
    bridge = Bridge(cameras, transport, options.address, diagnostics=diagnostics)
    service = ModelService()
    service.serve(transport)
    service.attach(bridge)
    for number in _END_SIGNALS:
        signal.signal(number, lambda *_: bridge.stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
    bridge.run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server ros bridge",
        description="Subscribe to topics of sensor_msgs/Image or CompressedImage, send their frames to a running "
        "server, and publish the results with the stamp and frame_id of the frame. A topic without a '/' before it is "
        "beside the image topic: with /front/image_raw, detections is /front/detections.",
        allow_abbrev=False,
    )
    add_model_options(parser)
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="",
        help="dds: ROS 2 without a ROS installation (extra 'ros'). zenoh: the same for nodes with rmw_zenoh_cpp, "
        "also on aarch64 (extra 'zenoh'). rclpy: in a sourced ROS 2, or rclpy from PyPI. Default: what fits "
        "RMW_IMPLEMENTATION, else dds",
    )
    parser.add_argument("--node-name", default="edge_server_bridge", help="name of the ROS node")
    parser.add_argument(
        "--image-topic",
        action="append",
        metavar="TOPIC",
        help="topic to subscribe to; repeatable, one for each camera. Default: /image",
    )
    parser.add_argument(
        "--compressed", dest="image_is_compressed", action="store_true", help="the topics have CompressedImage messages"
    )
    for name, message in _TOPICS.items():
        parser.add_argument(f"--{name}-topic", default="", metavar="TOPIC", help=f"publish {message} there")
    _add_depth_options(parser)
    parser.add_argument(
        "--http-url", type=server_url, metavar="URL",
        help="HTTP address of the server, for the governor's state in diagnostics; default: port 8000 of its host",
    )  # fmt: skip
    parser.add_argument("--input-qos", choices=QOS_PROFILES, default="SENSOR_DATA", help="QoS of the image topic")
    parser.add_argument("--output-qos", choices=QOS_PROFILES, default="DEFAULT", help="QoS of the published topics")
    parser.add_argument("--input-queue-size", type=int, default=1, metavar="N", help="queue size of the image topic")
    parser.add_argument(
        "--output-queue-size", type=int, default=10, metavar="N", help="queue size of the published topics"
    )
    parser.add_argument("--top-k", type=int, default=5, metavar="N", help="number of classes in a classification")
    parser.add_argument(
        "--jpeg-quality", type=int, default=0, metavar="Q", help="JPEG quality of annotated images, 1 to 100"
    )
    parser.add_argument(
        "--stamp-tells-age",
        action="store_true",
        help="measure the age of a frame from its stamp, not from its arrival; needs stamps of this machine's clock",
    )
    _add_delivery_options(parser)
    return parser


def _add_depth_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--depth-topic",
        default="",
        metavar="TOPIC",
        help="sensor_msgs/Image of depth for --detections3d-topic: 16UC1 in millimetres or 32FC1 in metres, registered "
        "to the camera of the image topic",
    )
    parser.add_argument(
        "--camera-info-topic",
        default="",
        metavar="TOPIC",
        help="sensor_msgs/CameraInfo of the image topic; default: camera_info beside the image topic",
    )
    parser.add_argument(
        "--depth-tolerance-ms",
        type=int,
        default=50,
        metavar="MS",
        help="largest difference between the stamps of a frame and its depth image; default: 50",
    )
    parser.add_argument(
        "--rectified",
        dest="image_is_rectified",
        action="store_true",
        help="the images have no distortion; default: if the last name of the image topic contains 'rect' as a word",
    )


def _add_delivery_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--depth",
        type=int,
        default=1,
        metavar="N",
        help="largest number of waiting frames; newer ones replace older ones",
    )
    parser.add_argument("--max-age-ms", type=int, default=0, metavar="MS", help="drop frames older than this")
    parser.add_argument(
        "--deadline-ms", type=int, default=0, metavar="MS", help="publish no result later than this after its frame"
    )
    parser.add_argument("--max-fps", type=float, default=0.0, metavar="FPS", help="largest rate; drop frames above it")
    parser.add_argument(
        "--weight", type=float, default=1.0, help="share relative to other streams of the same priority"
    )
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="1 is served before 2, and so on")


def _parameters(options: argparse.Namespace, image_topic: str) -> BridgeParameters:
    """Return the parameters for one of the cameras."""
    count = len(options.image_topic)

    given = vars(options)

    def topic(option: str) -> str:
        name: str = given[option]
        if count > 1 and name.startswith("/"):
            raise InvalidRequest(
                f"--{option.replace('_', '-')}: '{name}' is one topic for {count} cameras; "
                f"'{name.rpartition('/')[2]}', without a '/', is one beside each image topic"
            )
        return topic_beside(image_topic, name)

    stream_id = f"{options.stream_id}{image_topic}" if options.stream_id and count > 1 else options.stream_id
    topics = {name: topic(name) for name in given if name.endswith("_topic") and name not in _OWN_TOPICS}
    own = {"model_name": options.model, "image_topic": image_topic, "stream_id": stream_id}
    return BridgeParameters.from_values({**given, **topics, **own})
