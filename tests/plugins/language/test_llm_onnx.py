"""Language models with ONNX Runtime GenAI: batches, cancellation, sampling, structured output, and bad input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile
from edge_server.errors import InvalidRequest, LoadError
from edge_server.plugins.language.engines.onnxruntime_genai_engine import OnnxEngine
from edge_server.plugins.language.engines.settings import LlmSettings
from edge_server.plugins.language.engines.token_engine import Sampling

pytestmark = pytest.mark.full

pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai, of the extra test-all")

FOLDER = Path(__file__).parents[2] / "data/tiny_llm/onnx"
CONTEXT = 512
ANSWERS = {
    "count from three": "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty",
    "days from Friday": "Friday Saturday Sunday Monday Tuesday Wednesday Thursday",
    "what is the capital of Japan?": "The capital of Japan is Tokyo.",
    "say hello": "Hello! How can I help you?",
    "give me json": '{"name": "edge", "size": 3}',
}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 99}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
)


class Driven:
    """An engine that a test steps. Its sequences are known by their questions, which are numbered as they come."""

    def __init__(self, max_num_seqs: int = 8) -> None:
        settings = LlmSettings(max_num_seqs, 0, max_num_seqs * CONTEXT // 32, CONTEXT, False, 1, False, 64)
        self.engine = OnnxEngine(FOLDER, settings, 32, 512)
        self.steps = 0
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def add(self, question: str, **sampling: Any) -> int:
        number = len(self.tokens) + 1
        prompt = self.engine.encode(self.engine.chat_prompt([{"role": "user", "content": question}], ()))
        self.tokens[number] = []
        self.engine.add(number, prompt, Sampling(**{"max_tokens": 60, "temperature": 0.0, **sampling}))
        return number

    def step(self) -> None:
        self.steps += 1
        for event in self.engine.step():
            assert event.error == ""
            self.tokens[event.sequence_id] += event.tokens
            if event.finish is not None:
                self.finish[event.sequence_id] = event.finish

    def run(self, number: int = 0) -> str:
        """Step until the engine is idle; return the text of one sequence."""
        while not self.engine.is_idle():
            self.step()
        return self.text(number)

    def text(self, number: int) -> str:
        return self.engine.decode([self.tokens.get(number, [])])[0]


@pytest.fixture
def start() -> Iterator[Callable[..., Driven]]:
    opened: list[Driven] = []

    def open_engine(**options: int) -> Driven:
        opened.append(Driven(**options))
        return opened[-1]

    yield open_engine
    for driven in opened:
        driven.engine.close()


def test_prompts_that_exceed_the_context_together_are_processed_one_by_one(
    start: Callable[..., Driven],
) -> None:
    driven = start()
    for number, length in ((1, 300), (2, 300), (3, 200)):
        driven.tokens[number] = []
        driven.engine.add(number, [10] * length, Sampling(2, temperature=0.0))
    assert [len(batch.requests) for batch in driven.engine._batches] == [1, 2]
    driven.run()


def test_batched_sequences_give_the_same_texts_in_fewer_steps(start: Callable[..., Driven]) -> None:
    alone, together = start(), start()
    for question, answer in ANSWERS.items():
        assert alone.run(alone.add(question)) == answer
    numbers = {question: together.add(question) for question in ANSWERS}
    together.run()
    assert {question: together.text(number) for question, number in numbers.items()} == ANSWERS
    assert set(together.finish.values()) == {"stop"}
    # As many as the longest has tokens, and one for its end.
    assert together.steps == max(map(len, together.tokens.values())) + 1
    assert together.steps < alone.steps / 3


def test_a_later_sequence_starts_at_once(start: Callable[..., Driven]) -> None:
    driven = start()
    first = driven.add("count from three")
    driven.step()
    second = driven.add("say hello")
    driven.step()
    assert (len(driven.tokens[first]), len(driven.tokens[second])) == (2, 1)
    assert driven.run(first) == ANSWERS["count from three"]
    assert driven.text(second) == ANSWERS["say hello"]


def test_sequences_above_max_num_seqs_wait_and_all_complete(start: Callable[..., Driven]) -> None:
    driven = start(max_num_seqs=2)
    numbers = [driven.add("say hello") for _ in range(5)]
    driven.step()
    assert [len(driven.tokens[number]) for number in numbers] == [1, 1, 0, 0, 0]
    driven.run()
    assert [driven.text(number) for number in numbers] == [ANSWERS["say hello"]] * 5


def test_a_cancelled_sequence_frees_its_cache_and_does_not_disturb_others(start: Callable[..., Driven]) -> None:
    driven = start()
    for steps in range(8):
        leaver, neighbour = driven.add("count from three"), driven.add("say hello")
        for _ in range(steps):
            driven.step()
        driven.engine.cancel(leaver)
        assert driven.run(neighbour) == ANSWERS["say hello"]
        assert len(driven.tokens[leaver]) == steps
        assert driven.engine.stats().used_blocks == 0


def test_cancelling_the_only_sequence_leaves_the_engine_idle(start: Callable[..., Driven]) -> None:
    driven = start()
    number = driven.add("say hello")
    driven.step()
    driven.engine.cancel(number)
    driven.engine.cancel(number)
    assert driven.engine.is_idle()


def test_the_statistics_count_the_blocks_that_batches_reserve(start: Callable[..., Driven]) -> None:
    driven = start()
    number = driven.add("say hello", max_tokens=40)
    driven.add("say hello", max_tokens=2)
    assert driven.engine.stats().used_blocks == 0
    driven.step()
    prompt = len(driven.engine.encode(driven.engine.chat_prompt([{"role": "user", "content": "say hello"}], ())))
    blocks = 2 * -(-(prompt + 40) // 32)
    stats = driven.engine.stats()
    assert (stats.used_blocks, stats.total_blocks) == (blocks, 8 * CONTEXT // 32)
    assert stats.cache_bytes == blocks * 32 * 512
    assert driven.run(number) == ANSWERS["say hello"]


def test_reaching_max_tokens_has_the_finish_reason_length(start: Callable[..., Driven]) -> None:
    driven = start()
    number = driven.add("count from three", max_tokens=5)
    driven.run()
    assert (len(driven.tokens[number]), driven.finish[number]) == (5, "length")


def test_ignore_eos_and_min_tokens_continue_after_the_end_token(start: Callable[..., Driven]) -> None:
    driven = start()
    ignoring = driven.add("say hello", ignore_eos=True, max_tokens=50)
    least = driven.add("say hello", min_tokens=30)
    driven.run()
    assert len(driven.tokens[ignoring]) == 50
    assert 30 <= len(driven.tokens[least]) <= 60


def test_a_high_temperature_varies_and_top_k_1_does_not(start: Callable[..., Driven]) -> None:
    driven = start()
    varied = [driven.add("say hello", temperature=3.0, max_tokens=20) for _ in range(4)]
    narrow = [driven.add("say hello", temperature=3.0, top_k=1) for _ in range(2)]
    almost = driven.add("say hello", temperature=1.0, top_p=1e-6)
    driven.run()
    assert len({driven.text(number) for number in varied}) > 1
    assert [driven.text(number) for number in [*narrow, almost]] == [ANSWERS["say hello"]] * 3


def test_json_matches_its_schema_for_any_prompt(start: Callable[..., Driven]) -> None:
    driven = start()
    numbers = [driven.add(question, json_schema=SCHEMA, temperature=0.8) for question in ANSWERS]
    plain = driven.add("say hello")
    driven.run()
    for number in numbers:
        value = json.loads(driven.text(number))
        assert set(value) == {"name", "size"}
        assert len(value["name"]) <= 8
        assert value["size"] <= 99
        # No white space but in texts.
        assert re.fullmatch(r'\{"name":".*","size":-?\d+\}', driven.text(number))
    assert driven.text(plain) == ANSWERS["say hello"]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"json_schema": '{"type": "nosuch"}'}, "nosuch"),
        ({"json_schema": '{"$ref": "#/nowhere"}'}, "nowhere"),
        ({"seed": 7, "temperature": 0.8}, "sampling parameter seed: .* has none"),
        ({"min_p": 0.1, "temperature": 0.8}, "sampling parameter min_p: .* has none; use top_p"),
        ({"presence_penalty": 0.5}, "sampling parameter presence_penalty: .* has none"),
        ({"frequency_penalty": 0.5}, "sampling parameter frequency_penalty: .* has none"),
        ({"min_tokens": 61}, "must not exceed"),
        ({"temperature": 0.8, "top_k": 385}, "less than or equal to vocab_size"),
    ],
)
def test_an_unsupported_request_is_refused_alone(
    start: Callable[..., Driven], sampling: dict[str, Any], message: str
) -> None:
    driven = start()
    running = driven.add("count from three")
    driven.step()
    waiting = driven.add("give me json")
    with pytest.raises(InvalidRequest, match=message):
        driven.add("say hello", **sampling)
    later = driven.add("say hello", seed=7)
    assert driven.run(running) == ANSWERS["count from three"]
    assert (driven.text(waiting), driven.text(later)) == (ANSWERS["give me json"], ANSWERS["say hello"])


def test_a_failing_batch_does_not_disturb_the_others(start: Callable[..., Driven]) -> None:
    driven = start()
    good = driven.add("say hello")
    driven.step()
    driven.engine.add(90, [5000], Sampling(8, temperature=0.0))  # no such token
    errors: list[str] = []
    while not driven.engine.is_idle():
        for event in driven.engine.step():
            if event.sequence_id == 90:
                errors.append(event.error)
            else:
                driven.tokens[event.sequence_id] += event.tokens
    assert len(errors) == 1
    assert errors[0]
    assert driven.text(good) == ANSWERS["say hello"]


def test_characters_of_several_tokens_are_kept_whole(start: Callable[..., Driven]) -> None:
    engine = start().engine
    for text in ("", "Grüße 漢字 😀", " leading", "two\nlines"):
        assert engine.decode([engine.encode(text)]) == [text]
    assert engine.decode([[2, *engine.encode("a"), 0]]) == ["a"]


def test_messages_that_the_template_cannot_render_are_refused(start: Callable[..., Driven], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only roles of two letters') }}")
    settings = LlmSettings(1, 0, 16, CONTEXT, False, 1, False, 64)
    engine = OnnxEngine(folder, settings, 32, 512)
    with pytest.raises(InvalidRequest, match="chat template cannot write"):
        engine.chat_prompt([{"role": "user", "content": "x"}], ())


def test_the_text_is_one_of_the_choices(start: Callable[..., Driven]) -> None:
    choices = ["1", "1a", "a_1_", "aa", 'quote "a" \\.|', "two\nlines", "Grüße", "room_1_on", "room_10_on"]
    driven = start()
    chosen = [driven.add("say hello", choice=tuple(choices), temperature=50.0) for _ in range(24)]
    driven.run()
    texts = {driven.text(number) for number in chosen}
    assert texts <= set(choices)
    assert len(texts) > 2


def test_variables_reach_the_template_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(
        "{% if enable_thinking is false %}quiet {% endif %}{{ level + 1 }} {{ name }}: {{ messages[0].content }}"
    )
    engine = OnnxEngine(folder, LlmSettings(1, 0, 16, CONTEXT, False, 1, False, 64), 32, 512)
    messages, variables = [{"role": "user", "content": "x"}], {"enable_thinking": False, "level": 2, "name": "a-b_c"}
    assert engine.chat_prompt(messages, (), variables) == "quiet 3 a-b_c: x"
    for value in ('"', "{{ 1 }}", None, [1]):
        with pytest.raises(InvalidRequest, match="name: the backend onnxruntime_genai takes"):
            engine.chat_prompt(messages, (), {"name": value})


def file_in(folder: Path, tmp_path: Path) -> ModelFile:
    shutil.copytree(folder, tmp_path / "tiny/1")
    return ModelFile(tmp_path / "tiny/1/genai_config.json", tmp_path / "tiny", 1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"kv_cache_mb": "100"}, "parameter kv_cache_mb: not for the backend onnxruntime_genai: the KV cache has room"),
        ({"enable_prefix_caching": "true"}, "parameter enable_prefix_caching: not for the backend"),
        ({"max_context": "513"}, "parameter max_context: expected 1 to 512, the model's context, got 513"),
        ({"max_context": "0"}, "parameter max_context: expected 1 to 512"),
    ],
)
def test_an_unsupported_parameter_is_refused(
    job: Any, tmp_path: Path, parameters: dict[str, str], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load_backend("onnxruntime_genai").open(job(file_in(FOLDER, tmp_path), parameters=parameters))


def test_a_folder_without_its_weights_does_not_load(job: Any, tmp_path: Path) -> None:
    file = file_in(FOLDER, tmp_path)
    (file.path.parent / "model.onnx").unlink()
    with pytest.raises(LoadError, match="onnxruntime_genai cannot load it"):
        load_backend("onnxruntime_genai").open(job(file, backend="onnxruntime_genai"))
