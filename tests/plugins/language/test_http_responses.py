"""OpenAI's API `responses`: its calls are chats, its answers, streams and errors have its form,
and stored responses can be continued, read and deleted by their ids."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edge_server.core.model_spec import InputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType
from edge_server.errors import ContextTooLong
from edge_server.plugins.language.openai.responses_api_store import StoredResponse, TextResponseStore, memory_bytes
from tests.plugins.language.talker import HELLO, SCHEMA, TALKER, response, sent, two_words
from tests.plugins.language.talker import TOOL as CHAT_TOOL

TOOL = {"type": "function", "name": "f", "description": "does it", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def think_and_call(request: Request) -> list[Response]:
    part = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f"}}
    arguments = [{"index": 0, "function": {"arguments": character}} for character in '{"a": 1}']
    return [
        response(request, text_output="", reasoning_content="I"),
        response(request, text_output="", reasoning_content=" see", num_output_tokens=6),
        response(request, text_output="Look."),
        *(response(request, text_output="", tool_calls=[item]) for item in (part, *arguments)),
        response(request, is_final=True, text_output="", finish_reason="tool_calls", num_reasoning_tokens=4),
    ]


def cut(request: Request) -> list[Response]:
    part = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    return [
        response(request, text_output="Look.", tool_calls=[part]),
        response(request, is_final=True, text_output="", finish_reason="length"),
    ]


@pytest.fixture
def talker(talker: Any) -> Any:
    for name, compute in (("thinker", think_and_call), ("cutter", cut)):
        talker.service.models[name] = (TALKER, compute)
    return talker


def ask(site: Any, path: str = "/v1/responses", **members: Any) -> Any:
    return site.post(path, {"model": "talker", "input": "hello", **members})


def events(reply: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types, and whose numbers count them."""
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    found = []
    for text in reply.body.decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [item.pop("sequence_number") for item in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize(
    ("members", "own"),
    [
        ({"input": "hello"}, {"messages": HELLO}),
        (
            {
                "input": HELLO, "instructions": "be brief", "stream": True, "temperature": 0.5, "top_p": 0.5,
                "max_output_tokens": 7, "metadata": {"a": "b"}, "user": "me", "store": False, "truncation": "disabled",
                "background": False, "max_tool_calls": 3, "stream_options": {"include_obfuscation": False},
                "top_k": 3, "seed": 5, "text": {"format": {"type": "text"}, "verbosity": "medium"},
                "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "tools": [],
            },
            {
                "messages": [{"role": "system", "content": "be brief"}, *HELLO], "stream": True, "temperature": 0.5,
                "top_p": 0.5, "max_tokens": 7, "top_k": 3, "seed": 5,
            },
        ),
        (
            {"input": "hello", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        (
            {"input": "hello", "text": {"format": {"type": "json_object"}}},
            {"messages": HELLO, "response_format": {"type": "json_object"}},
        ),
        (
            {"input": "hello", "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"]},
            {"messages": HELLO, "reasoning_effort": "low", "logprobs": True},
        ),
        ({"input": "hello", "top_logprobs": 2}, {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
        *(
            ({"input": "hello", "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": parallel},
             {"messages": HELLO, "tools": [CHAT_TOOL], "tool_choice": own, "parallel_tool_calls": parallel})
            for choice, own, parallel in (
                (None, None, None), ("auto", "auto", False), ("required", "required", True), ("none", "none", None),
                ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
            )
        ),
        (
            {
                "input": [
                    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
                    {"role": "user", "content": [{"type": "input_text", "text": "hel"},
                                                 {"type": "input_text", "text": "lo"}]},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                        {"type": "reasoning_text", "text": "hm"}], "encrypted_content": None},
                    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                        {"type": "output_text", "text": "Look.", "annotations": []}]},
                    {**CALL, "id": "fc_1", "status": "completed"},
                    RESULT,
                    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
                    {**CALL, "call_id": "c2"},
                    {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                    {"role": "user", "content": "and?"},
                ],
            },
            {
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    *HELLO,
                    {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "4"},
                    {"role": "assistant", "content": "", "reasoning_content": "so",
                     "tool_calls": [{**CHAT_CALL, "id": "c2"}]},
                    {"role": "tool", "tool_call_id": "c2", "content": "5"},
                    {"role": "assistant", "content": "No."},
                    {"role": "user", "content": "and?"},
                ]
            },
        ),
    ],
)  # fmt: skip
def test_a_call_becomes_the_request_that_a_chat_makes(
    talker: Any, members: dict[str, Any], own: dict[str, Any]
) -> None:
    assert sent(talker, "/v1/responses", members) == sent(talker, "/v1/chat/completions", own)


def test_a_response_has_items_and_repeats_the_call(talker: Any) -> None:
    call = {"instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5, "tools": [TOOL], "store": False}
    cached = {"finish_reason": "stop", "num_cached_tokens": 5}
    talker.service.models["talker"] = (
        TALKER, lambda request: [*two_words(request)[:-1], response(request, is_final=True, text_output="", **cached)]
    )  # fmt: skip
    answer = ask(talker, **call).json
    assert (answer.pop("id")[:5], answer["output"][0].pop("id")[:4]) == ("resp_", "msg_")
    assert isinstance(answer.pop("created_at"), int)
    assert isinstance(answer.pop("completed_at"), int)
    text = {"type": "output_text", "text": "two words", "annotations": [], "logprobs": []}
    assert answer == {
        "object": "response", "status": "completed", "background": False, "error": None, "incomplete_details": None,
        **call, "max_output_tokens": None, "model": "talker", "parallel_tool_calls": True,
        "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "top_p": None,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "top_logprobs": 0, "truncation": "disabled",
        "user": None,
        "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [text]}],
        "usage": {
            "input_tokens": 9, "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
            "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 12,
        },
    }  # fmt: skip


def test_a_stream_has_the_events_of_a_message(talker: Any) -> None:
    created, in_progress, *found, completed = events(ask(talker, stream=True))
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    item = found[0]["item"]
    text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    done = {**text, "text": "two words"}
    of_item = {"item_id": item["id"], "output_index": 0}
    of_part = {**of_item, "content_index": 0}
    message = {**item, "status": "completed", "content": [done]}
    assert found == [
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.content_part.added", **of_part, "part": text},
        {"type": "response.output_text.delta", **of_part, "delta": "two", "logprobs": []},
        {"type": "response.output_text.delta", **of_part, "delta": " words", "logprobs": []},
        {"type": "response.output_text.done", **of_part, "text": "two words", "logprobs": []},
        {"type": "response.content_part.done", **of_part, "part": done},
        {"type": "response.output_item.done", "output_index": 0, "item": message},
    ]
    assert completed["type"] == "response.completed"
    assert (completed["response"]["status"], completed["response"]["output"]) == ("completed", [message])
    assert completed["response"]["id"] == created["response"]["id"]


def types(found: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, without their prefix and without repetitions."""
    names = [item["type"].removeprefix("response.") for item in found]
    return [name for index, name in enumerate(names) if name != names[index - 1]]


def ids_left_out(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_text_and_a_call_are_items(talker: Any, summary: str | None) -> None:
    call = {"model": "thinker", "tools": [TOOL], "reasoning": {"summary": summary}}
    answer = ask(talker, **call).json
    thought = [{"type": "summary_text" if summary else "reasoning_text", "text": "I see"}]
    reasoning, message, function_call = ids_left_out(answer["output"])
    parts = {"summary": thought} if summary else {"summary": [], "content": thought}
    assert reasoning == {"type": "reasoning", **parts, "status": "completed"}
    assert message["content"][0]["text"] == "Look."
    assert function_call == {**CALL, "status": "completed"}
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    found = events(ask(talker, **call, stream=True))
    assert ids_left_out(found[-1]["response"]["output"]) == ids_left_out(answer["output"])
    part, text = ("reasoning_summary_part", "reasoning_summary_text") if summary else ("content_part", "reasoning_text")
    assert types(found) == [
        "created", "in_progress",
        "output_item.added", f"{part}.added", f"{text}.delta", f"{text}.done", f"{part}.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    deltas = [item["delta"] for item in found if item["type"] == "response.function_call_arguments.delta"]
    assert deltas == list('{"a": 1}')
    assert [item["output_index"] for item in found if item["type"] == "response.output_item.done"] == [0, 1, 2]


def test_arguments_that_come_after_a_text_belong_to_their_call(talker: Any) -> None:
    part = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}
    rest = {"index": 0, "function": {"arguments": " 1}"}}

    def interleave(request: Request) -> list[Response]:
        return [
            response(request, text_output="", tool_calls=[part]),
            response(request, text_output="Look."),
            response(request, text_output="", tool_calls=[rest], finish_reason="tool_calls", is_final=True),
        ]

    talker.service.models["talker"] = (TALKER, interleave)
    found = events(ask(talker, tools=[TOOL], stream=True))
    call, message = found[-1]["response"]["output"]
    assert (call["arguments"], message["content"][0]["text"]) == ('{"a": 1}', "Look.")
    deltas = [item for item in found if item["type"] == "response.function_call_arguments.delta"]
    assert [(item["output_index"], item["item_id"]) for item in deltas] == [(0, call["id"])] * 2


def test_a_response_that_is_cut_short_is_incomplete(talker: Any) -> None:
    for members in ({}, {"stream": True}):
        reply = ask(talker, model="cutter", tools=[TOOL], **members)
        if members:
            last = events(reply)[-1]
            assert last["type"] == "response.incomplete"
        answer = last["response"] if members else reply.json
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
        again = ask(talker, previous_response_id=answer["id"])
        assert again.status == 200
        message = talker.service.requests[-1].inputs["messages"].value[1]
        assert message == {"role": "assistant", "content": "Look."}


def test_an_answer_without_text_is_an_empty_message(talker: Any) -> None:
    def think(request: Request) -> list[Response]:
        end = {"finish_reason": "stop", "text_output": "", "reasoning_content": "hm"}
        return [response(request, is_final=True, **end)]

    talker.service.models["talker"] = (TALKER, think)
    output = ask(talker).json["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"] == ""


def test_each_token_has_its_probability(talker: Any) -> None:
    def speak(request: Request) -> list[Response]:
        tokens = [{"token": "two", "logprob": -0.5, "top_logprobs": [["too", -1.5]]}]
        return [response(request, is_final=True, text_output="two", finish_reason="stop", logprobs=tokens)]

    talker.service.models["talker"] = (TALKER, speak)
    (part,) = ask(talker, top_logprobs=1).json["output"][0]["content"]
    assert part["logprobs"] == [
        {"token": "two", "logprob": -0.5, "bytes": [116, 119, 111],
         "top_logprobs": [{"token": "too", "logprob": -1.5, "bytes": [116, 111, 111]}]},
    ]  # fmt: skip


def test_a_stored_response_is_continued_without_its_instructions(talker: Any) -> None:
    first = ask(talker, model="thinker", instructions="be brief", tools=[TOOL]).json
    result = [{**RESULT, "output": "cold"}]
    second = ask(talker, input=result, previous_response_id=first["id"], instructions="be long").json
    third = ask(talker, "/v3/responses", input="more", previous_response_id=second["id"], stream=True)
    assert events(third)[0]["response"]["previous_response_id"] == second["id"]
    chats = [item.inputs["messages"].value for item in talker.service.requests]
    answer = {"role": "assistant", "content": "Look.", "reasoning_content": "I see", "tool_calls": [CHAT_CALL]}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "cold"}
    assert chats[1] == [{"role": "system", "content": "be long"}, *HELLO, answer, tool]
    words = {"role": "assistant", "content": "two words"}
    assert chats[2] == [*HELLO, answer, tool, words, {"role": "user", "content": "more"}]


def test_a_stored_response_is_read_and_deleted_by_its_id(talker: Any) -> None:
    made = ask(talker).json
    streamed = events(ask(talker, stream=True))[-1]["response"]
    assert made["id"] != streamed["id"]
    for answer in (made, streamed):
        path = f"/v1/responses/{answer['id']}"
        assert talker.get(path).json == answer
        assert talker.ask("DELETE", path).json == {"id": answer["id"], "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            reply = talker.ask(method, path)
            assert (reply.status, reply.json["error"]["code"]) == (404, "response_not_found")
    reply = ask(talker, previous_response_id=made["id"])
    error = reply.json["error"]
    assert (reply.status, error["param"], error["code"]) == (
        400, "previous_response_id", "previous_response_not_found"
    )  # fmt: skip
    assert f"no response '{made['id']}' is stored" in error["message"]
    kept_for_none = ask(talker, store=False).json
    assert kept_for_none["store"] is False
    assert talker.get(f"/v1/responses/{kept_for_none['id']}").status == 404
    assert "'stream': expected false" in talker.get("/v1/responses/a?stream=true").json["error"]["message"]


def test_the_items_that_a_response_was_made_from_are_read_in_pages(talker: Any) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]}
    given = [{"role": "user", "content": "a"}, thought, CALL, RESULT, {"role": "assistant", "content": "b"}]
    made = talker.post("/v1/responses", {"model": "talker", "input": given, "instructions": "i"}).json
    more = {"model": "talker", "previous_response_id": made["id"], "input": "c"}
    path = f"/v1/responses/{talker.post('/v1/responses', more).json['id']}/input_items"
    whole = talker.get(f"{path}?order=asc").json
    items = whole["data"]
    assert [item["type"] for item in items] == [
        "message", "reasoning", "function_call", "function_call_output", "message", "message", "message",
    ]  # fmt: skip
    assert {name: items[2][name] for name in CALL} == CALL
    assert {name: items[3][name] for name in RESULT} == RESULT
    assert [items[place]["content"][0]["text"] for place in (0, 1, 4, 5, 6)] == ["a", "h", "b", "two words", "c"]
    assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, items[0]["id"], items[-1]["id"])
    assert talker.get(path).json["data"] == items[::-1]
    page = talker.get(f"{path}?limit=2&after={items[-1]['id']}").json
    assert (page["data"], page["has_more"]) == (items[-2:-4:-1], True)
    end = talker.get(f"{path}?after={items[0]['id']}").json
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)


def test_input_items_that_cannot_be_read_are_refused(talker: Any) -> None:
    made = talker.post("/v1/responses", {"model": "talker", "input": "a"}).json["id"]
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=x", "order"), ("after=x", "after")):
        reply = talker.get(f"/v1/responses/{made}/input_items?{query}")
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert talker.get("/v1/responses/resp_x/input_items").json["error"]["code"] == "response_not_found"


def test_a_response_cannot_be_cancelled_as_none_is_made_in_the_background(talker: Any) -> None:
    made = talker.post("/v1/responses", {"model": "talker", "input": "a"}).json["id"]
    reply = talker.post(f"/v1/responses/{made}/cancel", {})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert "cannot be cancelled: it was not made in the background" in reply.json["error"]["message"]
    assert talker.post("/v1/responses/resp_x/cancel", {}).status == 404


def test_the_oldest_responses_are_removed() -> None:
    store = TextResponseStore(max_responses=2)
    for name in "abc":
        store.add(name, StoredResponse(name.encode(), ()))
    assert [store.find(name) is not None for name in "abc"] == [False, True, True]
    assert [store.remove(name) for name in "abc"] == [False, True, True]


def test_the_memory_of_all_responses_is_bounded() -> None:
    store = TextResponseStore(max_bytes=5000)
    half = StoredResponse(bytes(700), [{"role": "user", "content": "x" * 700}])
    assert 1400 < memory_bytes(half) < 2500
    for name in "abc":
        assert store.add(name, half)
    assert [store.find(name) is not None for name in "abc"] == [False, True, True]
    assert store.remove("b")
    assert store.add("d", half)
    assert [store.find(name) is not None for name in "cd"] == [True, True]
    assert not store.add("huge", StoredResponse(bytes(5000), ()))
    assert store.add("large", StoredResponse(b"", [{"content": [{"text": "x" * 4000}]}]))
    assert [store.find(name) is not None for name in ("c", "d", "large", "huge")] == [False, False, True, False]


def test_a_response_that_is_too_large_for_the_store_says_so(open_site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextResponseStore, "__init__", _small_store)
    site = open_site()
    site.service.models["talker"] = (TALKER, two_words)
    answer = ask(site, input="x" * 5000).json
    assert answer["store"] is False
    assert answer["warnings"] == ["store: not stored, because it takes more than 4000 bytes with its chat"]
    assert site.get(f"/v1/responses/{answer['id']}").status == 404
    assert ask(site).json["store"] is True


_plain_store = TextResponseStore.__init__


def _small_store(store: TextResponseStore) -> None:
    _plain_store(store, max_bytes=4000)


def takes_texts(count: int) -> Any:
    """Return the model whose context has room for so many messages."""

    def answer(request: Request) -> list[Response]:
        value = request.inputs["messages"].value
        messages = value["messages"] if isinstance(value, dict) else value
        if len(messages) > count:
            return [Response(request.model, 1, request.id, error=ContextTooLong(f"{len(messages)} messages"))]
        return two_words(request)

    return answer


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"stream": True}])
def test_the_oldest_turns_of_a_chat_that_is_too_long_are_left_out_if_the_call_allows_it(
    talker: Any, more: dict[str, Any]
) -> None:
    talker.service.models["talker"] = (TALKER, takes_texts(5))
    rules = {"role": "developer", "content": "in German"}
    turns = [
        [{"role": "user", "content": f"question {index}"}, {"role": "assistant", "content": f"answer {index}"}]
        for index in range(9)
    ]
    asked = {"role": "user", "content": "and?"}
    call = {
        "input": [*turns[0], rules, *(message for turn in turns[1:] for message in turn), asked],
        "instructions": "be brief",
        **more,
    }
    refused = ask(talker, **call)
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
    reply = ask(talker, **call, truncation="auto")
    answer = events(reply)[-1]["response"] if "stream" in more else reply.json
    assert (answer["status"], answer["truncation"]) == ("completed", "auto")
    chat = talker.service.requests[-1].inputs["messages"].value
    given = chat["messages"] if "tools" in more else chat
    assert given == [{"role": "system", "content": "be brief"}, rules, *turns[-1], asked]
    talker.service.models["talker"] = (TALKER, two_words)
    ask(talker, previous_response_id=answer["id"])
    words = {"role": "assistant", "content": "two words"}
    assert talker.service.requests[-1].inputs["messages"].value == [rules, *turns[-1], asked, words, *HELLO]


def test_pictures_reach_the_model_and_leave_with_their_turns(talker: Any) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{**image, "image_url": "data:image/png;base64,BBBB"}]},
    ]
    reply = ask(talker, input=turns)
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")
    assert reply.json["error"]["message"] == "'input': model 'talker' takes no pictures"
    seer = replace(TALKER, inputs=(*TALKER.inputs, InputSpec("image", DType.BYTES, (-1,), is_optional=True)))
    talker.service.models["talker"] = (seer, takes_texts(2))
    answer = ask(talker, input=turns, truncation="auto").json
    talker.service.models["talker"] = (seer, two_words)
    ask(talker, previous_response_id=answer["id"])
    files = [b"\x00\x00\x00", b"\x04\x10\x41"]
    assert [request.inputs["image"].array.tolist() for request in talker.service.requests] == [
        files, files[1:], files[1:]
    ]  # fmt: skip
    assert talker.service.requests[1].inputs["messages"].value == [{"role": "user", "content": [{"type": "image"}]}]


def test_the_last_turn_is_never_left_out(talker: Any) -> None:
    talker.service.models["talker"] = (TALKER, takes_texts(0))
    call = [{"role": "user", "content": "a"}, CALL, RESULT, {"role": "user", "content": "b"}, CALL, RESULT]
    reply = ask(talker, input=call, truncation="auto")
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert [len(request.inputs["messages"].value) for request in talker.service.requests] == [6, 3]
    assert ask(talker, input=[CALL, RESULT], truncation="auto").status == 400


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("members", "status", "param", "said"),
    [
        ({"model": "nosuch"}, 404, None, "'nosuch' is not found"),
        ({"model": None}, 400, "model", "'model': expected the name of a model"),
        ({"input": None}, 400, "input", "'input': expected a text or a list of items, got null"),
        ({"input": []}, 400, "input", "'input': expected at least one message"),
        ({"input": [3]}, 400, "input", "'input[0].type': expected message, function_call, function_call_output or"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, 400, "input", "got item_reference"),
        ({"input": [{"role": "tool", "content": "a"}]}, 400, "input", "'input[0].role': expected user, assistant, sys"),
        ({"input": [{"role": "user"}]}, 400, "input", "'input[0].content': expected a text or a list of parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            400, "input", "'input[0].content[0].type': expected input_text, input_image with an image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
            400, "input", "'input[0].content[0].text': expected a text, got an integer",
        ),
        ({"input": [USER, {**CALL, "arguments": {}}]}, 400, "input", "'input[1].arguments': expected a text, got an"),
        ({"input": [USER, {**RESULT, "call_id": None}]}, 400, "input", "'input[1].call_id': expected a text, got null"),
        ({"input": [USER, {**RESULT, "output": 3}]}, 400, "input", "'input[1].output': expected a text or a list"),
        ({"input": [USER, {"type": "reasoning", "summary": [3]}]}, 400, "input", "'input[1].summary': expected a list"),
        ({"previous_response_id": 3}, 400, "previous_response_id", "no response '3' is stored"),
        ({"instructions": [USER]}, 400, "instructions", "'instructions': expected a text, got an array"),
        ({"background": True}, 400, "background", "'background': expected false"),
        ({"truncation": "cut"}, 400, "truncation", "'truncation': expected disabled or auto, got cut"),
        ({"conversation": "a"}, 400, "conversation", "'conversation' is not supported"),
        ({"prompt": {"id": "a"}}, 400, "prompt", "'prompt' is not supported"),
        ({"store": 1}, 400, "store", "'store': expected true or false"),
        ({"metadata": {"a": 1}}, 400, "metadata", "'metadata': expected at most 16 texts of 512 characters"),
        ({"metadata": {str(index): "" for index in range(17)}}, 400, "metadata", "'metadata': expected at most 16"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "'max_output_tokens': expected a whole number from 1"),
        ({"text": {"verbosity": "low"}}, 400, "text", "'text.verbosity': expected medium"),
        ({"text": {"style": "low"}}, 400, "text", "'text.style' is not supported"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format", "'text.format.type': expected text, json"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text", "'text.format.schema': expected an object"),
        ({"reasoning": {"effort": "much"}}, 400, "reasoning.effort", "'reasoning.effort': expected none, minimal, low"),
        ({"reasoning": {"summary": "concise"}}, 400, "reasoning", "'reasoning.summary': expected auto or detailed"),
        ({"reasoning": {"mode": "pro"}}, 400, "reasoning", "'reasoning.mode' is not supported"),
        ({"include": ["file_search_call.results"]}, 400, "include", "'include': expected message.output_text.logprobs"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools", "'tools[0].type': expected function, got web_search"),
        ({"tools": 5}, 400, "tools", "'tools': expected a list, got an integer"),
        ({"tool_choice": {"type": "web_search"}}, 400, "tool_choice", "'tool_choice.type': expected function, got web"),
        ({"tool_choice": "required"}, 400, "tool_choice", "'tool_choice': expected none or auto without tools"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "'stream_options.include_usage' is not s"),
        ({"top_logprobs": 21}, 400, "top_logprobs", "'top_logprobs': expected a whole number from 0 to 20"),
        ({"messages": HELLO}, 400, "messages", "'messages' is not supported"),
    ],
)  # fmt: skip
def test_an_invalid_call_gets_openais_error(
    talker: Any, members: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    reply = ask(talker, **members)
    assert (reply.status, reply.json["error"]["param"]) == (status, param)
    assert said in reply.json["error"]["message"]
    assert not talker.service.requests


def test_ids_cannot_be_guessed_from_the_requests_of_the_server(talker: Any) -> None:
    answer = ask(talker).json
    (request,) = talker.service.requests
    assert request.id not in json.dumps(answer)
    assert len(answer["id"]) == len("resp_") + 48
