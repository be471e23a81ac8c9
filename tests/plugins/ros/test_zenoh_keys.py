"""Keys, attachments and tokens of rmw_zenoh, beside those that were recorded from rmw_zenoh_cpp 0.6.7 itself."""

from __future__ import annotations

import random

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.plugins.ros.transports.zenoh_keys import (
    MAX_TOKEN_LENGTH,
    NODE,
    PUBLISHER,
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

SESSION = "dac29767e02a1e141cb5b8b8e16699d0"
IMAGE = "sensor_msgs/msg/Image"
IMAGE_HASH = "RIHS01_d31d41a9a4c4bc8eae9be757b0beed306564f7526c88ea6a4588fb9582527d47"
CAMERA = Entity(0, SESSION, 0, 10, PUBLISHER, "/camera", "/camera/image_raw", IMAGE, IMAGE_HASH, "::,10:,:,:,,")

# rclpy.create_node("camera"), and create_publisher(Image, "/camera/image_raw", 10).
NODE_TOKEN = f"@ros2_lv/0/{SESSION}/0/0/NN/%/%/camera"
CAMERA_TOKEN = (
    f"@ros2_lv/0/{SESSION}/0/10/MP/%/%/camera/%camera%image_raw/sensor_msgs::msg::dds_::Image_/{IMAGE_HASH}"
    "/::,10:,:,:,,"
)
CAMERA_KEY = f"0/camera/image_raw/sensor_msgs::msg::dds_::Image_/{IMAGE_HASH}"
THIRD_ATTACHMENT = bytes.fromhex("0300000000000000 3b7020e030a5eb18 10 f5f78632d20921c2b36d92f9e6c05b57")


def test_data_is_sent_on_the_key_of_rmw_zenoh() -> None:
    assert data_key(0, "/camera/image_raw", IMAGE, IMAGE_HASH) == CAMERA_KEY


def test_entities_are_announced_by_the_tokens_of_rmw_zenoh() -> None:
    assert liveliness_token(Entity(0, SESSION, 0, 0, NODE, "camera")) == NODE_TOKEN
    assert liveliness_token(CAMERA._replace(node_name="camera")) == CAMERA_TOKEN


def test_tokens_of_rmw_zenoh_are_read() -> None:
    assert parse_token(NODE_TOKEN) == Entity(0, SESSION, 0, 0, NODE, "/camera")
    assert parse_token(CAMERA_TOKEN) == CAMERA
    in_namespace = NODE_TOKEN.replace("NN/%/%/camera", "NN/%/%left%arm/camera")
    found = parse_token(in_namespace)
    assert found is not None
    assert found.node_name == "/left/arm/camera"
    # Newer versions may append parts.
    assert parse_token(f"{CAMERA_TOKEN}/cpu:") == CAMERA


@pytest.mark.parametrize(
    ("qos", "expected"),
    [
        (Qos(), "::,10:,:,:,,"),
        (Qos("SENSOR_DATA", 5), "2::,5:,:,:,,"),
        (Qos("DEFAULT", 42), "::,:,:,:,,"),
        (Qos("DEFAULT", 1, is_transient_local=True), ":1:,1:,:,:,,"),
    ],
)
def test_a_quality_of_service_is_written_as_what_differs_from_the_defaults(qos: Qos, expected: str) -> None:
    assert qos_text(qos) == expected


def test_an_attachment_is_the_33_bytes_of_rmw_zenoh() -> None:
    given = Attachment(3, 1795710505774510139, bytes.fromhex("f5f78632d20921c2b36d92f9e6c05b57"))
    assert decode_attachment(THIRD_ATTACHMENT) == given
    assert encode_attachment(given) == THIRD_ATTACHMENT


def test_attachments_with_names_are_read_too() -> None:
    number, stamp, gid = THIRD_ATTACHMENT[:8], THIRD_ATTACHMENT[8:16], THIRD_ATTACHMENT[16:]
    named = b"\x0fsequence_number" + number + b"\x10source_timestamp" + stamp + b"\x0asource_gid" + gid
    assert decode_attachment(named) == decode_attachment(THIRD_ATTACHMENT)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        THIRD_ATTACHMENT[:-1],
        THIRD_ATTACHMENT + b"\0",
        THIRD_ATTACHMENT[:16] + b"\x11" + THIRD_ATTACHMENT[17:],
        bytes(77),
        bytes(10_000_000),
    ],
)
def test_other_attachments_are_refused_with_what_was_expected(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=rf"has {len(data)} bytes and is not one of rmw_zenoh, expected 33 bytes"):
        decode_attachment(data)


@pytest.mark.full
def test_the_id_of_a_publisher_is_that_of_rmw_zenoh() -> None:
    pytest.importorskip("xxhash", reason="needs xxhash: pip install '.[zenoh]'")
    assert entity_gid(CAMERA_TOKEN) == THIRD_ATTACHMENT[17:]


@pytest.mark.parametrize(
    "token",
    [
        "",
        "/",
        "@ros2_lv",
        "0/camera/image_raw/a/b/c/d/e/f/g/h/i/j",
        NODE_TOKEN.replace("/0/0/", "/x/0/"),
        NODE_TOKEN.replace("/0/0/", "/٣/0/"),
        NODE_TOKEN.replace("/0/0/", f"/{'9' * 30}/0/"),
        NODE_TOKEN.replace("/%/%/", "/%//"),
        CAMERA_TOKEN.rpartition("/")[0],
        CAMERA_TOKEN.replace("camera", "c" * MAX_TOKEN_LENGTH),
    ],
)
def test_what_is_no_token_is_ignored(token: str) -> None:
    assert parse_token(token) is None


def test_mutated_tokens_and_attachments_raise_nothing_else() -> None:
    chance = random.Random(1)
    for _ in range(3000):
        text = list(CAMERA_TOKEN)
        for _ in range(chance.randrange(1, 6)):
            text[chance.randrange(len(text))] = chance.choice("/%:,@0x\0é\U0001f600")
        found = parse_token("".join(text))
        assert found is None or isinstance(found, Entity)
        data = chance.randbytes(chance.choice([0, 33, 77, 78]))
        try:
            decode_attachment(data)
        except InvalidRequest:
            continue
