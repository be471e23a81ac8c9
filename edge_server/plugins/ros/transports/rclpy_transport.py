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

from edge_server.errors import InvalidRequest, NotFound, Unsupported
from edge_server.plugins.ros.messages.message_conversion import MessageKind, OutgoingMessage
from edge_server.plugins.ros.messages.ros2_types import MessageBuilder
from edge_server.plugins.ros.transports.ros2_environment import read_discovery_settings
from edge_server.plugins.ros.transports.transport import (
    Qos,
    SeenPublisher,
    explain_mismatch,
    explain_no_publisher,
)
from edge_server.plugins.ros.transports.udp_sockets import explain_no_nodes


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
        self._messages = _RclpyMessages()
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
            raise NotFound(f"topic '{topic}' was not advertised for {message.kind.value}")
        if self._context.ok():
            publisher.publish(self._messages.build(message))

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
        kind, qos, _ = self._inputs[topic]
        best_effort = self._qos_module.ReliabilityPolicy.BEST_EFFORT
        publishers = sorted(
            SeenPublisher(topic, one.topic_type, one.qos_profile.reliability != best_effort)
            for one in self._node.get_publishers_info_by_topic(topic)
        )
        if publishers:
            fits = "it has a publisher, which sends nothing, or the network loses its packets"
            return explain_mismatch(kind, qos, publishers) or fits
        domain_id = self._context.get_domain_id()
        own = self._node.get_name(), self._node.get_namespace()
        has_others = any(name != own for name in self._node.get_node_names_and_namespaces())
        reason = explain_no_publisher(kind, domain_id, ()) if has_others else explain_no_nodes(domain_id)
        return f"ROS 2 sees no publisher of it: {reason}"

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


class _RclpyMessages(MessageBuilder):
    """Builder of messages as objects of rclpy's classes."""

    def new(self, type_name: str, /, **fields: Any) -> Any:
        made = message_class(type_name)()
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def octets(self, data: Any) -> Any:
        # rclpy checks each element of any other type.
        return array.array("B", bytes(data))

    def byte(self, value: int) -> Any:
        return bytes([value])
