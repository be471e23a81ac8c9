"""Interface of a transport, a bridge's connection to ROS, and the list of the transports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.messages.message_conversion import MessageKind, OutgoingMessage

TRANSPORTS = {
    "dds": "edge_server.plugins.ros.transports.dds_transport",
    "rclpy": "edge_server.plugins.ros.transports.rclpy_transport",
    "zenoh": "edge_server.plugins.ros.transports.zenoh_transport",
}
"""Transport -> its module, with `open_transport(node_name: str, environment: Mapping[str, str]) -> Transport`. It
raises Unsupported when its libraries are missing, and names the package to install or the file to source."""

QOS_PROFILES = ("DEFAULT", "SENSOR_DATA")

_TOPIC = re.compile(r"/?[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True, slots=True)
class Qos:
    """Quality of service, with the names of Isaac ROS parameters.

    "DEFAULT" is reliable, "SENSOR_DATA" best effort; both keep the last `depth` messages. A reliable reader gets
    nothing from a best-effort writer, so images are read with best effort by default. With `is_transient_local`,
    subscribers that come later get the last `depth` messages too.
    """

    profile: str = "DEFAULT"
    depth: int = 10
    is_transient_local: bool = False

    def __post_init__(self) -> None:
        if self.profile not in QOS_PROFILES:
            raise InvalidRequest(f"a quality of service is one of {', '.join(QOS_PROFILES)}, got '{self.profile}'")
        if not 1 <= self.depth <= 10_000:
            raise InvalidRequest(f"a queue size is 1 to 10000, got {self.depth}")

    @property
    def is_reliable(self) -> bool:
        """Whether messages are sent again until they arrive."""
        return self.profile == "DEFAULT"


class Transport(Protocol):
    """Connection to ROS. Topic names are ROS names ("/camera/image_raw")."""

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        """Call `callback` with each message of a topic, one at a time: an object for `make_frame`. The memory of a
        message does not change while it is referenced."""

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        """Announce a topic, so that subscribers find it before the first message."""

    def publish(self, topic: str, message: OutgoingMessage) -> None:
        """Publish on a topic that is advertised for `message.kind`. For any thread."""

    def spin(self, timeout_s: float) -> bool:
        """Run callbacks for about `timeout_s`, on this or other threads. Return False when the transport has ended."""

    def explain_silence(self, topic: str) -> str:
        """Return why a subscribed topic may be silent, "" if this transport cannot know."""

    def close(self) -> None:
        """End all subscriptions and topics. Called once, after the last `spin` and `publish`."""


@runtime_checkable
class ServiceTransport(Transport, Protocol):
    """A transport that can also serve services, and change its subscriptions for them."""

    def serve(self, service: str, type_name: str, callback: Callable[[Any], Mapping[str, object]]) -> None:
        """Answer requests to a service such as "~/set_model" with the fields of the response that `callback` returns.
        It is called on a thread of its own. Raises Unsupported when the package of the type is not installed."""

    def unsubscribe(self, topic: str) -> None:
        """End the subscription to a topic. For any thread."""


def absolute_topic(topic: str) -> str:
    """Return a topic's name with a "/" before it. Raises InvalidRequest when ROS does not allow the name."""
    if not _TOPIC.fullmatch(topic):
        raise InvalidRequest(f"'{topic}' is no ROS topic: expected words of letters, digits and '_' between '/'")
    return "/" + topic.removeprefix("/")


def base_topic(image_topic: str) -> str:
    """Return an image topic without the name that image_transport adds for compressed images."""
    return image_topic.removesuffix("/compressed")


def topic_beside(image_topic: str, name: str) -> str:
    """Return the topic `name` beside an image topic, as image_transport has it for "camera_info". A name with a "/"
    before it, and "", stay as they are."""
    if not name or name.startswith("/"):
        return name
    namespace, slash, _ = base_topic(image_topic).rpartition("/")
    return f"{namespace}{slash}{name}"


class SeenPublisher(NamedTuple):
    """Publisher of another node, as a transport sees it. `type_name` is like "sensor_msgs/msg/Image"."""

    topic: str
    type_name: str
    is_reliable: bool = True


def explain_no_publisher(kind: MessageKind, domain_id: int, publishers: Iterable[SeenPublisher]) -> str:
    """Return why a topic is silent that none of these publishers of a domain has, though other nodes are seen."""
    same = sorted({one.topic for one in publishers if one.type_name == kind.value})
    elsewhere = f"; {kind.value} is published on {', '.join(same[:5])}" if same else ""
    return f"other nodes are seen in ROS domain {domain_id}, but none publishes it{elsewhere}"


def explain_mismatch(kind: MessageKind, qos: Qos, publishers: Sequence[SeenPublisher]) -> str:
    """Return why a subscription gets nothing from the publishers of its topic, or "" if one of them fits."""
    given = publishers[0].type_name
    fitting = [one for one in publishers if one.type_name == kind.value]
    if not fitting:
        hint = {
            MessageKind.COMPRESSED_IMAGE.value: " (--image-topic needs --compressed)",
            MessageKind.IMAGE.value: " (without --compressed, or the topic's own name and '/compressed')",
        }.get(given, "")
        return f"type mismatch: its publisher sends {given}, expected {kind.value}{hint}"
    if qos.is_reliable and not any(one.is_reliable for one in fitting):
        return "QoS mismatch: its publisher is best effort, expected reliable (--input-qos=SENSOR_DATA fits both)"
    return ""
