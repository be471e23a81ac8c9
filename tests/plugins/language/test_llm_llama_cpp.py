"""The engine over llama.cpp, with the tiny model: the library's own answers, batching, cancellation, sampling."""

from __future__ import annotations

import json
import os
import queue
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.core.json_tensor import JsonTensor
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.language.engines import llama_cpp_engine
from edge_server.plugins.language.engines.llama_cpp_engine import LlamaCppEngine
from edge_server.plugins.language.engines.model_size import read_gguf_for_llama_cpp
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.text.session import LlmSession
from tests.plugins.language.driven_engine import CHATS, TINY, Driven, llama_cpp

xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")


@pytest.fixture(scope="module")
def drive() -> Iterator[Callable[..., Driven]]:
    engines: dict[tuple[tuple[str, str], ...], Driven] = {}

    def make(**parameters: str) -> Driven:
        key = tuple(sorted(parameters.items()))
        if key not in engines:
            engines[key] = Driven(llama_cpp(**parameters))
        return engines[key]

    yield make
    for driven in engines.values():
        driven.engine.close()


def test_greedy_texts_and_tokens_are_the_librarys_own(drive: Callable[..., Driven]) -> None:
    driven = drive()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(TINY)
    parameters.hostnames = ["127.0.0.1"]
    parameters.n_parallel, parameters.warmup, parameters.verbosity = 1, False, 1
    library = xllamacpp.Server(parameters)
    for question, most in CHATS.items():
        prompt = driven.engine.chat_prompt([{"role": "user", "content": question}], ())
        request = {"prompt": prompt, "max_tokens": most, "temperature": 0, "logprobs": 1}
        [choice] = library.handle_completions(request)["choices"]
        number = driven.add(question, most, has_logprobs=True)
        driven.run()
        assert driven.text(number) == choice["text"]
        assert driven.finished[number] == choice["finish_reason"]
        expected = choice["logprobs"]["content"][: len(driven.tokens[number])]  # it has the end token too
        assert driven.tokens[number] == [item["id"] for item in expected]
        assert driven.logprobs[number] == pytest.approx([item["logprob"] for item in expected], abs=1e-4)


def test_a_text_comes_token_by_token(drive: Callable[..., Driven]) -> None:
    driven = drive()
    # A short text may have come whole before a busy machine lets anybody read.
    long = driven.add("count from three", 400, ignore_eos=True)
    driven.step_until_tokens(long)
    assert long not in driven.finished
    assert "three four".startswith(driven.text(long)[:10])
    driven.run()
    number = driven.add("count from three", 60)
    driven.run()
    assert driven.text(number).startswith("three four five")
    assert driven.engine.decode([driven.tokens[number]]) == [driven.text(number)]


def test_a_step_that_waits_ends_when_it_is_woken(drive: Callable[..., Driven], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp_engine, "_WAIT_S", None)  # for ever
    driven = drive()
    driven.engine.wake()
    assert driven.engine.step() is None
    driven.engine.wake()
    assert driven.answer("count from three") == driven.answer("count from three")


def test_a_waiting_sequence_can_be_cancelled() -> None:
    driven = Driven(llama_cpp(max_num_seqs="1"))
    first, second = driven.add("count from three", 60), driven.add("say hello", 20)
    driven.step_until_tokens(first)
    driven.engine.cancel(second)
    driven.run()
    assert driven.finished == {first: "stop"}
    driven.engine.close()


def test_sequences_that_do_not_fit_together_are_all_completed(drive: Callable[..., Driven]) -> None:
    wide, narrow = drive(), Driven(llama_cpp(max_num_seqs="4", num_kv_blocks="12"))
    questions = ["count from zero", "count from one", "count from two", "count from three"]
    numbers = [wide.add(question, 100, ignore_eos=True) for question in questions]
    wide.run()
    expected = [wide.texts[number] for number in numbers]
    numbers = [narrow.add(question, 100, ignore_eos=True) for question in questions]
    was_paused = False
    while not narrow.engine.is_idle():
        narrow.step()
        was_paused |= any(item.answer for item in narrow.engine._waiting)
        assert narrow.engine.stats().used_blocks <= narrow.engine.total_blocks
    assert was_paused
    assert [narrow.texts[number] for number in numbers] == expected
    assert all(len(narrow.tokens[number]) == 100 for number in numbers)
    narrow.engine.close()


def test_a_sequence_may_fill_its_own_part_of_the_cache(drive: Callable[..., Driven]) -> None:
    wide, parted = drive(), Driven(llama_cpp(max_num_seqs="2", max_context="256", num_kv_blocks="16"))
    chat_prompt, encode = wide.engine.chat_prompt, wide.engine.encode
    questions = ["count from zero", "count from one"]
    prompts = [len(encode(chat_prompt([{"role": "user", "content": question}], ()))) for question in questions]
    texts = []
    for driven in (wide, parted):
        numbers = [driven.add(q, 256 - size, ignore_eos=True) for q, size in zip(questions, prompts, strict=True)]
        was_paused = False
        while not driven.engine.is_idle():
            driven.step()
            was_paused |= any(item.answer for item in driven.engine._waiting)
        assert not was_paused
        assert [len(driven.tokens[number]) for number in numbers] == [256 - size for size in prompts]
        texts.append([driven.text(number) for number in numbers])
    assert texts[0] == texts[1]
    parted.engine.close()


def test_sequences_go_on_after_the_cache_was_full_in_spite_of_the_margin(drive: Callable[..., Driven]) -> None:
    wide, narrow = drive(), Driven(llama_cpp(max_num_seqs="3", num_kv_blocks="16"))
    questions = ["count from zero", "count from one", "count from two"]
    numbers = [wide.add(question, 200, ignore_eos=True) for question in questions]
    wide.run()
    narrow.engine.total_blocks = 18  # more than there are
    again = [narrow.add(question, 200, ignore_eos=True) for question in questions]
    narrow.run()
    assert [narrow.texts[number] for number in again] == [wide.texts[number] for number in numbers]
    narrow.engine.close()


def test_the_most_likely_tokens_are_the_librarys_own(drive: Callable[..., Driven]) -> None:
    driven = drive()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(TINY)
    parameters.hostnames = ["127.0.0.1"]
    parameters.n_parallel, parameters.warmup, parameters.verbosity = 1, False, 1
    library = xllamacpp.Server(parameters)
    prompt = driven.engine.chat_prompt([{"role": "user", "content": "say hello"}], ())
    request = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 20}
    [choice] = library.handle_completions(request)["choices"]
    driven.engine.add(
        9000, driven.engine.encode(prompt), Sampling(6, temperature=0.0, has_logprobs=True, top_logprobs=20)
    )
    found: list[Any] = []
    while not driven.engine.is_idle():
        for event in driven.engine.step() or ():
            found += event.top_logprobs
    expected = [item["top_logprobs"] for item in choice["logprobs"]["content"]]
    assert len(expected) == 6
    for place, other in zip(found, expected, strict=True):
        assert len(place) == 20
        # Which of two that are nearly as likely comes first depends on the batch.
        assert [token for token, _ in place[:3]] == [item["token"] for item in other[:3]]
        assert [logprob for _, logprob in place] == pytest.approx([item["logprob"] for item in other], abs=0.05)


@pytest.mark.parametrize("sampling", [{"choice": ["é😀ü" * 9]}, {"ignore_eos": True, "temperature": 0}])
def test_a_token_with_its_probability_costs_no_call_of_the_server(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    size = read_gguf_for_llama_cpp(TINY)
    settings = read_settings("tiny", {"threads": "1", "max_num_seqs": "1"}, size, 32)
    engine = LlamaCppEngine(TINY, settings, 32, size.bytes_per_token)
    session = LlmSession("tiny", engine, settings, {"model": "tiny"})
    call, calls = engine._call, []

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return call(*arguments)

    monkeypatch.setattr(engine, "_call", count)
    found = []
    for most in (2, 60):
        answers: queue.Queue[Any] = queue.Queue()
        values = {"max_tokens": most, "logprobs": 3, **sampling}
        request = Request("tiny", {
            "text_input": Tensor("text_input", DType.BYTES, np.array([b"say hello"], object)),
            "sampling_parameters": JsonTensor("sampling_parameters", values),
            "return_logprobs": Tensor("return_logprobs", DType.BOOL, np.array([True])),
            "exclude_input_in_output": Tensor("exclude_input_in_output", DType.BOOL, np.array([True])),
        })  # fmt: skip
        execution: Any = SimpleNamespace(
            request=request, send=lambda outputs, is_final, put=answers.put: put(outputs),
            fail=answers.put, is_cancelled=lambda: False,
        )  # fmt: skip
        calls.clear()
        session.execute([execution])
        outputs = answers.get(timeout=60)
        tokens = json.loads(outputs["logprobs"][0])
        assert "".join(item["token"] for item in tokens) == outputs["text_output"][0].decode()
        assert all(len(item["top_logprobs"]) == 3 for item in tokens)
        found.append(len(calls))
    session.close()
    assert found[0] == found[1]


def test_the_prompt_of_a_stopped_sequence_may_have_texts_of_tokens(drive: Callable[..., Driven]) -> None:
    engine, texts = drive().engine, []
    for answer in (["é", *engine.encode("ü!")], [*engine.encode("é"), *engine.encode("ü!")]):
        engine.add(len(texts) + 9100, engine.encode("count"), Sampling(9, temperature=0.0, ignore_eos=True))
        engine._waiting[-1].answer = answer
        text = ""
        while not engine.is_idle():
            text += "".join(event.text or "" for event in engine.step() or ())
        texts.append(text)
    assert texts[0] == texts[1] != ""


def test_adapters_give_the_librarys_own_texts_also_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(TINY, path)
    shutil.copytree(TINY.parent / "lora", tmp_path / "adapters")
    driven = Driven(llama_cpp(path))
    assert driven.engine.adapters == ["first", "second"]
    prompt = driven.engine.chat_prompt([{"role": "user", "content": "count from three"}], ())
    expected = {}
    for name in ("", "first", "second"):
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(TINY)
        parameters.hostnames = ["127.0.0.1"]
        parameters.n_parallel, parameters.warmup, parameters.verbosity = 1, False, 1
        if name:
            file = str(tmp_path / f"adapters/{name}.gguf")
            parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(file, 1.0)]
        library = xllamacpp.Server(parameters)
        [choice] = library.handle_completions({"prompt": prompt, "max_tokens": 20, "temperature": 0})["choices"]
        expected[name] = choice["text"]
    assert len(set(expected.values())) == 3
    numbers = {driven.add("count from three", 20, adapter=name): name for name in [*expected] * 3}
    driven.run()
    assert {name: driven.text(number) for number, name in numbers.items()} == expected
    assert {driven.text(number) for number, name in numbers.items() if name == "first"} == {expected["first"]}
    driven.engine.close()


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup", "true"), ("draft_model", TINY.name)])
def test_guessed_tokens_change_no_text(drive: Callable[..., Driven], name: str, value: str) -> None:
    plain, driven = drive(), drive(**{name: value})
    expected = {question: plain.answer(question, most) for question, most in CHATS.items()}
    numbers = {question: driven.add(question, most) for question, most in CHATS.items()}
    driven.run()
    assert {question: driven.text(number) for question, number in numbers.items()} == expected
    schema = json.dumps({"type": "array", "items": {"enum": [1, 3]}, "minItems": 4, "maxItems": 4})
    assert len(json.loads(driven.answer("give me json", 60, json_schema=schema))) == 4
    call = {"prompt": "one two three four one two three four one two three", "n_predict": 20, "temperature": 0}
    assert driven.engine._call("POST", "/completion", call)["timings"]["draft_n"] > 0
    assert "draft_n" not in plain.engine._call("POST", "/completion", call)["timings"]


def test_a_bias_excludes_a_token_or_chooses_it(drive: Callable[..., Driven]) -> None:
    driven = drive()
    (first,), (other,) = driven.engine.encode("H"), driven.engine.encode("P")
    assert driven.answer("say hello", 3).startswith("H")
    assert "H" not in driven.answer("say hello", 30, logit_bias=((first, -100.0),))
    assert driven.answer("say hello", 3, logit_bias=((other, 100.0),)) == "PPP"


def test_variables_reach_the_chat_template(tmp_path: Path) -> None:
    path, said, asked = tmp_path / "model.gguf", b"{% if add_generation_prompt %}", b"{% if not enable_thinking %}  "
    data = TINY.read_bytes()
    assert data.count(said) == 1
    path.write_bytes(data.replace(said, asked))
    driven = Driven(llama_cpp(path))
    prompts = [
        driven.engine.chat_prompt([{"role": "user", "content": "x"}], (), {"enable_thinking": value})
        for value in (False, True)
    ]
    assert [prompt.endswith("assistant\n") for prompt in prompts] == [True, False]
    driven.engine.close()


def test_a_text_ends_at_the_context_of_the_model(drive: Callable[..., Driven]) -> None:
    driven = drive()
    number = driven.add("count from zero", 2000, ignore_eos=True)
    driven.run()
    assert driven.finished[number] == "length"
    prompt = driven.engine.encode(driven.engine.chat_prompt([{"role": "user", "content": "count from zero"}], ()))
    assert len(prompt) + len(driven.tokens[number]) in (512, 513)


def test_a_prompt_above_the_context_is_an_error_of_its_own_sequence(drive: Callable[..., Driven]) -> None:
    driven = Driven(llama_cpp())
    driven.may_fail = True
    kept, gone = driven.add("count from three", 60), driven.add_prompt("count " * 400, 10)
    driven.run()
    assert driven.finished == {kept: "stop"}
    assert "exceeds the available context size" in driven.errors[gone]
    driven.engine.close()


def test_characters_of_several_tokens_come_whole_and_are_counted(drive: Callable[..., Driven]) -> None:
    driven = drive()
    text = "é😀ü"
    number = driven.add("say hello", 60, has_logprobs=True, json_schema=json.dumps({"const": text}))
    driven.run()
    assert driven.text(number) == f'"{text}"'
    assert len(driven.tokens[number]) == len(driven.engine.encode(f'"{text}"'))
    assert len(driven.logprobs[number]) == len(driven.tokens[number])


def test_a_schema_is_obeyed(drive: Callable[..., Driven]) -> None:
    driven = drive()
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "sizes": {"type": "array", "items": {"enum": [1, 3]},
                                                                          "minItems": 2, "maxItems": 2}},
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }  # fmt: skip
    text = driven.answer("give me json", 100, json_schema=json.dumps(schema))
    value = json.loads(text)
    assert value.keys() == {"name", "sizes"}
    assert len(value["sizes"]) == 2
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_min_tokens_are_refused(drive: Callable[..., Driven]) -> None:
    with pytest.raises(InvalidRequest, match="min_tokens: the backend llama_cpp has none"):
        drive().add("say hello", 20, min_tokens=5)


def test_a_repeated_prompt_is_not_computed_again(drive: Callable[..., Driven]) -> None:
    driven = Driven(llama_cpp(max_num_seqs="1"))
    first, second = driven.add("count from three", 5), driven.add("count from three", 5)
    driven.run()
    assert driven.cached[first] == 0
    assert driven.cached[second]
    driven.engine.close()
    driven = Driven(llama_cpp(max_num_seqs="1", enable_prefix_caching="false"))
    numbers = [driven.add("count from three", 5) for _ in range(2)]
    driven.run()
    assert [driven.cached[number] for number in numbers] == [0, 0]
    driven.engine.close()


def test_a_template_that_fails_is_the_requests_fault(drive: Callable[..., Driven]) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template cannot write these messages: "):
        drive().engine.chat_prompt([{"role": "user", "content": 5}], ())


def test_only_this_user_can_reach_the_librarys_server_and_it_has_no_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inodes = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_socket(name)}
    driven = Driven(llama_cpp())
    [folder] = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["llama.sock"]
    opened = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_socket(name)} - inodes
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    assert opened
    assert not opened & {f"socket:[{line[9]}]" for line in lines}
    driven.engine.close()
    assert not list(tmp_path.iterdir())


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except FileNotFoundError:
        return False


def test_a_file_that_the_library_cannot_load_gives_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(TINY.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0nosuc", 1))
    with pytest.raises(RuntimeError, match="unknown model architecture: 'nosuc'"):
        Driven(llama_cpp(path, max_context="64"))


def test_a_truncated_file_is_refused_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(TINY.read_bytes()[:200_000])
    with pytest.raises(RuntimeError, match="not within the file bounds"):
        Driven(llama_cpp(path))


def test_the_size_needs_no_known_architecture_and_counts_heads_of_each_layer(tmp_path: Path) -> None:
    size = read_gguf_for_llama_cpp(TINY)
    assert (size.context, size.width, size.bytes_per_token) == (512, 64, 2 * 2 * 2 * 16 * 2)
    data = TINY.read_bytes()
    key = b"llama.attention.head_count_kv"
    place = data.index(key) + len(key)
    assert struct.unpack_from("<I", data, place) == (4,), "expected a UINT32 in the file of the tests"
    array = struct.pack("<IIQ2I", 9, 4, 2, 2, 6)
    path = tmp_path / "model.gguf"
    path.write_bytes(data[:place] + array + data[place + 8 :])
    assert read_gguf_for_llama_cpp(path).bytes_per_token == 2 * size.bytes_per_token


def test_special_tokens_that_are_shown_are_text() -> None:
    driven = Driven(llama_cpp())
    try:
        engine = driven.engine
        (start,) = engine.encode("<|im_start|>")
        bias = ((start, 100.0),)
        hidden = driven.add("say hello", 3, logit_bias=bias)
        driven.run()
        engine.show_special_texts(["<|im_start|>"])
        shown = driven.add("say hello", 3, logit_bias=bias)
        driven.run()
        assert driven.tokens[hidden] == driven.tokens[shown] == [start] * 3
        assert driven.texts[hidden] == ""
        assert driven.text(shown) == "<|im_start|>" * 3
        assert engine.decode([[start, *engine.encode("a")]]) == ["<|im_start|>a"]
    finally:
        engine.close()
