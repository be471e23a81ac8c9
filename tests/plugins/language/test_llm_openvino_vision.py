"""The engine for vision-language models over OpenVINO GenAI, with a small model of random weights: the library's own
answer is the truth."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import ContextTooLong, InvalidRequest
from edge_server.plugins.language.engines.model_size import read_export
from edge_server.plugins.language.engines.openvino_vision_engine import OpenVinoVisionEngine
from edge_server.plugins.language.engines.pictures import decode_picture
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import ImagePrompt, Sampling, TokenEvent

pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
pytestmark = pytest.mark.full

TINY = Path(__file__).parents[2] / "data/tiny_vlm"
COFFEE = (TINY.parent / "coffee.jpg").read_bytes()
QUESTION = "what is in the cup?"


@pytest.fixture(scope="module")
def engine() -> OpenVinoVisionEngine:
    return open_engine(TINY)


def open_engine(folder: Path, **parameters: str) -> OpenVinoVisionEngine:
    size = read_export(folder)
    return OpenVinoVisionEngine(folder, read_settings("tiny", {"deterministic": "true", **parameters}, size, 32))


def prompt(engine: OpenVinoVisionEngine, content: str, *images: bytes) -> ImagePrompt:
    return ImagePrompt(engine.chat_prompt([{"role": "user", "content": content}], ()), images, 1)


def run(engine: OpenVinoVisionEngine) -> dict[int, tuple[str, TokenEvent]]:
    """Return the text and the last event of each sequence."""
    tokens: dict[int, list[int]] = {}
    found = {}
    while not engine.is_idle():
        for event in engine.step():
            assert not event.error, event.error
            tokens.setdefault(event.sequence_id, []).extend(event.tokens)
            if event.finish is not None:
                found[event.sequence_id] = (engine.decode([tokens[event.sequence_id]])[0], event)
    return found


def bare_answer(question: str, *pictures: Any) -> tuple[str, int]:
    """Return the answer of OpenVINO GenAI's VLMPipeline alone, and the tokens of its prompt."""
    import openvino
    import openvino_genai

    pipeline = openvino_genai.VLMPipeline(
        str(TINY), "CPU", INFERENCE_PRECISION_HINT="f32", DYNAMIC_QUANTIZATION_GROUP_SIZE="0"
    )
    images = [openvino.Tensor(picture[None]) for picture in pictures]
    result = pipeline.generate(question, images=images, max_new_tokens=16, do_sample=False)
    return result.texts[0], result.perf_metrics.get_num_input_tokens()


def test_answers_at_the_same_time_are_those_of_the_library_alone(engine: OpenVinoVisionEngine) -> None:
    pixels = decode_picture(COFFEE, "")
    import cv2

    turned = np.ascontiguousarray(pixels[::-1])
    ok, data = cv2.imencode(".png", turned[:, :, ::-1])
    assert ok
    sampling = Sampling(16, temperature=0.0)
    engine.add_image_prompt(1, prompt(engine, "<ov_genai_image_0>" + QUESTION, COFFEE), sampling)
    engine.add_image_prompt(2, prompt(engine, "<ov_genai_image_0>" + QUESTION, data.tobytes()), sampling)
    both = "<ov_genai_image_0><ov_genai_image_1>" + QUESTION
    engine.add_image_prompt(3, prompt(engine, both, COFFEE, data.tobytes()), sampling)
    engine.add_image_prompt(4, prompt(engine, QUESTION), sampling)
    found = {number: (text, event.prompt_tokens) for number, (text, event) in run(engine).items()}
    assert found[1] == bare_answer(QUESTION, pixels)
    assert found[2] == bare_answer(QUESTION, turned)
    assert found[3] == bare_answer(QUESTION, pixels, turned)
    assert found[4] == bare_answer(QUESTION)
    assert len({text for text, _ in found.values()}) == 4, "an answer depends on the pictures"


def test_a_stop_string_ends_a_sequence_with_its_count(engine: OpenVinoVisionEngine) -> None:
    asked = prompt(engine, "<ov_genai_image_0>" + QUESTION, COFFEE)
    engine.add_image_prompt(11, asked, Sampling(16, temperature=0.0))
    text, event = run(engine)[11]
    stop = next(character for character in text if character.isascii())
    engine.add_image_prompt(12, asked, Sampling(16, temperature=0.0, stop=(stop,)))
    cut, last = run(engine)[12]
    assert cut == text[: text.index(stop) + 1]
    assert last.prompt_tokens == event.prompt_tokens


def test_an_answer_without_a_limit_fills_the_context(engine: OpenVinoVisionEngine) -> None:
    engine.add_image_prompt(
        21, prompt(engine, "<ov_genai_image_0>", COFFEE), Sampling(0, temperature=0.0, ignore_eos=True)
    )
    tokens = 0
    while not engine.is_idle():
        for event in engine.step():
            tokens += len(event.tokens)
    assert event.prompt_tokens is not None
    assert event.prompt_tokens + tokens == engine.max_context


def test_a_prompt_too_long_with_its_pictures_is_refused() -> None:
    engine = open_engine(TINY, max_context="64")
    with pytest.raises(ContextTooLong, match="the prompt is too long: expected less than 64 tokens with its pictures"):
        engine.add_image_prompt(1, prompt(engine, "<ov_genai_image_0>" + "x" * 30, COFFEE), Sampling(4))
    assert engine.is_idle()


@pytest.mark.parametrize("content", ["<image><image>", "<ov_genai_image_1>", "<image><ov_genai_image_0>"])
def test_tags_that_do_not_fit_the_pictures_are_refused(engine: OpenVinoVisionEngine, content: str) -> None:
    with pytest.raises(InvalidRequest):
        engine.add_image_prompt(hash(content) & 0xFFFF, prompt(engine, content, COFFEE), Sampling(4))
    assert engine.is_idle()


def test_the_size_of_a_model_is_that_of_its_text_part(tmp_path: Path) -> None:
    size = read_export(TINY)
    assert (size.context, size.width, size.weight_bytes > 200_000) == (1024, 32, True)
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"text_config": []}')
    assert read_export(tmp_path / "model").context == 0
