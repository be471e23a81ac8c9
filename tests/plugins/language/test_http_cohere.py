"""Cohere's embeddings in both versions, and vLLM's classification: forms of vectors, labels, and errors."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor

TEXT = InputSpec("text", DType.BYTES, (1,))
TOKENS = OutputSpec("num_input_tokens", DType.UINT32, (1,))


def answer_with(name: str, request: Request, rows: Any, texts: list[bytes]) -> list[Response]:
    counts = np.array([[len(text)] for text in texts], np.uint32)
    outputs = Tensor(name, DType.FP32, rows), Tensor("num_input_tokens", DType.UINT32, counts)
    return [Response(request.model, 1, request.id, outputs=outputs)]


def embed(request: Request) -> list[Response]:
    texts = request.inputs["text"].array.ravel().tolist()
    rows = np.array([[len(text), -1.5, *[0.5] * 7] for text in texts], np.float32)
    return answer_with("embedding", request, rows, texts)


def classify(request: Request) -> list[Response]:
    texts = request.inputs["text"].array.ravel().tolist()
    rows = np.array([[0.25, 0.75, 0.0] if b"b" in text else [0.5, 0.25, 0.25] for text in texts], np.float32)
    return answer_with("probs", request, rows, texts)


def spec(name: str, output: str, size: int, labels: tuple[str, ...] = ()) -> ModelSpec:
    outputs = (OutputSpec(output, DType.FP32, (size,), labels=labels), TOKENS)
    return ModelSpec(name, "stub", "", 4, (TEXT,), outputs, ())


@pytest.fixture
def models(site: Any) -> Any:
    site.service.models["embedder"] = (spec("embedder", "embedding", 9), embed)
    site.service.models["labelled"] = (spec("labelled", "probs", 3, ("no", "yes")), classify)
    site.service.models["plain"] = (spec("plain", "probs", 3), classify)
    return site


BODY = {"model": "embedder", "texts": ["a", "bcd"], "input_type": "search_document"}
FLOATS = [[1.0, -1.5, *[0.5] * 7], [3.0, -1.5, *[0.5] * 7]]


def test_the_first_version_gives_lists_of_numbers(models: Any) -> None:
    answer = models.post("/v1/embed", BODY).json
    assert (answer["response_type"], answer["embeddings"], answer["texts"]) == (
        "embeddings_floats", FLOATS, ["a", "bcd"],
    )  # fmt: skip
    assert answer["meta"] == {"api_version": {"version": "1"}, "billed_units": {"input_tokens": 4}}
    answer = models.post("/v1/embed", {**BODY, "embedding_types": ["float"]}).json
    assert (answer["response_type"], answer["embeddings"]) == ("embeddings_by_type", {"float": FLOATS})


def test_the_second_version_gives_each_form_that_is_asked_for(models: Any) -> None:
    assert models.post("/v2/embed", BODY).json["embeddings"] == {"float": FLOATS}
    types = ["base64", "ubinary", "binary", "float"]
    found = models.post("/v2/embed", {**BODY, "embedding_types": types, "truncate": "NONE"}).json["embeddings"]
    assert found["float"] == FLOATS
    vectors = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in found["base64"]]
    assert vectors == FLOATS
    assert found["ubinary"] == [[0b10111111, 0b10000000]] * 2
    assert found["binary"] == [[0b10111111 - 128, 0]] * 2
    inputs = [{"content": [{"type": "text", "text": text}]} for text in BODY["texts"]]
    answer = models.post("/v2/embed", {"model": "embedder", "inputs": inputs, "input_type": "search_query"}).json
    assert answer["embeddings"] == {"float": FLOATS}


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"texts": "a"}, "texts", "'texts': expected a list of texts, got a string"),
        ({"texts": []}, "texts", "'texts': expected a text or a list of 1 to 2048 texts, got 0"),
        ({"texts": [3]}, "texts", "'texts[0]': expected a text, got an integer"),
        ({"truncate": "END"}, "truncate", "expected NONE, because no text is cut, got END"),
        ({"input_type": "image"}, "input_type", "expected search_document"),
        ({"embedding_types": ["int8"]}, "embedding_types", "expected a list of float, base64, ubinary, binary"),
        ({"embedding_types": [{}]}, "embedding_types", "expected a list of float"),
        ({"output_dimension": 4}, "output_dimension", "'output_dimension': expected 9, as model 'embedder' gives"),
        ({"images": ["x"]}, "images", "'images' is not supported"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, "inputs", "'inputs[0]': expected"),
        ({"model": "nosuch"}, None, "'nosuch' is not found"),
    ],
)
def test_what_is_not_supported_is_named(models: Any, members: Any, param: str | None, message: str) -> None:
    reply = models.post("/v2/embed", {**BODY, **members})
    assert reply.status == (404 if param is None else 400)
    assert reply.json["error"]["param"] == param
    assert message in reply.json["error"]["message"]
    assert not models.service.requests


@pytest.mark.parametrize(("model", "labels"), [("labelled", ["no", "yes"]), ("plain", ["LABEL_0", "LABEL_1"])])
def test_texts_are_classified_with_the_labels_of_the_model(models: Any, model: str, labels: list[str]) -> None:
    answer = models.post("/classify", {"model": model, "input": ["a", "b"]}).json
    assert answer["data"] == [
        {"index": 0, "label": labels[0], "probs": [0.5, 0.25, 0.25], "num_classes": 3},
        {"index": 1, "label": labels[1], "probs": [0.25, 0.75, 0.0], "num_classes": 3},
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
    assert answer["id"].startswith("classify-")
    assert models.post("/classify", {"model": model, "input": "a"}).json["data"] == answer["data"][:1]


def test_a_call_that_cannot_be_classified_is_refused(models: Any) -> None:
    reply = models.post("/classify", {"model": "embedder", "input": "a"})
    assert (reply.status, reply.json["error"]["param"]) == (400, "model")
    assert "the output 'probs' FP32 [n]" in reply.json["error"]["message"]
    reply = models.post("/classify", {"model": "plain", "input": [1]})
    assert "expected a text or a list of texts, got an integer" in reply.json["error"]["message"]
    broken = Tensor("probs", DType.FP32, np.array([[np.nan, 1, 1]], np.float32))
    models.service.models["broken"] = (
        spec("broken", "probs", 3), lambda request: [Response("broken", 1, request.id, outputs=(broken,))],
    )  # fmt: skip
    assert models.post("/classify", {"model": "broken", "input": "a"}).status == 500
