"""ROS 2 transport on Zenoh, without a ROS installation: a node for those whose middleware is rmw_zenoh_cpp.

It opens a session as rmw_zenoh does, announces itself, its publishers and its subscribers by liveliness tokens, so that
`ros2 topic list` shows them, and exchanges CDR messages. `zenoh_keys` has the names and bytes, `ros2_types` the CDR.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from edge_server.errors import InvalidRequest, NotFound, ServingFault
from edge_server.plugins.ros.messages.message_conversion import MessageKind, OutgoingMessage
from edge_server.plugins.ros.messages.ros2_types import MessageTypes, import_library
from edge_server.plugins.ros.transports.ros2_environment import read_domain_id
from edge_server.plugins.ros.transports.transport import (
    Qos,
    SeenPublisher,
    absolute_topic,
    explain_mismatch,
    explain_no_publisher,
)
from edge_server.plugins.ros.transports.zenoh_keys import (
    NO_TYPE_HASH,
    NODE,
    PUBLISHER,
    SUBSCRIBER,
    TOKENS,
    Attachment,
    Entity,
    data_key,
    decode_attachment,
    encode_attachment,
    entity_gid,
    liveliness_token,
    parse_token,
    qos_text,
)

SESSION_DEFAULTS: dict[str, Any] = {
    "mode": "peer",
    "connect": {
        "endpoints": ["tcp/localhost:7447"],
        "timeout_ms": {"router": -1, "peer": -1, "client": 0},
        "exit_on_failure": {"router": False, "peer": False, "client": True},
    },
    "listen": {"endpoints": ["tcp/localhost:0"]},
    "scouting": {
        "multicast": {"enabled": False},
        "gossip": {
            "target": {"router": ["router", "peer"], "peer": ["router"]},
            "autoconnect_strategy": {"peer": {"to_router": "always", "to_peer": "greater-zid"}},
        },
    },
    "timestamping": {"enabled": True},
    "queries_default_timeout": 600_000,
    "adminspace": {"enabled": True},
    "transport": {
        "unicast": {"open_timeout": 60_000, "accept_timeout": 60_000, "accept_pending": 10_000, "max_sessions": 10_000},
        "link": {"tx": {"lease": 60_000, "keep_alive": 2}, "rx": {"max_message_size": 2**28}},
        "shared_memory": {"enabled": False},
    },
}
"""What rmw_zenoh's default configuration of a session changes of Zenoh's own; but messages of at most 256 MiB."""

MAX_MESSAGE_BYTES = 2**28
_MAX_DOMAIN_ID = 2**32 - 1
_MAX_ENTITIES = 10_000
_GRAPH_TIMEOUT_S = 1.0
_ROUTER_CHECK_INTERVAL_S = 1.0
_WARNING_INTERVAL_S = 5.0
_HEARTBEAT_S = 0.5
_END_WAIT_S = 5.0
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

log = logging.getLogger(__name__)


class _Publisher(NamedTuple):
    """Publisher of a topic; `numbers` yields the sequence number of its next message."""

    kind: MessageKind
    publisher: Any
    gid: bytes
    numbers: Iterator[int]


class ZenohTransport:
    """Transport over a Zenoh session of its own. A thread for each topic runs the callbacks. `publish` may run on any.

    `configuration` is the session's zenoh.Config. `has_type_hashes` is False among nodes of ROS 2 Humble. While no
    router is connected, `router_checks` warnings are logged, one a second. Raises Unsupported when the libraries are
    missing, ServingFault when the session cannot be opened.
    """

    def __init__(
        self,
        node_name: str,
        domain_id: int,
        configuration: Any,
        *,
        has_type_hashes: bool = True,
        router_checks: float = 1,
    ) -> None:
        if not 0 <= domain_id <= _MAX_DOMAIN_ID:
            raise InvalidRequest(f"a ROS domain is 0 to {_MAX_DOMAIN_ID}, got {domain_id}")
        if not _NODE_NAME.fullmatch(node_name):
            raise InvalidRequest(f"a node's name has letters, digits and '_' and no digit first, got '{node_name}'")
        self._zenoh: Any = import_library("zenoh", "zenoh")
        self._advanced: Any = import_library("zenoh.ext", "zenoh")
        self._handlers: Any = import_library("zenoh.handlers", "zenoh")
        import_library("xxhash", "zenoh")
        self._types = MessageTypes()
        self._node_name, self._domain_id, self._has_type_hashes = node_name, domain_id, has_type_hashes
        endpoints = configuration.get_json("connect/endpoints")
        self._endpoints = (
            ", ".join(re.findall(r'"([^"]+/[^"]+)"', endpoints)) or "an address: it has none to connect to"
        )
        self._router_checks = router_checks
        self._publishers: dict[str, _Publisher] = {}
        self._subscribers: dict[str, tuple[MessageKind, Any]] = {}
        self._threads: list[threading.Thread] = []
        self._warned_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._failure: Exception | None = None
        try:
            self._session: Any = self._zenoh.open(configuration)
        except self._zenoh.ZError as error:
            raise ServingFault(f"no Zenoh session can be opened to {self._endpoints}: {_reason(error)}") from error
        self._session_id = str(self._session.info.zid())
        self._tokens = [self._announce(Entity(domain_id, self._session_id, 0, 0, NODE, node_name))]
        # A router that is there is connected by then.
        self._next_check_s = time.monotonic() + _ROUTER_CHECK_INTERVAL_S

    def subscribe(self, topic: str, kind: MessageKind, qos: Qos, callback: Callable[[Any], None]) -> None:
        entity, key = self._describe(SUBSCRIBER, topic, kind, qos)
        ext = self._advanced
        options: dict[str, Any] = {}
        if qos.is_transient_local:
            options["history"] = ext.HistoryConfig(detect_late_publishers=True, max_samples=qos.depth)
            options["subscriber_detection"] = True
            if qos.is_reliable:
                options["recovery"] = ext.RecoveryConfig(periodic_queries=None, heartbeat=True)
        # The channel keeps the newest messages, outside Python.
        channel = self._handlers.RingChannel(qos.depth)
        subscriber = ext.declare_advanced_subscriber(self._session, key, channel, **options)
        self._tokens.append(self._announce(entity))
        self._subscribers[topic] = kind, subscriber
        thread = threading.Thread(
            target=self._receive, args=(topic, kind, subscriber.handler, callback), name="ros-zenoh", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def advertise(self, topic: str, kind: MessageKind, qos: Qos) -> None:
        entity, key = self._describe(PUBLISHER, topic, kind, qos)
        reliability, ext = self._zenoh.Reliability, self._advanced
        options: dict[str, Any] = {}
        if qos.is_transient_local:
            options["cache"] = ext.CacheConfig(qos.depth)
            options["publisher_detection"] = True
            if qos.is_reliable:
                options["sample_miss_detection"] = ext.MissDetectionConfig(
                    heartbeat=None, sporadic_heartbeat=_HEARTBEAT_S
                )
        # Messages are dropped for a subscriber that is too slow: rmw_zenoh blocks for history "keep all" alone.
        publisher = ext.declare_advanced_publisher(
            self._session,
            key,
            congestion_control=self._zenoh.CongestionControl.DROP,
            reliability=reliability.RELIABLE if qos.is_reliable else reliability.BEST_EFFORT,
            **options,
        )
        self._tokens.append(self._announce(entity))
        gid = entity_gid(liveliness_token(entity))
        self._publishers[topic] = _Publisher(kind, publisher, gid, itertools.count(1))

    def publish(self, topic: str, message: OutgoingMessage) -> None:
        known = self._publishers.get(topic)
        if known is None or known.kind is not message.kind:
            raise NotFound(f"topic '{topic}' was not advertised for {message.kind.value}")
        data = self._types.encode(message)
        with self._lock:
            attachment = encode_attachment(Attachment(next(known.numbers), time.time_ns(), known.gid))
            try:
                known.publisher.put(data, attachment=attachment)
            except self._zenoh.ZError as error:
                self._warn(topic, f"a message was not sent: {_reason(error)}")

    def spin(self, timeout_s: float) -> bool:
        self._is_ended.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        if time.monotonic() >= self._next_check_s:
            self._check_router()
        return not self._session.is_closed()

    def explain_silence(self, topic: str) -> str:
        if not (self._session.info.routers_zid() or self._session.info.peers_zid()):
            return self._no_router
        others = [one for one in self._entities() if one.session_id != self._session_id]
        here = [one for one in others if one.domain_id == self._domain_id]
        if not here:
            where = f"the router is reached, but no other node is seen in ROS domain {self._domain_id}"
            domains = sorted({one.domain_id for one in others})
            if domains:
                return f"{where}; nodes are in domain {', '.join(map(str, domains))}: expected the same ROS_DOMAIN_ID"
            return (
                f"{where}: expected RMW_IMPLEMENTATION=rmw_zenoh_cpp there; nodes on other machines are seen through a "
                "router on this one, or by a client of theirs (mode=client in ZENOH_CONFIG_OVERRIDE)"
            )
        kind, _ = self._subscribers[topic]
        name = kind.value
        publishers = [one for one in here if one.kind == PUBLISHER]
        of_topic = [one for one in publishers if one.topic == absolute_topic(topic)]
        seen = [SeenPublisher(one.topic, one.type_name) for one in of_topic or publishers]
        if not of_topic:
            return explain_no_publisher(kind, self._domain_id, seen)
        if mismatch := explain_mismatch(kind, Qos(), seen):
            return mismatch
        of_type = [one for one in of_topic if one.type_name == name]
        expected = self._type_hash(name)
        if all(one.type_hash != expected for one in of_type):
            given = of_type[0].type_hash
            if given == NO_TYPE_HASH:
                return "its publisher is a node of ROS 2 Humble: expected ROS_DISTRO=humble here"
            advice = ": expected no ROS_DISTRO=humble here" if expected == NO_TYPE_HASH else ""
            return f"type mismatch: its publisher's {name} has the hash {given}, expected {expected}{advice}"
        return "its publisher is seen: it sends nothing, or its session is not connected to this one"

    def close(self) -> None:
        """Leave the graph: the other nodes see at once that the topics and the node end."""
        with self._lock:
            self._is_ended.set()
            if not self._session.is_closed():
                # The node's token is the first one, and ends last.
                for token in reversed(self._tokens):
                    token.undeclare()
                for _, subscriber in self._subscribers.values():
                    subscriber.undeclare()
                for known in self._publishers.values():
                    known.publisher.undeclare()
                self._session.close()
            self._publishers.clear()
        for thread in self._threads:
            thread.join(_END_WAIT_S)

    def _announce(self, entity: Entity) -> Any:
        return self._session.liveliness().declare_token(liveliness_token(entity))

    def _describe(self, entity_kind: str, topic: str, kind: MessageKind, qos: Qos) -> tuple[Entity, str]:
        """Return a new entity, and the key of its topic."""
        name, type_hash = absolute_topic(topic), self._type_hash(kind.value)
        entity = Entity(
            self._domain_id, self._session_id, 0, len(self._tokens), entity_kind, self._node_name,
            name, kind.value, type_hash, qos_text(qos),
        )  # fmt: skip
        return entity, data_key(self._domain_id, name, kind.value, type_hash)

    def _type_hash(self, type_name: str) -> str:
        return self._types.type_hash(type_name) if self._has_type_hashes else NO_TYPE_HASH

    def _receive(self, topic: str, kind: MessageKind, channel: Any, callback: Callable[[Any], None]) -> None:
        try:
            while not self._is_ended.is_set():
                try:
                    sample = channel.recv()
                except self._zenoh.ZError:
                    # The subscription has ended.
                    return
                message = self._decode(sample, topic, kind)
                if message is not None:
                    callback(message)
        except Exception as error:  # noqa: BLE001 - raised by `spin` on its thread
            self._failure = error
            self._is_ended.set()

    def _decode(self, sample: Any, topic: str, kind: MessageKind) -> Any:
        """Return the message of a sample, or None after a warning."""
        try:
            size = len(sample.payload)
            if size > MAX_MESSAGE_BYTES:
                raise InvalidRequest(f"a message has {size} bytes, expected at most {MAX_MESSAGE_BYTES}")
            if sample.attachment is None:
                raise InvalidRequest("a message has no attachment, so its publisher is no node of ROS")
            decode_attachment(sample.attachment.to_bytes())
            return self._types.decode(sample.payload.to_bytes(), kind.value)
        except InvalidRequest as error:
            self._warn(topic, error.message)
            return None

    def _warn(self, topic: str, message: str) -> None:
        """Log a warning, for each topic at most once in some seconds: a peer can send thousands of wrong messages."""
        now = time.monotonic()
        if now - self._warned_s.get(topic, -math.inf) >= _WARNING_INTERVAL_S:
            self._warned_s[topic] = now
            log.warning("%s: %s", topic, message)

    def _entities(self) -> Iterator[Entity]:
        """Yield the nodes, publishers and subscribers that exist now, in all domains."""
        replies = self._session.liveliness().get(f"{TOKENS}/**", timeout=_GRAPH_TIMEOUT_S)
        for reply in itertools.islice(replies, _MAX_ENTITIES):
            entity = parse_token(str(reply.ok.key_expr)) if reply.ok is not None else None
            if entity is not None:
                yield entity

    @property
    def _no_router(self) -> str:
        return (
            f"no Zenoh router is reached at {self._endpoints}: expected one (`ros2 run rmw_zenoh_cpp rmw_zenohd`) "
            "there, or another address in ZENOH_CONFIG_OVERRIDE or ZENOH_SESSION_CONFIG_URI"
        )

    def _check_router(self) -> None:
        """Log that no router is connected, as often as `router_checks` says."""
        self._next_check_s = time.monotonic() + _ROUTER_CHECK_INTERVAL_S
        if self._router_checks <= 0:
            self._next_check_s = math.inf
        elif self._session.info.routers_zid():
            self._router_checks = 0
        else:
            self._router_checks -= 1
            log.warning("%s; topics are silent until it is there", self._no_router)


def open_transport(node_name: str, environment: Mapping[str, str]) -> ZenohTransport:
    """Open a session like a ROS 2 node with rmw_zenoh_cpp, in the domain of ROS_DOMAIN_ID.

    ROS_DISTRO=humble makes it one of ROS 2 Humble, whose keys have no type hashes.
    """
    domain_id = read_domain_id(environment, _MAX_DOMAIN_ID)
    log.info("%s joins ROS domain %d over Zenoh", node_name, domain_id)
    return ZenohTransport(
        node_name,
        domain_id,
        session_configuration(environment),
        has_type_hashes=environment.get("ROS_DISTRO") != "humble",
        router_checks=router_checks(environment),
    )


def session_configuration(environment: Mapping[str, str]) -> Any:
    """Return a zenoh.Config: that of the file ZENOH_SESSION_CONFIG_URI, else rmw_zenoh's defaults, with the changes of
    ZENOH_CONFIG_OVERRIDE, such as 'mode="client";connect/endpoints=["tcp/robot:7447"]'. Raises InvalidRequest."""
    zenoh: Any = import_library("zenoh", "zenoh")
    zenoh.try_init_log_from_env()
    path = environment.get("ZENOH_SESSION_CONFIG_URI", "")
    try:
        configuration = zenoh.Config.from_file(path) if path else zenoh.Config.from_json5(json.dumps(SESSION_DEFAULTS))
    except zenoh.ZError as error:
        raise InvalidRequest(
            f"ZENOH_SESSION_CONFIG_URI: '{path}' is no configuration of Zenoh: {_reason(error)}"
        ) from error
    for pair in environment.get("ZENOH_CONFIG_OVERRIDE", "").split(";"):
        key, equals, value = pair.strip().partition("=")
        if not key and not equals:
            continue
        try:
            configuration.insert_json5(key, value)
        except zenoh.ZError as error:
            raise InvalidRequest(
                f"ZENOH_CONFIG_OVERRIDE: expected KEY=VALUE with a key of Zenoh's configuration and a JSON value, and "
                f"';' between them, got '{pair}': {_reason(error)}"
            ) from error
    return configuration


def router_checks(environment: Mapping[str, str]) -> float:
    """Return how many times to warn that there is no router: ZENOH_ROUTER_CHECK_ATTEMPTS, 1 unless set. As in
    rmw_zenoh, 0 is without end and a negative number is never; but the start waits for no router."""
    given = environment.get("ZENOH_ROUTER_CHECK_ATTEMPTS", "") or "1"
    if not re.fullmatch(r"-?[0-9]{1,18}", given):
        raise InvalidRequest(f"ZENOH_ROUTER_CHECK_ATTEMPTS: expected a number, got '{given}'")
    return int(given) or math.inf


def _reason(error: Exception) -> str:
    """Return an error of Zenoh without the place in Zenoh's sources."""
    return str(error).partition(" at /")[0].strip()
