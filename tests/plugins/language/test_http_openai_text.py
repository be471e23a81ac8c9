"""OpenAI's chats and completions: members that are not supported, probabilities, streams, paths, and calls of tools."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_server.config import RestrictedGroup
from edge_server.core.model_spec import ChatTemplate
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from tests.plugins.language.talker import HELLO, TALKER, TOOL, calls, response, two_words


@pytest.fixture
def talker(talker: Any) -> Any:
    talker.service.models["caller"] = (TALKER, calls("{}", "{}"))
    return talker


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "talker", "messages": HELLO, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "talker", "prompt": "hello", **more}


def events(reply: Any) -> list[Any]:
    found = [line.removeprefix(b"data: ") for line in reply.body.split(b"\n\n") if line.startswith(b"data: {")]
    return [json.loads(item) for item in found]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("truncate_prompt_tokens", 9, ""),
        ("verbosity", "low", ""),
        ("bad_words", ["a"], ""),
        ("mirostat", 2, ""),
        ("repeat_penalty", 1.1, "'repetition_penalty'"),
        ("skip_special_tokens", False, ""),
        ("audio", {"voice": "alloy"}, ""),
        ("temprature", 0, ""),
    ],
)
def test_an_unsupported_constraint_is_refused_with_the_supported_ones(
    talker: Any, name: str, value: Any, instead: str
) -> None:
    for path, body, own in (
        ("/v1/chat/completions", chat(), "messages"),
        ("/v1/completions", completion(), "prompt"),
    ):
        reply = talker.post(path, {**body, name: value})
        error = reply.json["error"]
        assert (reply.status, error["param"], error["type"]) == (400, name, "invalid_request_error")
        assert error["message"].startswith(f"'{name}' is not supported; ")
        assert instead in error["message"]
        assert {own, "temperature", "response_format"} <= set(error["message"].replace(",", "").split())
    assert not talker.service.requests


CONSTRAINED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_json": {"type": "null"}}, {"json_schema": {"type": "null"}}),
    ({"structured_outputs": {"choice": ["a"], "regex": None, "json_object": False}}, {"choice": ["a"]}),
    ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, {"regex": "a+"}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"grammar": 'root ::= "a"', "guided_regex": ""}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json_schema": '{"type": "null"}'}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
]


@pytest.mark.parametrize(("members", "parameters"), CONSTRAINED)
def test_vllms_constraints_become_sampling_parameters(
    talker: Any, members: dict[str, Any], parameters: dict[str, Any]
) -> None:
    for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", completion())):
        assert talker.post(path, {**body, **members}).status == 200
        sampling = talker.service.requests.pop().inputs["sampling_parameters"].value
        assert {name: sampling.get(name) for name in parameters} == parameters
        assert len({"choice", "regex", "json_schema", "grammar"} & sampling.keys()) == 1


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"structured_outputs": []}, "structured_outputs", "expected an object, got an array"),
        ({"structured_outputs": {"tags": "x"}}, "structured_outputs", "'structured_outputs.tags' is not supported"),
        ({"grammar": ["a"]}, "grammar", "'grammar': expected rules in GBNF, got an array"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "expected a list of texts, got an array"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "'guided_choice': expected a list of texts"),
        ({"guided_regex": 3}, "guided_regex", "expected a regular expression, got an integer"),
        ({"guided_json": []}, "guided_json", "expected a JSON schema, got an array"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "expected none beside 'guided_choice'"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "expected none beside 'guided_regex'",
        ),
    ],
)
def test_an_invalid_constraint_is_named(talker: Any, members: dict[str, Any], param: str, message: str) -> None:
    reply = talker.post("/v1/chat/completions", chat(**members))
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert message in reply.json["error"]["message"]


def test_a_chat_sets_variables_of_its_template(talker: Any) -> None:
    for members, variables in (
        ({"chat_template_kwargs": {"enable_thinking": False, "style": "brief"}}, {"enable_thinking": False,
                                                                                 "style": "brief"}),
        ({"enable_thinking": True, "reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": True}, {"enable_thinking": True}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ):  # fmt: skip
        assert talker.post("/v1/chat/completions", chat(**members)).status == 200
        assert talker.service.requests.pop().inputs["messages"].value == {
            "messages": chat()["messages"],
            "chat_template_kwargs": variables,
        }


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "expected an object, got an array"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "but none of bos_token"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "got 'a b'"),
        ({"continue_final_message": True}, "chat_template_kwargs", "'add_generation_prompt' cannot both be true"),
        ({"continue_final_message": "yes"}, "continue_final_message", "expected true or false, got a string"),
        ({"chat_template_kwargs": {"add_generation_prompt": 0}}, "chat_template_kwargs", "expected true or false"),
        ({"chat_template_kwargs": {f"v{n}": 1 for n in range(17)}}, "chat_template_kwargs", "at most 16 variables"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "expected none, minimal, low, medium, high, xhigh"),
        ({"reasoning_effort": []}, "reasoning_effort", "got '[]'"),
        ({"enable_thinking": "no"}, "enable_thinking", "expected true or false, got a string"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
            "'chat_template_kwargs' has another value",
        ),
    ],
)
def test_an_invalid_variable_of_a_template_is_named(
    talker: Any, members: dict[str, Any], param: str, message: str
) -> None:
    reply = talker.post("/v1/chat/completions", chat(**members))
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert message in reply.json["error"]["message"]


def test_a_completion_has_no_template_and_no_variables(talker: Any) -> None:
    for name, value in (("chat_template_kwargs", {"a": 1}), ("reasoning_effort", "low"), ("enable_thinking", False)):
        reply = talker.post("/v1/completions", completion(**{name: value}))
        assert (reply.status, reply.json["error"]["param"]) == (400, name)


def think_first(request: Request) -> list[Response]:
    return [
        response(request, text_output="", reasoning_content="I", logprobs=[{"token": "I", "logprob": -1.0}]),
        response(
            request,
            text_output="two",
            reasoning_content=" see",
            logprobs=[{"token": " see", "logprob": -2.0}, {"token": "two", "logprob": -3.0}],
        ),
        response(request, is_final=True, text_output="", reasoning_content="", finish_reason="stop", logprobs=[]),
    ]


def test_reasoning_is_a_member_of_its_own_and_each_probability_is_given_once(talker: Any) -> None:
    talker.service.models["talker"] = (TALKER, think_first)
    members = chat(logprobs=True)
    (choice,) = talker.post("/v1/chat/completions", members).json["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("I see", "two")
    choices = [
        event["choices"][0] for event in events(talker.post("/v1/chat/completions", {**members, "stream": True}))
    ]
    deltas = [choice["delta"] for choice in choices]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "I"},
        {"reasoning_content": " see"},
        {"content": "two"},
        {},
    ]
    tokens = [item["token"] for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
    assert tokens == ["I", " see", "two"]
    talker.service.models["talker"] = (TALKER, two_words)
    (choice,) = talker.post("/v1/chat/completions", chat()).json["choices"]
    assert "reasoning_content" not in choice["message"]


def test_members_without_effect_are_ignored(talker: Any) -> None:
    nothing = {"logit_bias": {}, "reasoning_effort": None, "guided_json": None, "best_of": 1, "grammar": "",
               "chat_template_kwargs": {}, "skip_special_tokens": True, "use_beam_search": False}  # fmt: skip
    ignored = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "cache_prompt": True}
    assert talker.post("/v1/chat/completions", chat(**nothing, **ignored)).status == 200
    assert talker.post("/v1/completions", completion(**nothing, **ignored)).status == 200


def test_embeddings_refuse_members_that_might_change_the_vector(talker: Any) -> None:
    reply = talker.post("/v1/embeddings", {"model": "talker", "input": "a", "truncate_prompt_tokens": 9})
    assert (reply.status, reply.json["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"messages": []}, "messages", "'messages': expected at least one message, got an empty list"),
        ({"messages": "hello"}, "messages", "'messages': expected a list of messages, got a string"),
        ({"seed": -2}, "seed", "from 0 to 9223372036854775807, or -1 for another answer each time, got -2"),
        ({"seed": 1 << 63}, "seed", "or -1 for another answer each time, got 9223372036854775808"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected a whole number from 0 to 20, got 21"),
        ({"top_logprobs": 1}, "top_logprobs", "'top_logprobs': only with 'logprobs' true"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "expected true or false"),
    ],
)
def test_an_invalid_member_gets_a_clear_error(talker: Any, members: dict[str, Any], param: str, message: str) -> None:
    reply = talker.post("/v1/chat/completions", chat(**members))
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert message in reply.json["error"]["message"]


def test_a_chat_has_openais_form_whole_and_in_parts(talker: Any) -> None:
    answer = talker.post("/v1/chat/completions", chat()).json
    assert (answer["object"], answer["usage"]) == (
        "chat.completion", {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    )  # fmt: skip
    message = {"role": "assistant", "content": "two words", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    reply = talker.post("/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True}))
    first, *parts, last = events(reply)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "stop"]
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")


def test_each_prompt_has_its_choices_in_order(talker: Any) -> None:
    def says_its_prompt(request: Request) -> list[Response]:
        return [response(request, is_final=True, text_output=request.inputs["text_input"].array.item().decode())]

    talker.service.models["talker"] = (TALKER, says_its_prompt)
    body = completion(prompt=["a", "b"], n=2)
    found = [(choice["index"], choice["text"]) for choice in talker.post("/v1/completions", body).json["choices"]]
    assert found == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    streamed = [event["choices"][0] for event in events(talker.post("/v1/completions", {**body, "stream": True}))]
    assert sorted((choice["index"], choice["text"]) for choice in streamed if choice["text"]) == found


def test_choices_of_a_chat_share_its_parsed_messages(talker: Any) -> None:
    assert talker.post("/v1/chat/completions", chat(n=2)).status == 200
    first, second = (request.inputs["messages"] for request in talker.service.requests)
    assert first.value is second.value
    assert first.value == chat()["messages"] == json.loads(first.array[0])


def test_choices_of_the_largest_seed_have_valid_seeds(talker: Any) -> None:
    assert talker.post("/v1/chat/completions", chat(seed=(1 << 63) - 1, n=2)).status == 200
    sampling = [json.loads(item.inputs["sampling_parameters"].array[0]) for item in talker.service.requests]
    assert [item["seed"] for item in sampling] == [(1 << 63) - 1, 0]


def test_the_seed_minus_one_asks_for_none(talker: Any) -> None:
    assert talker.post("/v1/chat/completions", chat(seed=-1, n=2)).status == 200
    assert not any(b"seed" in item.inputs["sampling_parameters"].array[0] for item in talker.service.requests)


def test_logprobs_of_a_chat_contain_the_chosen_token(talker: Any) -> None:
    expected = [{"token": "two", "logprob": 0.0, "bytes": list(b"two")},
                {"token": " words", "logprob": -0.5, "bytes": list(b" words")}]  # fmt: skip
    for top in (0, 1):
        members = chat(logprobs=True, top_logprobs=top)
        content = [{**item, "top_logprobs": [item][:top]} for item in expected]
        (choice,) = talker.post("/v1/chat/completions", members).json["choices"]
        assert choice["logprobs"]["content"] == content
        streamed = events(talker.post("/v1/chat/completions", {**members, "stream": True}))
        logprobs = [event["choices"][0]["logprobs"] for event in streamed]
        assert [item for part in logprobs if part for item in part["content"]] == content


def test_the_most_likely_tokens_are_those_that_the_model_tells(talker: Any) -> None:
    def with_tops(request: Request) -> list[Response]:
        item = {"token": "b", "logprob": -2.0, "top_logprobs": [["a", -0.5], ["b", -2.0], ["c", -3.0]]}
        return [response(request, is_final=True, text_output="b", finish_reason="stop", logprobs=[item])]

    talker.service.models["talker"] = (TALKER, with_tops)
    for top in (0, 2, 20):
        reply = talker.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=top)).json
        ((token,),) = [choice["logprobs"]["content"] for choice in reply["choices"]]
        assert (token["token"], token["logprob"]) == ("b", -2.0)
        assert [item["token"] for item in token["top_logprobs"]] == ["a", "b", "c"][:top]
        sampling = talker.service.requests.pop().inputs["sampling_parameters"].value
        assert sampling.get("logprobs", 0) == top
    (choice,) = talker.post("/v1/completions", completion(logprobs=3)).json["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -2.0, "c": -3.0}]


def test_logprobs_of_a_completion_contain_offsets_and_top_tokens(talker: Any) -> None:
    (choice,) = talker.post("/v1/completions", completion(logprobs=1)).json["choices"]
    assert choice["logprobs"] == {
        "tokens": ["two", " words"],
        "token_logprobs": [0.0, -0.5],
        "top_logprobs": [{"two": 0.0}, {" words": -0.5}],
        "text_offset": [0, 3],
    }
    (choice,) = talker.post("/v1/completions", completion(logprobs=0)).json["choices"]
    assert choice["logprobs"]["top_logprobs"] is None
    streamed = events(talker.post("/v1/completions", completion(logprobs=1, stream=True)))
    places = [place for event in streamed for place in event["choices"][0]["logprobs"]["text_offset"]]
    assert places == [0, 3]


def test_logprobs_of_an_echoed_prompt_are_refused(talker: Any) -> None:
    for logprobs in (0, 1):
        reply = talker.post("/v1/completions", completion(echo=True, logprobs=logprobs))
        assert (reply.status, reply.json["error"]["param"]) == (400, "logprobs")
        assert "not supported with 'echo'" in reply.json["error"]["message"]
    assert talker.post("/v1/completions", completion(echo=True, logprobs=None)).status == 200


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="needs jinja2, of the extra chat")
@pytest.mark.parametrize(("more", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_templates_without_the_role_developer_get_system(talker: Any, more: str, role: str) -> None:
    template = ChatTemplate("{{ messages[0].role }}" + more, {})
    spec = replace(TALKER, inputs=TALKER.inputs[:1], chat_template=template)
    talker.service.models["talker"] = (spec, two_words)
    members = chat(messages=[{"role": "developer", "content": "be brief"}])
    assert talker.post("/v1/chat/completions", members).status == 200
    (request,) = talker.service.requests
    assert request.inputs["text_input"].array.tolist() == [role.encode()]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="needs jinja2, of the extra chat")
@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": "hi<|im_end|>"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("<|im_", "end|>")]}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "name": "<|im_end|>", "content": ""}]},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "description": "<|im_end|>"}}]},
    ],
)
def test_a_special_token_in_a_prompt_is_refused_by_name(talker: Any, members: dict[str, Any]) -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}<|im_end|>{{ eos_token }}", {"eos_token": "</s>"}, ("<|im_end|>",)
    )
    inputs, (spec, answer) = TALKER.inputs[:1], talker.service.models["caller"]
    talker.service.models["caller"] = (replace(spec, inputs=inputs, chat_template=template), answer)
    reply = talker.post("/v1/chat/completions", chat(model="caller", **members))
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, "messages")
    assert "the text of the special token '<|im_end|>', which would take effect in its prompt" in error["message"]
    assert not talker.service.requests
    assert talker.post("/v1/chat/completions", chat(model="caller")).status == 200


def test_without_parallel_tool_calls_a_response_has_the_first_call_only(talker: Any) -> None:
    members = chat(model="caller", tools=[TOOL])
    for more, count in (({}, 2), ({"parallel_tool_calls": True}, 2), ({"parallel_tool_calls": False}, 1)):
        (choice,) = talker.post("/v1/chat/completions", members | more).json["choices"]
        assert [call["id"] for call in choice["message"]["tool_calls"]] == ["call_0", "call_1"][:count]
        streamed = events(talker.post("/v1/chat/completions", members | more | {"stream": True}))
        parts = [part for event in streamed for part in event["choices"][0]["delta"].get("tool_calls", ())]
        assert [part["id"] for part in parts if "id" in part] == ["call_0", "call_1"][:count]


def test_usage_has_the_cached_tokens_of_each_prompt_if_the_model_reports_them(talker: Any) -> None:
    def token_counts(request: Request) -> list[Response]:
        counts = (("num_input_tokens", 9), ("num_cached_tokens", 4))
        outputs = tuple(Tensor(name, DType.UINT32, np.array([count], np.uint32)) for name, count in counts)
        return [Response(request.model, 1, request.id, outputs=outputs)]

    assert "prompt_tokens_details" not in talker.post("/v1/chat/completions", chat()).json["usage"]
    talker.service.models["talker"] = (TALKER, token_counts)
    body = completion(prompt=["a", "b"], n=2)
    expected = {"prompt_tokens": 18, "completion_tokens": 0, "total_tokens": 18,
                "prompt_tokens_details": {"cached_tokens": 8}}  # fmt: skip
    assert talker.post("/v1/completions", body).json["usage"] == expected
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    assert events(talker.post("/v1/completions", body))[-1]["usage"] == expected


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/", "/v3/images/edits?x=1", "/v1/models/a/b"])
def test_unknown_paths_get_openais_error(site: Any, path: str) -> None:
    for method in ("POST", "GET"):
        reply = site.ask(method, path)
        assert reply.status == 404
        error = reply.json["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "unknown_url")
        assert error["message"].startswith(f"unknown path: {method} {path}; of OpenAI's API this server has /v1/chat")


def test_wrong_methods_and_missing_tokens_get_openais_error(open_site: Any) -> None:
    reply = open_site().get("/v1/chat/completions")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert reply.json["error"]["message"] == "GET: use POST"
    reply = open_site().post("/v1/models/iris:predict", {})
    assert reply.json["error"]["message"] == "POST: use GET; inference is POST /v2/models/NAME/infer"
    guarded = open_site(restricted=(RestrictedGroup(("inference",), "key", "secret"),))
    reply = guarded.post("/v1/chat/completions", chat())
    assert (reply.status, reply.json["error"]["type"]) == (403, "permission_error")
    assert reply.json["error"]["message"] == "This API is restricted, expecting header 'key'"


def test_other_paths_keep_their_errors(site: Any) -> None:
    for path in ("/v1x", "/v2/nosuch", "/v1/vision/nosuch"):
        assert (site.get(path).status, site.get(path).error) == (404, "Not Found")
