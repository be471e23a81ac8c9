"""Python models behind OpenAI's API: completions, chats by a template beside the model, embeddings."""

from __future__ import annotations

import base64
import importlib.util
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.kit.model_folder import model_folder, parameters
from tests.kit.server import serve_here

SPEAKER = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""
SHOUTS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for letter in pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode():
                loud = pb_utils.Tensor("text_output", np.array([letter.upper()], object))
                sender.send(pb_utils.InferenceResponse([loud]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TEMPLATES = {
    "templated": "{% if messages[0].role == 'user' %}{{ messages[0].content + '' }}"
                 "{% else %}{{ raise_exception('the first role must be user') }}{% endif %}",
    "broken_template": "\n{% if %}",
}  # fmt: skip
EMBEDDER = """
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            vectors = np.stack([
                np.frombuffer(zlib.crc32(text).to_bytes(4, "little"), np.uint8) / 256 for text in texts.ravel()
            ]).astype(np.float32)
            counts = np.array([len(text) for text in texts.ravel()], np.uint32).reshape(texts.shape)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("embedding", vectors if texts.ndim == 2 else vectors[0]),
                pb_utils.Tensor("num_input_tokens", counts),
            ]))
        return responses
"""
"""Model whose embedding is the CRC of the text, as four numbers from 0 to 1, and which counts bytes as tokens."""
needs_jinja = pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="needs jinja2, of the extra chat")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    model_folder(models / "plain", SPEAKER, {"1/model.py": SHOUTS})
    for name, template in TEMPLATES.items():
        files = {"1/model.py": SHOUTS, "tokenizer/chat_template.jinja": template}
        model_folder(models / name, SPEAKER + parameters(chat_tokenizer="tokenizer"), files)
    for name, rows in (("embedder", 0), ("batched_embedder", 3)):
        model_folder(
            models / name,
            f'backend: "python" max_batch_size: {rows} input {{ name: "text" data_type: TYPE_STRING dims: [1] }} '
            'output { name: "embedding" data_type: TYPE_FP32 dims: [4] } '
            'output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [1] }',
            {"1/model.py": EMBEDDER},
        )
    with serve_here(models) as running:
        yield running


def chat(server: Any, model: str, role: str = "user", **more: Any) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": role, "content": "hello", **more}]}
    status, answer = server.ask("/v1/chat/completions", body)
    return status, answer["error"] if status != 200 else answer["choices"][0]["message"]["content"]


def test_a_model_without_a_template_completes_a_prompt_and_takes_no_chat(server: Any) -> None:
    _, completion = server.ask("/v1/completions", {"model": "plain", "prompt": "hello"})
    assert completion["choices"][0]["text"] == "HELLO"
    status, error = chat(server, "plain")
    assert (status, error["param"], "it needs an input 'messages'" in error["message"]) == (400, "model", True)


@pytest.mark.full
@needs_jinja
def test_a_template_beside_a_model_makes_a_prompt_of_a_chat_or_refuses_it(server: Any) -> None:
    assert chat(server, "templated") == (200, "HELLO")
    assert chat(server, "templated", more=1) == (200, "HELLO")
    status, error = chat(server, "templated", role="system")
    assert (status, error["param"]) == (400, "messages")
    assert "the first role must be user" in error["message"]


@pytest.mark.full
@needs_jinja
def test_a_template_that_cannot_be_compiled_does_not_load(server: Any) -> None:
    assert "model 'broken_template': chat template, line 2" in server.index()["broken_template"]["reason"]


def test_models_of_texts_and_embeddings_are_listed(server: Any) -> None:
    listed = {model["id"] for model in server.ask("/v1/models")[1]["data"]} - TEMPLATES.keys()  # loaded where jinja2 is
    assert listed == {"plain", "embedder", "batched_embedder"}
    assert server.ask("/v1/models/plain")[1]["object"] == "model"


@pytest.mark.parametrize("model", ["embedder", "batched_embedder"])
def test_each_text_gets_its_embedding_in_both_encodings(server: Any, model: str) -> None:
    texts = [f"text {number}" for number in range(10)]
    expected = [[byte / 256 for byte in zlib.crc32(text.encode()).to_bytes(4, "little")] for text in texts]
    _, answer = server.ask("/v1/embeddings", {"model": model, "input": texts})
    assert [item["embedding"] for item in answer["data"]] == expected
    assert answer["usage"] == {"prompt_tokens": 60, "total_tokens": 60}
    _, answer = server.ask("/v3/embeddings", {"model": model, "input": texts, "encoding_format": "base64"})
    assert [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() for item in answer["data"]] == expected
