"""The engine for pictures over llama.cpp, with the tiny model and a projector of random weights: the answer of
llama.cpp's own server is the truth."""

from __future__ import annotations

import base64
import http.client
import json
import math
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_server.backends.base import ModelFile
from edge_server.errors import LoadError
from edge_server.plugins.language.backend import make
from edge_server.plugins.language.engines.llama_cpp_vision_engine import LlamaCppVisionEngine
from edge_server.plugins.language.engines.model_size import read_gguf_for_llama_cpp
from edge_server.plugins.language.engines.pictures import MAX_PIXELS
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import ImagePrompt, Sampling, TokenEvent

xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")
pytestmark = pytest.mark.full

DATA = Path(__file__).parents[2] / "data"
TINY, PROJECTOR = DATA / "tiny_llm/tiny.gguf", DATA / "tiny_mmproj/mmproj-tiny.gguf"
COFFEE = (DATA / "coffee.jpg").read_bytes()
QUESTIONS = ("say hello", "what is the colour of snow?")


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaCppVisionEngine]:
    opened = open_engine()
    yield opened
    opened.close()


def open_engine(**parameters: str) -> LlamaCppVisionEngine:
    size = read_gguf_for_llama_cpp(TINY)
    return LlamaCppVisionEngine(TINY, PROJECTOR, read_settings("tiny", parameters, size, 32), 32, size.bytes_per_token)


def prompt(engine: LlamaCppVisionEngine, content: str, *images: bytes) -> ImagePrompt:
    text = engine.chat_prompt([{"role": "user", "content": content}], ())
    return ImagePrompt(text, images, len(engine.encode(engine.without_image_tags(text))))


def run(engine: LlamaCppVisionEngine) -> dict[int, tuple[str, TokenEvent]]:
    """Return the text and the last event of each sequence."""
    texts: dict[int, str] = {}
    found = {}
    while not engine.is_idle():
        for event in engine.step() or ():
            texts[event.sequence_id] = texts.get(event.sequence_id, "") + (event.text or "")
            if event.finish is not None or event.error:
                found[event.sequence_id] = (texts[event.sequence_id], event)
    return found


@pytest.fixture(scope="module")
def truth() -> dict[str, tuple[str, int]]:
    """Return the answers of llama.cpp's own API to each question about the picture, and the tokens of the prompts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.mmproj.path = str(TINY), str(PROJECTOR)
    parameters.hostnames, parameters.port, parameters.ui, parameters.n_ctx = ["127.0.0.1"], port, False, 512
    server = xllamacpp.Server(parameters)
    answers = {}
    url = f"data:image/jpeg;base64,{base64.b64encode(COFFEE).decode()}"
    for question in QUESTIONS:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        answers[question] = (answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"])
    del server
    return answers


def test_answers_at_the_same_time_are_those_of_llama_cpps_own_api(
    engine: LlamaCppVisionEngine, truth: dict[str, tuple[str, int]]
) -> None:
    for number, question in enumerate(QUESTIONS):
        asked = prompt(engine, f"<__media__>{question}", COFFEE)
        engine.add_image_prompt(number, asked, Sampling(16, temperature=0.0))
    tokens = engine.encode(engine.chat_prompt([{"role": "user", "content": "say hello"}], ()))
    engine.add(2, tokens, Sampling(40, temperature=0.0))
    found = {number: (text, event.prompt_tokens) for number, (text, event) in run(engine).items()}
    assert [found[number] for number in range(2)] == [truth[question] for question in QUESTIONS]
    assert found[2] == ("Hello! How can I help you?", None)


def test_the_largest_picture_reaches_the_server(engine: LlamaCppVisionEngine) -> None:
    import cv2

    side = math.isqrt(MAX_PIXELS)
    ok, data = cv2.imencode(".jpg", np.zeros((side, side, 3), np.uint8))
    assert ok
    engine.add_image_prompt(10, prompt(engine, "<__media__>say hello", data.tobytes()), Sampling(4))
    ((_, event),) = run(engine).values()
    assert event.finish is not None


def test_an_answer_without_a_limit_fills_the_context() -> None:
    engine = open_engine(max_context="64")
    asked = prompt(engine, "<__media__>count from zero", COFFEE)
    engine.add_image_prompt(1, asked, Sampling(0, temperature=0.0, ignore_eos=True))
    tokens, text = [], ""
    while not engine.is_idle():
        time.sleep(0.05)  # lets several tokens come together
        for event in engine.step() or ():
            tokens += event.tokens
            text += event.text or ""
            last = event
    written = engine.decode([tokens])[0]
    engine.close()
    assert last.finish == "length"
    assert last.prompt_tokens is not None
    assert last.prompt_tokens + len(tokens) == 64
    assert text == written


@pytest.mark.parametrize(
    ("content", "images", "problem"),
    [
        ("<__media__>" * 2, 1, "Failed to tokenize prompt"),
        ("<__media__>" * 4, 4, "the prompt is too long: expected less than 64 tokens with its pictures, got"),
        ("<__media__>" * 40, 40, "exceeds the available context size"),
    ],
)
def test_a_prompt_that_does_not_fit_fails_alone(content: str, images: int, problem: str) -> None:
    engine = open_engine(max_context="64", num_kv_blocks="4")
    engine.add_image_prompt(1, prompt(engine, content, *[COFFEE] * images), Sampling(4))
    engine.add(2, engine.encode("count"), Sampling(4))
    found = run(engine)
    engine.close()
    assert problem in found[1][1].error
    assert found[2][1].finish is not None


def test_a_projector_beside_a_model_makes_it_take_pictures(tmp_path: Path) -> None:
    shutil.copy(TINY, tmp_path / "model.gguf")
    file = ModelFile(tmp_path / "model.gguf", tmp_path, 1)

    def input_names() -> set[str]:
        config = json.loads(make("llama_cpp").auto_complete(file, "{}") or "")
        return {item["name"] for item in config["input"]}

    assert "image" not in input_names()
    shutil.copy(PROJECTOR, tmp_path / "mmproj-a.gguf")
    assert "image" in input_names()
    assert make("llama_cpp").memory_parts(file, "m", {})["projector"] == PROJECTOR.stat().st_size
    shutil.copy(PROJECTOR, tmp_path / "mmproj-b.gguf")
    with pytest.raises(LoadError, match=r"expected one file mmproj\*.gguf beside it, got mmproj-a.gguf, mmproj-b.gguf"):
        make("llama_cpp").inspect(file, {})
    pytest.importorskip("openvino_genai")
    (tmp_path / "mmproj-b.gguf").unlink()
    with pytest.raises(LoadError, match=r"'mmproj-a\.gguf' beside it makes it take pictures, for which llama_cpp is"):
        make("openvino_genai").inspect(file, {})
