"""OpenAI's embeddings: batches, both encodings, usage, errors, and the models that can be asked."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Throttled
from edge_server.plugins.language.openai import api_endpoints, endpoints
from edge_server.plugins.language.openai.completion_request import BadMember
from edge_server.plugins.language.openai.embedding_codec import EmbeddingRequest, embedding_tensors

TEXT = InputSpec("text", DType.BYTES, (1,))
EMBEDDING = OutputSpec("embedding", DType.FP32, (3,))
TOKENS = OutputSpec("num_input_tokens", DType.UINT32, (1,))


def spec_of(
    inputs: tuple[InputSpec, ...] = (TEXT,), outputs: tuple[OutputSpec, ...] = (EMBEDDING,), **more: Any
) -> Any:
    fields = {"max_batch_size": 0, **more}
    return ModelSpec("embedder", "stub", "", inputs=inputs, outputs=outputs, instance_groups=(), **fields)


def vector(text: str) -> list[float]:
    """Three numbers that float32 holds exactly."""
    return [len(text), text.count("a") / 4, -1.5]


def compute(request: Request) -> list[Response]:
    texts = request.inputs["text"].array
    values = np.array([vector(text.decode()) for text in texts.ravel()], np.float32)
    counts = np.array([len(text) for text in texts.ravel()], np.uint32)
    if texts.ndim == 1:
        values = values[0]
    tensors = {"embedding": Tensor("embedding", DType.FP32, values), "num_input_tokens": Tensor(
        "num_input_tokens", DType.UINT32, counts.reshape(texts.shape))}  # fmt: skip
    outputs = tuple(tensors[name] for name in request.outputs)
    return [Response(request.model, 1, request.id, outputs=outputs)]


@pytest.fixture
def embedder(site: Any) -> Any:
    site.service.models["plain"] = (spec_of(), compute)
    site.service.models["batched"] = (spec_of(outputs=(EMBEDDING, TOKENS), max_batch_size=4), compute)
    return site


@pytest.mark.parametrize(
    ("origin", "orders"),
    [
        ({}, [("keep_alive", "batched", 0.0)]),
        ({"Origin": "http://localhost"}, [("keep_alive", "batched", 0.0)]),
        ({"Origin": "https://page.example"}, []),
        ({"Origin": "null"}, []),
    ],
)
def test_only_pages_of_this_server_may_set_keep_alive(
    open_site: Any, origin: dict[str, str], orders: list[Any]
) -> None:
    site = open_site(allowed_origins=("*", "https://page.example"))
    site.service.models["batched"] = (spec_of(outputs=(EMBEDDING, TOKENS), max_batch_size=4), compute)
    headers = {"Host": "localhost", "Content-Type": "application/json", **origin}
    reply = site.post("/v1/embeddings", {"model": "batched", "input": "banana", "keep_alive": 0}, headers)
    assert (reply.status, site.service.orders) == (200, orders)


def ask(site: Any, path: str = "/v1/embeddings", **members: Any) -> Any:
    return site.post(path, {"model": "batched", "input": "banana", **members})


def test_the_answer_has_openais_form(embedder):
    for path in ("/v1/embeddings", "/v3/embeddings"):
        reply = ask(embedder, path, user="ignored", dimensions=3, encoding_format=None)
        assert reply.headers["Content-Type"] == "application/json"
        assert reply.json == {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": vector("banana")}],
            "model": "batched",
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
        }


def test_base64_holds_little_endian_float32(embedder):
    reply = ask(embedder, input=["banana", "äöü"], encoding_format="base64")
    texts = [base64.b64decode(item["embedding"]) for item in reply.json["data"]]
    assert [np.frombuffer(text, "<f4").tolist() for text in texts] == [vector("banana"), vector("äöü")]


@pytest.mark.parametrize(("model", "rows"), [("plain", [1] * 10), ("batched", [4, 4, 2])])
def test_texts_are_sent_in_batches_and_answered_in_order(embedder, model, rows):
    texts = ["x" * size for size in range(10)]
    reply = ask(embedder, model=model, input=texts)
    assert [item["embedding"] for item in reply.json["data"]] == [vector(text) for text in texts]
    assert [item["index"] for item in reply.json["data"]] == list(range(10))
    shape_after_rows = (1,) if model == "batched" else ()
    shapes = [request.inputs["text"].shape for request in embedder.service.requests]
    assert shapes == [(count, *shape_after_rows) for count in rows]
    # A model that does not report its tokens has none in the usage.
    assert reply.json["usage"]["prompt_tokens"] == (sum(range(10)) if model == "batched" else 0)


def test_at_most_2048_texts_are_accepted(embedder):
    reply = ask(embedder, input=["a"] * 2048)
    assert len(reply.json["data"]) == 2048
    assert ask(embedder, input=["a"] * 2049).status == 400


def test_a_call_opens_at_most_16_requests_and_cancels_them_if_its_client_disconnects(embedder):
    embedder.service.models["plain"] = (spec_of(), lambda request: [])
    connection = http.client.HTTPConnection("127.0.0.1", embedder.port, timeout=30)
    connection.request("POST", "/v1/embeddings", json.dumps({"model": "plain", "input": ["a"] * 40}))
    assert embedder.service.submitted.wait(30)
    # The loop submits all sixteen in one turn; a request to it returns after that turn.
    embedder.get("/v2/health/live")
    tickets = list(embedder.service.tickets)
    connection.close()
    assert all(ticket.was_cancelled.wait(30) for ticket in tickets)
    assert len(embedder.service.tickets) == len(tickets) == 16


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"input": None}, "input", "'input': expected a text, got null"),
        ({"input": []}, "input", "list of 1 to 2048 texts, got 0"),
        ({"input": [1, 2]}, "input", "'input[0]': expected a text, got an integer; tokens are not supported"),
        ({"input": ["a", [1, 2]]}, "input", "'input[1]': expected a text, got an array; tokens are not supported"),
        ({"input": {}}, "input", "got an object"),
        ({"encoding_format": "int8"}, "encoding_format", "expected float or base64, got int8"),
        ({"dimensions": 2}, "dimensions", "expected 3, as model 'batched' gives, got 2"),
        ({"dimensions": 0}, "dimensions", "expected a whole number from 1, got 0"),
        ({"model": ""}, "model", "expected the name of a model"),
        ({"model": "add"}, "model", "model 'add' gives no embeddings: it needs exactly one input"),
        ({"keep_alive": "soon"}, "keep_alive", "expected seconds"),
    ],
)
def test_an_invalid_member_is_named(embedder, members, param, message):
    reply = ask(embedder, **members)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert message in reply.json["error"]["message"]
    assert not embedder.service.requests


def test_dimensions_are_compared_with_the_response_if_not_configured(embedder):
    embedder.service.models["plain"] = (spec_of(outputs=(OutputSpec("embedding", DType.FP32, (-1,)),)), compute)
    assert ask(embedder, model="plain", dimensions=3).status == 200
    reply = ask(embedder, model="plain", dimensions=4)
    assert (reply.status, reply.json["error"]["param"]) == (400, "dimensions")


def test_a_large_call_is_parsed_and_answered_on_another_thread(embedder, monkeypatch):
    monkeypatch.setattr(api_endpoints, "TEXT_ON_LOOP_BYTES", 0)
    monkeypatch.setattr(endpoints, "read_embedding_request", on_worker(endpoints.read_embedding_request))
    monkeypatch.setattr(EmbeddingRequest, "results", on_worker(EmbeddingRequest.results))
    assert ask(embedder).json["data"][0]["embedding"] == vector("banana")
    assert ask(embedder, input=[]).json["error"]["param"] == "input"


def on_worker(function: Any) -> Any:
    """Return the function; it raises on a thread with an event loop."""

    def checked(*args: Any) -> Any:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return function(*args)

    return checked


def test_errors_have_openais_form(embedder):
    assert ask(embedder, model="nosuch").json["error"]["code"] == "model_not_found"
    error = Throttled("too hot", retry_after_s=2.5)
    embedder.service.models["hot"] = (spec_of(), lambda request: [Response("hot", 1, request.id, error=error)])
    reply = ask(embedder, model="hot", input=["a", "b"])
    assert (reply.status, reply.headers["Retry-After"]) == (429, "3")
    assert reply.json["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("values", "message"),
    [([1, np.nan, 0], "NaN or infinity in output 'embedding'"), ([], "gave no output 'embedding'")],
)
def test_an_invalid_vector_is_an_error_of_the_model(embedder, values, message):
    tensor = Tensor("embedding", DType.FP32, np.array(values, np.float32))
    embedder.service.models["broken"] = (
        spec_of(),
        lambda request: [Response("broken", 1, request.id, outputs=(tensor,))],
    )
    reply = ask(embedder, model="broken")
    assert reply.status == 500
    assert message in reply.json["error"]["message"]


OTHER = OutputSpec("other", DType.FP32, (2,))
HALF = OutputSpec("embedding", DType.FP16, (2,))


@pytest.mark.parametrize(
    ("outputs", "parameters", "name"),
    [
        ((OTHER,), {}, "other"),
        ((OTHER, EMBEDDING), {}, "embedding"),
        ((OTHER, EMBEDDING), {"embedding_output": "other"}, "other"),
    ],
)
def test_the_output_is_the_configured_one_or_embedding_or_the_only_one(outputs, parameters, name):
    source, output = embedding_tensors(spec_of(outputs=outputs, parameters=parameters))
    assert (source.name, output.name) == ("text", name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": (TEXT, InputSpec("other", DType.FP32, (1,)))}, "it has 'text' STRING, 'other' FP32"),
        ({"inputs": (InputSpec("text", DType.BYTES, (1,), is_optional=True),)}, "it has none"),
        ({"inputs": (InputSpec("text", DType.BYTES, (2,)),)}, "an input for one text, of shape [1]; 'text' has [2]"),
        ({"outputs": (OTHER, OutputSpec("another", DType.FP32, (2,)))}, "it has 2"),
        ({"outputs": (TOKENS,)}, "it has 0"),
        ({"outputs": (HALF,)}, "FP32 [-1] or [n] in the output 'embedding'; it has FP16 [2]"),
        ({"outputs": (OutputSpec("embedding", DType.FP32, (2, 2)),)}, "it has FP32 [2, 2]"),
        ({"parameters": {"embedding_output": "nosuch"}}, "the output 'nosuch', which its parameter"),
        ({"is_decoupled": True}, "it is decoupled"),
    ],
)
def test_an_unsuitable_model_is_refused_with_what_is_missing(fields, message):
    with pytest.raises(BadMember, match="model 'embedder' gives no embeddings: it needs") as caught:
        embedding_tensors(spec_of(**fields))
    assert message in caught.value.message
    assert caught.value.param == "model"


def test_an_optional_input_is_ignored():
    optional = InputSpec("kind", DType.BYTES, (1,), is_optional=True)
    assert embedding_tensors(spec_of(inputs=(optional, TEXT)))[0] is TEXT
