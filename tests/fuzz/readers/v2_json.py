"""Inference bodies over HTTP: JSON, and JSON with raw tensors behind it.

A body is parsed directly, through the header cache (which may not change the result), and with large arrays cut out
(small ones are cut out here too). The tensors are written as a response and read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from input_reader import InputReader
from stubs import Regions, model, result_of, tensors_key

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.frontends import json_number_arrays
from edge_server.frontends.v2.generate_codec import decode_generate
from edge_server.frontends.v2.infer_body_codec import DecodedRequest, decode_infer, encode_infer
from edge_server.frontends.v2.infer_json_cache import InferJsonCache
from edge_server.frontends.v2.json_tensor_data import tensor_from_json
from edge_server.protocol.raw_tensors import tensor_from_raw

_MODELS = (
    model(DType.FP32), model(DType.BYTES), model(DType.INT64, DType.BOOL), model(DType.UINT8, max_batch_size=4),
    model(DType.FP16, DType.INT8, DType.FP64), model(DType.BF16),
)  # fmt: skip
_SMALL_BYTES = 6
_cut_large = json_number_arrays._LARGE
_cut_small = re.compile(_cut_large.pattern.replace(b"{65536,}", b"{%d,}" % _SMALL_BYTES))
assert _cut_small.pattern != _cut_large.pattern


def _body(index: int, members: Any, payload: bytes = b"", *, is_raw: bool = False) -> bytes:
    text = json.dumps(members, separators=(",", ":")).encode()
    return bytes((index | (0x80 if is_raw else 0),)) + (len(text) if is_raw else 0).to_bytes(2, "big") + text + payload


def seeds() -> Iterable[bytes]:
    def given(name: str, dtype: str, shape: list[int], data: Any = None, **parameters: Any) -> dict[str, Any]:
        item: dict[str, Any] = {"name": name, "shape": shape, "datatype": dtype}
        return {
            **item,
            **({} if data is None else {"data": data}),
            **({"parameters": parameters} if parameters else {}),
        }

    yield _body(0, {"id": "7", "inputs": [given("IN0", "FP32", [3], [1, 2.5, -3e5])]})
    yield _body(0, {"inputs": [given("IN0", "FP32", [2, 2], [[1, 2], [3, 4]])], "outputs": [{"name": "OUT0"}]})
    yield _body(
        1, {"inputs": [given("IN0", "BYTES", [2], ["a", "\u00e4\ud83d\ude00"])], "parameters": {"a": 1, "b": "c"}}
    )
    inputs = [given("IN0", "INT64", [2], [1, -(2**63)]), given("IN1", "BOOL", [1], [True])]
    yield _body(2, {"inputs": inputs, "parameters": {"sequence_id": 3, "sequence_start": True, "priority": 2}})
    yield _body(3, {"inputs": [given("IN0", "UINT8", [1, 4], binary_data_size=4)]}, b"abcd", is_raw=True)
    yield _body(1, {"inputs": [given("IN0", "BYTES", [1], binary_data_size=7)]}, b"\3\0\0\0xyz", is_raw=True)
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 4}
    yield _body(
        0, {"inputs": [given("IN0", "FP32", [2], **region)], "outputs": [{"name": "OUT0", "parameters": region}]}
    )
    outputs = [
        {"name": "OUT0", "parameters": {"binary_data": True}},
        {"name": "OUT2", "parameters": {"classification": 2}},
    ]
    three = [given("IN0", "FP16", [1], binary_data_size=2), given("IN1", "INT8", [3], [1, 2, 3]),
             given("IN2", "FP64", [2], [1e300, 2])]  # fmt: skip
    yield _body(4, {"inputs": three, "outputs": outputs}, b"\0\x3c", is_raw=True)
    yield bytes((0x12, 0, 0, 2, 2, 2, 1, 66, 160, 5, 160, 6, 30, 200, 3, 1, 1, 66, 185, 186, 30, 200, 6, 1, 30, 160, 9))
    yield b"\x40\0\0\0\0\x80\x3f"
    yield b"\x20\0\0" + json.dumps({"IN0": [1, 2], "id": "x", "temperature": 0.5, "parameters": {"k": True}}).encode()


def _key(decoded: DecodedRequest | None) -> Any:
    if decoded is None:
        return None
    request = decoded.request
    return (
        request.id, request.version, tensors_key(request.inputs), request.outputs, repr(dict(request.parameters)),
        request.priority, request.timeout_us, bool(request.deadline_ns), request.sequence, decoded.outputs,
        decoded.binary_output, sorted(decoded.output_views),
    )  # fmt: skip


def _release(decoded: DecodedRequest | None) -> None:
    if decoded is not None:
        decoded.output_pins.release()
        if decoded.request.release is not None:
            decoded.request.release()


WORDS = (
    "inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id", "IN0", "IN1", "IN2", "OUT0", "OUT1",
    "FP32", "BYTES", "INT64", "BOOL", "UINT8", "FP16", "INT8", "FP64", "BF16", "binary_data_size", "binary_data",
    "binary_data_output", "classification", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset",
    "r", "sequence_id", "sequence_start", "priority", "timeout", "edge_deadline_ms", "triton_x",
)  # fmt: skip


def _made_body(take: InputReader) -> bytes:
    """Return a body made from the input, close to a valid one."""
    inputs = []
    for index in range(take.byte() & 3):
        item = {
            "name": f"IN{index}",
            "datatype": take.choice(WORDS[13:22]),
            "shape": [take.byte() & 3, take.byte() & 3],
        }
        item["data"] = take.json(WORDS[13:16], 3)
        inputs.append({**item, take.choice(WORDS): take.json(WORDS, 2)})
    members = {"inputs": inputs, take.choice(WORDS): take.json(WORDS)}
    separators = ((",", ":"), (", ", ": "))[take.byte() & 1]
    return json.dumps(members, ensure_ascii=False, separators=separators).encode()


def check(data: bytes) -> None:
    take = InputReader(data)
    mode = take.byte()
    spec = _MODELS[(mode & 0xF) % len(_MODELS)]
    given = take.number(2)
    header_length = given if mode & 0x80 else 0 if mode & 0x40 else None
    body = _made_body(take) if mode & 0x10 else take.rest()
    regions = Regions()
    if mode & 0x20:
        request = result_of(lambda: decode_generate(body, spec))
        if request is not None:
            assert set(request.inputs) <= {item.name for item in spec.inputs}
        return

    def decode() -> DecodedRequest | None:
        found: DecodedRequest | None = result_of(lambda: decode_infer(body, header_length, spec, regions))
        return found

    decoded = decode()
    key = _key(decoded)
    _compare_cut(decode, key)
    _compare_cached(body, header_length, spec, regions, key)
    if decoded is not None:
        _write_and_read(decoded, spec)
    _release(decoded)
    assert not regions.pinned, f"{regions.pinned} pieces stay pinned"


def _compare_cut(decode: Any, key: Any) -> None:
    json_number_arrays._LARGE, json_number_arrays.LARGE_BYTES = _cut_small, _SMALL_BYTES
    json_number_arrays._PIECE_BYTES = 16
    try:
        decoded = decode()
    finally:
        json_number_arrays._LARGE, json_number_arrays.LARGE_BYTES = _cut_large, 64 << 10
        json_number_arrays._PIECE_BYTES = 256 << 10
    # A piece of 16 bytes cannot hold each number: an error more is allowed, another result is not.
    if decoded is not None:
        assert _key(decoded) == key, "an array that is cut out is read differently"
    _release(decoded)


def _compare_cached(body: bytes, header_length: int | None, spec: ModelSpec, regions: Regions, key: Any) -> None:
    cache = InferJsonCache(regions)
    for _ in range(3):
        recalled: DecodedRequest | None = result_of(lambda: cache.lookup(body, header_length, spec.name, None))
        if recalled is not None:
            assert _key(recalled) == key, "the cache of headers gives another request"
            _release(recalled)
            continue
        learned: DecodedRequest | None = result_of(lambda: cache.decode_and_store(body, header_length, spec, None))
        assert _key(learned) == key
        _release(learned)


def _write_and_read(decoded: DecodedRequest, spec: ModelSpec) -> None:
    tensors = [
        Tensor(f"OUT{index}", tensor.dtype, tensor.array)
        for index, tensor in enumerate(decoded.request.inputs.values())
    ]
    response = Response(model=spec.name, version=1, request_id=decoded.request.id, outputs=tuple(tensors))
    encoded = result_of(lambda: encode_infer(response, decoded, spec))
    if encoded is None:
        return
    text, chunks, size = encoded
    assert (size is None) or size == len(text)
    payload = memoryview(b"".join(chunks))
    members = json.loads(text)
    assert members.get("id", "") == decoded.request.id
    by_name = {tensor.name: tensor for tensor in tensors}
    for item in members["outputs"]:
        tensor = by_name[item["name"]]
        raw_size = item.get("parameters", {}).get("binary_data_size")
        if "data" not in item and raw_size is None:
            continue
        wanted = decoded.outputs.get(item["name"])
        if wanted is not None and wanted.classification:
            continue
        dtype = DType(item["datatype"])
        if raw_size is None:
            found = tensor_from_json(item["name"], dtype, item["shape"], item["data"], model="m")
        else:
            found = tensor_from_raw(item["name"], dtype, item["shape"], payload[:raw_size], model="m")
            payload = payload[raw_size:]
        assert found.shape == tensor.shape
        if dtype in (DType.FP32, DType.FP64) and raw_size is None:
            continue  # decimal digits are rounded; orjson and json have tests of their own
        assert tensors_key({"": found}) == tensors_key({"": tensor}), "a response is read as another tensor"
