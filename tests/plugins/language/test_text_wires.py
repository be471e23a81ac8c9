"""What each API for texts promises: the same text whole and in parts, errors in its own form, and a live stream."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

import pytest

from edge_server.core.request_response import Request, Response
from edge_server.errors import BackendError, BadSchema, ConstraintFailed, Throttled
from edge_server.plugins.language.openai import api_endpoints
from tests.plugins.language.talker import HELLO, TALKER, fails_with, two_words

CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "hello"},
}
OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.fixture(params=CALLS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(site: Any, path: str, *, is_stream: bool, **members: Any) -> Any:
    return site.post(path, {"model": "talker", "stream": is_stream, **CALLS[path], **members})


def events(body: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of a stream of events or of lines."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n")]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def whole_text(path: str, answer: dict[str, Any]) -> str:
    match path:
        case "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        case "/v1/completions":
            return str(answer["choices"][0]["text"])
        case "/v1/responses":
            return str(answer["output"][0]["content"][0]["text"])
        case "/v1/messages":
            return str(answer["content"][0]["text"])
        case _:
            return part_text(path, answer)


def part_text(path: str, event: dict[str, Any]) -> str:
    match path:
        case "/v1/chat/completions":
            return str(event["choices"][0]["delta"].get("content", ""))
        case "/v1/completions":
            return str(event["choices"][0]["text"])
        case "/v1/responses":
            return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
        case "/v1/messages":
            return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""
        case "/api/chat":
            return str(event["message"]["content"])
        case _:
            return str(event["response"])


def ends(path: str, event: dict[str, Any]) -> bool:
    """Return whether an event says that the answer is complete."""
    if path in OPENAI[:2]:
        return any(choice["finish_reason"] for choice in event.get("choices", ()))
    return event.get("type") in ("response.completed", "message_delta", "message_stop") or event.get("done") is True


def error_of(path: str, message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in the form of an API."""
    if path in OPENAI:
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}
    if path == "/v1/messages":
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": message}


def test_a_text_is_the_same_whole_and_in_parts(talker: Any, path: str) -> None:
    reply = ask(talker, path, is_stream=False)
    assert reply.headers["Content-Type"] == "application/json"
    assert whole_text(path, reply.json) == "two words"
    reply = ask(talker, path, is_stream=True)
    kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
    assert reply.headers["Content-Type"].startswith(kind)
    found = events(reply.body)
    assert [text for event in found if (text := part_text(path, event))] == ["two", " words"]
    assert ends(path, found[-1]) or path in OPENAI[:2]
    assert not any(ends(path, event) for event in found[:2])


def test_an_answer_that_does_not_obey_its_schema_is_an_error_and_no_end(talker: Any, path: str) -> None:
    error = ConstraintFailed("constraint_failed: json_schema: no JSON")
    expected = error_of(path, error.message, "constraint_failed", code="constraint_failed")
    talker.service.models["talker"] = (TALKER, fails_with(error, "a"))
    *found, last = events(ask(talker, path, is_stream=True).body)
    assert "".join(part_text(path, event) for event in found) == "a"
    assert not any(ends(path, event) for event in (*found, last))
    if path == "/v1/responses":
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "constraint_failed", "message": error.message}
    else:
        assert last == expected
    talker.service.models["talker"] = (TALKER, fails_with(error))
    reply = ask(talker, path, is_stream=False)
    assert (reply.status, reply.json) == (500, expected)


SCHEMAS = [
    ("/v1/chat/completions", "response_format.json_schema.schema", "tools[0].function.parameters"),
    ("/v1/responses", "text.format.schema", "tools[0].parameters"),
    ("/v1/messages", "output_config.format.schema", "tools[0].input_schema"),
    ("/api/chat", "format", "tools[0].function.parameters"),
]


@pytest.mark.parametrize(("path", "answer", "tool"), SCHEMAS)
def test_a_refused_schema_is_named_by_the_clients_member(talker: Any, path: str, answer: str, tool: str) -> None:
    for place, member in (("json_schema.x", answer), ("tools[0].function.parameters.x", tool)):
        talker.service.models["talker"] = (TALKER, fails_with(BadSchema(place, "too slow")))
        reply = ask(talker, path, is_stream=False)
        param = member.split("[")[0].split(".")[0]
        assert (reply.status, reply.json) == (
            400, error_of(path, f"{member}.x: too slow", "invalid_request_error", param)
        )  # fmt: skip


def test_a_failure_within_a_stream_is_its_last_event(talker: Any, path: str) -> None:
    talker.service.models["talker"] = (TALKER, fails_with(BackendError("the engine stopped"), "a"))
    last = events(ask(talker, path, is_stream=True).body)[-1]
    if path == "/v1/responses":
        assert last["response"]["error"] == {"code": "server_error", "message": "the engine stopped"}
        assert talker.get(f"/v1/responses/{last['response']['id']}").status == 404
    else:
        kind = "api_error" if path == "/v1/messages" else "server_error"
        assert last == error_of(path, "the engine stopped", kind)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_refusal_keeps_its_status_and_headers(talker: Any, path: str, is_stream: bool) -> None:
    talker.service.models["talker"] = (TALKER, fails_with(Throttled("too hot", retry_after_s=2.5)))
    reply = ask(talker, path, is_stream=is_stream)
    assert (reply.status, reply.headers["Retry-After"]) == (429, "3")
    assert reply.json == error_of(path, "too hot", "rate_limit_error")


def test_a_slow_stream_shows_that_it_lives(talker: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(api_endpoints, "_KEEP_ALIVE_S", 0.01)
    has_line = threading.Event()

    def two_words_late(request: Request) -> list[Response]:
        assert has_line.wait(30)
        return two_words(request)

    talker.service.models["talker"] = (TALKER, two_words_late)
    connection = http.client.HTTPConnection("127.0.0.1", talker.port, timeout=30)
    try:
        connection.request("POST", path, json.dumps({"model": "talker", "stream": True, **CALLS[path]}))
        answer = connection.getresponse()
        first = answer.readline()
        has_line.set()
        found = events(answer.read())
    finally:
        connection.close()
    if path.startswith("/api/"):
        assert (part_text(path, json.loads(first)), json.loads(first)["done"]) == ("", False)
    else:
        assert first.startswith(b"event: ping" if path == "/v1/messages" else b": ")
    assert "".join(part_text(path, event) for event in found) == "two words"


def test_a_client_that_disconnects_cancels_its_request(talker: Any, path: str) -> None:
    talker.service.models["talker"] = (TALKER, lambda request: [])
    connection = http.client.HTTPConnection("127.0.0.1", talker.port, timeout=30)
    connection.request("POST", path, json.dumps({"model": "talker", "stream": True, **CALLS[path]}))
    assert talker.service.submitted.wait(30)
    connection.close()
    assert talker.service.tickets[0].was_cancelled.wait(30)


@pytest.mark.parametrize(
    "path",
    [
        *CALLS, "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/messages/count_tokens", "/api/embed",
        "/api/embeddings", "/api/show", "/v1/audio/speech",
    ],
)  # fmt: skip
@pytest.mark.parametrize("members", [{"nosuch": 1}, {"stream": 3, "input": 5}, {}])
def test_an_unknown_model_is_answered_before_wrong_members_with_those_that_serve(
    talker: Any, path: str, members: dict[str, Any]
) -> None:
    for model in ("nosuch", "nosuch:latest"):
        reply = talker.post(path, {"model": model, **members})
        assert reply.status == 404, reply.body
        assert b"models that serve here: " in reply.body
    if members and path != "/v1/audio/speech":
        assert talker.post(path, {"model": "talker", **members}).status == 400


def test_a_server_whose_models_may_not_be_listed_names_none(talker: Any, path: str) -> None:
    talker.service.suggests_models = False
    reply = ask(talker, path, is_stream=False, model="nosuch")
    message = "Request for unknown model: 'nosuch' is not found"
    kinds = {"/v1/messages": "not_found_error"}
    assert (reply.status, reply.json) == (
        404, error_of(path, message, kinds.get(path, "invalid_request_error"), code="model_not_found")
    )  # fmt: skip
