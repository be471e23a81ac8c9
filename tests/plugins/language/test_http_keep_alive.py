"""`keep_alive` of the text APIs: only a client that may load and unload models sets how long they stay loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.config import RestrictedGroup
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Throttled
from edge_server.frontends.auth_tokens import Tokens

JSON = {"Content-Type": "application/json"}
CALLS = {
    "/v1/chat/completions": {"model": "talker", "messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"model": "talker", "prompt": "hello"},
    "/v1/embeddings": {"model": "embedder", "input": "hello"},
    "/api/chat": {"model": "talker", "messages": [{"role": "user", "content": "hello"}], "stream": False},
    "/api/generate": {"model": "talker", "prompt": "hello", "stream": False},
    "/api/embed": {"model": "embedder", "input": "hello"},
}


def spec_of(name: str, source: tuple[str, ...], output: OutputSpec, **more: Any) -> ModelSpec:
    inputs = tuple(InputSpec(item, DType.BYTES, (1,), is_optional=len(source) > 1) for item in source)
    return ModelSpec(name, "stub", "", 0, inputs, (output,), instance_groups=(), **more)


def talk(request: Request) -> list[Response]:
    text = np.array([b"hi"], object)
    return [Response(request.model, 1, request.id, outputs=(Tensor("text_output", DType.BYTES, text),))]


def embed(request: Request) -> list[Response]:
    return [Response(request.model, 1, request.id, outputs=(Tensor("embedding", DType.FP32, np.ones(3, np.float32)),))]


@pytest.fixture
def open_talker(open_site: Callable[..., Any]) -> Callable[..., Any]:
    def start(**options: Any) -> Any:
        site = open_site(**options)
        talker = spec_of("talker", ("text_input", "messages"), OutputSpec("text_output", DType.BYTES, (-1,)))
        site.service.models["talker"] = (talker, talk)
        site.service.models["embedder"] = (
            spec_of("embedder", ("text",), OutputSpec("embedding", DType.FP32, (3,))),
            embed,
        )
        return site

    return start


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    lines = [("client", "asks", "inference"), ("operator", "changes", "inference,model-repository")]
    text = "".join(f"{name} {hashlib.sha256(token.encode()).hexdigest()} {allowed}\n" for name, token, allowed in lines)
    (tmp_path / "tokens").write_text(text)
    return Tokens(str(tmp_path / "tokens"))


@pytest.mark.parametrize("path", CALLS)
def test_a_token_without_the_right_to_unload_gets_its_response_and_a_warning(
    open_talker: Callable[..., Any], tokens: Tokens, path: str
) -> None:
    site = open_talker(tokens=tokens)
    reply = site.post(path, {**CALLS[path], "keep_alive": 0}, bearer("asks"))
    assert reply.status == 200
    (warning,) = reply.json["warnings"]
    assert "keep_alive is ignored" in warning
    assert "model-repository" in warning
    assert site.service.keep_alives == []
    reply = site.post(path, {**CALLS[path], "keep_alive": "5m"}, bearer("changes"))
    assert "warnings" not in reply.json
    assert site.service.keep_alives == [(CALLS[path]["model"], 300.0)]
    assert "warnings" not in site.post(path, CALLS[path], bearer("asks")).json


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("headers", "is_set"),
    [
        ({}, True),
        (JSON, True),
        ({"Origin": "http://evil.example", **JSON}, False),
        ({"Origin": "http://admitted.example", **JSON}, False),
        ({"Sec-Fetch-Site": "cross-site", **JSON}, False),
        ({"Origin": "http://{host}", **JSON}, True),
    ],
)
def test_a_page_of_another_site_cannot_set_keep_alive(
    open_talker: Callable[..., Any], path: str, headers: dict[str, str], is_set: bool
) -> None:
    site = open_talker(allowed_origins=("http://admitted.example",))
    given = {name: value.format(host=f"127.0.0.1:{site.port}") for name, value in headers.items()}
    reply = site.post(path, {**CALLS[path], "keep_alive": 0}, given)
    assert bool(site.service.keep_alives) == is_set
    if reply.status == 200:
        assert ("warnings" in reply.json) != is_set
    else:
        assert (reply.status, is_set) == (403, False)


def test_a_restricted_api_requires_its_key(open_talker: Callable[..., Any]) -> None:
    site = open_talker(restricted=(RestrictedGroup(("model-repository",), "admin-key", "secret"),))
    call = {**CALLS["/v1/completions"], "keep_alive": -1}
    assert "warnings" in site.post("/v1/completions", call).json
    assert "warnings" not in site.post("/v1/completions", call, {"admin-key": "secret"}).json
    assert len(site.service.keep_alives) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_last_chunk_of_a_stream_has_the_warning(open_talker: Callable[..., Any], tokens: Tokens, path: str) -> None:
    site = open_talker(tokens=tokens)
    reply = site.post(path, {**CALLS[path], "keep_alive": 0, "stream": True}, bearer("asks"))
    chunks = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line.startswith("data: {")]
    assert ["warnings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    # Programs read the first choice of each chunk.
    assert all(chunk["choices"] for chunk in chunks)
    assert site.service.keep_alives == []


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90.0), ("90", 90.0), ("1.5m", 90.0), ("5m0s", 300.0), ("1h30m0s", 5400.0), ("500ms", 0.5), (0, 0.0)]
    + [(value, float("inf")) for value in (-1, "-1", "-1m")],
)
def test_a_duration_may_have_several_units(open_talker: Callable[..., Any], given: Any, seconds: float) -> None:
    site = open_talker()
    assert site.post("/api/chat", {**CALLS["/api/chat"], "keep_alive": given}).status == 200
    assert site.service.keep_alives == [("talker", seconds)]


@pytest.mark.parametrize("given", ["", "m", "1.m", "1d", "1h 2m", "1m" * 9, "1" * 10, True, [1], 1e300])
def test_a_text_that_is_no_duration_is_refused(open_talker: Callable[..., Any], given: Any) -> None:
    site = open_talker()
    reply = site.post("/api/chat", {**CALLS["/api/chat"], "keep_alive": given})
    assert (reply.status, "'keep_alive': expected seconds or a text such as 5m" in reply.error) == (400, True)
    assert site.service.keep_alives == []


@pytest.mark.parametrize("path", CALLS)
def test_a_call_that_the_server_refuses_sets_nothing(open_talker: Callable[..., Any], path: str) -> None:
    site = open_talker()

    def refuse(request: Request, sink: Any) -> Any:
        raise Throttled("too hot", retry_after_s=1.0)

    site.service.submit = refuse
    assert site.post(path, {**CALLS[path], "keep_alive": 0}).status == 429
    assert site.service.keep_alives == []
