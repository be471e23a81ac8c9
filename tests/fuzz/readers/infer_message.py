"""ModelInferRequest over gRPC: large fields split from a message, typed contents, and the cache of headers.

Each way gives the same request as the message class alone, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from input_reader import InputReader
from stubs import Regions, result_of, tensors_key

from edge_server.errors import InvalidRequest
from edge_server.frontends.grpc import infer_message
from edge_server.frontends.grpc.infer_request import ResponsePlan
from edge_server.frontends.grpc.unary_inference import RequestReader
from edge_server.protocol.messages import message_class

_REQUEST = message_class("inference.ModelInferRequest")
_NEVER = 1 << 40


def seeds() -> Iterable[bytes]:
    def request(**members: Any) -> bytes:
        octets: bytes = _REQUEST(model_name="m", **members).SerializeToString()
        return octets

    fp32 = {"name": "IN0", "datatype": "FP32", "shape": [2]}
    yield request(id="7", inputs=[fp32], raw_input_contents=[b"\0\0\x80\x3f\0\0\0\x40"])
    yield request(
        model_version="3", inputs=[{**fp32, "contents": {"fp32_contents": [1.0, 2.0]}}], outputs=[{"name": "O"}]
    )
    int64 = {"name": "A", "datatype": "INT64", "shape": [3], "contents": {"int64_contents": [1, -1, 1 << 62]}}
    text = {"name": "B", "datatype": "BYTES", "shape": [1, 2], "contents": {"bytes_contents": [b"ab", b""]}}
    yield request(inputs=[int64, text], parameters={"sequence_id": {"int64_param": 4}, "x": {"string_param": "y"}})
    region = {
        "shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 8},
    }  # fmt: skip
    yield request(inputs=[{**fp32, "parameters": region}], outputs=[{"name": "O", "parameters": region}])
    boolean = {"name": "C", "datatype": "BOOL", "shape": [2]}
    yield request(inputs=[boolean, fp32], raw_input_contents=[b"\1\2", b"\0" * 8])
    uint8 = {"name": "D", "datatype": "UINT8", "shape": [2], "contents": {"uint_contents": [1, 255]}}
    yield request(inputs=[uint8], outputs=[{"name": "O", "parameters": {"classification": {"int64_param": 2}}}])


def _key(reader: RequestReader, data: bytes) -> Any:
    plan = ResponsePlan()

    def read() -> Any:
        found = reader.find(data, reader.recognise(data), plan)
        return reader.request(data, found, plan, {})

    request = result_of(read)
    if request is None:
        return None
    key = (
        request.model, request.version, request.id, tensors_key(request.inputs), request.outputs,
        sorted(repr(item) for item in request.parameters.items()), request.priority, request.timeout_us,
        bool(request.deadline_ns), request.sequence, plan.special, plan.version_text, plan.request_id,
        plan.wants_empty_final, plan.places is None,
    )  # fmt: skip
    if request.release is not None:
        request.release()
    plan.release()
    return key


def check(data: bytes) -> None:
    regions = Regions()
    infer_message.MIN_SPLIT_BYTES = _NEVER
    whole = _key(RequestReader(regions), data)
    results = [whole]
    if whole is not None and _REQUEST.FromString(data).SerializeToString(deterministic=True) != data:
        results.append(None)  # such as a number of more than 64 bits, which protobuf cuts off: large ones are refused
    for least in (0, 4, 40):
        infer_message.MIN_SPLIT_BYTES = least
        reader = RequestReader(regions)
        for _ in range(2):  # the second time with the header from the cache
            assert _key(reader, data) in results, f"split from {least} bytes on, a message gives another request"
    # The header in the cache, with other data behind it.
    changed = bytearray(data)
    if changed:
        changed[InputReader(data).byte() % len(changed)] ^= 1
        infer_message.MIN_SPLIT_BYTES = _NEVER
        assert _key(reader, bytes(changed)) == _key(RequestReader(regions), bytes(changed)), "the cache is wrong"
    assert not regions.pinned, f"{regions.pinned} pieces stay pinned"
    assert whole is None or result_of(lambda: _REQUEST.FromString(data), InvalidRequest) is not None
