"""ROS 2 transport on the library rclpy, from a sourced ROS 2 environment (Humble or newer) or from PyPI (Jazzy,
Kilted).

It uses the configured middleware, remapping and the tools of the ROS graph. `dds_transport` needs no ROS. Only a small,
documented part of rclpy is used, which all distributions have: rclpy.init with a context of its own, one node, one
executor, QoSProfile, and the message classes of sensor_msgs and vision_msgs 4. PyPI has no vision_msgs.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.plugins.ros.messages.message_conversion import (
    ClassificationMessage,
    CompressedImageMessage,
    Detection3DMessage,
    DetectionMessage,
    Detections3DMessage,
    DetectionsMessage,
    DiagnosticsMessage,
    DiagnosticStatus,
    HypothesisMessage,
    LabelInfoMessage,
    MessageKind,
    OutgoingMessage,
    VisionInfoMessage,
)
from edge_server.plugins.ros.transports.dds_domains import explain_no_nodes
from edge_server.plugins.ros.transports.ros2_environment import read_discovery_settings
from edge_server.plugins.ros.transports.transport import Qos, type_hint
from edge_server.protocol.frame_messages import FrameHeader


class RclpyTransport:
    """Transport with one rclpy node. `spin` runs the callbacks; `publish` may run on another thread.

    Without `node` the transport owns a context and a node. They get `arguments` ("--ros-args", ...), install no signal
    handlers, and end with `close`. A given `node` belongs to the caller, whose executor runs the callbacks: `spin` is
    not for it. Raises Unsupported without rclpy.
    """

    def __init__(
        self, node_name: str = "edge_server_bridge", *, node: Any = None, arguments: Sequence[str] = ()
    ) -> None:
        self._rclpy = _import_ros("rclpy")
        self._qos_module = _import_ros("rclpy.qos")
        executors = _import_ros("rclpy.executors")
        self._shutdown_error: type[Exception] = executors.ExternalShutdownException
        self._name_error: type[Exception] = _import_ros("rclpy.exceptions").NameValidationException
        self._is_owner = node is None
        if node is None:
            context = _import_ros("rclpy.context").Context()
            no_handlers = _import_ros("rclpy.signals").SignalHandlerOptions.NO
            self._rclpy.init(args=list(arguments), context=context, signal_handler_options=no_handlers)
            with self._translate_name_errors():
                node = self._rclpy.create_node(node_name, context=context)
        self._node = node
        self._context = self._node.context
        self._executor: Any = None
        if self._is_owner:
            self._executor = executors.SingleThreadedExecutor(context=self._context)
            self._executor.add_node(self._node)
        self._publishers: dict[str, tuple[MessageKind, Any]] = {}
        self._services: list[Any] = []
        self._inputs: dict[str, tuple[MessageKind, Qos, Any]] = {}

    @contextlib.contextmanager
    def _translate_name_errors(self) -> Iterator[None]:
        """Raise InvalidRequest for names that ROS does not allow."""
        try:
            yield
        except self._name_error as error:
            raise InvalidRequest(f"ROS does not allow that name: {error}") from None

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        """Subscribe to a topic. The `data` of a message is an array.array, which the bridge sends without a copy."""
        with self._translate_name_errors():
            made = self._node.create_subscription(message_class(kind.value), topic, callback, self._profile(qos))
        self._inputs[topic] = kind, qos, made

    def unsubscribe(self, topic: str) -> None:
        _, _, subscription = self._inputs.pop(topic)
        self._node.destroy_subscription(subscription)

    def serve(self, service: str, type_name: str, callback: Callable[[Any], Mapping[str, object]]) -> None:
        """Serve a service. The executor runs other callbacks while `callback` works on its thread."""
        future_class = _import_ros("rclpy.task").Future

        async def respond(request: Any, response: Any) -> Any:
            answer = future_class()

            def work() -> None:
                try:
                    answer.set_result(callback(request))
                except Exception as error:  # noqa: BLE001 - raised by `spin` on its thread
                    answer.set_exception(error)

            threading.Thread(target=work, name=f"ros-{service}", daemon=True).start()
            for name, value in (await answer).items():
                setattr(response, name, value)
            return response

        made = message_class(type_name)
        # A group of its own: in the node's group no other callback would run until the response.
        group = _import_ros("rclpy.callback_groups").MutuallyExclusiveCallbackGroup()
        with self._translate_name_errors():
            self._services.append(self._node.create_service(made, service, respond, callback_group=group))

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        with self._translate_name_errors():
            made = self._node.create_publisher(message_class(kind.value), topic, self._profile(qos))
        self._publishers[topic] = kind, made

    def publish(self, topic: str, message: OutgoingMessage) -> None:
        kind, publisher = self._publishers.get(topic, (None, None))
        if publisher is None or kind is not message.kind:
            raise InvalidRequest(f"topic '{topic}' was not advertised for {message.kind.value}")
        if self._context.ok():
            publisher.publish(to_ros2(message))

    def spin(self, timeout_s: float) -> bool:
        """Run the next callback, or wait for one. Return False after a shutdown of the context."""
        # An executor reports a shutdown while it waits; before that, it raises an error of rcl.
        if not self._context.ok():
            return False
        try:
            self._executor.spin_once(timeout_sec=timeout_s)
        except self._shutdown_error:
            return False
        return bool(self._context.ok())

    def explain_silence(self, topic: str) -> str:
        publishers = self._node.get_publishers_info_by_topic(topic)
        kind, qos, _ = self._inputs[topic]
        if not publishers:
            return f"ROS 2 sees no publisher of it: {self._explain_no_publisher()}"
        given = {one.topic_type for one in publishers}
        if kind.value not in given:
            return f"type mismatch: its publisher sends {min(given)}, expected {kind.value}{type_hint(min(given))}"
        best_effort = self._qos_module.ReliabilityPolicy.BEST_EFFORT
        if qos.is_reliable and all(
            one.qos_profile.reliability == best_effort for one in publishers if one.topic_type == kind.value
        ):
            return "QoS mismatch: its publisher is best effort, expected reliable (--input-qos=SENSOR_DATA fits both)"
        return "it has a publisher, which sends nothing, or the network loses its packets"

    def _explain_no_publisher(self) -> str:
        domain_id = self._context.get_domain_id()
        own = self._node.get_name(), self._node.get_namespace()
        if any(name != own for name in self._node.get_node_names_and_namespaces()):
            return f"other nodes are seen in ROS domain {domain_id}, but none publishes it"
        return explain_no_nodes(domain_id)

    def close(self) -> None:
        for topic in tuple(self._inputs):
            self.unsubscribe(topic)
        for service in self._services:
            self._node.destroy_service(service)
        for _, publisher in self._publishers.values():
            self._node.destroy_publisher(publisher)
        if self._is_owner:
            self._executor.shutdown()
            self._node.destroy_node()
            self._context.try_shutdown()

    def _profile(self, qos: Qos) -> Any:
        policy, durability = self._qos_module.ReliabilityPolicy, self._qos_module.DurabilityPolicy
        return self._qos_module.QoSProfile(
            history=self._qos_module.HistoryPolicy.KEEP_LAST,
            depth=qos.depth,
            reliability=policy.RELIABLE if qos.is_reliable else policy.BEST_EFFORT,
            durability=durability.TRANSIENT_LOCAL if qos.is_transient_local else durability.VOLATILE,
        )


def open_transport(node_name: str, environment: Mapping[str, str]) -> RclpyTransport:
    """Return a transport with a node of this name. rclpy reads ROS_DOMAIN_ID, RMW_IMPLEMENTATION and similar
    variables. Raises InvalidRequest when they exclude all other nodes."""
    if environment.get("RMW_IMPLEMENTATION") != "rmw_zenoh_cpp":  # it has settings of its own for discovery
        read_discovery_settings(environment)
    return RclpyTransport(node_name)


def message_class(name: str) -> Any:
    """Return the Python class of a type such as "sensor_msgs/msg/Image" or "std_srvs/srv/Trigger".

    Raises Unsupported when its package is missing, or is too old for the type.
    """
    package, folder, base = name.split("/")
    module = _import_ros(f"{package}.{folder}")
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
            f"ROS 2, and apt install ros-DISTRIBUTION-{package}, or pip install ros-{package} ros-rmw-fastrtps-cpp "
            "(PyPI has no vision_msgs); without ROS 2, the transport dds does the same"
        ) from None


def to_ros2(message: OutgoingMessage) -> Any:
    """Return a message as an object of its rclpy class."""
    made = message_class(message.kind.value)()
    _copy_header(message.header, made.header)
    if isinstance(message, DetectionsMessage):
        made.detections = [_make_detection(box, message.header) for box in message.detections]
    elif isinstance(message, Detections3DMessage):
        made.detections = [_make_detection3d(box, message.header) for box in message.detections]
    elif isinstance(message, ClassificationMessage):
        made.results = [
            _fill_hypothesis(message_class("vision_msgs/msg/ObjectHypothesis")(), one) for one in message.results
        ]
    elif isinstance(message, VisionInfoMessage):
        made.method, made.database_location = message.method, message.database_location
        made.database_version = message.database_version
    elif isinstance(message, LabelInfoMessage):
        made.class_map = [_make_vision_class(number, label) for number, label in enumerate(message.labels)]
    elif isinstance(message, DiagnosticsMessage):
        made.status = [_make_status(one) for one in message.statuses]
    elif isinstance(message, CompressedImageMessage):
        made.format, made.data = message.format, _octets(message.data)
    else:
        made.height, made.width, made.step = message.height, message.width, message.step
        made.encoding, made.is_bigendian = message.encoding, int(message.is_bigendian)
        made.data = _octets(message.data)
    return made


def _make_detection(box: DetectionMessage, header: FrameHeader) -> Any:
    made = message_class("vision_msgs/msg/Detection2D")()
    _copy_header(header, made.header)
    made.bbox.center.position.x, made.bbox.center.position.y = float(box.center_x), float(box.center_y)
    made.bbox.center.theta = float(box.theta)
    made.bbox.size_x, made.bbox.size_y = float(box.size_x), float(box.size_y)
    found = message_class("vision_msgs/msg/ObjectHypothesisWithPose")()
    _fill_hypothesis(found.hypothesis, box.hypothesis)
    made.results = [found]
    made.id = box.track_id
    return made


def _make_detection3d(box: Detection3DMessage, header: FrameHeader) -> Any:
    made = message_class("vision_msgs/msg/Detection3D")()
    _copy_header(header, made.header)
    found = message_class("vision_msgs/msg/ObjectHypothesisWithPose")()
    _fill_hypothesis(found.hypothesis, box.hypothesis)
    for pose in (made.bbox.center, found.pose.pose):
        pose.position.x, pose.position.y, pose.position.z = float(box.x), float(box.y), float(box.z)
        pose.orientation.z, pose.orientation.w = box.orientation
    size = made.bbox.size
    size.x, size.y, size.z = float(box.size_x), float(box.size_y), float(box.size_z)
    made.results = [found]
    made.id = box.track_id
    return made


def _fill_hypothesis(made: Any, one: HypothesisMessage) -> Any:
    made.class_id, made.score = one.class_id, float(one.score)
    return made


def _make_vision_class(number: int, label: str) -> Any:
    made = message_class("vision_msgs/msg/VisionClass")()
    made.class_id, made.class_name = number, label
    return made


def _make_status(one: DiagnosticStatus) -> Any:
    made = message_class("diagnostic_msgs/msg/DiagnosticStatus")()
    # A `byte` of ROS 2 is bytes of length 1 in Python.
    made.level, made.name = bytes([one.level]), one.name
    made.message, made.hardware_id = one.message, one.hardware_id
    pair = message_class("diagnostic_msgs/msg/KeyValue")
    made.values = [pair(key=key, value=value) for key, value in one.values.items()]
    return made


def _octets(data: Any) -> Any:
    """Return an array.array: rclpy checks each element of any other type assigned to uint8[]."""
    return array.array("B", bytes(data))


def _copy_header(header: FrameHeader, made: Any) -> None:
    made.stamp.sec, made.stamp.nanosec, made.frame_id = header.sec, header.nanosec, header.frame_id
