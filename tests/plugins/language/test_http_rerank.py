"""Jina's and Cohere's rerank: order, batches, cosines of embeddings, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor

DOCUMENTS = ["a fox", "the brown fox jumps", "nothing", "brown"]


def cross_encoder(rows: int = 0, **more: Any) -> ModelSpec:
    inputs = tuple(InputSpec(name, DType.BYTES, (1,)) for name in ("query", "document"))
    outputs = (OutputSpec("score", DType.FP32, (1,)), OutputSpec("num_input_tokens", DType.UINT32, (1,)))
    fields = {"backend": "stub", "inputs": inputs, "outputs": outputs, "max_batch_size": rows, **more}
    return ModelSpec("scorer", platform="", instance_groups=(), **fields)


def share_words(request: Request) -> list[Response]:
    """The score is the number of words that query and document share, the tokens those of both."""
    pairs = zip(*(request.inputs[name].array.ravel().tolist() for name in ("query", "document")), strict=True)
    found = [(len({*one.split()} & {*other.split()}), len(one.split()) + len(other.split())) for one, other in pairs]
    shape = request.inputs["query"].shape
    tensors = (
        Tensor("score", DType.FP32, np.array([score for score, _ in found], np.float32).reshape(shape)),
        Tensor("num_input_tokens", DType.UINT32, np.array([count for _, count in found], np.uint32).reshape(shape)),
    )
    return [Response(request.model, 1, request.id, outputs=tensors)]


def letters(request: Request) -> list[Response]:
    """The vector counts the letters a and b."""
    texts = request.inputs["text"].array.ravel().tolist()
    rows = np.array([[text.count(b"a"), text.count(b"b")] for text in texts], np.float32)
    return [Response(request.model, 1, request.id, outputs=(Tensor("embedding", DType.FP32, rows),))]


@pytest.fixture
def scorer(site: Any) -> Any:
    site.service.models["scorer"] = (cross_encoder(), share_words)
    site.service.models["batched"] = (cross_encoder(3), share_words)
    embedder = ModelSpec(
        "embedder", "stub", "", 4, (InputSpec("text", DType.BYTES, (1,)),),
        (OutputSpec("embedding", DType.FP32, (2,)),), (),
    )  # fmt: skip
    site.service.models["embedder"] = (embedder, letters)
    return site


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/v3/rerank", "/rerank"])
def test_documents_are_sorted_by_their_score(scorer: Any, path: str) -> None:
    body = {"model": "scorer", "query": "brown fox", "documents": DOCUMENTS}
    answer = scorer.post(path, body).json
    assert answer["results"] == [
        {"index": 1, "relevance_score": 2.0},
        {"index": 0, "relevance_score": 1.0},
        {"index": 3, "relevance_score": 1.0},
        {"index": 2, "relevance_score": 0.0},
    ]
    assert answer["id"].startswith("rerank-")
    assert (answer["model"], answer["usage"]) == ("scorer", {"prompt_tokens": 16, "total_tokens": 16})
    objects = [{"text": text} for text in DOCUMENTS]
    answer = scorer.post(path, {**body, "documents": objects, "top_n": 2, "return_documents": True}).json
    assert [(item["index"], item["document"]["text"]) for item in answer["results"]] == [
        (1, "the brown fox jumps"),
        (0, "a fox"),
    ]


@pytest.mark.parametrize(("model", "rows"), [("scorer", [(1,)] * 4), ("batched", [(3, 1), (1, 1)])])
def test_pairs_are_sent_in_batches(scorer: Any, model: str, rows: list[Any]) -> None:
    answer = scorer.post("/v1/rerank", {"model": model, "query": "brown fox", "documents": DOCUMENTS}).json
    scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert (scores, answer["usage"]["prompt_tokens"]) == ({0: 1.0, 1: 2.0, 2: 0.0, 3: 1.0}, 16)
    assert [request.inputs["query"].shape for request in scorer.service.requests] == rows


def test_the_length_of_documents_is_a_parameter_of_the_request(scorer: Any) -> None:
    scorer.service.models["cutter"] = (cross_encoder(backend="openvino_rerank"), share_words)
    body = {"model": "cutter", "query": "a", "documents": ["b"], "max_tokens_per_doc": 7}
    assert scorer.post("/v2/rerank", body).status == 200
    assert scorer.service.requests[-1].parameters == {"max_tokens_per_doc": 7}


def test_an_embedding_model_scores_by_the_cosine(scorer: Any) -> None:
    body = {"model": "embedder", "query": "ab", "documents": ["a", "aabb", "aaab", "x", "ab"]}
    results = scorer.post("/v1/rerank", body).json["results"]
    assert [item["index"] for item in results] == [1, 4, 2, 0, 3]
    expected = [1.0, 1.0, 4 / (2**0.5 * 10**0.5), 0.5**0.5, 0.0]
    np.testing.assert_allclose([item["relevance_score"] for item in results], expected, atol=1e-12)
    # Each text is embedded once.
    assert sum(request.inputs["text"].array.size for request in scorer.service.requests) == 5


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"query": None}, "query", "'query': expected a text, got null"),
        ({"documents": "a"}, "documents", "expected a list of 1 to 2048 texts, got a string"),
        ({"documents": []}, "documents", "expected a list of 1 to 2048 texts, got 0 texts"),
        ({"documents": ["a"] * 2049}, "documents", "got 2049 texts"),
        ({"documents": ["a", {"image": "b"}]}, "documents", "'documents[1]': expected a text, got an object"),
        ({"top_n": 0}, "top_n", "expected a whole number from 1, got 0"),
        ({"return_documents": 1}, "return_documents", "expected true or false, got an integer"),
        ({"max_tokens_per_doc": 9}, "max_tokens_per_doc", "model 'scorer' cannot cut documents; models of"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", "expected a whole number from 1, got 0"),
        ({"model": "add"}, "model", "model 'add' gives no scores: it needs the inputs 'query' and 'document'"),
    ],
)
def test_an_invalid_member_is_named(scorer: Any, members: Any, param: str, message: str) -> None:
    reply = scorer.post("/v1/rerank", {"model": "scorer", "query": "a", "documents": ["a"], **members})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert message in reply.json["error"]["message"]
    assert not scorer.service.requests


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [np.nan]])
def test_scores_that_are_missing_or_no_numbers_are_an_error_of_the_model(scorer: Any, values: list[float]) -> None:
    tensor = Tensor("score", DType.FP32, np.array(values, np.float32))
    scorer.service.models["broken"] = (
        cross_encoder(),
        lambda request: [Response("broken", 1, request.id, outputs=(tensor,))],
    )
    reply = scorer.post("/v1/rerank", {"model": "broken", "query": "a", "documents": ["b"]})
    assert reply.status == 500
    assert "gave no number for each pair in output 'score'" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": tuple(InputSpec(name, DType.BYTES, (1,)) for name in ("query", "document", "other"))},
        {"inputs": (InputSpec("query", DType.BYTES, (1,)), InputSpec("document", DType.FP32, (1,)))},
        {"outputs": (OutputSpec("score", DType.FP32, (2,)),)},
        {"outputs": (OutputSpec("score", DType.INT32, (1,)),)},
        {"is_decoupled": True},
    ],
)
def test_a_model_with_other_tensors_gives_no_scores(scorer: Any, fields: dict[str, Any]) -> None:
    scorer.service.models["other"] = (cross_encoder(**fields), share_words)
    reply = scorer.post("/v1/rerank", {"model": "other", "query": "a", "documents": ["b"]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "model")
    assert scorer.get("/v1/models/other").status == 404


def test_a_model_for_scores_is_one_of_openais_api_alone(scorer: Any) -> None:
    for model, status in (("scorer", 404), ("embedder", 200)):
        assert scorer.get(f"/v1/models/{model}").status == 200
        assert scorer.post("/api/show", {"model": model}).status == status
