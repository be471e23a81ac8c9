"""Fake rclpy that records calls. See the README in this folder."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from rclpy.context import Context, default_context
from rclpy.exceptions import InvalidTopicNameException
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions

nodes: list[Node] = []
"""Every node that was made and not destroyed."""


def init(
    *,
    args: list[str] | None = None,
    context: Context | None = None,
    domain_id: int | None = None,
    signal_handler_options: SignalHandlerOptions | None = None,
) -> None:
    chosen = context or default_context
    chosen.init(args, signal_handler_options)


def shutdown(*, context: Context | None = None) -> None:
    (context or default_context).shutdown()


def create_node(node_name: str, *, context: Context | None = None) -> Node:
    node = Node(node_name, context or default_context)
    nodes.append(node)
    return node


class Node:
    def __init__(self, name: str, context: Context) -> None:
        assert context.ok(), "rclpy.init comes first"
        self.name, self.context = name, context
        self.subscriptions: list[Subscription] = []
        self.publishers: list[Publisher] = []
        self.parameters: dict[str, Any] = {}
        self.overrides: dict[str, Any] = dict(parameter_overrides)
        self.logger = Logger()

    def create_subscription(self, msg_type: type, topic: str, callback: Any, qos_profile: QoSProfile) -> Subscription:
        _check(topic)
        self.subscriptions.append(Subscription(msg_type, topic, callback, qos_profile))
        return self.subscriptions[-1]

    def create_publisher(self, msg_type: type, topic: str, qos_profile: QoSProfile) -> Publisher:
        _check(topic)
        self.publishers.append(Publisher(msg_type, topic, qos_profile))
        return self.publishers[-1]

    def destroy_subscription(self, subscription: Subscription) -> bool:
        self.subscriptions.remove(subscription)
        return True

    def destroy_publisher(self, publisher: Publisher) -> bool:
        self.publishers.remove(publisher)
        return True

    def get_publishers_info_by_topic(self, topic_name: str) -> list[SimpleNamespace]:
        """Return the publishers of all nodes, each with a type of sensor_msgs."""
        return [
            SimpleNamespace(topic_type=f"sensor_msgs/msg/{one.msg_type.__name__}", qos_profile=one.qos_profile)
            for node in nodes
            for one in node.publishers
            if one.topic == topic_name
        ]

    def get_name(self) -> str:
        return self.name

    def get_namespace(self) -> str:
        return "/"

    def get_node_names_and_namespaces(self) -> list[tuple[str, str]]:
        return [(node.name, "/") for node in nodes]

    def destroy_node(self) -> None:
        nodes.remove(self)

    def declare_parameter(self, name: str, value: Any, descriptor: Any = None) -> Parameter:
        given = self.overrides.get(name, value)
        assert type(given) is type(value), f"a parameter keeps the type of its default: {name}"
        self.parameters[name] = (given, descriptor)
        return Parameter(given)

    def get_logger(self) -> Logger:
        return self.logger


parameter_overrides: dict[str, Any] = {}
"""Parameters from a params.yaml for nodes created from now on."""


class Parameter:
    def __init__(self, value: Any) -> None:
        self.value = value


class Logger:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def info(self, text: str) -> None:
        self.lines.append(("info", text))

    def warning(self, text: str) -> None:
        self.lines.append(("warning", text))

    def error(self, text: str) -> None:
        self.lines.append(("error", text))

    def fatal(self, text: str) -> None:
        self.lines.append(("fatal", text))


class Subscription:
    def __init__(self, msg_type: type, topic: str, callback: Any, qos_profile: QoSProfile) -> None:
        self.msg_type, self.topic, self.callback, self.qos_profile = msg_type, topic, callback, qos_profile
        self.waiting: deque[Any] = deque(maxlen=qos_profile.depth)
        self.arrived = threading.Event()

    def receive(self, message: Any) -> None:
        """Let a message come, as from another process."""
        assert type(message) is self.msg_type
        self.waiting.append(message)
        self.arrived.set()


class Publisher:
    def __init__(self, msg_type: type, topic: str, qos_profile: QoSProfile) -> None:
        self.msg_type, self.topic, self.qos_profile = msg_type, topic, qos_profile
        self.published: list[Any] = []

    def publish(self, msg: Any) -> None:
        if type(msg) is not self.msg_type:
            raise TypeError(f"expected {self.msg_type}, got {type(msg)}")
        self.published.append(msg)


def _check(topic: str) -> None:
    if not topic.replace("/", "").replace("_", "").isalnum() or topic[:1].isdigit():
        raise InvalidTopicNameException(topic, "topic name must not contain characters other than alphanumerics", 0)
