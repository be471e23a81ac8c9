from __future__ import annotations

import json

import pytest


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


def test_shapes_follow_the_configuration_with_a_batch_of_one(site):
    assert site.post("/v2/models/raw/generate", {"IN": [1, 2, 3, 4]}).json["OUT"] == [1, 2, 3, 4]
    assert site.service.requests[-1].inputs["IN"].shape == (1, 2, 2)
    assert site.post("/v2/models/raw/generate", {"IN": [1, 2, 3]}).status == 400


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


def test_the_first_response_decides_the_status_of_a_stream(site):
    reply = site.post("/v2/models/full/generate_stream", {"INPUT0": [1] * 4, "INPUT1": [1] * 4})
    assert (reply.status, reply.error) == (503, "Exceeds maximum queue size")


def test_later_errors_of_a_stream_are_events(site):
    from dataclasses import replace

    from edge_server.errors import BackendError

    spec, compute = site.service.models["repeat"]

    def fail_at_last(request):
        responses = compute(request)
        return [*responses[:-1], replace(responses[-1], error=BackendError("lost"))]

    site.service.models["repeat"] = (spec, fail_at_last)
    first, second = events(site.post("/v2/models/repeat/generate_stream", {"IN": 1}))
    assert first["OUT"] == 0
    assert second == {"error": "lost"}


def test_types_that_json_cannot_carry_are_refused(site):
    assert site.post("/v2/models/half/generate", {"IN": 1}).status == 400
