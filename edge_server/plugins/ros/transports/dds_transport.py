"""ROS 2 transport on DDS, without a ROS installation: subscribes and publishes with the names, types and QoS of ROS.

Cyclone DDS transfers the bytes and discovers the other nodes. `ros2_types` decodes them, because the Python codec of
Cyclone DDS makes a list of all pixels and takes ten times as long. Names follow design.ros2.org, "Topic and Service
name mapping to DDS": topic "/camera/image_raw" is "rt/camera/image_raw", type sensor_msgs/msg/Image is
"sensor_msgs::msg::dds_::Image_". The type's hash is in USER_DATA, where newer middlewares expect it (REP-2016).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from edge_server.errors import InvalidRequest, NotFound, ServingFault
from edge_server.plugins.ros.messages.message_conversion import MessageKind, OutgoingMessage
from edge_server.plugins.ros.messages.ros2_types import MessageTypes, import_library
from edge_server.plugins.ros.transports.dds_network import network_configuration
from edge_server.plugins.ros.transports.ros2_environment import MAX_DOMAIN_ID, read_discovery_settings
from edge_server.plugins.ros.transports.transport import (
    Qos,
    SeenPublisher,
    absolute_topic,
    explain_mismatch,
    explain_no_publisher,
)
from edge_server.plugins.ros.transports.udp_sockets import explain_no_nodes

_DDS_MODULES = ("builtin", "core", "domain", "pub", "qos", "sub", "topic")
_RELIABLE_WAIT_MS = 100
_MAX_TAKEN = 16
_MAX_DISCOVERED = 10_000
_POLICIES = {
    0: "type",
    2: "durability",
    11: "reliability (DEFAULT is reliable, SENSOR_DATA is not)",
    23: "representation",
    24: "type",
}
"""Policy numbers of the DDS and XTypes specifications, for the policies in which ROS nodes differ."""

_domains: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Domain id -> the domain that this process made. With a domain all its participants end: the last transport in it must
be the last to forget it."""

_domains_lock = threading.Lock()

log = logging.getLogger(__name__)


class _RawMessage:
    """CDR bytes of a message. Replaces the codec of Cyclone DDS, which passes them unchanged."""

    data: bytes

    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self, **_: object) -> bytes:
        return self.data

    @classmethod
    def deserialize(cls, data: bytes, **_: object) -> _RawMessage:
        return cls(data)

    @classmethod
    def deserialize_key(cls, data: bytes, **_: object) -> _RawMessage:
        """Return an empty message: these types have no key, so this is a state change of a publisher without data."""
        return cls(b"")


class _Input(NamedTuple):
    """Subscription to a topic. `anything` is the condition under which its reader has messages."""

    topic: str
    kind: MessageKind
    qos: Qos
    reader: Any
    anything: Any
    callback: Callable[[Any], None]


class DdsTransport:
    """Transport over DDS. The constructor joins the domain; `spin` runs the callbacks; `publish` is for any thread.

    `domain_id` is ROS_DOMAIN_ID. `configuration` is that of Cyclone DDS, used instead of CYCLONEDDS_URI unless it is ""
    or another transport of this process is in the domain. `reach` says in messages where nodes are looked for.
    Raises Unsupported when the libraries are missing, ServingFault when the domain cannot be joined.
    """

    def __init__(self, domain_id: int = 0, *, configuration: str = "", reach: str = "the network") -> None:
        if not 0 <= domain_id <= MAX_DOMAIN_ID:
            raise InvalidRequest(f"a ROS domain is 0 to {MAX_DOMAIN_ID}, got {domain_id}")
        self._domain_id, self._reach = domain_id, reach
        self._types = MessageTypes()
        self._dds: Any = SimpleNamespace(**{name: import_library(f"cyclonedds.{name}") for name in _DDS_MODULES})
        self._raw_types: dict[str, Any] = {}
        self._inputs: list[_Input] = []
        self._writers: dict[str, tuple[MessageKind | None, Any]] = {}
        self._lock = threading.Lock()
        self._domain: Any = None
        try:
            if configuration:
                self._domain = self._find_domain(configuration)
            self._participant: Any = self._dds.domain.DomainParticipant(domain_id)
            self._waiting: Any = self._dds.core.WaitSet(self._participant)
        except self._dds.core.DDSException as error:
            raise ServingFault(f"DDS domain {domain_id} cannot be joined: {error}") from error

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        reader = self._dds.sub.DataReader(
            self._participant,
            self._topic(topic, kind),
            self._qos(kind, qos),
            self._dds.core.Listener(on_requested_incompatible_qos=_mismatch_logger(topic, kind, "publisher")),
        )
        core = self._dds.core
        anything = core.ReadCondition(reader, core.SampleState.Any | core.ViewState.Any | core.InstanceState.Any)
        self._waiting.attach(anything)
        self._inputs.append(_Input(topic, kind, qos, reader, anything, callback))

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        writer = self._dds.pub.DataWriter(
            self._participant,
            self._topic(topic, kind),
            self._qos(kind, qos),
            self._dds.core.Listener(on_offered_incompatible_qos=_mismatch_logger(topic, kind, "subscriber")),
        )
        self._writers[topic] = kind, writer

    def publish(self, topic: str, message: OutgoingMessage) -> None:
        kind, writer = self._writers.get(topic, (None, None))
        if writer is None or kind is not message.kind:
            raise NotFound(f"topic '{topic}' was not advertised for {message.kind.value}")
        raw = self._raw_types[message.kind.value](self._types.encode(message))
        with self._lock:
            try:
                writer.write(raw)
            except self._dds.core.DDSException as error:
                # A reliable reader is too slow: this message is lost, and the next one is sent as usual.
                log.warning("%s: a message was not sent: %s", topic, error)

    def spin(self, timeout_s: float) -> bool:
        if self._waiting.wait(int(timeout_s * 1e9)) > 0:
            for one in self._inputs:
                for raw in one.reader.take(_MAX_TAKEN, condition=one.anything):
                    if hasattr(raw, "data"):
                        self._deliver(raw, one)
        return True

    def explain_silence(self, topic: str) -> str:
        reader, kind, qos = next((one.reader, one.kind, one.qos) for one in self._inputs if one.topic == topic)
        own = self._participant.guid
        participants = self._discovered(self._dds.builtin.BuiltinTopicDcpsParticipant)
        if not any(one.key != own for one in participants):
            return explain_no_nodes(self._domain_id, self._reach)
        best_effort = self._dds.qos.Policy.Reliability.BestEffort
        publishers = [
            SeenPublisher(
                one.topic_name.removeprefix("rt"),
                one.type_name.replace("::msg::dds_::", "/msg/").removesuffix("_"),
                best_effort not in one.qos,
            )
            for one in self._discovered(self._dds.builtin.BuiltinTopicDcpsPublication)
            if one.topic_name.startswith("rt/")
        ]
        of_topic = [one for one in publishers if one.topic == absolute_topic(topic)]
        if not of_topic:
            return explain_no_publisher(kind, self._domain_id, publishers)
        if mismatch := explain_mismatch(kind, qos, of_topic):
            return mismatch
        if not reader.get_matched_publications():
            return "its publisher has the expected type and reliability, and another part of its QoS or type differs"
        return "its publisher is connected: it sends nothing, or the network loses its packets"

    def close(self) -> None:
        """Leave the domain; the other nodes see that the topics end."""
        with self._lock:
            # Cyclone DDS closes an entity with its last reference; children must be closed before their parents.
            self._waiting = None
            self._inputs.clear()
            self._writers.clear()
            self._participant = self._domain = None

    def _find_domain(self, configuration: str) -> Any:
        """Return the domain, with this configuration unless a transport of this process has it already. None: another
        part of the process has made it."""
        with _domains_lock:
            domain = _domains.get(self._domain_id)
            if domain is None:
                try:
                    domain = _domains[self._domain_id] = self._dds.domain.Domain(self._domain_id, configuration)
                except self._dds.core.DDSException as error:
                    if error.code != self._dds.core.DDSException.DDS_RETCODE_PRECONDITION_NOT_MET:
                        raise
            return domain

    def _discovered(self, builtin_topic: Any) -> list[Any]:
        """Return the participants or publishers that exist now, of all nodes including this one."""
        core = self._dds.core
        reader = self._dds.builtin.BuiltinDataReader(self._participant, builtin_topic)
        alive = core.ReadCondition(reader, core.SampleState.Any | core.ViewState.Any | core.InstanceState.Alive)
        return list(reader.read(_MAX_DISCOVERED, condition=alive))

    def _deliver(self, raw: _RawMessage, to: _Input) -> None:
        try:
            message = self._types.decode(raw.data, to.kind.value)
        except InvalidRequest as error:
            log.warning("%s: %s", to.topic, error)
            return
        to.callback(message)

    def _topic(self, topic: str, kind: MessageKind) -> Any:
        if kind.value not in self._raw_types:
            self._raw_types[kind.value] = raw_message_type(kind.value, self._types.store.fielddefs)
        return self._dds.topic.Topic(self._participant, dds_topic(topic), self._raw_types[kind.value])

    def _qos(self, kind: MessageKind, qos: Qos) -> Any:
        policy = self._dds.qos.Policy
        reliability = policy.Reliability.BestEffort
        if qos.is_reliable:
            reliability = policy.Reliability.Reliable(_RELIABLE_WAIT_MS * 1_000_000)
        history = policy.History.KeepLast(qos.depth)
        durability = [policy.Durability.Volatile]
        if qos.is_transient_local:
            # Without its own history the service keeps one message for those that come later.
            durability = [policy.Durability.TransientLocal, policy.DurabilityService(0, history, -1, -1, -1)]
        return self._dds.qos.Qos(
            reliability,
            *durability,
            history,
            policy.DataRepresentation(use_cdrv0_representation=True),
            policy.Userdata(f"typehash={self._types.type_hash(kind.value)};".encode()),
        )


def _mismatch_logger(topic: str, kind: MessageKind, other: str) -> Callable[[Any, Any], None]:
    """Return a callback of a listener; Cyclone DDS calls it on its thread for each endpoint that does not match."""

    def log_mismatch(_: Any, status: Any) -> None:
        policy = _POLICIES.get(int(status.last_policy_id), f"policy {int(status.last_policy_id)}")
        log.warning(
            "%s: a %s does not match for its %s, and nothing passes to or from it; this side has %s",
            topic, other, policy, kind.value,
        )  # fmt: skip

    return log_mismatch


def open_transport(node_name: str, environment: Mapping[str, str]) -> DdsTransport:
    """Join the domain of ROS_DOMAIN_ID like a ROS 2 node. DDS has no node names."""
    settings = read_discovery_settings(environment)
    configuration, reach = network_configuration(settings, environment)
    log.info("%s joins ROS domain %d over DDS, on %s", node_name, settings.domain_id, reach)
    return DdsTransport(settings.domain_id, configuration=configuration, reach=reach)


def dds_topic(topic: str) -> str:
    """Return the DDS name of a ROS topic. Raises InvalidRequest when the name is not valid."""
    return "rt" + absolute_topic(topic)


def dds_type(name: str) -> str:
    """Return the DDS name of a message type; cyclonedds-python writes dots for "::"."""
    package, _, message = name.split("/")
    return f"{package}.msg.dds_.{message}_"


def raw_message_type(name: str, fields_of: Any) -> Any:
    """Return a class for the raw bytes of a message type. It describes the fields to Cyclone DDS, which compares their
    names and types during discovery. `fields_of` is rosbags' table of fields."""
    described = _struct_type(name, fields_of)
    # Not by inheritance: a base class would become part of the type description.
    for part in ("__init__", "serialize", "deserialize", "deserialize_key"):
        setattr(described, part, vars(_RawMessage)[part])
    return described


def _struct_type(name: str, fields_of: Any) -> Any:
    idl: Any = import_library("cyclonedds.idl")
    fields = {field: _field_type(description, fields_of) for field, description in fields_of[name][1]}
    return idl.make_idl_struct(name.replace("/", "_"), dds_type(name), fields, dataclassify=False)


def _field_type(description: Any, fields_of: Any) -> Any:
    """Return the type annotation of one field, described as (node, detail) of rosbags.interfaces.Nodetype."""
    types: Any = import_library("cyclonedds.idl.types")
    nodes: Any = import_library("rosbags.interfaces").Nodetype
    node, detail = description
    if node == nodes.BASE:
        return {"string": str, "bool": bool}.get(detail[0]) or getattr(types, detail[0])
    if node == nodes.NAME:
        return _struct_type(detail, fields_of)
    inner, size = detail
    element = _field_type(inner, fields_of)
    return types.array[element, size] if node == nodes.ARRAY else types.sequence[element]
