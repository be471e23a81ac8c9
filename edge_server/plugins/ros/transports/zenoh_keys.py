"""Keys, attachments and liveliness tokens of rmw_zenoh, the Zenoh middleware of ROS 2, as pure functions.

Read from rmw_zenoh's sources: 0.1.9 (Humble), 0.2.10 (Jazzy) and 0.6.7 (Kilted), and compared with what its C++ code
sends. Names have no ROS remapping here: the namespace is "/" and the enclave is "/".
"""

from __future__ import annotations

import importlib
import struct
from typing import NamedTuple

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.transports.transport import Qos

TOKENS = "@ros2_lv"
"""First part of every liveliness token. "@" keeps it out of wildcard subscriptions."""

NODE, PUBLISHER, SUBSCRIBER = "NN", "MP", "MS"

NO_TYPE_HASH = "TypeHashNotSupported"
"""What Humble, which has no type hashes, writes in their place. Its nodes hear only keys with it."""

MAX_TOKEN_LENGTH = 2048
_TOKEN_PARTS_OF_NODE, _TOKEN_PARTS_OF_TOPIC = 9, 13

_DEFAULT_DEPTH = 42
"""Queue size that a token leaves out: RMW_ZENOH_DEFAULT_HISTORY_DEPTH."""

_GID_SIZE = 16
_ATTACHMENT = struct.Struct(f"<qqB{_GID_SIZE}s")
_NAMED_ATTACHMENT = struct.Struct(f"<16sq17sq11sB{_GID_SIZE}s")
_ATTACHMENT_NAMES = b"\x0fsequence_number", b"\x10source_timestamp", b"\x0asource_gid"
"""Names before the fields in versions before 0.3, Jazzy's 0.2.3 among them, each after its length."""


class Entity(NamedTuple):
    """Node, publisher or subscriber, as a liveliness token announces it. `kind` is one of NODE, PUBLISHER, SUBSCRIBER,
    or one for services; topic and type are "" for a node, and `type_name` is like "sensor_msgs/msg/Image"."""

    domain_id: int
    session_id: str
    node_id: int
    entity_id: int
    kind: str
    node_name: str
    topic: str = ""
    type_name: str = ""
    type_hash: str = ""
    qos: str = ""


class Attachment(NamedTuple):
    """Metadata beside each message. `sequence_number` counts messages from 1; `stamp_ns` is since 1970."""

    sequence_number: int
    stamp_ns: int
    gid: bytes


def data_key(domain_id: int, topic: str, type_name: str, type_hash: str) -> str:
    """Return the key on which the messages of a topic are sent."""
    return f"{domain_id}/{topic.strip('/')}/{_mangled_type(type_name)}/{type_hash}"


def liveliness_token(entity: Entity) -> str:
    """Return the token that announces an entity to the other nodes."""
    parts = [
        TOKENS, str(entity.domain_id), entity.session_id, str(entity.node_id), str(entity.entity_id), entity.kind,
        "%", "%", entity.node_name,
    ]  # fmt: skip
    if entity.kind != NODE:
        parts += [entity.topic.replace("/", "%"), _mangled_type(entity.type_name), entity.type_hash, entity.qos]
    return "/".join(parts)


def parse_token(token: str) -> Entity | None:
    """Return the entity of a token, or None for one that is not of this form."""
    if len(token) > MAX_TOKEN_LENGTH:
        return None
    parts = token.split("/")
    if len(parts) < _TOKEN_PARTS_OF_NODE or parts[0] != TOKENS or not all(parts):
        return None
    _, domain_id, session_id, node_id, entity_id, kind, _, namespace, node_name, *of_topic = parts
    numbers = domain_id, node_id, entity_id
    if not all(text.isascii() and text.isdigit() and len(text) < 20 for text in numbers):
        return None
    full_name = f"{namespace.replace('%', '/').rstrip('/')}/{node_name.replace('%', '/')}"
    entity = Entity(int(domain_id), session_id, int(node_id), int(entity_id), kind, full_name)
    if kind == NODE:
        return entity
    if len(parts) < _TOKEN_PARTS_OF_TOPIC:
        return None
    topic, type_name, type_hash, qos, *_ = of_topic
    type_name = type_name.replace("::dds_::", "::").removesuffix("_").replace("::", "/")
    return entity._replace(topic=topic.replace("%", "/"), type_name=type_name, type_hash=type_hash, qos=qos)


def qos_text(qos: Qos) -> str:
    """Return a quality of service as the last part of a token.

    Reliability, durability, history and queue size, deadline, lifespan, liveliness: numbers of rmw/types.h, or nothing
    for rmw_zenoh's default, which is reliable, volatile, and to keep the last 42 messages.
    """
    reliability = "" if qos.is_reliable else "2"
    durability = "1" if qos.is_transient_local else ""
    depth = "" if qos.depth == _DEFAULT_DEPTH else str(qos.depth)
    return f"{reliability}:{durability}:,{depth}:,:,:,,"


def encode_attachment(attachment: Attachment) -> bytes:
    """Return the 33 bytes that stand beside each message. A node that cannot read them ends its process."""
    return _ATTACHMENT.pack(attachment.sequence_number, attachment.stamp_ns, _GID_SIZE, attachment.gid)


def decode_attachment(data: bytes) -> Attachment:
    """Return the metadata of a message, in this form or that with names. Raises InvalidRequest."""
    if len(data) == _ATTACHMENT.size:
        sequence_number, stamp_ns, size, gid = _ATTACHMENT.unpack(data)
        if size == _GID_SIZE:
            return Attachment(sequence_number, stamp_ns, gid)
    elif len(data) == _NAMED_ATTACHMENT.size:
        first, sequence_number, second, stamp_ns, third, size, gid = _NAMED_ATTACHMENT.unpack(data)
        if (first, second, third) == _ATTACHMENT_NAMES and size == _GID_SIZE:
            return Attachment(sequence_number, stamp_ns, gid)
    raise InvalidRequest(
        f"the attachment of a message has {len(data)} bytes and is not one of rmw_zenoh, expected {_ATTACHMENT.size} "
        f"bytes (or {_NAMED_ATTACHMENT.size} with names): number, time, and id of the publisher"
    )


def entity_gid(token: str) -> bytes:
    """Return the 16 bytes that identify an entity: XXH3-128 of its token, the lower half first, each little-endian."""
    return bytes(importlib.import_module("xxhash").xxh3_128_digest(token.encode())[::-1])


def _mangled_type(type_name: str) -> str:
    package, _, message = type_name.split("/")
    return f"{package}::msg::dds_::{message}_"
