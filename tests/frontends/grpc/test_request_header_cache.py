"""A request whose head was met before is read as if it had not been, and costs no memory for being remembered."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import EdgeServerError, InvalidRequest, NotFound
from edge_server.frontends.decode_cache import MAX_ENTRIES, MAX_KEY_BYTES
from edge_server.frontends.grpc import unary_inference
from edge_server.frontends.grpc.infer_message import InferMessage
from edge_server.frontends.grpc.infer_request import ResponsePlan
from edge_server.frontends.grpc.unary_inference import (
    MAX_LAYOUTS,
    MAX_LAYOUTS_OF_LENGTH,
    RequestReader,
    split_message,
)
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.protocol import messages

SIZES = {"FP32": 4, "INT64": 8, "UINT8": 1, "BOOL": 1, "FP16": 2}
REGIONS = SharedMemoryRegistry(is_allowed=False)


@st.composite
def heads(draw: st.DrawFn) -> Any:
    """A message without id and data: right nearly always."""
    message = messages.ModelInferRequest(model_name=draw(st.sampled_from(("m", "n"))))
    message.model_version = draw(st.sampled_from(("", "1", "7", "x")))
    for _ in range(draw(st.integers(0, 2))):
        message.inputs.add(
            name=draw(st.sampled_from("abé")),
            datatype=draw(st.sampled_from((*SIZES, "BYTES", "FP31"))),
            shape=draw(st.lists(st.integers(-1, 3), max_size=2)),
        )
    for _ in range(draw(st.integers(0, 2))):
        wanted = message.outputs.add(name=draw(st.sampled_from("yz")))
        if draw(st.booleans()):
            wanted.parameters["classification"].int64_param = draw(st.integers(-1, 2))
    for key in draw(st.sets(st.sampled_from(("priority", "timeout", "own", "triton_x", "sequence_id")), max_size=2)):
        message.parameters[key].int64_param = draw(st.integers(-1, 3))
    if draw(st.booleans()):
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


@st.composite
def repetitions(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two messages with one head; the second may lack data, or have too much of it."""
    head = draw(heads())
    made = []
    for _ in range(2):
        message = messages.ModelInferRequest()
        message.CopyFrom(head)
        message.id = draw(st.text(max_size=4))
        for tensor in message.inputs:
            size = SIZES.get(tensor.datatype, 4) * int(np.prod([max(0, dim) for dim in tensor.shape], dtype=np.int64))
            given_bytes = size if draw(st.integers(0, 9)) else draw(st.integers(0, 20))
            data = secrets.token_bytes(given_bytes)
            if draw(st.integers(0, 9)):
                message.raw_input_contents.append(data)
        if draw(st.integers(0, 9)) == 0:
            message.raw_input_contents.append(b"more")
        made.append(message)
    return made[0], made[1]


def read(reader: RequestReader, data: bytes, forwarded: dict[str, str] | None = None) -> tuple[ResponsePlan, Any] | str:
    """Return the decoded request, or the error."""
    try:
        plan = ResponsePlan()
        found = reader.find(data, reader.recognise(data), plan)
        return plan, reader.request(data, found, plan, forwarded or {})
    except EdgeServerError as error:
        return error.message


def told(tensor: Any) -> tuple[object, ...]:
    array = tensor.array
    values = list(array.flat) if tensor.dtype.value == "BYTES" else array.tobytes()
    return tensor.name, tensor.dtype, array.dtype, array.shape, values, array.flags.aligned


def is_same(one: tuple[ResponsePlan, Any] | str, other: tuple[ResponsePlan, Any] | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    (plan, request), (other_plan, other_request) = one, other
    fields = ("model", "version", "id", "outputs", "priority", "parameters", "timeout_us", "sequence", "deadline_ns")
    return (
        plan == other_plan
        and all(getattr(request, field) == getattr(other_request, field) for field in fields)
        and list(request.inputs) == list(other_request.inputs)
        and list(map(told, request.inputs.values())) == list(map(told, other_request.inputs.values()))
    )


headers = st.dictionaries(st.sampled_from(("own", "x-robot")), st.sampled_from(("a", "b")))


@given(repetitions(), headers)
def test_a_cached_header_decodes_as_an_unknown_one(pair: tuple[Any, Any], forwarded: dict[str, str]) -> None:
    reader = RequestReader(REGIONS)
    for number, message in enumerate((*pair, *pair)):
        data = message.SerializeToString()
        more = forwarded if number % 2 else {}
        assert is_same(read(reader, data, more), read(RequestReader(REGIONS), data, more))


@given(repetitions(), st.data())
def test_a_damaged_message_is_not_taken_for_one_that_is_known(pair: tuple[Any, Any], data: st.DataObject) -> None:
    reader = RequestReader(REGIONS)
    for _ in range(2):  # the second time, the layout is kept
        read(reader, pair[0].SerializeToString())
    damaged = bytearray(pair[1].SerializeToString())
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    assert is_same(read(reader, cut), read(RequestReader(REGIONS), cut))


def plain(model: str = "m", request_id: str = "", count: int = 4) -> Any:
    message = messages.ModelInferRequest(model_name=model, id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=[count])
    message.raw_input_contents.append(np.arange(count, dtype=np.float32).tobytes())
    return message


def is_known(reader: RequestReader, message: Any) -> bool:
    data = message.SerializeToString()
    return not isinstance(reader.find(data, reader.recognise(data), ResponsePlan()), InferMessage)


@pytest.mark.parametrize("count", [4, 4096, 100_000])
def test_the_second_request_of_a_client_is_known_whatever_its_id(count: int) -> None:
    reader = RequestReader(REGIONS)
    assert not is_known(reader, plain(count=count))
    read(reader, plain(count=count).SerializeToString())
    assert is_known(reader, plain(count=count))
    assert is_known(reader, plain(request_id="é-17", count=count))


def test_large_data_is_a_view_of_the_message_where_it_is_aligned() -> None:
    reader = RequestReader(REGIONS)
    shifts = set()
    for length in range(1, 5):
        message = plain(model="m" * length, count=4096)
        for _ in range(2):
            data = message.SerializeToString()
            _, request = read(reader, data)
            array = request.inputs["x"].array
            assert not array.flags.writeable or array.base is None
            place = array.__array_interface__["data"][0] - np.frombuffer(data, np.uint8).__array_interface__["data"][0]
            shifts.add(0 <= place < len(data))
    assert shifts == {True, False}


def test_messages_of_equal_length_are_told_apart() -> None:
    reader = RequestReader(REGIONS)
    for _ in range(3):
        for model, request_id in (("ab", "1"), ("ba", "1"), ("a", "12"), ("ab", "2")):
            plan, request = read(reader, plain(model, request_id).SerializeToString())
            assert (request.model, request.id, plan.model, plan.request_id) == (model, request_id, model, request_id)


def test_messages_that_differ_only_in_the_order_of_parameters_are_recognised_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C++ clients write parameters, a map, in an order that differs between request objects: all have one length."""
    reader = RequestReader(REGIONS)
    names = [f"own{number}" for number in range(3)]
    messages_by_order = []
    for order in itertools.permutations(names):
        message = messages.ModelInferRequest(model_name="m")
        parts = [message.SerializeToString()]
        for name in order:
            part = messages.ModelInferRequest()
            part.parameters[name].int64_param = 1
            parts.append(part.SerializeToString())
        messages_by_order.append(b"".join(parts))
    assert len(set(messages_by_order)) == 6 <= MAX_LAYOUTS_OF_LENGTH
    for data in messages_by_order * 2:
        read(reader, data)
    monkeypatch.setattr(unary_inference, "split_message", lambda data: pytest.fail("the layout was not kept"))
    for data in messages_by_order:
        assert dict(read(reader, data)[1].parameters) == dict.fromkeys(names, 1)


def test_the_layouts_of_one_length_are_bounded() -> None:
    reader = RequestReader(REGIONS)
    for number in range(3 * MAX_LAYOUTS_OF_LENGTH):
        for _ in range(2):
            read(reader, plain(model=f"m{number:02}").SerializeToString())
        (layouts,) = reader._layouts.values()
        assert len(layouts) <= MAX_LAYOUTS_OF_LENGTH


def contents(message: Any) -> None:
    del message.raw_input_contents[:]
    message.inputs[0].contents.fp32_contents.extend(range(4))


def deadline(message: Any) -> None:
    message.parameters["edge_deadline_ms"].double_param = 1e6


def sequence(message: Any) -> None:
    message.parameters["sequence_id"].int64_param = 5


def long(message: Any) -> None:
    message.outputs.add(name="y" * MAX_KEY_BYTES)


@pytest.mark.parametrize("change", [contents, deadline, sequence, long])
def test_what_may_change_or_is_long_is_read_anew(change: Any) -> None:
    reader = RequestReader(REGIONS)
    message = plain()
    change(message)
    for _ in range(3):
        assert not isinstance(read(reader, message.SerializeToString()), str)
        assert not is_known(reader, message)


def test_a_request_with_a_fault_is_not_remembered() -> None:
    reader = RequestReader(REGIONS)
    message = plain()
    message.raw_input_contents[0] += b"x"
    assert "byte size mismatch" in str(read(reader, message.SerializeToString()))
    assert not is_known(reader, message)


def test_a_client_that_varies_its_requests_cannot_fill_the_memory() -> None:
    reader = RequestReader(REGIONS)
    for number in range(3 * MAX_ENTRIES):
        for _ in range(2):
            read(reader, plain(model=f"m{number}", request_id="7" * number).SerializeToString())
        assert len(reader._headers) <= MAX_ENTRIES
        assert sum(map(len, reader._layouts.values())) <= MAX_LAYOUTS
    assert is_known(reader, plain(model=f"m{3 * MAX_ENTRIES - 1}"))


@pytest.mark.parametrize("times", [1, 2])
def test_an_id_that_is_no_text_is_refused_with_a_cached_header_too(times: int) -> None:
    reader = RequestReader(REGIONS)
    good = plain(request_id="ab").SerializeToString()
    for _ in range(times):
        read(reader, good)
    bad = good.replace(b"\x1a\x02ab", b"\x1a\x02\xff\xfe")
    assert bad != good
    with pytest.raises(InvalidRequest, match="not a valid ModelInferRequest"):
        reader.find(bad, reader.recognise(bad), ResponsePlan())


@pytest.mark.parametrize("tail", [b"", b"\x3a", b"\x3a\x05", b"\x0a\x81", b"\x08\x01", b"\x3a\x00\x0a\x01m"])
def test_an_outline_ends_where_the_message_ends(tail: bytes) -> None:
    found = split_message(b"\x0a\x01m" + tail)
    assert (found is not None) == (tail == b"")


REGION_BYTES = 1 << 16


@pytest.fixture
def segment() -> Iterator[Path]:
    segment = Path("/dev/shm") / f"edge_heads_{secrets.token_hex(4)}"
    segment.write_bytes(bytes(REGION_BYTES))
    yield segment
    segment.unlink()


@pytest.fixture
def regions(segment: Path) -> Iterator[SharedMemoryRegistry]:
    registry = SharedMemoryRegistry(is_allowed=True)
    registry.register("region", segment.name, 0, REGION_BYTES)
    yield registry
    registry.close()


def in_region(count: int) -> bytes:
    """Return a message whose input of `count` numbers and whose output are in the region."""
    message = messages.ModelInferRequest(model_name="m")
    for owner in (message.inputs.add(name="x", datatype="FP32", shape=[count]), message.outputs.add(name="y")):
        owner.parameters["shared_memory_region"].string_param = "region"
        owner.parameters["shared_memory_byte_size"].int64_param = 4 * count
    data: bytes = message.SerializeToString()
    return data


def request_in_region(reader: RequestReader, data: bytes, plan: ResponsePlan | None = None) -> Request:
    plan = plan or ResponsePlan()
    return reader.request(data, reader.find(data, reader.recognise(data), plan), plan, {})


def test_a_cached_header_pins_its_regions_for_each_request(regions: SharedMemoryRegistry) -> None:
    reader = RequestReader(regions)
    data = in_region(4)
    for number in range(4):
        plan = ResponsePlan()
        found = reader.find(data, reader.recognise(data), plan)
        assert isinstance(found, InferMessage) is (number == 0)
        request = reader.request(data, found, plan, {})
        assert plan.special["y"].region is not None
        assert request.release is not None
        output = Tensor("y", DType.FP32, request.inputs["x"].array)
        assert plan.places.write(output, plan.special["y"].region) == 16
        # A region goes once nobody has it pinned: it is pinned by this request, and by none before.
        request.release()
        plan.release()
    regions.unregister("region")
    with pytest.raises(NotFound, match="region"):
        request_in_region(reader, data)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_region_that_was_registered_anew_is_found(regions: SharedMemoryRegistry, segment: Path, times: int) -> None:
    reader = RequestReader(regions)
    data = in_region(4)
    for _ in range(times):
        request_in_region(reader, data).release()
    segment.write_bytes(np.arange(16, dtype="<f4").tobytes())
    regions.unregister()
    regions.register("region", segment.name, 32, 32)
    request = request_in_region(reader, data)
    assert request.inputs["x"].array.tolist() == [8, 9, 10, 11]
    request.release()
    regions.unregister()
    regions.register("region", segment.name, 0, 8)
    with pytest.raises(InvalidRequest, match="'region': 0 \\+ 16, the region has 8 bytes"):
        request_in_region(reader, data)


def test_a_segment_that_shrank_is_refused_with_a_cached_header(regions: SharedMemoryRegistry, segment: Path) -> None:
    reader = RequestReader(regions)
    data = in_region(4)
    for size in (16, 15, 0):
        os.truncate(segment, REGION_BYTES)
        request_in_region(reader, data).release()
        os.truncate(segment, size)
        if size < 16:
            with pytest.raises(InvalidRequest, match=f"'region': 16 bytes .* shrank to {size} bytes"):
                request_in_region(reader, data)
        else:
            request_in_region(reader, data).release()


def test_values_in_a_region_are_checked_for_each_request(regions: SharedMemoryRegistry, segment: Path) -> None:
    """Strings in a region may become invalid at any time; a request that is refused then holds nothing."""
    reader = RequestReader(regions)
    message = messages.ModelInferRequest(model_name="m")
    given = message.inputs.add(name="x", datatype="BYTES", shape=[1])
    given.parameters["shared_memory_region"].string_param = "region"
    given.parameters["shared_memory_byte_size"].int64_param = 8
    data = message.SerializeToString()
    for number in range(4):
        segment.write_bytes(b"\4\0\0\0abc" + bytes([65 + number]))
        request = request_in_region(reader, data)
        assert request.inputs["x"].array.tolist() == [b"abc" + bytes([65 + number])]
        request.release()
        segment.write_bytes(b"\5\0\0\0abcd")
        with pytest.raises(InvalidRequest, match="incomplete string"):
            request_in_region(reader, data)
    regions.unregister()
    assert segment.name not in Path("/proc/self/maps").read_text()


def test_an_array_that_outlives_its_request_keeps_its_region_mapped(
    regions: SharedMemoryRegistry, segment: Path
) -> None:
    reader = RequestReader(regions)
    data = in_region(REGION_BYTES // 4)
    for _ in range(3):
        plan = ResponsePlan()
        request = request_in_region(reader, data, plan)
        array = request.inputs["x"].array
        request.release()
        plan.release()
    del request
    regions.unregister()
    assert segment.name in Path("/proc/self/maps").read_text()
    assert not array.any()
    del array
    assert segment.name not in Path("/proc/self/maps").read_text()
