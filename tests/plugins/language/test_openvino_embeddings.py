"""Exports of embedding models and cross-encoders with OpenVINO GenAI: the vectors and scores of the bare model."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.model_folder import parameters
from tests.kit.server import serve_here

TINY_EMBEDDINGS = Path(__file__).parents[2] / "data/tiny_embeddings"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("openvino_genai", "openai")),
        reason="needs openvino-genai and openai, of the extra test-all",
    ),
]


def embedding_model(folder: Path, **values: str) -> None:
    shutil.copytree(TINY_EMBEDDINGS, folder / "1", ignore=shutil.ignore_patterns("make.py"))
    (folder / "config.pbtxt").write_text('backend: "openvino_embeddings" ' + parameters(**values))


def cross_encoder(folder: Path, classes: int) -> None:
    """Make a model with so many classes of the embedding model: a random layer over its first vector."""
    import openvino
    from openvino import opset13

    embedding_model(folder)
    (folder / "config.pbtxt").write_text('backend: "openvino_rerank"')
    model = openvino.Core().read_model(TINY_EMBEDDINGS / "openvino_model.xml")
    vectors = model.output(0).get_node().input_value(0)
    first = opset13.gather(vectors, opset13.constant(0), opset13.constant(1))
    weights = np.random.default_rng(0).normal(size=(16, classes)).astype(np.float32)
    logits = opset13.result(opset13.matmul(first, opset13.constant(weights), False, False))
    logits.output(0).get_tensor().set_names({"logits"})
    whole = openvino.Model([logits], model.get_parameters(), "cross_encoder")
    openvino.save_model(whole, folder / "1/openvino_model.xml", compress_to_fp16=False)


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("embeddings")
    for pooling in ("cls", "mean", "last_token"):
        embedding_model(models / pooling, pooling=pooling, normalize="false")
    embedding_model(models / "default")
    embedding_model(models / "wrong", pooling="max")
    embedding_model(models / "incomplete")
    (models / "incomplete/1/openvino_tokenizer.xml").unlink()
    for name, classes in (("scorer", 1), ("classifier", 2)):
        cross_encoder(models / name, classes)
    embedding_model(models / "nested", matryoshka_dimensions="4, 8", normalize="false")
    with serve_here(models) as running:
        yield running


TEXTS = ["hello", "a", "a longer text with several words", "", "grüezi"]


@pytest.fixture(scope="module")
def token_vectors() -> list[Any]:
    """The vectors that the bare model gives to the tokens of each of TEXTS."""
    import openvino
    import openvino_genai

    tokenizer = openvino_genai.Tokenizer(str(TINY_EMBEDDINGS))
    model = openvino.Core().compile_model(TINY_EMBEDDINGS / "openvino_model.xml", "CPU")
    found = []
    for text in TEXTS:
        ids = np.array(tokenizer.encode([text]).input_ids.data)
        found.append(model([ids, np.ones_like(ids), np.zeros_like(ids)])[0][0])
    return found


@pytest.fixture
def client(embedding_server: Any) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=embedding_server.url("/v1"), api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
def test_the_embedding_is_the_pooled_vectors_of_the_bare_model(
    client: Any, token_vectors: list[Any], pooling: str
) -> None:
    answer = client.embeddings.create(model=pooling, input=TEXTS, dimensions=16)
    pool = {
        "cls": lambda rows: rows[0],
        "mean": lambda rows: rows.mean(axis=0),
        "last_token": lambda rows: rows[-1],
    }
    expected = [pool[pooling](rows) for rows in token_vectors]
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=0.02)
    assert answer.usage.prompt_tokens == sum(len(rows) for rows in token_vectors)


def test_by_default_the_embedding_is_the_normalised_first_vector(client: Any, token_vectors: list[Any]) -> None:
    texts = TEXTS * 5  # several batches
    answer = client.embeddings.create(model="default", input=texts, encoding_format="float")
    expected = [rows[0] / np.linalg.norm(rows[0]) for rows in token_vectors] * 5
    np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=0.02)


def test_a_text_that_is_too_long_is_refused_with_length_and_limit(client: Any) -> None:
    import openai

    assert client.embeddings.create(model="default", input="x " * 62).usage.prompt_tokens == 64
    with pytest.raises(openai.BadRequestError, match="at most 64 tokens, got 65") as caught:
        client.embeddings.create(model="default", input="x " * 63)
    assert caught.value.code == "context_length_exceeded"


def test_dimensions_cut_an_embedding_of_a_model_that_was_trained_so(client: Any, token_vectors: list[Any]) -> None:
    import openai

    for size in (4, 8):
        answer = client.embeddings.create(model="nested", input=TEXTS, dimensions=size)
        cut = np.array([vectors[0][:size] for vectors in token_vectors])
        expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=0.02)
    whole = client.embeddings.create(model="nested", input=TEXTS, dimensions=16)
    np.testing.assert_allclose(
        [item.embedding for item in whole.data], [vectors[0] for vectors in token_vectors], atol=0.02
    )
    for model, message in (("nested", "expected 16, 4, 8, as"), ("default", "expected 16, as")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.embeddings.create(model=model, input="a", dimensions=5)


@pytest.mark.parametrize("name", ["scorer", "classifier"])
def test_a_cross_encoder_scores_as_the_bare_model_does(
    embedding_server: Any, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    import openvino
    import openvino_genai

    folder = tmp_path_factory.mktemp("bare")
    cross_encoder(folder, 1 if name == "scorer" else 2)
    tokenizer = openvino_genai.Tokenizer(str(TINY_EMBEDDINGS))
    model = openvino.Core().compile_model(folder / "1/openvino_model.xml", "CPU")
    query, documents = "which cat", ["hello", "a cat", "", "something long here", "which cat", *TEXTS, "a", "b"]
    expected, tokens = [], 0
    for document in documents:
        one, other = (np.array(tokenizer.encode([text]).input_ids.data)[0] for text in (query, document))
        ids = np.concatenate([one, other[1:]])[None]  # the second text without its [CLS]
        kinds = np.concatenate([np.zeros(len(one)), np.ones(len(other) - 1)])[None].astype(np.int64)
        logits = model([ids, np.ones_like(ids), kinds])[0][0]
        powers = np.exp(logits)
        expected.append(powers[1] / powers.sum() if len(powers) == 2 else 1 / (1 + 1 / powers[0]))
        tokens += ids.size
    call = {"model": name, "query": query, "documents": documents}
    status, answer = embedding_server.ask("/v1/rerank", call)
    assert status == 200, answer
    scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
    np.testing.assert_allclose([scores[index] for index in range(len(documents))], expected, atol=1e-3)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert answer["usage"]["total_tokens"] == tokens


def test_a_pair_that_is_too_long_is_refused_with_length_and_limit(embedding_server: Any) -> None:
    call = {"model": "scorer", "query": "x " * 30, "documents": ["x " * 31]}
    status, answer = embedding_server.ask("/v1/rerank", call)
    assert (status, answer["usage"]["total_tokens"]) == (200, 64)
    status, answer = embedding_server.ask("/v1/rerank", {**call, "documents": ["a", "x " * 32]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "a query and a document of at most 64 tokens together, got 65" in answer["error"]["message"]
    # A document of the same tokens, cut to as many as fit.
    call = {**call, "documents": ["x " * 90, "x"]}
    status, answer = embedding_server.ask("/v2/rerank", {**call, "max_tokens_per_doc": 31})
    assert status == 200, answer
    assert answer["usage"]["total_tokens"] == 64 + 34
    _, expected = embedding_server.ask("/v2/rerank", {**call, "documents": ["x " * 31, "x"]})
    assert answer["results"] == expected["results"]


def test_embeddings_are_compared_by_their_cosine(embedding_server: Any, client: Any) -> None:
    vectors = [np.array(item.embedding) for item in client.embeddings.create(model="default", input=TEXTS).data]
    _, answer = embedding_server.ask("/v1/rerank", {"model": "default", "query": TEXTS[0], "documents": TEXTS})
    scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
    expected = [float(vectors[0] @ vector) for vector in vectors]
    np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], expected, atol=1e-3)


def test_an_unservable_model_has_its_reason(embedding_server: Any) -> None:
    index = embedding_server.index()
    assert "parameter pooling: expected cls, mean, last_token, got 'max'" in index["wrong"]["reason"]
    assert "expected 'openvino_tokenizer.xml' beside it" in index["incomplete"]["reason"]
