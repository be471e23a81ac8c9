"""Inference over HTTP: JSON, binary data, compression, errors and cancellation."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.frontends.http import generate_endpoints, inference_route
from edge_server.frontends.http.inference_route import TEXT_ON_LOOP_BYTES
from edge_server.frontends.v2 import infer_json_cache
from edge_server.service import READING_THREAD_HOLD_US
from tests.kit.eventually import eventually


def add_body(**more):
    item = {"shape": [1, 4], "datatype": "INT32"}
    return {
        "inputs": [
            {"name": "INPUT0", "data": [1, 2, 3, 4], **item},
            {"name": "INPUT1", "data": [[1, 1, 1, 1]], **item},
        ],
        **more,
    }


def test_json_in_is_json_out(site):
    reply = site.post("/v2/models/add/versions/2/infer", add_body(id="7"))
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers["Inference-Header-Content-Length"] is None
    assert reply.json == {
        "id": "7",
        "model_name": "add",
        "model_version": "2",
        "outputs": [
            {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 4], "data": [2, 3, 4, 5]},
            {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 4], "data": [0, 1, 2, 3]},
        ],
    }


def test_a_short_model_may_run_on_the_thread_that_reads(site):
    assert site.post("/v2/models/add/infer", add_body()).status == 200
    assert site.service.holds_us == [READING_THREAD_HOLD_US]


def test_a_wrong_input_name_is_the_error_even_if_its_data_is_wrong_too(site):
    wrong = {"name": "INPUT_0", "shape": [1, 4], "datatype": "INT32", "data": [1]}
    reply = site.post("/v2/models/add/infer", {"inputs": [wrong]})
    assert reply.status == 400
    assert reply.json["error"].startswith(
        "unexpected inference input 'INPUT_0' for model 'add', which has 'INPUT0', 'INPUT1' ("
    )


@pytest.mark.parametrize("binary", [False, True])
def test_a_response_without_outputs_is_200_with_an_empty_list(site, binary):
    given = {"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}
    body = {"id": "7", "inputs": [given], "parameters": {"binary_data_output": binary}}
    reply = site.post("/v2/models/sink/infer", body)
    assert reply.status == 200
    assert reply.json == {"id": "7", "model_name": "sink", "model_version": "1", "outputs": []}


def test_binary_in_is_binary_out_in_model_order(site):
    values = np.arange(4, dtype="<i4").reshape(1, 4)
    text = json.dumps(
        {
            "inputs": [
                {"name": name, "shape": [1, 4], "datatype": "INT32", "parameters": {"binary_data_size": 16}}
                for name in ("INPUT0", "INPUT1")
            ],
            "outputs": [
                {"name": "OUTPUT1", "parameters": {"binary_data": True}},
                {"name": "OUTPUT0", "parameters": {"binary_data": True}},
            ],
        }
    ).encode()
    reply = site.post(
        "/v2/models/add/infer",
        text + values.tobytes() + values.tobytes(),
        {"Inference-Header-Content-Length": str(len(text))},
    )
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "application/octet-stream"
    length = int(reply.headers["Inference-Header-Content-Length"])
    header = json.loads(reply.body[:length])
    assert [output["name"] for output in header["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert reply.body[length:] == (values + values).tobytes() + bytes(16)


@pytest.mark.parametrize("size", [10, 70_000, 1_000_003])
def test_binary_bodies_of_any_size_arrive_whole_and_aligned(site, size):
    values = np.random.default_rng(1).random(size, dtype="f4")
    text = json.dumps(
        {
            "inputs": [
                {"name": "IN", "shape": [size], "datatype": "FP32", "parameters": {"binary_data_size": 4 * size}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    reply = site.post("/v2/models/float/infer", text + values.tobytes(), headers)
    length = int(reply.headers["Inference-Header-Content-Length"])
    assert reply.body[length:] == values.tobytes()
    array = site.service.requests[-1].inputs["IN"].array
    assert array.flags.aligned
    if size > 100_000:
        assert not array.flags.owndata, "a large tensor is a view of the body"


def test_a_raw_body_needs_only_the_header(site):
    values = np.arange(6, dtype="<f4")
    reply = site.post("/v2/models/raw/infer", values.tobytes(), {"Inference-Header-Content-Length": "0"})
    length = int(reply.headers["Inference-Header-Content-Length"])
    assert json.loads(reply.body[:length])["outputs"][0]["shape"] == [1, 3, 2]
    assert reply.body[length:] == values.tobytes()
    reply = site.post("/v2/models/bytes1/infer", b"\xff\xd8", {"Inference-Header-Content-Length": "0"})
    assert reply.body.endswith(b"\x02\0\0\0\xff\xd8")
    assert (
        "must only have 1 input"
        in site.post("/v2/models/add/infer", b"1234", {"Inference-Header-Content-Length": "0"}).error
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [("x", "Unable to parse Inference-Header-Content-Length"), ("-1", "inference header size should be in range (0,")],
)
def test_bad_header_lengths_are_refused(site, value, words):
    reply = site.post("/v2/models/add/infer", add_body(), {"Inference-Header-Content-Length": value})
    assert reply.status == 400
    assert words in reply.error


def test_classes_come_with_labels(site):
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": 2}}]
    output = site.post("/v2/models/add/infer", add_body(outputs=outputs)).json["outputs"][0]
    assert output == {"name": "OUTPUT0", "datatype": "BYTES", "shape": [1, 2], "data": ["5:3", "4:2:two"]}


def test_tensors_travel_through_shared_memory_both_ways(site):
    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        values = np.array([5, 6, 7, 8], "<i4")
        segment.buf[:16] = values.tobytes()
        path = "/v2/systemsharedmemory/region/r/register"
        assert site.post(path, {"key": segment.name, "byte_size": 64}).status == 200
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
        item = {"shape": [1, 4], "datatype": "INT32", "parameters": place}
        body = {
            "inputs": [{"name": "INPUT0", **item}, {"name": "INPUT1", **item}],
            "outputs": [{"name": "OUTPUT0", "parameters": {**place, "shared_memory_offset": 32}}],
        }
        reply = site.post("/v2/models/add/infer", body)
        assert reply.json["outputs"] == [{"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 4]}]
        assert bytes(segment.buf[32:48]) == (2 * values).tobytes()
        body["outputs"][0]["parameters"]["shared_memory_byte_size"] = 8
        assert "should be at least 16 bytes" in site.post("/v2/models/add/infer", body).error
        assert site.post("/v2/systemsharedmemory/unregister").status == 200
        gone = site.post("/v2/models/add/infer", body)
        assert (gone.status, gone.error) == (404, "Unable to find shared memory region: 'r'")
    finally:
        segment.close()
        segment.unlink()


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("nobody", 404, "Request for unknown model: 'nobody' is not found"),
        ("add/versions/3", 503, "is not at ready state"),
        ("add/versions/x", 400, "failed to get model version from specified version string 'x'"),
        ("repeat", 501, "HTTP end point doesn't support models with decoupled transaction policy"),
        ("full", 503, "Exceeds maximum queue size"),
        ("hot", 429, "too hot"),
        ("broken", 500, "internal error"),
    ],
)
def test_failures_have_tritons_status_and_words(site, path, status, words):
    reply = site.post(f"/v2/models/{path}/infer", add_body())
    assert reply.status == status
    assert words in reply.error


def test_refusals_say_when_to_come_back(site):
    assert site.post("/v2/models/full/infer", add_body()).headers["Retry-After"] == "1"
    assert site.post("/v2/models/hot/infer", add_body()).headers["Retry-After"] == "3"
    assert site.post("/v2/models/add/infer", b"{").headers["Retry-After"] is None


def test_a_request_that_the_model_refuses_is_answered_400(site):
    body = add_body(id="9")
    body["inputs"][0]["name"] = "OTHER"
    reply = site.post("/v2/models/add/infer", body)
    assert reply.status == 400
    assert "[request id: 9] unexpected inference input 'OTHER' for model 'add'" in reply.error


def test_matching_headers_become_parameters_and_reserved_ones_are_refused(open_site):
    site = open_site(header_pattern=re.compile("x-.*|priority", re.IGNORECASE))
    body = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}], "parameters": {"gain": 2}}
    reply = site.post("/v2/models/float/infer", body, {"x-frame": "7", "other": "8"})
    assert reply.json["parameters"] == {"gain": 2, "x-frame": "7"}
    assert site.post("/v2/models/float/infer", body, {"Priority": "1"}).status == 400


def test_a_client_that_leaves_takes_its_request_back(site):
    body = json.dumps(add_body()).encode()
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        head = f"POST /v2/models/never/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert site.service.submitted.wait(10)
    assert site.service.tickets[0].was_cancelled.wait(10)


def test_stopping_waits_for_answers_under_way_and_then_cuts(open_site):
    site = open_site()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            site.post("/v2/models/never/infer", add_body())
        except (http.client.HTTPException, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert site.service.submitted.wait(10)
    site.run(site.frontend.stop(0.05))
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert site.service.tickets[0].was_cancelled.wait(10)
    with pytest.raises(OSError):
        site.get("/v2/health/live")


def test_many_clients_at_once_each_get_their_own_answer(site):
    def ask(number: int) -> tuple[int, str]:
        item = {"shape": [1, 4], "datatype": "INT32"}
        inputs = [{"name": name, "data": [number] * 4, **item} for name in ("INPUT0", "INPUT1")]
        answer = site.post("/v2/models/add/infer", {"id": str(number), "inputs": inputs}).json
        return answer["outputs"][0]["data"][0], answer["id"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(200))) == [(2 * number, str(number)) for number in range(200)]


def test_a_connection_serves_many_requests_even_after_errors(site):
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    for _ in range(5):
        for path, body, status in (
            ("/v2/models/nobody/infer", json.dumps(add_body()), 404),
            ("/v2/models/add/infer", "{", 400),
            ("/v2/models/add/infer", json.dumps(add_body()), 200),
            ("/nothing", "x" * 1000, 404),
        ):
            connection.request("POST", path, body=body)
            reply = connection.getresponse()
            reply.read()
            assert reply.status == status
    assert connection.sock is not None
    connection.close()


@pytest.mark.parametrize("model", ["image", "float"])
def test_an_image_or_text_without_a_type_is_told_which_images_are_read_and_the_header(site, model):
    path = f"/v2/models/{model}/infer"
    as_form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl --data-binary says
    for body in (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"\xff\xd8\xff\xe0\0\x10JFIF" + b"[{" * 200,
        b"RIFF\x00\x01\x02\x03WEBPVP8 ",
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        b"GIF89a\1\0\1\0",
        b"a note",
    ):
        given = f"given {len(body)} bytes beginning with 0x{body[:8].hex()}"
        for headers in ({}, as_form):
            reply = site.post(path, body, headers)
            assert reply.status == 400
            assert "expected a JPEG, PNG, BMP or WebP image with the header 'Content-Type: image/jpeg', " in reply.error
            assert given in reply.error


def test_json_that_is_damaged_is_not_taken_for_an_image(site):
    assert "picture" not in site.post("/v2/models/float/infer", b'{"inputs": [,').error


@pytest.mark.parametrize("content_type", ["image/png", "multipart/form-data; boundary=x"])
def test_a_body_that_no_plugin_decodes_is_read_as_json(site, content_type):
    reply = site.post("/v2/models/image/infer", b"x", {"Content-Type": content_type})
    assert reply.status == 400
    assert reply.error.startswith("failed to parse the request JSON buffer: ")


def test_a_body_goes_to_the_decoder_of_its_type(open_site):
    def decode(content_type, body, spec):
        assert (content_type, spec.name) == ("audio/wav; rate=1", "float")
        values = np.frombuffer(body, np.uint8).astype(np.float32)
        return {"IN": Tensor("IN", DType.FP32, values)}, {}

    site = open_site(body_decoders={"audio/": decode})
    reply = site.post("/v2/models/float/infer", b"\1\2", {"Content-Type": "audio/wav; rate=1"})
    assert reply.json["outputs"][0]["data"] == [1.0, 2.0]


def decoding_threads(monkeypatch, name, *modules):
    """Return the threads that decoded, noted as they do."""
    seen = []
    decode = getattr(modules[0], name)

    def noting(*args, **more):
        seen.append(threading.current_thread())
        return decode(*args, **more)

    for module in modules:
        monkeypatch.setattr(module, name, noting)
    return seen


@pytest.mark.parametrize("tail", [b"", b"\0\0\x80\x3f"], ids=["all of it", "before raw tensors"])
def test_much_json_is_parsed_beside_the_loop_and_little_on_it(site, monkeypatch, tail):
    threads = decoding_threads(monkeypatch, "decode_infer", inference_route, infer_json_cache)
    tensor = {"name": "IN", "shape": [1], "datatype": "FP32"}
    source = {"parameters": {"binary_data_size": 4}} if tail else {"data": [1.0]}
    for spaces in (0, TEXT_ON_LOOP_BYTES):
        text = json.dumps({"inputs": [{**tensor, **source}]}).encode() + b" " * spaces
        headers = {} if spaces else {"Content-Encoding": "identity"}
        if tail:
            headers["Inference-Header-Content-Length"] = str(len(text))
        reply = site.post("/v2/models/float/infer", text + tail, headers)
        assert reply.json["outputs"][0]["data"] == [1.0]
    assert threads[0] is site._thread
    assert [thread.name.startswith("http-worker") for thread in threads] == [False, True]


@pytest.mark.parametrize("names_length", [False, True])
def test_json_that_differs_in_its_numbers_is_recognised_the_third_time(site, monkeypatch, names_length):
    threads = decoding_threads(monkeypatch, "decode_infer", inference_route, infer_json_cache)
    for number in range(1, 6):
        given = {"name": "IN", "shape": [1], "datatype": "FP32", "data": [float(number)]}
        text = json.dumps({"inputs": [given]}, separators=(",", ":")).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))} if names_length else {}
        reply = site.post("/v2/models/float/infer", text, headers)
        assert reply.json["outputs"][0]["data"] == [float(number)]
    assert len(threads) == 2


def test_much_json_to_generate_is_parsed_beside_the_loop(site, monkeypatch):
    threads = decoding_threads(monkeypatch, "decode_generate", generate_endpoints)
    long = "x" * TEXT_ON_LOOP_BYTES
    assert site.post("/v2/models/text/generate", {"IN": "short"}).json["OUT"] == "short"
    assert site.post("/v2/models/text/generate", {"IN": long}).json["OUT"] == long
    assert threads[0] is site._thread
    assert threads[1].name.startswith("http-worker")


def test_a_request_decoded_for_a_client_that_left_is_released(site, monkeypatch):
    decode = inference_route.decode_infer
    has_begun, may_end, was_released = threading.Event(), threading.Event(), threading.Event()
    outputs = []

    def slowly(*args, **more):
        decoded = decode(*args, **more)
        decoded.request.release = was_released.set
        outputs.append(decoded.output_pins)
        has_begun.set()
        assert may_end.wait(60)
        return decoded

    monkeypatch.setattr(inference_route, "decode_infer", slowly)
    block = shared_memory.SharedMemory(create=True, size=64)
    try:
        region = {"key": f"/{block.name}", "byte_size": 64}
        assert site.post("/v2/systemsharedmemory/region/out/register", region).status == 200
        place = {"shared_memory_region": "out", "shared_memory_byte_size": 64}
        members = {
            "inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.0]}],
            "outputs": [{"name": "OUT", "parameters": place}],
        }
        body = json.dumps(members).encode() + b" " * TEXT_ON_LOOP_BYTES
        head = f"POST /v2/models/float/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", site.port), timeout=60) as client:
            client.sendall(head.encode() + body)
            assert has_begun.wait(60)
        budget = site.frontend._budget
        assert eventually(lambda: not site.frontend._server._setups[0].connections._open)
        assert outputs[0]
        may_end.set()
        assert was_released.wait(60)
        assert not outputs[0]
        assert site.service.requests == []
        assert eventually(lambda: budget.held == 0)
    finally:
        may_end.set()
        block.close()
        block.unlink()
