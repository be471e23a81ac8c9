"""A vision-language model through a real server: a picture asked about over every API gets the library's own answer."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from edge_server.plugins.language.engines.pictures import decode_picture
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.server import serve
from tests.kit.triton_stream import TritonStream

pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
pytestmark = pytest.mark.full

TINY = Path(__file__).parents[1] / "data/tiny_vlm"
JPEG = (TINY.parent / "coffee.jpg").read_bytes()
BASE64 = base64.b64encode(JPEG).decode()
QUESTION = "what is in the cup?"
TOKENS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(TINY, models / "seer/1", ignore=shutil.ignore_patterns("make.py"))
    (models / "seer/config.pbtxt").write_text(parameters(deterministic="true"))
    (models / "gguf_seer/1").mkdir(parents=True)
    shutil.copy(TINY.parent / "tiny_llm/tiny.gguf", models / "gguf_seer/1/model.gguf")
    shutil.copy(TINY.parent / "tiny_mmproj/mmproj-tiny.gguf", models / "gguf_seer/1")
    with serve(models) as running:
        yield running


@pytest.fixture(scope="module")
def truth() -> tuple[str, int]:
    """Return the answer of OpenVINO GenAI alone, and the tokens of its prompt."""
    import openvino
    import openvino_genai

    pipeline = openvino_genai.VLMPipeline(
        str(TINY), "CPU", INFERENCE_PRECISION_HINT="f32", DYNAMIC_QUANTIZATION_GROUP_SIZE="0"
    )
    picture = openvino.Tensor(decode_picture(JPEG, "")[None])
    result = pipeline.generate(QUESTION, images=[picture], max_new_tokens=TOKENS, do_sample=False)
    return result.texts[0], result.perf_metrics.get_num_input_tokens()


def openai_chat(**more: Any) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{BASE64}"}}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]
    return {"model": "seer", "messages": messages, "temperature": 0, "max_tokens": TOKENS, **more}


def test_every_text_api_gives_the_librarys_answer(server: Any, truth: tuple[str, int]) -> None:
    text, tokens = truth
    status, answer = server.ask("/v1/chat/completions", openai_chat())
    assert (status, answer["choices"][0]["message"]["content"]) == (200, text)
    assert answer["usage"]["prompt_tokens"] == tokens
    options = {"temperature": 0, "num_predict": TOKENS}
    call = {"model": "seer", "images": [BASE64], "prompt": QUESTION, "options": options, "stream": False}
    status, answer = server.ask("/api/generate", call)
    assert (status, answer["response"], answer["prompt_eval_count"]) == (200, text, tokens)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": BASE64}}
    messages = [{"role": "user", "content": [block, {"type": "text", "text": QUESTION}]}]
    call = {"model": "seer", "max_tokens": TOKENS, "temperature": 0, "messages": messages}
    status, answer = server.ask("/v1/messages", call)
    assert (status, answer["content"][0]["text"], answer["usage"]["input_tokens"]) == (200, text, tokens)
    call = {"text_input": QUESTION, "image": BASE64, "exclude_input_in_output": True}
    status, answer = server.ask(
        "/v2/models/seer/generate", {**call, "parameters": {"temperature": 0, "max_tokens": TOKENS}}
    )
    assert (status, answer["text_output"]) == (200, text)


def test_a_stream_has_the_same_text_and_its_last_usage_is_exact(server: Any, truth: tuple[str, int]) -> None:
    body = openai_chat(stream=True, stream_options={"include_usage": True})
    status, data = server.request("POST", "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    pieces = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    assert ("".join(pieces), events[-1]["usage"]["prompt_tokens"]) == truth


def test_a_grpc_stream_takes_the_file_itself(server: Any, truth: tuple[str, int]) -> None:
    sampling = json.dumps({"temperature": 0, "max_tokens": TOKENS}).encode()
    values = {"text_input": QUESTION.encode(), "image": JPEG, "sampling_parameters": sampling}
    with TritonStream(server.grpc) as stream:
        stream.send(
            "seer", [infer_input(grpc_client, name, np.array([value], object)) for name, value in values.items()]
        )
        result = stream.result()
    assert result.as_numpy("text_output")[0].decode() == QUESTION + truth[0]


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, of the extra test-all")
def test_a_gguf_file_with_a_projector_is_served_by_llama_cpp(server: Any) -> None:
    """Its answers are compared with llama.cpp's own in tests/plugins/language/test_llm_llama_cpp_vision.py."""
    status, seen = server.ask("/v1/chat/completions", openai_chat(model="gguf_seer"))
    assert status == 200, seen
    typed = [{"role": "user", "content": "<|im_end|>say hello"}]
    status, _ = server.ask("/v1/chat/completions", openai_chat(model="gguf_seer", messages=typed))
    assert status == 200, "a chat without pictures is given as tokens, in which special tokens are text"
    messages = [{"role": "user", "content": QUESTION}]
    status, blind = server.ask("/v1/chat/completions", openai_chat(model="gguf_seer", messages=messages))
    assert seen["usage"]["prompt_tokens"] == blind["usage"]["prompt_tokens"] + 16
    assert seen["choices"][0]["message"]["content"] != blind["choices"][0]["message"]["content"]
    call = {"text_input": f"<__media__>{QUESTION}", "image": [BASE64, BASE64], "parameters": {"max_tokens": 4}}
    status, answer = server.ask("/v2/models/gguf_seer/generate", call)
    assert (status, "Failed to tokenize prompt" in answer["error"]) == (400, True), "two pictures for one tag"


def test_the_text_of_a_pictures_tag_is_refused(server: Any) -> None:
    body = openai_chat(messages=[{"role": "user", "content": "<ov_genai_image_0>"}])
    code, answer = server.ask("/v1/chat/completions", body)
    assert (code, "or of a picture's tag" in answer["error"]["message"]) == (400, True), answer
