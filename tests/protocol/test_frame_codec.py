"""The codec of the frame stream and the generated classes agree on every message, damaged ones included."""

from __future__ import annotations

import math
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.protocol import frame_codec
from edge_server.protocol.frame_codec import (
    MAX_NAMES,
    STREAM_PATH,
    decode_client_message,
    decode_server_message,
    encode_client_message,
    encode_server_message,
)
from edge_server.protocol.frame_messages import (
    ClassScore,
    Credit,
    Delivery,
    DenseMap,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    FrameTimes,
    Keypoint,
    Mask,
    ObjectMask,
    RegionSlice,
    Returns,
    RotatedBox,
    StreamCounts,
    StreamOpened,
    StreamRequest,
)
from edge_server.protocol.messages import message_class, service_methods
from edge_server.protocol.protobuf_wire_format import encode_delimited, encode_number_field, encode_varint
from edge_server.protocol.raw_tensors import raw_from_tensor, tensor_from_raw

ClientWire = message_class("edge.frames.v1.ClientMessage")
ServerWire = message_class("edge.frames.v1.ServerMessage")


@pytest.fixture(scope="module", autouse=True, params=["parsed whole", "payloads cut out"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with small messages parsed whole, as they are, and as if they were large."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "payloads cut out":
            patch.setattr(frame_codec, "_SMALL_BYTES", -1)
        yield


texts = st.text(max_size=6)
u32 = st.one_of(st.sampled_from([0, 1, 2**32 - 1]), st.integers(0, 2**32 - 1))
u64 = st.one_of(st.sampled_from([0, 1, 2**64 - 1]), st.integers(0, 2**64 - 1))
i64 = st.one_of(st.sampled_from([0, -1, -(2**63)]), st.integers(-(2**63), 2**63 - 1))
floats = st.one_of(st.sampled_from([0.0, -0.0, math.inf]), st.floats(width=32, allow_nan=False))
data = st.binary(max_size=40)
headers = st.builds(FrameHeader, i64, u32, texts, u64)
drops = st.dictionaries(st.sampled_from(list(DropReason)), st.integers(1, 2**63 - 1), max_size=3)
counts = st.builds(StreamCounts, u64, u64, drops)
labels = st.lists(texts, max_size=3).map(tuple)

frames = st.builds(
    Frame, headers, u32, u32, texts, u32, st.booleans(), texts,
    st.none() | st.builds(RegionSlice, texts, u64, u64), u32, data,
)  # fmt: skip
requests = st.builds(
    StreamRequest, texts, i64, texts,
    st.builds(Returns, labels, u32, st.booleans(), st.booleans(), st.booleans(), u32, st.booleans()),
    st.builds(
        Delivery, u32.filter(bool), u32, u32, floats, floats.filter(bool), u32, st.booleans()
    ), texts,
)  # fmt: skip
keypoints = st.builds(Keypoint, floats, floats, floats)
object_masks = st.builds(ObjectMask, u32, u32, u32, u32, data)
detections = st.builds(
    Detection, floats, floats, floats, floats, floats, u32, texts, st.lists(keypoints, max_size=2).map(tuple), u64,
    mask=st.none() | object_masks, rotated=st.none() | st.builds(RotatedBox, floats, floats, floats, floats, floats),
    text=texts, text_score=floats,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(DType)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    if dtype is DType.BYTES:
        array = np.empty(count, dtype=object)
        array[:] = draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count))
        return Tensor(draw(texts), dtype, array.reshape(shape))
    limit = 1 if dtype is DType.BOOL else 255
    octets = draw(st.lists(st.integers(0, limit), min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return tensor_from_raw(draw(texts), dtype, shape, bytes(octets), model="m")


results = st.builds(
    FrameResult, headers, st.builds(FrameTimes, i64, u64, u64, u64, u64), drops, counts, texts, i64, texts, texts,
    texts, texts, u32, u32, u32, st.lists(tensors(), max_size=2).map(tuple),
    st.lists(st.builds(ClassScore, u32, floats, texts), max_size=2).map(tuple),
    st.lists(detections, max_size=2).map(tuple),
    st.none() | st.builds(Mask, u32, u32, texts, data, labels), data, texts, texts, st.booleans(),
    dense_map=st.none() | st.builds(DenseMap, texts, u32, u32, texts, data, floats, floats, floats),
)  # fmt: skip
answers = st.one_of(
    results,
    st.builds(StreamOpened, texts, texts, i64, texts, labels, counts, texts),
    st.builds(FrameDropped, headers, st.sampled_from(list(DropReason)), texts),
    st.just(Credit()),
)


# The values read by the generated classes, as the codec's types: a description of the format independent of the codec.


def reason(number: int) -> DropReason:
    return DropReason(number) if number in {each.value for each in DropReason} else DropReason.OTHER


def summed(entries: object) -> dict[DropReason, int]:
    found: dict[DropReason, int] = {}
    for entry in entries:
        found[reason(entry.reason)] = found.get(reason(entry.reason), 0) + entry.count
    return found


def header(wire: object) -> FrameHeader:
    return FrameHeader(wire.sec, wire.nanosec, wire.frame_id, wire.seq)


def stream_counts(wire: object) -> StreamCounts:
    return StreamCounts(wire.received, wire.answered, summed(wire.dropped), wire.late)


def to_client_message(wire: object) -> object:
    if wire.WhichOneof("kind") == "open":
        item, given_returns, given_delivery = wire.open, wire.open.returns, wire.open.delivery
        return StreamRequest(
            item.model, item.version, item.stream_id,
            Returns(
                tuple(given_returns.tensors), given_returns.top_k, given_returns.detections, given_returns.mask,
                given_returns.annotated_jpeg, given_returns.jpeg_quality, given_returns.map,
            ),
            Delivery(
                given_delivery.depth or 1, given_delivery.max_age_ms, given_delivery.deadline_ms,
                given_delivery.max_fps, given_delivery.weight or 1.0, given_delivery.priority,
                given_delivery.notify_drops,
            ),
            item.client,
        )  # fmt: skip
    if wire.WhichOneof("kind") == "frame":
        item = wire.frame
        region = RegionSlice(item.region.name, item.region.offset, item.region.byte_size)
        return Frame(
            header(item.header), item.height, item.width, item.encoding, item.step, item.is_bigendian, item.format,
            region if item.HasField("region") else None, item.age_us, item.data,
        )  # fmt: skip
    return None


def to_server_message(wire: object) -> object:
    kind = wire.WhichOneof("kind")
    if kind == "opened":
        item = wire.opened
        return StreamOpened(
            item.stream_id, item.model, item.version, item.runtime, tuple(item.labels), stream_counts(item.counts),
            item.server,
        )  # fmt: skip
    if kind == "dropped":
        return FrameDropped(header(wire.dropped.header), reason(wire.dropped.reason), wire.dropped.detail)
    return to_frame_result(wire.result) if kind == "result" else Credit()


def to_frame_result(item: object) -> FrameResult:
    times, mask = item.times, item.mask
    return FrameResult(
        header(item.header),
        FrameTimes(times.received_unix_ns, times.taken_us, times.queued_us, times.started_us, times.finished_us),
        summed(item.dropped), stream_counts(item.counts), item.model, item.version, item.variant, item.runtime,
        item.governor, item.governor_detail, item.height, item.width, item.batch_size,
        tuple(
            tensor_from_raw(each.name, DType(each.datatype), tuple(each.shape), each.data, model="m")
            for each in item.tensors
        ),
        tuple(ClassScore(each.index, each.score, each.label) for each in item.classes),
        tuple(
            Detection(
                each.x_min, each.y_min, each.x_max, each.y_max, each.score, each.class_index, each.label,
                tuple(Keypoint(point.x, point.y, point.score) for point in each.keypoints), each.track_id,
                ObjectMask(*(getattr(each.mask, key) for key in ("x", "y", "width", "height", "data")))
                if each.HasField("mask") else None,
                RotatedBox(*(getattr(each.rotated, key) for key in ("x", "y", "width", "height", "angle")))
                if each.HasField("rotated") else None,
                text=each.text, text_score=each.text_score,
            )
            for each in item.detections
        ),
        Mask(mask.height, mask.width, mask.encoding, mask.data, tuple(mask.labels)) if item.HasField("mask") else None,
        item.annotated_jpeg, item.error_code, item.error, item.is_late,
        dense_map=DenseMap(
            item.map.kind, item.map.height, item.map.width, item.map.encoding, item.map.data, item.map.minimum,
            item.map.maximum, item.map.score,
        ) if item.HasField("map") else None,
    )  # fmt: skip


def comparable(noun: object) -> str:
    """Return a complete description of a message: views as bytes, NaN as NaN, tensors as type, shape and bytes."""
    if isinstance(noun, Tensor):
        return f"Tensor({noun.name!r}, {noun.dtype}, {noun.shape}, {bytes(raw_from_tensor(noun))!r})"
    if isinstance(noun, memoryview | bytes):
        return repr(bytes(noun))
    if isinstance(noun, dict):
        return repr(sorted((key.value, value) for key, value in noun.items()))
    if isinstance(noun, tuple):
        return f"({', '.join(map(comparable, noun))})"
    if hasattr(noun, "__dataclass_fields__"):
        return (
            f"{type(noun).__name__}({', '.join(comparable(getattr(noun, key)) for key in noun.__dataclass_fields__)})"
        )
    return repr(noun)


def ours_client(octets: bytes) -> object | None:
    try:
        return decode_client_message(octets)
    except InvalidRequest:
        return None


def ours_server(octets: bytes) -> object | None:
    try:
        return decode_server_message(octets)
    except InvalidRequest:
        return None


def theirs_client(octets: bytes) -> object | None:
    try:
        return to_client_message(ClientWire.FromString(octets))
    except DecodeError:
        return None


def theirs_server(octets: bytes) -> object | None:
    """None also where the generated class reads a tensor whose shape, type and bytes contradict each other."""
    try:
        wire = ServerWire.FromString(octets)
        return to_server_message(wire), wire.frames_allowed
    except (DecodeError, InvalidRequest, ValueError):
        return None


@given(st.one_of(requests, frames))
def test_client_messages_round_trip_with_the_generated_class(message: object) -> None:
    octets = encode_client_message(message)
    assert comparable(to_client_message(ClientWire.FromString(octets))) == comparable(message)
    again = ClientWire.FromString(octets).SerializeToString()
    assert comparable(decode_client_message(again)) == comparable(message)


@given(answers, u64)
def test_server_messages_round_trip_with_the_generated_class(message: object, allowed: int) -> None:
    octets = encode_server_message(message, allowed)
    wire = ServerWire.FromString(octets)
    assert wire.frames_allowed == allowed
    assert comparable(to_server_message(wire)) == comparable(message)
    found, found_allowed = decode_server_message(wire.SerializeToString())
    assert (comparable(found), found_allowed) == (comparable(message), allowed)


def test_the_bits_of_an_object_mask_are_rows_of_pixels() -> None:
    mask = ObjectMask(5, 6, 3, 2, bytes([0b10101100]))
    assert mask.pixels().tolist() == [[True, False, True], [False, True, True]]
    for width, height, octets in ((3, 2, b""), (3, 3, b"a"), (2**32 - 1, 2**32 - 1, b"a")):
        with pytest.raises(ValueError, match=r"expected \d+ bytes for a mask of"):
            ObjectMask(0, 0, width, height, octets).pixels()


def test_a_map_gives_its_numbers_and_refuses_data_of_another_size() -> None:
    dense = DenseMap("inverse_depth", 1, 3, "mono16", np.array([0, 65535, 13107], "<u2").tobytes(), -1.0, 4.0)
    assert dense.values().tolist() == [pytest.approx([-1, 4, 0])]
    metres = np.array([[0.5], [np.nan]], "<f4")
    assert np.array_equal(
        DenseMap("metric_depth", 2, 1, "32FC1", metres.tobytes(), 0.5, 0.5).values(), metres, equal_nan=True
    )
    for encoding, octets in (("32FC1", b"1234"), ("mono16", b"123"), ("mono8", b"12")):
        with pytest.raises(ValueError, match=r"map|size|reshape"):
            DenseMap("anomaly", 1, 2, encoding, octets, 0.0, 1.0).values()


def test_the_corners_of_a_rotated_box_go_clockwise_with_the_angle() -> None:
    upright = RotatedBox(10, 20, 8, 4, 0.0)
    assert upright.corners() == ((6, 18), (14, 18), (14, 22), (6, 22))
    # The right end goes down, the lower end to the left.
    turned = RotatedBox(10, 20, 8, 4, math.pi / 6)
    long_side, short_side = (4 * math.cos(math.pi / 6), 2.0), (-1.0, 2 * math.cos(math.pi / 6))
    expected = (10 + long_side[0] + short_side[0], 20 + long_side[1] + short_side[1])
    assert turned.corners()[2] == pytest.approx(expected)


@given(st.lists(st.one_of(requests, frames), min_size=2, max_size=3))
def test_concatenated_client_messages_are_merged_as_in_protobuf(parts: list[object]) -> None:
    octets = b"".join(map(encode_client_message, parts))
    assert comparable(decode_client_message(octets)) == comparable(theirs_client(octets))


@given(st.lists(answers, min_size=2, max_size=3))
def test_concatenated_server_messages_are_merged_as_in_protobuf(parts: list[object]) -> None:
    octets = b"".join(encode_server_message(part, 7) for part in parts)
    assert comparable(decode_server_message(octets)) == comparable(theirs_server(octets))


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    octets = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        if octets:
            octets[draw(st.integers(0, len(octets) - 1))] = draw(st.integers(0, 255))
    return bytes(octets[: draw(st.integers(0, len(octets)))]) if draw(st.booleans()) else bytes(octets)


@given(st.one_of(requests, frames).map(encode_client_message).flatmap(damaged))
def test_a_damaged_client_message_is_refused_or_read_as_by_protobuf(octets: bytes) -> None:
    found = ours_client(octets)
    if found is not None:
        assert comparable(found) == comparable(theirs_client(octets))


@given(answers.map(encode_server_message).flatmap(damaged))
def test_a_damaged_server_message_is_refused_or_read_as_by_protobuf(octets: bytes) -> None:
    found = ours_server(octets)
    if found is not None:
        assert comparable(found) == comparable(theirs_server(octets))


@given(st.binary(max_size=80))
def test_random_bytes_are_refused_or_read_as_by_protobuf(octets: bytes) -> None:
    for ours, theirs in ((ours_client, theirs_client), (ours_server, theirs_server)):
        found = ours(octets)
        if found is not None:
            assert comparable(found) == comparable(theirs(octets))


@given(frames, st.sampled_from([(3, 0), (3, 1), (3, 5), (900, 2)]), st.binary(max_size=8))
def test_fields_of_later_versions_are_skipped(frame: Frame, field: tuple[int, int], payload: bytes) -> None:
    number, kind = field
    values = {0: encode_varint(77), 1: bytes(8), 5: bytes(4), 2: encode_varint(len(payload)) + payload}
    unknown = encode_varint(number << 3 | kind) + values[kind]
    assert comparable(decode_client_message(unknown + encode_client_message(frame) + unknown)) == comparable(frame)


def test_a_kind_of_message_of_a_later_version_counts_as_credit() -> None:
    assert decode_server_message(encode_delimited(9, b"news") + encode_number_field(15, 12)) == (Credit(), 12)


def test_a_drop_reason_of_a_later_version_is_counted() -> None:
    wire = ServerWire()
    for number, count in ((99, 2), (0, 1), (1, 4), (1, 1)):
        wire.result.dropped.add(reason=number, count=count)
    found, _ = decode_server_message(wire.SerializeToString())
    assert found.dropped == {DropReason.OTHER: 3, DropReason.NEWER: 5}


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_shape_is_read_packed_and_unpacked(is_packed: bool) -> None:
    dims = b"\x1a\x02\x02\x03" if is_packed else b"\x18\x02\x18\x03"
    tensor = encode_delimited(1, b"x") + encode_delimited(2, b"UINT8") + dims + encode_delimited(15, bytes(range(6)))
    found, _ = decode_server_message(encode_delimited(2, encode_delimited(14, tensor)))
    assert found.tensors[0].array.tolist() == [[0, 1, 2], [3, 4, 5]]


FRAME = b"\x12"
OPEN = b"\x0a"
MALFORMED = {
    "nothing": b"",
    "an unknown kind alone": encode_delimited(7, b"x"),
    "a length beyond the end": FRAME + encode_varint(2**31 - 1) + b"x",
    "a length of 64 bits": FRAME + encode_varint(2**64 - 1),
    "a length of more than 64 bits": FRAME + b"\xff" * 10 + b"\x01",
    "a number of eleven bytes": FRAME + encode_varint(13) + b"\x10" + b"\x80" * 11 + b"\x01",
    "a number cut off": FRAME + encode_varint(2) + b"\x10\x80",
    "a number that runs out of its message": FRAME + encode_varint(2) + b"\x10\x80" + b"\x01\x01",
    "field number 0": b"\x02\x00",
    "a tag beyond 32 bits": encode_varint(1 << 35 | 2) + b"\x00",
    "a tag in six bytes": b"\x80\x80\x80\x80\x81\x00\x00" + FRAME + b"\x00",
    "a group": b"\x13\x14",
    "a group of another number": b"\x1b\x1c",
    "an end of a group": b"\x14",
    "wire type 6": b"\x16",
    "text that is not UTF-8": FRAME + encode_varint(4) + encode_delimited(4, b"\xff\xfe"),
    "half a surrogate": OPEN + encode_varint(5) + encode_delimited(1, b"\xed\xa0\x80"),
    "a height as bytes": FRAME + encode_varint(3) + encode_delimited(2, b"x"),
    "pixels as a number": FRAME + encode_varint(2) + encode_number_field(15, 3),
    "a frame as a number": encode_number_field(2, 1),
    "a rate as a number": OPEN + encode_varint(4) + encode_delimited(5, encode_number_field(4, 1)),
    "fixed bytes cut off": OPEN + encode_varint(5) + encode_delimited(5, b"\x25\x00\x00"),
    "more names than anybody needs": OPEN + encode_varint(2 * (MAX_NAMES + 1) + 3) + b"\x22"
    + encode_varint(2 * (MAX_NAMES + 1)) + b"\x0a\x00" * (MAX_NAMES + 1),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_message_is_an_invalid_request(what: str) -> None:
    if what == "a tag in six bytes" and sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("protobuf's implementation in Python, the only one without an interpreter lock, reads such a tag")
    with pytest.raises(InvalidRequest):
        decode_client_message(MALFORMED[what])


def test_both_parsers_of_results_make_the_same_checks() -> None:
    wrong = encode_delimited(2, encode_number_field(5, 3))  # a model's name as a number
    with pytest.raises(InvalidRequest, match="'model' of Result has the wire type 0"):
        decode_server_message(wrong)
    with pytest.raises(InvalidRequest, match="'model' of Result has the wire type 0"):
        decode_server_message(wrong + encode_delimited(2, b""))  # two parts of one result are merged whole


TENSORS = {
    "an unknown type": (b"FP128", b"\x1a\x01\x01", bytes(16)),
    "too few bytes": (b"FP32", b"\x1a\x01\x02", bytes(4)),
    "a negative dimension": (b"FP32", b"\x1a\x0a" + b"\xff" * 9 + b"\x01", bytes(4)),
    "a shape that overflows": (b"FP32", b"\x1a\x14" + 2 * (b"\xff" * 8 + b"\x7f\x00")[:10], bytes(4)),
    "more dimensions than arrays have": (b"FP32", b"\x1a\x64" + b"\x01" * 100, bytes(4)),
    "strings without their lengths": (b"BYTES", b"\x1a\x01\x02", b"\x09\x00\x00\x00"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_an_inconsistent_tensor_is_an_invalid_request(what: str) -> None:
    datatype, shape, octets = TENSORS[what]
    tensor = encode_delimited(1, b"boxes") + encode_delimited(2, datatype) + shape + encode_delimited(15, octets)
    with pytest.raises(InvalidRequest, match="tensor 'boxes' of a result"):
        decode_server_message(encode_delimited(2, encode_delimited(14, tensor)))


UNFIT: dict[str, Callable[[], bytes]] = {
    "'depth' of Delivery must be 0 to 4294967295, got -1": lambda: encode_client_message(
        StreamRequest("m", delivery=Delivery(depth=-1))
    ),
    "'max_fps' of Delivery must be a number that fits into 32 bits, got 1e\\+300": lambda: encode_client_message(
        StreamRequest("m", delivery=Delivery(max_fps=1e300))
    ),
    "'height' of Frame must be an integer, got float": lambda: encode_client_message(Frame(FrameHeader(), 1.5)),
    "'encoding' of Frame must be text, got int": lambda: encode_client_message(Frame(FrameHeader(), 1, 1, 3)),
    "'data' of Frame must be bytes, got str": lambda: encode_client_message(Frame(FrameHeader(), data="x")),
    "'x_min' of Detection must be a number that fits": lambda: encode_server_message(
        FrameResult(FrameHeader(), detections=(Detection(1e300, 0, 0, 0, 0, 0),))
    ),
}


@pytest.mark.parametrize("message", UNFIT)
def test_an_out_of_range_value_is_refused_by_field_name(message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        UNFIT[message]()


def test_pixels_are_a_view_of_the_message() -> None:
    octets = encode_client_message(Frame(FrameHeader(), 40, 40, "mono8", data=memoryview(bytearray(1600))))
    found = decode_client_message(octets)
    assert isinstance(found, Frame)
    assert found.data.obj is octets


def test_arrays_of_a_result_are_views_of_the_message() -> None:
    tensor = Tensor("x", DType.UINT8, np.zeros((40, 40), np.uint8))
    octets = encode_server_message(FrameResult(FrameHeader(), tensors=(tensor,)))
    found, _ = decode_server_message(octets)
    begin = np.frombuffer(octets, np.uint8).__array_interface__["data"][0]
    assert 0 <= found.tensors[0].array.__array_interface__["data"][0] - begin < len(octets)
    assert not found.tensors[0].array.flags.writeable


def test_strided_views_are_written_correctly() -> None:
    every_other = memoryview(bytes(range(10)))[::2]
    found = decode_client_message(encode_client_message(Frame(FrameHeader(), data=every_other)))
    assert bytes(found.data) == bytes(range(0, 10, 2))


def test_the_path_equals_that_of_the_service() -> None:
    (method,) = service_methods("edge.frames.v1.FrameService")
    assert (method.path, method.client_streaming, method.server_streaming) == (STREAM_PATH, True, True)


def test_importing_the_codec_imports_no_protobuf() -> None:
    code = "import sys, edge_server.protocol.frame_codec; print([n for n in sys.modules if n.startswith('google')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
