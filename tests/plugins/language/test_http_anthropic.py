"""Anthropic's API: its calls are those of OpenAI's API, and its answers, streams and errors have its form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edge_server.core.model_spec import InputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType
from tests.plugins.language.talker import HELLO, SCHEMA, TALKER, calls, response, sent, two_words
from tests.plugins.language.talker import TOOL as OPENAI_TOOL

TOOL = {"name": "f", "description": "does it", "input_schema": SCHEMA, "strict": True}


def ask(site: Any, path: str = "/v1/messages", **members: Any) -> Any:
    return site.post(path, {"model": "talker", "max_tokens": 5, "messages": HELLO, **members})


def events(reply: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    found = []
    for text in reply.body.decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize(
    ("members", "own"),
    [
        ({"messages": HELLO}, {"messages": HELLO}),
        (
            {
                "system": "be brief", "messages": HELLO, "stream": True, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
                "stop_sequences": ["x"], "metadata": {"user_id": "me"}, "thinking": {"type": "adaptive"},
            },
            {
                "messages": [{"role": "system", "content": "be brief"}, *HELLO], "stream": True, "temperature": 0.5,
                "top_p": 0.5, "top_k": 3, "stop": ["x"],
            },
        ),
        *(
            ({"messages": HELLO, "thinking": thinking}, {"messages": HELLO, "enable_thinking": is_enabled})
            for thinking, is_enabled in (
                ({"type": "disabled"}, False),
                ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True),
            )
        ),
        (
            {
                "system": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {}}]}],
            },
            {"messages": [{"role": "system", "content": "be brief"}, *HELLO]},
        ),
        (
            {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            },
        ),
        *(
            ({"messages": HELLO, "tools": [TOOL], "tool_choice": choice},
             {"messages": HELLO, "tools": [OPENAI_TOOL], "tool_choice": own})
            for choice, own in (
                (None, None), ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
                ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
            )
        ),
        (
            {
                "tools": [TOOL],
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "text", "text": "Look."},
                            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]},
                            {"type": "text", "text": "and?"},
                        ],
                    },
                ],
            },
            {
                "tools": [OPENAI_TOOL],
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant", "content": "Look.", "reasoning_content": "hm",
                        "tool_calls": [
                            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "4"},
                    {"role": "user", "content": "and?"},
                ],
            },
        ),
    ],
)  # fmt: skip
def test_a_call_becomes_the_request_that_openais_api_makes(
    talker: Any, members: dict[str, Any], own: dict[str, Any]
) -> None:
    assert sent(talker, "/v1/messages", {"max_tokens": 5, **members}) == sent(
        talker, "/v1/chat/completions", {"max_tokens": 5, **own}
    )


def test_a_message_has_blocks_and_counts(talker: Any) -> None:
    answer = ask(talker).json
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "talker",
        "content": [{"type": "text", "text": "two words"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 3},
    }


def test_a_stream_has_the_events_of_a_text(talker: Any) -> None:
    found = events(ask(talker, stream=True))
    assert found[0]["message"]["usage"] == {"input_tokens": 9, "output_tokens": 0}
    assert found[0]["message"]["content"] == []
    assert found[1:] == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "two"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " words"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


def test_each_call_of_a_tool_is_a_block(talker: Any) -> None:
    talker.service.models["talker"] = (TALKER, calls('{"a": 1}', "{}", text="Look."))
    uses = [{"type": "tool_use", "id": f"call_{index}", "name": "f"} for index in range(2)]
    answer = ask(talker, tools=[TOOL]).json
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"] == [
        {"type": "text", "text": "Look."}, {**uses[0], "input": {"a": 1}}, {**uses[1], "input": {}}
    ]  # fmt: skip
    found = events(ask(talker, tools=[TOOL], stream=True))
    starts = [item for item in found if item["type"] == "content_block_start"]
    assert [item["content_block"] for item in starts] == [
        {"type": "text", "text": ""}, *({**use, "input": {}} for use in uses)
    ]  # fmt: skip
    texts = ["", "", ""]
    for item in found:
        if item["type"] == "content_block_delta":
            texts[item["index"]] += item["delta"].get("text", "") + item["delta"].get("partial_json", "")
    assert texts == ["Look.", '{"a": 1}', "{}"]
    assert [item["index"] for item in found if item["type"] == "content_block_stop"] == [0, 1, 2]
    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert len(ask(talker, tools=[TOOL], **one).json["content"]) == 2


def think_and_look(request: Request) -> list[Response]:
    part = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        response(request, text_output="", reasoning_content="I"),
        response(request, text_output="", reasoning_content=" see"),
        response(request, text_output="Look.", reasoning_content="", num_output_tokens=[9]),
        response(request, is_final=True, text_output="", finish_reason="tool_calls", tool_calls=[part],
                 num_reasoning_tokens=[4]),
    ]  # fmt: skip


ENABLED = {"type": "enabled", "budget_tokens": 1024}
THOUGHT = {"type": "thinking", "thinking": "I see", "signature": "unsigned"}


def test_thinking_is_a_block_if_the_call_enables_it(talker: Any) -> None:
    talker.service.models["talker"] = (TALKER, think_and_look)
    answer = ask(talker, thinking=ENABLED, tools=[TOOL]).json
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][0] == THOUGHT
    assert answer["usage"] == {"input_tokens": 0, "output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}}
    assert answer["warnings"] == ["thinking.budget_tokens: not enforced; only max_tokens ends the thinking"]
    assert ask(talker, thinking={"type": "adaptive"}).json["content"][0] == THOUGHT
    for more in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive", "display": "omitted"}}):
        answer = ask(talker, tools=[TOOL], **more).json
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
        assert "warnings" not in answer


def test_a_stream_has_the_deltas_of_thinking_and_then_its_signature(talker: Any) -> None:
    talker.service.models["talker"] = (TALKER, think_and_look)
    found = events(ask(talker, thinking=ENABLED, tools=[TOOL], stream=True))
    assert found[1:8] == [
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "I"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": " see"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "unsigned"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Look."}},
    ]  # fmt: skip
    assert found[-2]["usage"] == {"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}}
    hidden = events(ask(talker, tools=[TOOL], stream=True))
    assert [item["content_block"]["type"] for item in hidden if item["type"] == "content_block_start"] == [
        "text", "tool_use"
    ]  # fmt: skip


def test_a_call_that_was_cut_short_is_text(talker: Any) -> None:
    talker.service.models["talker"] = (TALKER, calls('{"a": ', text="Look."))
    assert ask(talker, tools=[TOOL]).json["content"] == [
        {"type": "text", "text": 'Look.{"name": "f", "arguments": {"a": '}
    ]


def test_the_tokens_of_a_chat_are_counted(talker: Any) -> None:
    members = {"model": "talker", "messages": HELLO, "system": "be brief", "tools": [TOOL]}
    assert talker.post("/v1/messages/count_tokens", members).json == {"input_tokens": 3}
    (request,) = talker.service.requests
    assert [message["role"] for message in request.inputs["messages"].value["messages"]] == ["system", "user"]


def test_tokens_of_pictures_are_not_counted(talker: Any) -> None:
    talker.service.models["talker"] = (
        replace(TALKER, inputs=(*TALKER.inputs, InputSpec("image", DType.BYTES, (-1,), is_optional=True))),
        two_words,
    )
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    reply = talker.post(
        "/v1/messages/count_tokens", {"model": "talker", "messages": [{"role": "user", "content": [image]}]}
    )
    assert (reply.status, reply.json["error"]["message"]) == (
        400,
        "'messages': expected no pictures: their tokens are known when the model reads them",
    )


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("members", "status", "kind", "said"),
    [
        ({"model": "nosuch"}, 404, "not_found_error", "'nosuch' is not found"),
        ({"max_tokens": None}, 400, "", "'max_tokens': expected a whole number from 1, got none"),
        ({"max_tokens": 0}, 400, "", "'max_tokens': expected a whole number from 1, got 0"),
        ({"messages": "a"}, 400, "", "'messages': expected a list of messages, got a string"),
        ({"messages": []}, 400, "", "'messages': expected at least one message"),
        ({"messages": [{"role": "system", "content": "a"}]}, 400, "", "'messages[0].role': expected user or assistant"),
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, 400, "", "an answer cannot be continued"),
        ({"messages": [{"role": "user"}]}, 400, "", "'messages[0].content': expected a text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, "", "blocks of type text, got audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "", "'messages[0].content[0].source'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, USER]},
            400, "", "'messages[0].content[0]': expected a name and an object as input",
        ),
        ({"system": 3}, 400, "", "'system': expected a text or a list, got an integer"),
        ({"tools": [{"type": "web_search_20250305"}]}, 400, "", "'tools[0].type': expected custom or none, got web_"),
        ({"tools": [3]}, 400, "", "'tools[0].type': expected custom or none, got an integer"),
        ({"tool_choice": "auto"}, 400, "", "'tool_choice.type': expected auto, any, tool or none"),
        ({"tool_choice": {"type": "any"}}, 400, "", "'tool_choice': expected none or auto without tools"),
        ({"thinking": "on"}, 400, "", "'thinking.type': expected enabled, adaptive or disabled, got None"),
        ({"thinking": {"type": "enabled"}}, 400, "", "'thinking.budget_tokens': expected a whole number from 1, got N"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, 400, "", "'thinking.display': expected summarized or o"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "signature": "a"}]}, USER]},
            400, "", "'messages[0].content[0].thinking': expected a text",
        ),
        ({"output_config": {"effort": "low"}}, 400, "", "'output_config': expected an object with 'format' only"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "", "'output_config.format': expected type json_schema"),
        ({"stream": 1}, 400, "", "'stream': expected true or false"),
        ({"logit_bias": {"1": 2}}, 400, "", "'logit_bias' is not supported"),
    ],
)  # fmt: skip
def test_an_invalid_call_gets_anthropics_error(
    talker: Any, members: dict[str, Any], status: int, kind: str, said: str
) -> None:
    reply = ask(talker, **members)
    assert (reply.status, reply.json["type"]) == (status, "error")
    assert reply.json["error"]["type"] == (kind or "invalid_request_error")
    assert said in reply.json["error"]["message"]
    assert not talker.service.requests


def test_a_wrong_method_gets_anthropics_error(talker: Any) -> None:
    reply = talker.get("/v1/messages")
    assert (reply.status, reply.json["type"]) == (405, "error")
