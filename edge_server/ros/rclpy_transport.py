"""ROS 2 as a transport of the bridge, through the rclpy of a sourced ROS 2 environment (Humble or newer).

For who has ROS 2 anyhow: it uses the middleware that is configured there, remapping and the graph's tools. `dds` needs
no ROS. rclpy is on no package index, so what is used of it is little and documented: rclpy.init with a context of its
own, one node, one executor, QoSProfile, and the message classes of sensor_msgs and vision_msgs 4.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge_server.core.frame import FrameHeader
from edge_server.errors import InvalidRequest, Unsupported
from edge_server.ros.bridge import Qos
from edge_server.ros.message_conversion import (
    ClassificationMessage,
    CompressedImageMessage,
    DetectionMessage,
    DetectionsMessage,
    HypothesisMessage,
    ImageMessage,
    MessageKind,
    OutgoingMessage,
)

log = logging.getLogger(__name__)


class RclpyTransport:
    """One rclpy node. `spin` is where callbacks run; `publish` may run beside it on another thread.

    Without `node` it makes a context and a node of its own, which sees `arguments` ("--ros-args", ...), leaves signals
    to the program, and ends both when closed. A node that is given stays its owner's. Raises Unsupported where there is
    no rclpy.
    """

    def __init__(
        self, node_name: str = "edge_server_bridge", *, node: Any = None, arguments: Sequence[str] = ()
    ) -> None:
        self._rclpy = _import_ros("rclpy")
        self._quality = _import_ros("rclpy.qos")
        executors = _import_ros("rclpy.executors")
        self._ended_elsewhere: type[Exception] = executors.ExternalShutdownException
        self._bad_name: type[Exception] = _import_ros("rclpy.exceptions").NameValidationException
        self._is_owner = node is None
        self._node = self._make_node(node_name, arguments) if node is None else node
        self._context = self._node.context
        self._executor = executors.SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._publishers: dict[str, tuple[MessageKind, Any]] = {}
        self._subscriptions: list[Any] = []

    def _make_node(self, name: str, arguments: Sequence[str]) -> Any:
        context = _import_ros("rclpy.context").Context()
        no_handlers = _import_ros("rclpy.signals").SignalHandlerOptions.NO
        self._rclpy.init(args=list(arguments), context=context, signal_handler_options=no_handlers)
        with self._names_checked():
            return self._rclpy.create_node(name, context=context)

    @contextlib.contextmanager
    def _names_checked(self) -> Iterator[None]:
        """Say in our words what rclpy says of names that ROS does not allow."""
        try:
            yield
        except self._bad_name as error:
            raise InvalidRequest(f"ROS does not allow that name: {error}") from None

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        """Listen to a topic. A message's `data` is an array.array, which the bridge sends as it lies."""
        with self._names_checked():
            made = self._node.create_subscription(message_class(kind.value), topic, callback, self._profile(qos))
        self._subscriptions.append(made)

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        with self._names_checked():
            made = self._node.create_publisher(message_class(kind.value), topic, self._profile(qos))
        self._publishers[topic] = kind, made

    def publish(self, topic: str, message: OutgoingMessage) -> None:
        kind, publisher = self._publishers.get(topic, (None, None))
        if publisher is None or kind is not message.kind:
            raise InvalidRequest(f"topic '{topic}' was not advertised for {message.kind.value}")
        if self._context.ok():
            publisher.publish(to_ros2(message))

    def spin(self, timeout_s: float) -> bool:
        """Run the next callback, or wait for one. False once somebody shut the context down."""
        try:
            self._executor.spin_once(timeout_sec=timeout_s)
        except self._ended_elsewhere:
            return False
        return bool(self._context.ok())

    def close(self) -> None:
        self._executor.shutdown()
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        for _, publisher in self._publishers.values():
            self._node.destroy_publisher(publisher)
        if self._is_owner:
            self._node.destroy_node()
            self._context.try_shutdown()

    def _profile(self, qos: Qos) -> Any:
        policy = self._quality.ReliabilityPolicy
        return self._quality.QoSProfile(
            history=self._quality.HistoryPolicy.KEEP_LAST,
            depth=qos.depth,
            reliability=policy.RELIABLE if qos.is_reliable else policy.BEST_EFFORT,
            durability=self._quality.DurabilityPolicy.VOLATILE,
        )


def open_transport(node_name: str, environment: Mapping[str, str]) -> RclpyTransport:
    """Return a transport with a node of that name. ROS_DOMAIN_ID, RMW_IMPLEMENTATION and the like are for rclpy."""
    if not environment.get("ROS_DISTRO"):
        log.warning("ROS_DISTRO is not set: has the setup.bash of ROS 2 been sourced?")
    return RclpyTransport(node_name)


def message_class(name: str) -> Any:
    """Return the Python class of a type such as "sensor_msgs/msg/Image".

    Raises Unsupported where its package is missing, or is so old that it lacks the type.
    """
    package, _, base = name.split("/")
    module = _import_ros(f"{package}.msg")
    if not hasattr(module, base):
        raise Unsupported(f"the {package} that is installed has no {base}; version 4 of vision_msgs is needed")
    return getattr(module, base)


def _import_ros(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise Unsupported(
            f"the transport rclpy needs {module}, which this Python cannot import ({error}): source the setup.bash of "
            f"ROS 2, and apt install ros-$ROS_DISTRO-{package}; without ROS 2, the transport dds does the same"
        ) from None


def to_ros2(message: OutgoingMessage) -> Any:
    """Return a message as an object of its rclpy class."""
    made = message_class(message.kind.value)()
    _copy_header(message.header, made.header)
    if isinstance(message, DetectionsMessage):
        made.detections = [_detection(box, message.header) for box in message.detections]
    elif isinstance(message, ClassificationMessage):
        made.results = [_fill(message_class("vision_msgs/msg/ObjectHypothesis")(), one) for one in message.results]
    elif isinstance(message, CompressedImageMessage):
        made.format, made.data = message.format, _octets(message.data)
    else:
        _copy_image(message, made)
    return made


def _detection(box: DetectionMessage, header: FrameHeader) -> Any:
    made = message_class("vision_msgs/msg/Detection2D")()
    _copy_header(header, made.header)
    made.bbox.center.position.x, made.bbox.center.position.y = float(box.center_x), float(box.center_y)
    made.bbox.size_x, made.bbox.size_y = float(box.size_x), float(box.size_y)
    found = message_class("vision_msgs/msg/ObjectHypothesisWithPose")()
    _fill(found.hypothesis, box.hypothesis)
    made.results = [found]
    return made


def _fill(made: Any, one: HypothesisMessage) -> Any:
    made.class_id, made.score = one.class_id, float(one.score)
    return made


def _copy_image(message: ImageMessage, made: Any) -> None:
    made.height, made.width, made.step = message.height, message.width, message.step
    made.encoding, made.is_bigendian = message.encoding, int(message.is_bigendian)
    made.data = _octets(message.data)


def _octets(data: Any) -> Any:
    """rclpy checks every element of anything else that is assigned to a uint8[]."""
    return array.array("B", bytes(data))


def _copy_header(header: FrameHeader, made: Any) -> None:
    made.stamp.sec, made.stamp.nanosec, made.frame_id = header.sec, header.nanosec, header.frame_id
