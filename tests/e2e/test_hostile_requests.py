"""Invalid requests of every type: refused with the right status and message, and the next one is answered."""

from __future__ import annotations

import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

GOOD = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
PATH = "/v2/models/same_INT32/infer"


@pytest.fixture(autouse=True)
def next_request_is_answered(zoo: Any) -> Iterator[None]:
    """After each hostile request the server answers a good one and is still the same process."""
    yield
    status, answer = zoo.infer("same_INT32", {"inputs": [GOOD]})
    assert (status, answer["outputs"][0]["data"]) == (200, [1, 2])
    assert zoo.process.poll() is None


def tensor(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not None}


WRONG_INFERENCES = {
    "no inputs": ({"inputs": []}, ["expected 1 inputs but got 0 inputs for model 'same_INT32'", "INPUT0"]),
    "wrong input name": (
        {"inputs": [tensor(name="WRONG")]},
        ["same_INT32", "INPUT0"],
    ),
    "one input too many": (
        {"inputs": [GOOD, tensor(name="WRONG")]},
        ["same_INT32"],
    ),
    "input twice": ({"inputs": [GOOD, GOOD]}, ["INPUT0"]),
    "wrong output name": (
        {"inputs": [GOOD], "outputs": [{"name": "WRONG"}]},
        ["unexpected inference output 'WRONG' for model 'same_INT32'"],
    ),
    "output twice": ({"inputs": [GOOD], "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]}, ["OUTPUT0"]),
    "wrong type": (
        {"inputs": [tensor(datatype="FP32", data=[1.0, 2.0])]},
        ["inference input 'INPUT0' data-type is 'FP32', but model 'same_INT32' expects 'INT32'"],
    ),
    "no such type": ({"inputs": [tensor(datatype="INT128")]}, ["INT128", "INPUT0", "there are BOOL, ", "FP32"]),
    "too many dimensions": (
        {"inputs": [tensor(shape=[1, 1, 2])]},
        ["unexpected shape for input 'INPUT0' for model 'same_INT32'. Expected [-1,-1], got [1,1,2]"],
    ),
    "batch too big": (
        {"inputs": [tensor(shape=[9, 1], data=[1] * 9)]},
        ["inference request batch-size must be <= 8 for 'same_INT32'"],
    ),
    "fewer values than the shape says": ({"inputs": [tensor(shape=[1, 3])]}, ["INPUT0"]),
    "more values than the shape says": ({"inputs": [tensor(shape=[1, 1])]}, ["INPUT0"]),
    "negative dimension": ({"inputs": [tensor(shape=[1, -2])]}, ["INPUT0"]),
    "dimensions whose product overflows": ({"inputs": [tensor(shape=[1, 2**62])]}, ["INPUT0"]),
    "dimension beyond 64 bits": ({"inputs": [tensor(shape=[1, 2**70])]}, ["INPUT0"]),
    "dimension that is no integer": ({"inputs": [tensor(shape=[1, 2.5])]}, ["shape"]),
    "hundred dimensions": ({"inputs": [tensor(shape=[1] * 100)]}, ["INPUT0"]),
    "number out of the type's range": ({"inputs": [tensor(data=[1, 2**31])]}, ["INPUT0"]),
    "fraction for an integer": ({"inputs": [tensor(data=[1, 2.5])]}, ["INPUT0"]),
    "text for an integer": ({"inputs": [tensor(data=[1, "2"])]}, ["INPUT0"]),
    "null for an integer": ({"inputs": [tensor(data=[1, None])]}, ["INPUT0"]),
    "no data": ({"inputs": [tensor(data=None)]}, ["INPUT0"]),
    "data twice": (
        {"inputs": [tensor(parameters={"binary_data_size": 8})]},
        ["Input must set only one of the following fields"],
    ),
    "binary size beyond the body": (
        {"inputs": [tensor(data=None, parameters={"binary_data_size": 2**40})]},
        ["INPUT0"],
    ),
    "no name": ({"inputs": [tensor(name=None)]}, ["name"]),
    "no shape": ({"inputs": [tensor(shape=None)]}, ["shape"]),
    "no type": ({"inputs": [tensor(datatype=None)]}, ["datatype"]),
    "inputs are no list": ({"inputs": {"INPUT0": [1]}}, ["inputs"]),
    "inputs are missing": ({}, ["inputs"]),
    "an input is no object": ({"inputs": [7]}, ["inputs"]),
    "id is no text": ({"id": 7, "inputs": [GOOD]}, ["id"]),
    "priority is negative": ({"inputs": [GOOD], "parameters": {"priority": -1}}, ["priority"]),
    "timeout is text": ({"inputs": [GOOD], "parameters": {"timeout": "soon"}}, ["timeout"]),
    "parameter is an object": ({"inputs": [GOOD], "parameters": {"x": {"y": 1}}}, ["x"]),
    "parameter is reserved": ({"inputs": [GOOD], "parameters": {"triton_x": 1}}, ["triton_x"]),
    "classes are negative": (
        {"inputs": [GOOD], "outputs": [{"name": "OUTPUT0", "parameters": {"classification": -1}}]},
        ["classification"],
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", WRONG_INFERENCES)
def test_an_invalid_http_request_is_refused_with_the_reason(zoo: Any, case: str) -> None:
    body, words = WRONG_INFERENCES[case]
    status, answer = zoo.infer("same_INT32", body)
    assert status == 400, answer
    assert list(answer) == ["error"]
    for word in words:
        assert word in answer["error"], case


def test_a_wrong_fixed_shape_is_reported_with_the_expected_one(zoo: Any) -> None:
    item = {"datatype": "INT32", "shape": [3, 2], "data": [0] * 6}
    inputs = [{"name": name, **item} for name in ("INPUT0", "INPUT1")]
    status, answer = zoo.infer("fixed", {"inputs": inputs})
    assert status == 400
    assert "for model 'fixed'. Expected [2,3], got [3,2]" in answer["error"]


def test_inputs_of_different_batch_sizes_are_refused(zoo: Any) -> None:
    first = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [0]}
    second = {"name": "INPUT1", "datatype": "FP32", "shape": [2, 1], "data": [0, 0]}
    status, answer = zoo.infer("same_pair", {"inputs": [first, second]})
    assert status == 400
    assert "input 'INPUT1' batch size does not match other inputs for 'same_pair'" in answer["error"]


def test_a_missing_input_is_named(zoo: Any) -> None:
    only = {"name": "INPUT1", "datatype": "FP32", "shape": [1, 1], "data": [0]}
    status, answer = zoo.infer("same_pair", {"inputs": [only]})
    assert status == 400
    assert "expected 2 inputs but got 1 inputs for model 'same_pair'" in answer["error"]
    assert "missing required input(s) ['INPUT0']" in answer["error"]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_fp16_is_refused_in_json_in_both_directions(zoo: Any, datatype: str) -> None:
    item = {"name": "INPUT0", "datatype": datatype, "shape": [1, 1], "data": [0.5]}
    status, answer = zoo.infer(f"same_{datatype}", {"inputs": [item]})
    assert status == 400
    assert f"receiving {datatype} data via JSON is not supported" in answer["error"]
    assert "INPUT0" in answer["error"]
    head = {"inputs": [{**item, "data": None, "parameters": {"binary_data_size": 2}}]}
    del head["inputs"][0]["data"]
    status, answer = post_binary(zoo, f"same_{datatype}", json.dumps(head).encode(), b"\0\0")
    assert status == 400
    assert f"{datatype}" in answer["error"]


def post_binary(zoo: Any, model: str, head: bytes, tail: bytes, length: str | None = None) -> tuple[int, Any]:
    headers = {"Inference-Header-Content-Length": str(len(head)) if length is None else length}
    status, text = zoo.request("POST", f"/v2/models/{model}/infer", head + tail, headers)
    return status, json.loads(text)


def binary_head(size: int, shape: tuple[int, ...] = (1, 2)) -> bytes:
    item = {**tensor(data=None), "shape": shape, "parameters": {"binary_data_size": size}}
    return json.dumps({"inputs": [item]}).encode()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("size", "tail", "message"),
    [
        (8, b"1234", "unexpected size for input 'INPUT0'"),
        (8, b"123456789012", "unexpected additional input data for model 'same_INT32'"),
        (4, b"1234", "input byte size mismatch for input 'INPUT0' for model 'same_INT32'. Expected 8, got 4"),
        (0, b"", "INPUT0"),
        (2**63, b"12345678", "binary_data_size"),
        (-8, b"12345678", "binary_data_size"),
    ],
)
def test_binary_data_of_the_wrong_size_is_refused(zoo: Any, size: int, tail: bytes, message: str) -> None:
    status, answer = post_binary(zoo, "same_INT32", binary_head(size), tail)
    assert status == 400
    assert message in answer["error"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("length", ["-1", "9999999", "many", "", "1e3", "0x10", "1.0", "9" * 4000])
def test_an_invalid_header_length_is_refused(zoo: Any, length: str) -> None:
    status, answer = post_binary(zoo, "same_INT32", binary_head(8), b"12345678", length)
    assert status == 400
    assert "header size" in answer["error"] or "Inference-Header-Content-Length" in answer["error"]


def test_strings_longer_than_the_body_are_refused(zoo: Any) -> None:
    for data in (b"\xff\xff\xff\xff", b"\x05\x00\x00\x00abc", b"\x01\x00", b"\x01\x00\x00\x00ab\x00\x00\x00\x00"):
        item = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
        status, answer = post_binary(zoo, "same_BYTES", json.dumps({"inputs": [item]}).encode(), data)
        assert status == 400, data
        assert "inference input 'INPUT0' for model 'same_BYTES'" in answer["error"], data


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b"7", b'"text"', b"\xff\xfe", b"{'inputs': []}", b'{"inputs": [}', b"\x00" * 100,
        b'{"inputs":' + b"[" * 100_000, b'{"a":' * 100_000, b'{"inputs": [' + b"1," * 100_000 + b"1]}",
        b'{"inputs": ' + b"9" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(zoo: Any, text: bytes) -> None:
    status, body = zoo.request("POST", PATH, text)
    assert status == 400, body
    assert json.loads(body)["error"]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v3", 404), ("GET", "/v2/models", 404),
        ("POST", "/v2/models/same_INT32/infer/more", 404), ("GET", "/v2/../etc/passwd", 404), ("GET", "/%00", 404),
        ("GET", "/v2/models/nobody", 404), ("GET", "/v2/models/nobody/config", 404),
        ("GET", "/v2/models/nobody/versions/1", 404), ("GET", "/v2/models/versions/versions/3", 404),
        ("POST", "/v2/models/nobody/infer", 404),
        ("GET", PATH, 405), ("PUT", PATH, 405), ("DELETE", PATH, 405), ("PATCH", PATH, 405),
        ("POST", "/v2/health/live", 405), ("POST", "/v2", 405), ("GET", "/v2/repository/index", 405),
        ("GET", "/v2/models/versions/versions/one", 400), ("GET", "/v2/models/versions/versions/-1", 400),
        ("GET", "/v2/models/versions/versions/" + "9" * 500, 400),
    ],
)  # fmt: skip
def test_a_wrong_path_or_method_is_refused(zoo: Any, method: str, path: str, status: int) -> None:
    found, body = zoo.request(method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None)
    assert found == status, body
    assert list(json.loads(body)) == ["error"]


def test_messages_for_a_wrong_path_and_method_are_tritons(zoo: Any) -> None:
    assert zoo.ask("/nonsense") == (404, {"error": "Not Found"})
    assert zoo.ask(PATH, method="PUT") == (405, {"error": "Method Not Allowed"})
    status, answer = zoo.ask("/v2/models/nobody/infer", {"inputs": []})
    assert (status, answer) == (404, {"error": "Request for unknown model: 'nobody' is not found"})
    status, answer = zoo.ask("/v2/models/versions/versions/3/infer", {"inputs": []})
    assert "Request for unknown model: 'versions' version 3 is not found" in answer["error"]


def test_a_misspelt_model_is_refused_with_the_nearest_name_unless_it_is_long(zoo: Any) -> None:
    time.sleep(1)  # an earlier test may have used up the suggestions of this second
    status, answer = zoo.ask("/v2/models/same_INT23/infer", {"inputs": []})
    assert (status, answer["error"].partition(" is ")[2]) == (404, "not found, did you mean 'same_INT32'?")
    status, answer = zoo.ask("/v2/models/same_INT32")
    assert status == 200
    status, answer = zoo.ask("/v2/models/same_INT32/versions/99")
    assert (status, "did you mean" in answer["error"]) == (404, False)
    status, answer = zoo.ask("/v2/models/" + "same_INT32" * 7)
    assert (status, "did you mean" in answer["error"]) == (404, False)


def test_many_misspelt_models_get_few_suggestions(zoo: Any) -> None:
    begin_s = time.monotonic()
    answers = [zoo.ask("/v2/models/same_INT23/infer", {"inputs": []})[1]["error"] for _ in range(60)]
    seconds = time.monotonic() - begin_s
    assert all(answer.startswith("Request for unknown model: 'same_INT23' is not found") for answer in answers)
    assert sum("did you mean" in answer for answer in answers) <= 10 * (seconds + 2)


def test_an_unknown_content_encoding_is_refused_with_the_known_ones(zoo: Any) -> None:
    connection = zoo.connection()
    try:
        connection.request("POST", PATH, b"{}", {"Content-Encoding": "br"})
        reply = connection.getresponse()
        assert reply.status == 501
        assert reply.getheader("Accept-Encoding") == "gzip, deflate"
        assert b"error" in reply.read()
    finally:
        connection.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"not gzip"), ("gzip", gzip.compress(b"{}", mtime=0)[:-5]), ("gzip", b""),
        ("deflate", b"\x78\x9c broken"), ("deflate", zlib.compress(b"{}")[:-3]),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"trailing"),
    ],
)  # fmt: skip
def test_a_damaged_compressed_body_is_refused(zoo: Any, encoding: str, body: bytes) -> None:
    status, text = zoo.request("POST", PATH, body, {"Content-Encoding": encoding})
    assert status == 400, text
    assert json.loads(text)["error"]


def test_a_body_that_decompresses_beyond_the_limit_is_refused_without_allocating_it(zoo: Any) -> None:
    bomb = gzip.compress(b"\0" * (200 << 20), 1)
    before = zoo.resident_bytes()
    status, text = zoo.request("POST", PATH, bomb, {"Content-Encoding": "gzip"})
    assert status in (400, 413), text
    assert zoo.resident_bytes() - before < 140 << 20


def test_a_body_above_the_size_limit_is_refused(zoo: Any) -> None:
    connection = zoo.connection()
    try:
        connection.putrequest("POST", PATH)
        connection.putheader("Content-Length", str(65 << 20))
        connection.endheaders()
        # The length alone is enough to refuse: nothing of the body is sent.
        reply = connection.getresponse()
        assert reply.status in (400, 413)
        assert json.loads(reply.read())["error"]
    finally:
        connection.close()


def exchange(zoo: Any, data: bytes) -> bytes:
    """Send bytes as they are and return what comes back until the server closes or the answer stops."""
    host, port = zoo.http.rsplit(":", 1)
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while True:
            part = raw.recv(65536)
            if not part:
                return received
            received += part


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nLong: " + b"x" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_end_only_their_connection(zoo: Any, data: bytes) -> None:
    answer = exchange(zoo, data)
    assert not answer or b" 400 " in answer.split(b"\r\n", 1)[0] or b" 505 " in answer.split(b"\r\n", 1)[0]


def test_a_client_that_disconnects_before_its_body_is_sent_disturbs_no_other(zoo: Any) -> None:
    host, port = zoo.http.rsplit(":", 1)
    for _ in range(10):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{")


def test_a_client_that_disconnects_during_its_request_disturbs_no_other(zoo: Any) -> None:
    host, port = zoo.http.rsplit(":", 1)
    body = json.dumps({"inputs": [GOOD]}).encode()
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            raw.sendall(head + body)
    assert zoo.infer("slow", {"inputs": [GOOD]})[0] == 200


def test_valid_requests_among_invalid_ones_are_all_answered(zoo: Any) -> None:
    def ask(number: int) -> bool:
        if number % 2:
            return zoo.infer("same_INT32", {"inputs": [tensor(shape=[1, 2**40])]})[0] == 400
        return zoo.infer("same_INT32", {"inputs": [GOOD]})[0] == 200

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(80)))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"ready": "yes"}',
        b"\xff",
        b'{"parameters": 7}',
        b'{"log_verbose_level": "x"}',
        b'{"log_info": 1}',
    ],
)
def test_control_endpoints_refuse_invalid_bodies_without_an_internal_error(zoo: Any, body: bytes) -> None:
    for path in ("/v2/repository/index", "/v2/logging", "/v2/repository/models/slow/load"):
        status, text = zoo.request("POST", path, body)
        assert status in (200, 400, 500, 503), text
        assert json.loads(text) is not None


def test_invalid_log_settings_are_refused_and_change_nothing(zoo: Any) -> None:
    before = zoo.ask("/v2/logging")[1]
    for body in ({"log_verbose_level": -1}, {"log_info": "yes"}, {"log_format": "xml"}, {"log_file": "/tmp/x"}):
        status, answer = zoo.ask("/v2/logging", body)
        assert status >= 400, body
        assert answer["error"], body
    assert zoo.ask("/v2/logging")[1] == before


# gRPC


@pytest.fixture(scope="module")
def channel(zoo: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(zoo.grpc) as channel:
        yield channel


def send(channel: grpc.Channel, data: bytes, method: str = "ModelInfer") -> grpc.RpcError:
    call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(data, timeout=30)
    return caught.value


def grpc_request(**changes: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=changes.pop("model_name", "same_INT32"))
    raw = changes.pop("raw", [b"12345678"])
    contents = changes.pop("contents", [])
    item = request.inputs.add(**{"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], **changes})
    if contents:
        item.contents.int_contents.extend(contents)
    request.raw_input_contents.extend(raw)
    return request


WRONG_MESSAGES = {
    "unknown model": (grpc_request(model_name="nobody"), "NOT_FOUND", "unknown model: 'nobody' is not found"),
    "misspelt model": (grpc_request(model_name="same_IN32"), "NOT_FOUND", "is not found, did you mean 'same_INT32'?"),
    "no model": (grpc_request(model_name=""), "NOT_FOUND", "unknown model"),
    "wrong input name": (grpc_request(name="WRONG"), "INVALID_ARGUMENT", "same_INT32"),
    "wrong type": (grpc_request(datatype="FP32"), "INVALID_ARGUMENT", "expects 'INT32'"),
    "no such type": (grpc_request(datatype="INT128"), "INVALID_ARGUMENT", "'INT128'; there are BOOL, "),
    "wrong shape": (grpc_request(shape=[1, 1, 2]), "INVALID_ARGUMENT", "Expected [-1,-1], got [1,1,2]"),
    "negative shape": (grpc_request(shape=[1, -2]), "INVALID_ARGUMENT", "INPUT0"),
    "overflowing shape": (grpc_request(shape=[1, 2**62]), "INVALID_ARGUMENT", "INPUT0"),
    "huge shape": (grpc_request(shape=[2**40, 2**40]), "INVALID_ARGUMENT", "INPUT0"),
    "hundred dimensions": (grpc_request(shape=[1] * 100), "INVALID_ARGUMENT", "INPUT0"),
    "too few bytes": (grpc_request(raw=[b"1234"]), "INVALID_ARGUMENT", "Expected 8, got 4"),
    "too many bytes": (grpc_request(raw=[b"123456789012"]), "INVALID_ARGUMENT", "Expected 8, got 12"),
    "no data": (grpc_request(raw=[]), "INVALID_ARGUMENT", "INPUT0"),
    "one raw too many": (grpc_request(raw=[b"12345678", b"12345678"]), "INVALID_ARGUMENT", "same_INT32"),
    "raw and typed": (
        grpc_request(contents=[1, 2]),
        "INVALID_ARGUMENT",
        "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'same_INT32'",
    ),
    "typed of the wrong count": (grpc_request(raw=[], contents=[1, 2, 3]), "INVALID_ARGUMENT", "INPUT0"),
    "batch too big": (grpc_request(shape=[9, 1], raw=[b"1234" * 9]), "INVALID_ARGUMENT", "batch-size must be <= 8"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", WRONG_MESSAGES)
def test_an_invalid_grpc_message_is_refused_with_the_reason(channel: grpc.Channel, case: str) -> None:
    request, code, words = WRONG_MESSAGES[case]
    error = send(channel, request.SerializeToString())
    assert error.code() is grpc.StatusCode[code], error.details()
    assert words in error.details()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "data",
    [
        b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x2a\x7f", b"\x08", b"\x00", b"\x0a\x05abc", b"\xff" * 100,
        b"\x3a\x80\x80\x80\x80\x10", b"\x0b\x0a",
    ],
)  # fmt: skip
def test_undecodable_bytes_are_refused(channel: grpc.Channel, data: bytes) -> None:
    for method in ("ModelInfer", "ModelConfig", "RepositoryIndex", "SystemSharedMemoryRegister"):
        error = send(channel, data, method)
        assert error.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.NOT_FOUND,
        ), (method, error.details())
        assert "Traceback" not in (error.details() or "")
        assert "Exception iterating" not in (error.details() or "")


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    assert send(channel, b"", "Nonsense").code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_truncated_anywhere_is_refused(channel: grpc.Channel) -> None:
    whole = grpc_request().SerializeToString()
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    for cut in range(len(whole)):
        with pytest.raises(grpc.RpcError) as caught:
            call(whole[:cut], timeout=30)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), cut
