"""The engine over OpenVINO GenAI, with the tiny model: batching, cancellation, a full KV cache, the prefix cache."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines.sampling_parser import DEFAULT_SAMPLING
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.text.tool_prompt import describe_tools
from tests.plugins.language.driven_engine import CHATS, TINY, Driven, openvino

pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def drive() -> Callable[..., Driven]:
    engines: dict[tuple[Path, tuple[tuple[str, str], ...]], Driven] = {}

    def make(path: Path = TINY, **parameters: str) -> Driven:
        key = path, tuple(sorted(parameters.items()))
        if key not in engines:
            engines[key] = Driven(openvino(path, **parameters))
        return engines[key]

    return make


def test_eight_concurrent_chats_take_the_steps_of_the_longest(
    drive: Callable[..., Driven],
) -> None:
    driven = drive(num_kv_blocks="64", enable_prefix_caching="false")
    steps = [(driven.add(question, most), driven.run())[1] for question, most in CHATS.items()]
    for question, most in CHATS.items():
        driven.add(question, most)
    assert driven.run() <= 30
    assert sum(steps) > 90


def test_tokens_that_are_looked_up_change_no_text_and_save_steps(drive: Callable[..., Driven]) -> None:
    plain = drive(num_kv_blocks="64", enable_prefix_caching="false")
    driven = drive(num_kv_blocks="64", enable_prefix_caching="false", prompt_lookup="true")
    for question, most in CHATS.items():
        numbers = plain.add(question, most), driven.add(question, most)
        plain.run()
        driven.run()
        assert driven.text(numbers[1]) == plain.text(numbers[0])
    answer = "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    prompt = plain.engine.chat_prompt([{"role": "user", "content": "count from three"}], ())
    prompt = f"{prompt}{answer}<|im_end|>\n{prompt}"
    numbers = plain.add_prompt(prompt, 15), driven.add_prompt(prompt, 15)
    steps = plain.run(), driven.run()
    assert driven.text(numbers[1]) == plain.text(numbers[0])
    assert steps[1] < steps[0]


def test_a_sequence_cancelled_during_schema_compilation_frees_its_blocks(
    drive: Callable[..., Driven],
) -> None:
    driven = drive(num_kv_blocks="64", enable_prefix_caching="false")
    neighbour = driven.add("count from three", 60)
    driven.run()
    expected = driven.text(neighbour)
    for index in range(5):
        properties = {f"p{index}_{name}": {"type": "number", "minimum": 0.123456789} for name in range(100)}
        schema = json.dumps({"type": "object", "properties": properties, "required": list(properties)})
        gone = driven.add("count from zero", 400, json_schema=schema)
        driven.step()  # compiles
        driven.engine.cancel(gone)
        driven.step(2)
        assert driven.engine.is_idle()
        assert driven.engine.stats().used_blocks == 0
        neighbour, gone = (driven.add("count from three", 60), driven.add("count from zero", 400, json_schema=schema))
        driven.engine.cancel(gone)
        driven.run()
        assert not driven.tokens[gone]
        assert driven.text(neighbour) == expected


def test_responses_that_fill_the_cache_end_or_complete_in_turn(
    drive: Callable[..., Driven],
) -> None:
    driven = drive(num_kv_blocks="6", enable_prefix_caching="false")
    number = driven.add("say hello", 400, ignore_eos=True)
    driven.run()
    assert driven.finished[number] == "length"
    assert 100 < len(driven.tokens[number]) < 192
    number = driven.add("count from zero", 70, ignore_eos=True)
    driven.run()
    numbers = [driven.add("count from zero", 70, ignore_eos=True) for _ in range(3)]
    driven.run()
    assert [driven.tokens[other] for other in numbers] == [driven.tokens[number]] * 3
    assert len(driven.tokens[number]) == 70


def test_a_known_prompt_prefix_is_taken_from_the_cache(drive: Callable[..., Driven]) -> None:
    driven = drive(num_kv_blocks="64", max_num_batched_tokens="16")
    prompt = "one two three four five six seven eight nine ten " * 5
    size = len(driven.engine.encode(prompt))

    def steps_to_first_token() -> int:
        before, number = driven.steps, driven.add_prompt(prompt, 4)
        while not driven.tokens[number]:
            driven.step()
        found = driven.steps - before
        driven.run()
        return found

    assert steps_to_first_token() >= size // 16
    assert steps_to_first_token() <= 4


def test_a_choice_of_many_places_is_refused(drive: Callable[..., Driven]) -> None:
    with pytest.raises(InvalidRequest, match="more than 50 places"):
        drive(num_kv_blocks="64").add("say hello", 40, choice=tuple("a" * size + "b" for size in range(60)))


def test_variables_reach_the_chat_template(drive: Callable[..., Driven], export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    path = folder / "openvino_tokenizer.xml"
    template = "{% if enable_thinking is false %}quiet {% endif %}{{ level + 1 }} {{ name }}: {{ messages[0].content }}"
    path.write_text(
        re.sub(r'(<chat_template value=)"[^"]*"', lambda found: f'{found[1]}"{template}"', path.read_text())
    )
    engine = drive(folder, num_kv_blocks="64").engine
    variables = {"enable_thinking": False, "level": 2, "name": '"{{ 1 }}'}
    assert engine.chat_prompt([{"role": "user", "content": "x"}], (), variables) == 'quiet 3 "{{ 1 }}: x'


LONG_PROMPT = "count from zero, then what is the capital of Japan? " * 1500


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as the library writes it from the GGUF file, with its tokenizer's limit of 8,192 tokens."""
    import openvino_genai

    folder = tmp_path_factory.mktemp("export")
    gguf = folder / "tiny.gguf"
    shutil.copy(TINY, gguf)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = 1
    openvino_genai.Tokenizer(gguf, enable_save_ov_model=True)
    openvino_genai.ContinuousBatchingPipeline(
        str(gguf), scheduler, "CPU", {"enable_save_ov_model": True, "INFERENCE_PRECISION_HINT": "f32"}
    )
    gguf.unlink()
    assert len(openvino_genai.Tokenizer(folder).encode(LONG_PROMPT).input_ids.data.ravel()) == 8192
    return folder


@pytest.mark.parametrize("kind", ["gguf", "export"])
def test_a_prompt_above_8192_tokens_is_tokenized_correctly(
    drive: Callable[..., Driven], export: Path, open_engine: Callable[[str], Any], kind: str
) -> None:
    other = open_engine("llama_cpp")
    expected = list(other.encode(LONG_PROMPT))
    other.close()
    engine = drive(TINY if kind == "gguf" else export, num_kv_blocks="64").engine
    assert len(expected) > 2 * 8192
    assert list(engine.encode(LONG_PROMPT)) == expected


@pytest.fixture
def make_export(export: Path, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Return a function that copies the export, with a generation_config.json."""

    def make(members: dict[str, Any]) -> Path:
        folder = tmp_path / f"export{len(list(tmp_path.iterdir()))}"
        shutil.copytree(export, folder)
        (folder / "generation_config.json").write_text(json.dumps(members))
        return folder

    return make


def test_a_text_ends_at_any_end_token_unless_ignore_eos_is_set(
    drive: Callable[..., Driven], make_export: Callable[[dict[str, Any]], Path]
) -> None:
    (mark,) = drive(num_kv_blocks="64").engine.encode("!")
    driven = drive(make_export({"eos_token_id": [2, mark]}), num_kv_blocks="64")
    numbers = [
        driven.add("say hello", 40),
        driven.add("count from nine", 40),
        driven.add("say hello", 40, ignore_eos=True),
        driven.add("say hello", 40, json_schema='{"type": "object", "properties": {}, "additionalProperties": false}'),
    ]
    driven.run()
    texts = [driven.text(number) for number in numbers]
    assert texts[0] == "Hello"
    assert texts[1].startswith("nine ten eleven")
    assert texts[1].endswith("nineteen twenty")
    assert texts[2].startswith("Hello! How can I help you?")
    assert json.loads(texts[3]) == {}
    assert [driven.finished[number] for number in numbers] == ["stop", "stop", "length", "stop"]


def test_with_ignore_eos_an_end_token_at_the_last_place_counts(drive: Callable[..., Driven]) -> None:
    driven = drive(num_kv_blocks="64")
    ended = driven.add("say hello", 40)
    driven.run()
    most = len(driven.tokens[ended]) + 1
    endless = driven.add("say hello", most, ignore_eos=True)
    driven.run()
    assert (len(driven.tokens[endless]), driven.finished[endless]) == (most, "length")


def test_sampling_defaults_come_from_the_export(
    drive: Callable[..., Driven], make_export: Callable[[dict[str, Any]], Path]
) -> None:
    stated = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    expected = Sampling(max_tokens=16, **stated)
    assert drive(make_export({"do_sample": True, **stated})).engine.default_sampling == expected


def test_sampling_defaults_come_from_the_gguf_file(
    drive: Callable[..., Driven], tmp_path: Path, add_gguf_metadata: Callable[[Path, dict[str, float]], None]
) -> None:
    assert drive(TINY).engine.default_sampling == DEFAULT_SAMPLING
    path = Path(shutil.copy(TINY, tmp_path / "model.gguf"))
    add_gguf_metadata(path, {"temp": 0.5, "top_k": 20})
    assert drive(path).engine.default_sampling == Sampling(max_tokens=16, temperature=0.5, top_k=20)


@pytest.mark.parametrize("takes_system", [True, False])
def test_a_template_without_tools_writes_their_description(drive: Callable[..., Driven], takes_system: bool) -> None:
    driven = drive(num_kv_blocks="64", enable_prefix_caching="false")
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city"}}
    question = {"role": "user", "content": "say hello"}
    prompt = driven.engine.chat_prompt(describe_tools([question], [tool], takes_system=takes_system), ())
    assert '<tools>\n{"name": "weather", "description": "of a city"}\n</tools>' in prompt
    assert prompt.index("<tools>") < prompt.index("say hello")
    assert prompt.startswith("<|im_start|>system" if takes_system else "<|im_start|>user")
    number = driven.add_prompt(prompt, 12)
    driven.run()
    assert driven.text(number)


@pytest.mark.parametrize("is_right", [True, False])
def test_the_guesses_of_a_draft_model_change_no_text(
    drive: Callable[..., Driven], export: Path, tmp_path: Path, is_right: bool
) -> None:
    shutil.copy(TINY, tmp_path / "model.gguf")
    shutil.copytree(export, tmp_path / "draft")
    if not is_right:
        weights = tmp_path / "draft/openvino_model.bin"
        data = weights.read_bytes()
        half = len(data) // 2
        weights.write_bytes(data[:half] + bytes(len(data) - half))
    plain = drive(num_kv_blocks="64", enable_prefix_caching="false")
    drafted = Driven(openvino(
        tmp_path / "model.gguf", num_kv_blocks="64", enable_prefix_caching="false", draft_model="draft",
        num_speculative_tokens="4",
    ))  # fmt: skip
    texts, steps = [], []
    for driven in (plain, drafted):
        numbers = [driven.add(question, most) for question, most in CHATS.items()]
        steps.append(driven.run())
        texts.append([(driven.text(number), driven.finished[number]) for number in numbers])
    assert texts[0] == texts[1]
    assert (steps[1] < steps[0] / 2) is is_right
    numbers = [drafted.add(question, 30, temperature=3.0, seed=5) for question in CHATS]
    schema = json.dumps({"type": "array", "items": {"enum": [1, 3]}, "minItems": 4, "maxItems": 4})
    constrained = drafted.add("give me json", 60, json_schema=schema)
    cancelled = drafted.add("count from zero", 400, ignore_eos=True)
    drafted.step(3)
    drafted.engine.cancel(cancelled)
    drafted.run()
    assert drafted.finished.keys() >= {*numbers, constrained}
    assert len(json.loads(drafted.text(constrained))) == 4
    drafted.add("say hello", 12)
    drafted.run()
    assert drafted.engine.stats().used_blocks <= 1, "of the last text alone"
    drafted.engine.close()
