"""Header cache: cached headers decode like new ones, and some headers must not be cached."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_server.core.decode_cache import MAX_BYTES, MAX_ENTRIES
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.v2 import infer_json_cache
from edge_server.frontends.v2.infer_body_codec import DecodedRequest, decode_infer, encode_infer
from edge_server.frontends.v2.infer_json_cache import InferJsonCache
from edge_server.memory.shared_memory import SharedMemoryRegistry

REGIONS = SharedMemoryRegistry(is_allowed=True)


def decode(cache: InferJsonCache, body: bytes, size: int | None, spec: ModelSpec, version: int | None = None) -> Any:
    """Decode as an inference does."""
    return cache.lookup(body, size, spec.name, version) or cache.decode_and_store(body, size, spec, version)


@pytest.fixture
def spec(make_spec: Callable[..., ModelSpec]) -> ModelSpec:
    return make_spec("m", DType.FP32)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each header that was read in full."""
    made: list[int] = []

    def counting(*args: Any, **options: Any) -> DecodedRequest:
        made.append(1)
        return decode_infer(*args, **options)

    monkeypatch.setattr(infer_json_cache, "decode_infer", counting)
    return made


def text_of(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def tensor(name: str = "IN", dtype: str = "FP32", shape: list[int] | None = None, size: int = 8) -> dict[str, Any]:
    return {"name": name, "datatype": dtype, "shape": shape or [2], "parameters": {"binary_data_size": size}}


def shown(decoded: DecodedRequest) -> Any:
    request = decoded.request
    inputs = {
        name: (item.name, item.dtype, item.shape, item.array.dtype, item.array.tolist(), item.array.flags.writeable)
        for name, item in request.inputs.items()
    }
    rest = (request.model, request.version, request.id, request.outputs, dict(request.parameters), request.priority)
    more = (request.timeout_us, request.deadline_ns, request.sequence, request.release)
    return inputs, rest, more, decoded.outputs, decoded.binary_output, decoded.output_views, bool(decoded.output_pins)


SAMES: dict[str, tuple[dict[str, Any], bytes]] = {
    "one": ({"inputs": [tensor()]}, np.array([1, 2], "<f4").tobytes()),
    "id": ({"id": "a-1", "inputs": [tensor()]}, np.array([1, 2], "<f4").tobytes()),
    "two": ({"inputs": [tensor(), tensor("B", "INT8", [1, 3], 3)]}, np.array([1, 2], "<f4").tobytes() + b"\1\2\3"),
    "odd address": ({"inputs": [tensor("B", "INT8", [3], 3), tensor()]}, b"\1\2\3" + np.array([1, 2], "<f4").tobytes()),
    "strings": ({"inputs": [tensor("S", "BYTES", [2], 10)]}, b"\1\0\0\0a\1\0\0\0b"),
    "booleans": ({"inputs": [tensor("S", "BOOL", [3], 3)]}, b"\0\1\2"),
    "empty": ({"inputs": [tensor(shape=[0], size=0)]}, b""),
    "outputs": (
        {
            "inputs": [tensor()],
            "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}, {"name": "X"}],
            "parameters": {
                "binary_data_output": True, "mine": 7, "priority": 2, "timeout": 9,
                "sequence_id": 5, "sequence_start": True,
            },
        },
        bytes(8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAMES)
def test_a_header_decodes_the_same_the_third_time(spec, decodings, case):
    members, payload = SAMES[case]
    text = text_of(members)
    expected = shown(decode_infer(text + payload, len(text), spec, REGIONS, version=3))
    decoder = InferJsonCache(REGIONS)
    for _ in range(5):
        assert shown(decode(decoder, text + payload, len(text), spec, version=3)) == expected
    assert len(decodings) == 2


def json_text(*data: str, separators: tuple[str, str] = (",", ":"), dtype: str = "FP32", **more: Any) -> bytes:
    """Return a text whose inputs hold the JSON texts `data`."""
    inputs = [{"name": f"IN{i}" if i else "IN", "datatype": dtype, "shape": [2], "data": i} for i in range(len(data))]
    text = json.dumps({"inputs": inputs, **more}, separators=separators)
    for i, value in enumerate(data):
        text = text.replace(f'"data"{separators[1]}{i}', f'"data"{separators[1]}{value}')
    return text.encode()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("dtype", ["FP32", "INT8"])
def test_json_around_arrays_is_recognised_and_its_numbers_are_read_anew(spec, decodings, separators, dtype):
    cache = InferJsonCache(REGIONS)
    for i in range(6):
        body = json_text(f"[{i}, {i + 1}]", f" [ -{i},7]", separators=separators, dtype=dtype, outputs=[{"name": "X"}])
        decoded = decode(cache, body, None, spec)
        assert shown(decoded) == shown(decode_infer(body, None, spec, REGIONS))
        assert decoded.request.inputs["IN1"].array.tolist() == [-i, 7]
    assert len(decodings) == 2


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("FP32", "[1]"), ("FP32", "[1,2,3]"), ("FP32", "[1,true]"), ("FP32", '[1,"2"]'), ("FP32", "[1,null]"),
        ("FP32", "[1,2"), ("FP32", "1,2]"), ("FP32", "[1,2],"), ("FP32", "[1,2]]"), ("FP32", "[1,,2]"),
        ("FP32", "[1,1e39]"), ("FP32", "[1,{}]"), ("FP32", "[01,2]"), ("FP32", ""), ("FP32", "5"),
        ("FP32", '[1,2],"data":[1,2]'), ("FP32", '[1,2],"name":"IN"'), ("FP32", "[1,2]}]}"), ("FP32", "[1,\u00b2]"),
        ("INT8", "[1,128]"), ("INT8", "[1,2.0]"), ("INT8", "[1,true]"), ("INT8", "[1,1e0]"), ("INT8", "[1,NaN]"),
    ],
)  # fmt: skip
def test_wrong_data_in_a_known_text_is_refused_in_the_same_words(spec, dtype, data):
    cache = InferJsonCache(REGIONS)
    for _ in range(4):
        decode(cache, json_text("[1,2]", dtype=dtype), None, spec)
    body = json_text(data, dtype=dtype)
    with pytest.raises(InvalidRequest) as known:
        decode(cache, body, None, spec)
    with pytest.raises(InvalidRequest) as fresh:
        decode_infer(body, None, spec, REGIONS)
    assert known.value.message == fresh.value.message


@pytest.mark.parametrize("data", ["[[1],[2]]", "[[1,2]]", "[1,-0.5e-3]", "[NaN,Infinity]", "[1,3.4e38]", "[ 1 , 2 ]\n"])
def test_unusual_data_in_a_cached_text_decodes_as_without_the_cache(spec, data):
    cache = InferJsonCache(REGIONS)
    for _ in range(4):
        decode(cache, json_text("[1,2]"), None, spec)
    found, fresh = decode(cache, json_text(data), None, spec), decode_infer(json_text(data), None, spec, REGIONS)
    np.testing.assert_array_equal(found.request.inputs["IN"].array, fresh.request.inputs["IN"].array)


def test_a_string_that_looks_like_data_is_not_cut(spec, decodings):
    cache = InferJsonCache(REGIONS)
    item = '{"name":"IN","datatype":"FP32","shape":[2],"data":[%d,2]}'
    for i in range(5):
        body = b'{"parameters":{"x":"\\"data\\":[1]","data":[1]},"inputs":[' + (item % i).encode() + b"]}"
        with pytest.raises(InvalidRequest):
            decode(cache, body, None, spec)
        body = b'{"parameters":{"x":"\\"data\\":[1,2]"},"inputs":[' + (item % i).encode() + b"]}"
        assert decode(cache, body, None, spec).request.inputs["IN"].array.tolist() == [i, 2]


def answered(*tensors: Tensor, spec: ModelSpec, **more: Any) -> Response:
    return Response("m", 1, outputs=tensors, spec=spec, **{"request_id": "", **more})


@pytest.mark.parametrize("binary", [False, True])
def test_an_answer_of_known_shapes_is_the_text_that_it_is_at_first_sight(make_spec, spec, binary):
    cache = InferJsonCache(REGIONS)
    other = make_spec("m", DType.FP32)
    parameters = {"binary_data_output": binary}
    for i in range(8):
        name = f"r{i}" if i % 2 else ""
        body = json_text("[1,2]", parameters=parameters, **({"id": name} if name else {}))
        body = body if not name else b'{"id":"' + name.encode() + b'",' + json_text("[1,2]", parameters=parameters)[1:]
        decoded = decode(cache, body, None, spec)
        values = np.array([[i, 0.1], [np.nan if i == 6 else -i, 3e38]], "<f4")
        counts = np.arange(2 + (i > 4), dtype="<i8")
        tensors = (Tensor("B", DType.INT64, counts), Tensor("OUT", DType.FP32, values.T if i == 7 else values))
        response = answered(*tensors, spec=other if i > 5 else spec, request_id=name)
        text, chunks, size = cache.encode(response, decoded, spec)
        expected, raw, length = encode_infer(response, decoded, spec)
        assert (text, [bytes(chunk) for chunk in chunks], size) == (expected, [bytes(chunk) for chunk in raw], length)


def test_half_precision_has_no_json_form_at_any_sight(make_spec):
    cache = InferJsonCache(REGIONS)
    spec = make_spec("m", DType.FP32)
    for _ in range(5):
        decoded = decode(cache, json_text("[1,2]"), None, spec)
        response = answered(Tensor("OUT", DType.FP16, np.zeros(2, "<f2")), spec=spec)
        with pytest.raises(InvalidRequest, match="FP16"):
            cache.encode(response, decoded, spec)


def test_ids_in_front_may_change_and_tensors_do(spec, decodings):
    decoder = InferJsonCache(REGIONS)
    for i in range(9):
        text = text_of({"id": f"r{i}", "inputs": [tensor()]})
        payload = np.array([i, -i], "<f4").tobytes()
        request = decode(decoder, text + payload, len(text), spec).request
        assert (request.id, request.inputs["IN"].array.tolist()) == (f"r{i}", [i, -i])
    assert len(decodings) == 2


def test_an_empty_id_in_front_is_recognised_and_stays_empty(spec, decodings):
    decoder = InferJsonCache(REGIONS)
    for i in range(9):
        text = text_of({"id": "", "inputs": [tensor()]})
        payload = np.array([i, -i], "<f4").tobytes()
        request = decode(decoder, text + payload, len(text), spec).request
        assert (request.id, request.inputs["IN"].array.tolist()) == ("", [i, -i])
    assert len(decodings) == 2


def test_one_request_cannot_change_the_parameters_of_the_next(spec):
    decoder = InferJsonCache(REGIONS)
    text = text_of({"inputs": [tensor()], "parameters": {"mine": 1}})
    for _ in range(4):
        parameters = decode(decoder, text + bytes(8), len(text), spec).request.parameters
        assert parameters == {"mine": 1}
        parameters["mine"] = 2


def test_known_headers_with_wrong_payloads_are_refused_in_the_same_words(spec):
    decoder = InferJsonCache(REGIONS)
    text = text_of({"inputs": [tensor()]})
    for _ in range(3):
        decode(decoder, text + bytes(8), len(text), spec)
    for payload in (bytes(7), bytes(9), b""):
        with pytest.raises(InvalidRequest) as known:
            decode(decoder, text + payload, len(text), spec)
        with pytest.raises(InvalidRequest) as fresh:
            decode_infer(text + payload, len(text), spec, REGIONS)
        assert known.value.message == fresh.value.message
    text = text_of({"inputs": [tensor("S", "BYTES", [1], 5)]})
    for _ in range(3):
        decode(decoder, text + b"\1\0\0\0a", len(text), spec)
    with pytest.raises(InvalidRequest, match="incomplete string data"):
        decode(decoder, text + b"\2\0\0\0a", len(text), spec)


def test_a_deadline_counts_from_each_request(spec):
    decoder = InferJsonCache(REGIONS)
    text = text_of({"inputs": [tensor()], "parameters": {"edge_deadline_ms": 1000}})
    for _ in range(4):
        before = time.monotonic_ns()
        assert decode(decoder, text + bytes(8), len(text), spec).request.deadline_ns >= before + 10**9


@pytest.mark.parametrize(
    "text",
    [
        b'{"id":"x","inputs":[],"id":"y"}',
        b'{"id":"x",}',
        b'{"id":"x",,"inputs":[]}',
        b'{"id":"x","inputs":[{"name":"IN"}]}',
    ],
)
def test_invalid_bodies_stay_invalid(spec, text):
    decoder = InferJsonCache(REGIONS)
    for _ in range(4):
        with pytest.raises(InvalidRequest):
            decode(decoder, text, len(text), spec)


def test_an_id_within_the_header_is_each_request_s_own(spec):
    decoder = InferJsonCache(REGIONS)
    for i in range(4):
        for name in ("a", "b"):
            text = text_of({"inputs": [tensor()], "id": name})
            assert decode(decoder, text + bytes(8), len(text), spec).request.id == name, i


def test_a_client_that_never_repeats_itself_fills_no_memory(spec):
    decoder = InferJsonCache(REGIONS)
    for i in range(2 * MAX_ENTRIES):
        text = text_of({"inputs": [tensor(f"IN{i}")]})
        for _ in range(2):
            decode(decoder, text + bytes(8), len(text), spec)
    assert MAX_ENTRIES // 2 < len(decoder._requests) <= MAX_ENTRIES
    assert decoder._requests.used_bytes <= MAX_BYTES
    assert len(decoder._seen) <= 4 * MAX_ENTRIES
    long = text_of({"inputs": [tensor("x" * 3000)]})
    for _ in range(3):
        decode(decoder, long + bytes(8), len(long), spec)
    assert all(long != text for _, _, text in decoder._requests)


def test_many_arrays_cost_no_more_than_their_bytes(spec):
    cache = InferJsonCache(REGIONS)
    item = '{"name":"IN%d","datatype":"FP32","shape":[0],"data":[]}'
    body = ('{"inputs":[' + ",".join(item % i for i in range(1000)) + "]}").encode()
    for _ in range(4):
        assert len(decode(cache, body, None, spec).request.inputs) == 1000
    assert cache._requests == {}
