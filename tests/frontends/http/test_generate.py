"""Generate endpoints: single responses and streams of events."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError
from edge_server.frontends.http import generate_endpoints


def events(reply):
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    parts = reply.body.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_flat_object_in_is_a_flat_object_out(site):
    reply = site.post("/v2/models/text/generate", {"IN": "hello", "id": "7", "tone": "calm", "parameters": {"n": 2}})
    assert reply.status == 200
    assert reply.json == {
        "model_name": "text",
        "model_version": "1",
        "id": "7",
        "parameters": {"n": 2, "tone": "calm"},
        "OUT": "hello",
    }
    assert site.post("/v2/models/text/versions/2/generate", {"IN": ["a", "b"]}).json["OUT"] == ["a", "b"]


def test_a_response_without_outputs_is_an_object_with_the_model_alone(site):
    told = {"model_name": "sink", "model_version": "1"}
    assert site.post("/v2/models/sink/generate", {"IN": 1}).json == told
    assert events(site.post("/v2/models/sink/generate_stream", {"IN": 1})) == [told]


def test_the_inputs_stand_in_the_order_of_the_body(site):
    for names in (["INPUT1", "INPUT0"], ["INPUT0", "INPUT1"]):
        assert site.post("/v2/models/add/generate", {name: [1, 2, 3, 4] for name in names}).status == 200
        assert list(site.service.requests[-1].inputs) == names


def test_shapes_follow_the_configuration_with_a_batch_of_one(site):
    assert site.post("/v2/models/raw/generate", {"IN": [1, 2, 3, 4]}).json["OUT"] == [1, 2, 3, 4]
    assert site.service.requests[-1].inputs["IN"].shape == (1, 2, 2)
    assert site.post("/v2/models/raw/generate", {"IN": [1, 2, 3]}).status == 400


def test_a_body_of_infer_and_several_rows_are_refused_with_the_path_for_them(site):
    reply = site.post("/v2/models/add/generate", {"inputs": [{"name": "INPUT0"}]})
    assert reply.status == 400
    assert reply.error == (
        "invalid value type for 'inputs' parameter: a list of inputs is a body for /v2/models/add/infer; "
        'expected {"INPUT0": [...], "INPUT1": [...]}'
    )
    reply = site.post("/v2/models/add/generate", {"INPUT0": [[1, 2, 3, 4], [5, 6, 7, 8]], "INPUT1": [1, 2, 3, 4]})
    assert reply.status == 400
    assert reply.error.endswith("expected 4 elements, got 8; generate takes one row, /v2/models/add/infer several")


def test_a_misspelt_input_that_is_no_parameter_is_refused_with_the_missing_inputs(site):
    reply = site.post("/v2/models/add/generate", {"input0": [1, 2, 3, 4], "INPUT1": [1, 2, 3, 4]})
    assert reply.status == 400
    assert reply.error.startswith("invalid value type for 'input0' parameter, expected ")
    assert reply.error.endswith("; missing required input(s) ['INPUT0']")


@pytest.mark.parametrize("body", [b"", b"{", {"IN": {}}, {"IN": "x", "other": []}, {"IN": "x", "id": 1}, {"IN": None}])
def test_wrong_bodies_are_refused(site, body):
    assert site.post("/v2/models/text/generate", body).status == 400


@pytest.mark.parametrize(("count", "status"), [(0, 500), (1, 200), (2, 500)])
def test_generate_needs_exactly_one_response(site, count, status):
    reply = site.post("/v2/models/repeat/generate", {"IN": count})
    assert reply.status == status
    if status == 500:
        assert "generate expects model to produce exactly 1 response" in reply.error
    else:
        assert reply.json["OUT"] == 0


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_stream_has_one_event_for_each_response(site, count):
    reply = site.post("/v2/models/repeat/generate_stream", {"IN": count})
    assert reply.status == 200
    assert [event["OUT"] for event in events(reply)] == list(range(count))


PAIR = {"INPUT0": [1] * 4, "INPUT1": [1] * 4}


def test_the_first_response_decides_the_status_of_a_stream_and_is_an_event_all_the_same(site):
    reply = site.post("/v2/models/full/generate_stream", PAIR)
    assert reply.status == 503
    assert events(reply) == [{"error": "Exceeds maximum queue size"}]


def test_a_stream_that_begins_with_an_error_has_the_headers_that_the_error_brings(site):
    plain = site.post("/v2/models/hot/generate", PAIR)
    reply = site.post("/v2/models/hot/generate_stream", PAIR)
    assert events(reply) == [{"error": plain.error}]
    assert (reply.status, reply.headers["Retry-After"]) == (plain.status, plain.headers["Retry-After"])
    assert reply.headers["Retry-After"] is not None


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("add", {"INPUT0": [1] * 4}, 400), ("absent", PAIR, 404), ("add", b"{", 400)],
    ids=["an input is missing", "no such model", "no JSON"],
)
def test_a_refusal_before_the_response_is_no_event(site, path, body, status):
    reply = site.post(f"/v2/models/{path}/generate_stream", body)
    assert (reply.status, reply.headers["Content-Type"]) == (status, "application/json")
    assert reply.error


def test_what_comes_after_a_first_error_is_sent_too(site):
    spec, compute = site.service.models["repeat"]

    def fail_at_first(request):
        first, *more = compute(request)
        return [replace(first, outputs=(), error=BackendError("lost")), *more]

    site.service.models["repeat"] = (spec, fail_at_first)
    reply = site.post("/v2/models/repeat/generate_stream", {"IN": 3})
    first, *more = events(reply)
    assert (reply.status, first) == (500, {"error": "lost"})
    assert [event["OUT"] for event in more] == [1, 2]


@pytest.mark.parametrize("place", [0, 1])
def test_a_response_that_json_cannot_carry_is_an_event_that_says_so(site, place):
    spec, compute = site.service.models["repeat"]
    half = Tensor("OUT", DType.FP16, np.zeros(1, np.float16))

    def make_half(request):
        responses = compute(request)
        responses[place] = replace(responses[place], outputs=(half,))
        return responses

    site.service.models["repeat"] = (spec, make_half)
    reply = site.post("/v2/models/repeat/generate_stream", {"IN": 2})
    assert reply.status == (400 if place == 0 else 200)
    told = events(reply)
    assert "FP16" in told[place]["error"]
    assert told[1 - place]["OUT"] == 1 - place


def test_later_errors_of_a_stream_are_events(site):
    spec, compute = site.service.models["repeat"]

    def fail_at_last(request):
        responses = compute(request)
        return [*responses[:-1], replace(responses[-1], is_empty=False, error=BackendError("lost"))]

    site.service.models["repeat"] = (spec, fail_at_last)
    first, second = events(site.post("/v2/models/repeat/generate_stream", {"IN": 1}))
    assert first["OUT"] == 0
    assert second == {"error": "lost"}


def endless(request):
    """Answer without end."""
    from edge_server.core.request_response import Response

    for number in itertools.count():
        yield Response("repeat", 1, "", (Tensor("OUT", DType.INT32, np.array([number], "<i4")),), is_final=False)


@contextlib.contextmanager
def endless_stream(site):
    """Yield a socket on which the events of an endless answer come."""
    spec, _ = site.service.models["repeat"]
    stop = threading.Event()

    def compute(request):
        for response in endless(request):
            if stop.is_set() or site.service.tickets[-1].was_cancelled.is_set():
                return
            yield response

    site.service.models["repeat"] = (spec, compute)
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:
        body = b'{"IN": 1}'
        client.sendall(
            b"POST /v2/models/repeat/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        try:
            yield client
        finally:
            stop.set()


def test_a_stream_that_never_ends_leaves_other_requests_their_turn(site):
    with endless_stream(site) as client:
        reading = threading.Event()

        def read():
            while not reading.is_set() and client.recv(1 << 16):
                pass

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(5):
                assert site.get("/v2/health/live").status == 200
        finally:
            reading.set()
            reader.join()


def test_a_reader_that_stops_reading_loses_its_connection_and_its_request(site, monkeypatch):
    monkeypatch.setattr(generate_endpoints, "MAX_BACKLOG", 2000)
    with endless_stream(site) as client:
        # Nothing is read until then: a loop that comes late may find that many responses before the first is sent.
        assert site.service.submitted.wait(30)
        assert site.service.tickets[-1].was_cancelled.wait(30), "the request was not taken back"
        # What was on its way still comes, then the connection is at its end, in good order or by a reset.
        with contextlib.suppress(ConnectionResetError):
            while client.recv(1 << 20):
                pass


def test_a_client_that_is_cut_off_before_its_first_event_is_nothing_to_log(site, monkeypatch, caplog):
    monkeypatch.setattr(generate_endpoints, "MAX_BACKLOG", 0)
    with endless_stream(site) as client:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert site.service.tickets[-1].was_cancelled.wait(30)
    assert site.get("/v2/health/live").status == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_types_that_json_cannot_carry_are_refused(site):
    assert site.post("/v2/models/half/generate", {"IN": 1}).status == 400
