"""Messages of frame streams: both parsers of payloads give equal results, and a message that is read, written and
read again is unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from stubs import result_of, tensors_key

from edge_server.core.tensor import DType, Tensor
from edge_server.protocol import frame_codec
from edge_server.protocol.frame_codec import (
    decode_client_message,
    decode_server_message,
    encode_client_message,
    encode_server_message,
)
from edge_server.protocol.frame_messages import (
    Delivery,
    DenseMap,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    Mask,
    ObjectMask,
    RegionSlice,
    Returns,
    RotatedBox,
    StreamCounts,
    StreamOpened,
    StreamRequest,
)

_split = frame_codec.split


def seeds() -> Iterable[bytes]:
    header = FrameHeader(5, 6, "camera", 7)
    yield b"\0" + encode_client_message(
        StreamRequest("m", 1, "s", Returns(("a",), 3, True), Delivery(2, 100, 50, 10.0, 1.5), "client")
    )
    yield b"\0" + encode_client_message(Frame(header, 2, 2, "rgb8", 6, False, "", None, 9, bytes(12)))
    yield b"\0" + encode_client_message(Frame(header, 2, 2, "", 6, True, "jpeg", RegionSlice("r", 1, 2), 0, b""))
    result = FrameResult(
        header, height=3, width=4, tensors=(Tensor("t", DType.FP32, np.ones((1, 2), np.float32)),),
        detections=(
            Detection(0.1, 0.2, 0.3, 0.4, 0.9, 1, "cup", mask=ObjectMask(1, 2, 3, 4, b"\x0f\xf0")),
            Detection(0.1, 0.2, 0.3, 0.4, 0.9, 1, "tree", rotated=RotatedBox(0.2, 0.3, 0.1, 0.1, 0.5), text="exit"),
        ),
        mask=Mask(1, 2, "mono8", b"ab", ("x",)),
        annotated_jpeg=b"jpeg", error="e", model="m", version=1,
        dense_map=DenseMap("anomaly", 1, 1, "mono16", b"ab", 0.0, 1.0, 0.5),
    )  # fmt: skip
    yield b"\1" + encode_server_message(result, 3)
    yield b"\1" + encode_server_message(FrameDropped(header, DropReason.OTHER, "why"), 1)
    yield b"\1" + encode_server_message(
        StreamOpened("s", "m", 1, "onnx", ("a", "b"), StreamCounts(1, 2, {DropReason.OTHER: 3}), "server"), 2
    )


def _without_views(message: Any) -> Any:
    """Return a message as a value that can be compared, NaN included."""
    if isinstance(message, Frame):
        return repr(dataclasses.replace(message, data=bytes(message.data)))
    if isinstance(message, FrameResult):
        names = [name for name in message.__slots__ if name not in ("tensors", "mask", "annotated_jpeg")]
        mask = message.mask
        return (
            repr([getattr(message, name) for name in names]), [tensors_key({"": item}) for item in message.tensors],
            bytes(message.annotated_jpeg),
            None if mask is None else (mask.height, mask.width, mask.encoding, bytes(mask.data), mask.labels),
        )  # fmt: skip
    return repr(message)


def check(data: bytes) -> None:
    is_server, data = data[:1] == b"\1", data[1:]

    def decode(octets: bytes) -> Any:
        if not is_server:
            return result_of(lambda: (decode_client_message(octets), 0))
        return result_of(lambda: decode_server_message(octets))

    found = decode(data)
    frame_codec.split = lambda data, field, least_bytes=0: None
    try:
        whole = decode(data)
    finally:
        frame_codec.split = _split
    assert (found is None) == (whole is None), "cut out and whole, only one is read"
    if found is None or whole is None:
        return
    message, allowed = found
    key = _without_views(message)
    assert (key, allowed) == (_without_views(whole[0]), whole[1]), "cut out, the message is another one"
    encoded = result_of(
        (lambda: encode_server_message(message, allowed)) if is_server else (lambda: encode_client_message(message))
    )
    if encoded is None:
        return
    again = decode(encoded)
    assert again is not None, "what was written cannot be read"
    # Not the values: reasons with a count of 0 are not written.
    message = again[0]
    assert encoded == (encode_server_message(*again) if is_server else encode_client_message(message)), (
        "what was written is read as another message"
    )
