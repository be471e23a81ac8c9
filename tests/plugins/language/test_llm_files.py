"""Files of language models before they are opened: sizes from GGUF headers and exports, damaged files, and text."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server import backends as backends_module
from edge_server.backends.base import ModelFile
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BackendMissing, LoadError
from edge_server.plugins.language.backend import make
from edge_server.plugins.language.engines.generation_config import GenerationConfig, read_generation_config
from edge_server.plugins.language.engines.lora_adapters import MAX_ADAPTERS, find_adapters
from edge_server.plugins.language.engines.model_size import (
    EXPORT_LOAD_FACTOR,
    GGUF_LOAD_FACTOR,
    KV_BYTES_PER_VALUE,
    BadModelFile,
    LlmSize,
    describe_export,
    read_export,
    read_gguf,
    read_gguf_for_llama_cpp,
)
from edge_server.plugins.language.engines.sampling_parser import DEFAULT_SAMPLING
from edge_server.plugins.language.engines.settings import DEFAULT_MAX_NUM_SEQS, memory_parts, read_settings
from edge_server.plugins.language.engines.token_engine import Sampling
from edge_server.plugins.language.ollama.model_reports import show_model
from edge_server.plugins.language.plugin import GGUF_ORDER
from edge_server.plugins.language.text.incremental_detokenizer import IncrementalDetokenizer
from edge_server.repository.choice.backend_choice import candidates
from edge_server.repository.choice.runtime_times import RuntimeTimes
from edge_server.repository.disk.load_call_files import delete_abandoned
from edge_server.repository.model_config.auto_complete import inspect_model
from edge_server.repository.model_config.pbtxt import new_config

TINY = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
ADAPTERS = TINY.parent / "lora"


def test_the_memory_of_a_gguf_model_is_computed_from_its_header() -> None:
    values = 2 * 2 * 2 * 16  # K and V, layers, heads, numbers of a head
    weight_bytes = int(TINY.stat().st_size * GGUF_LOAD_FACTOR)
    assert read_gguf(TINY) == LlmSize(weight_bytes, 512, int(values * KV_BYTES_PER_VALUE), 64)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((TINY.read_bytes()[:size], "cut short") for size in (0, 3, 24, 100, 2000, 9000, 200_000, -1)),
        (b"GGML" + TINY.read_bytes()[4:], "expected a GGUF file"),
        (
            TINY.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1),
            r"one of llama, qwen2, qwen3, .* got 'mamba': serve an OpenVINO export",
        ),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 1 << 60), "at most 1000 entries"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 1) + struct.pack("<Q", 1 << 60), "texts of at most"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match=reason):
        read_gguf(path)


def test_adapters_are_found_by_their_file_names(tmp_path: Path) -> None:
    assert find_adapters(tmp_path / "model.gguf") == {}
    shutil.copytree(ADAPTERS, tmp_path / "adapters")
    (tmp_path / "adapters/.hidden").write_bytes(b"")
    assert list(find_adapters(tmp_path / "model.gguf")) == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.safetensors", b"", "'adapters/a.safetensors': expected a .gguf file"),
        ("a b.gguf", b"", "'adapters/a b.gguf': expected a name of up to 64 letters"),
        ("latest.gguf", b"", "that is not 'latest'"),
        ("a.gguf", b"GGUF", "'adapters/a.gguf': the file is cut short"),
        ("a.gguf", None, "'adapters/a.gguf': expected general.type 'adapter', got 'None'"),
    ],
)
def test_a_file_that_is_no_adapter_is_refused(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / name).write_bytes(TINY.read_bytes() if content is None else content)
    with pytest.raises(BadModelFile, match=reason):
        find_adapters(tmp_path / "model.gguf")


@pytest.mark.parametrize("read", [read_gguf, read_gguf_for_llama_cpp])
@pytest.mark.parametrize(("kind", "advice"), [("adapter", "adapters/NAME.gguf"), ("mmproj", "mmproj.gguf")])
def test_a_file_that_belongs_beside_a_model_is_named_in_its_place(
    tmp_path: Path, read: Callable[[Path], LlmSize], kind: str, advice: str
) -> None:
    path = tmp_path / "model.gguf"
    adapter, text = (ADAPTERS / "first.gguf").read_bytes(), len(kind).to_bytes(8, "little") + kind.encode()
    path.write_bytes(adapter.replace(b"\7\0\0\0\0\0\0\0adapter", text, 1))
    with pytest.raises(BadModelFile, match=f"general.type: expected 'model', got '{kind}': .*{advice}"):
        read(path)


@pytest.mark.parametrize("parameters", [{}, {"num_kv_blocks": "64"}])
def test_a_context_above_the_models_own_is_refused_at_the_load(parameters: dict[str, str]) -> None:
    with pytest.raises(LoadError, match="parameter max_context: expected 1 to 512, the model's context, got 513"):
        read_settings("m", {"max_context": "513", **parameters}, read_gguf(TINY), 32)
    with pytest.raises(LoadError, match="parameter max_context must be a whole number from 1, got '0'"):
        read_settings("m", {"max_context": "0", **parameters}, read_gguf(TINY), 32)
    assert read_settings("m", {"max_context": "512", **parameters}, read_gguf(TINY), 32).max_context == 512
    # The files of some exports do not say it.
    assert read_settings("m", {"max_context": "513", **parameters}, LlmSize(1, 0, 1), 32).max_context == 513


@pytest.mark.full
@pytest.mark.parametrize(("sequences", "tokens", "least"), [("4", "3", 4), ("1", "1", 2), ("300", "256", 300)])
def test_a_step_of_llama_cpp_has_room_for_a_token_of_each_sequence(sequences: str, tokens: str, least: int) -> None:
    """The library ends its process for fewer, with the first request."""
    pytest.importorskip("xllamacpp")
    backend, file = make("llama_cpp"), ModelFile(TINY, TINY.parent, 1)
    parameters = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}
    with pytest.raises(
        LoadError, match=f"max_num_batched_tokens: expected at least {least}, .*llama_cpp, got {tokens}"
    ):
        backend.memory_parts(file, "m", parameters)
    assert backend.memory_parts(file, "m", {**parameters, "max_num_batched_tokens": str(least)})


@pytest.mark.full
@pytest.mark.parametrize("backend", ["llama_cpp", "openvino_genai"])
def test_ollamas_clients_are_shown_what_the_models_file_says(backend: str) -> None:
    pytest.importorskip({"llama_cpp": "xllamacpp"}.get(backend, backend))
    config = json.loads(make(backend).auto_complete(ModelFile(TINY, TINY.parent, 1), "{}") or "")
    parameters = {name: item["string_value"] for name, item in config["parameters"].items()}
    spec = ModelSpec("tiny", backend, "", 0, (), (), (), default_model_filename="tiny.gguf", parameters=parameters)
    details = {"family": "llama", "families": ["llama"], "parameter_size": "148K", "quantization_level": "F16"}
    shown = show_model(spec)
    assert shown["details"] == {"parent_model": "", "format": "gguf", **details}
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.basename": "tiny",
        "general.file_type": 1,
        "general.parameter_count": 147_776,
        "llama.context_length": 512,
    }


def test_an_export_is_described_by_its_config(tmp_path: Path) -> None:
    assert describe_export(tmp_path) == {}
    values = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": "qwen3"}))
    assert describe_export(tmp_path) == {"general.architecture": "qwen3", "qwen3.context_length": 2048}


def test_too_many_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    for number in range(MAX_ADAPTERS + 1):
        shutil.copy(ADAPTERS / "first.gguf", tmp_path / f"adapters/{number}.gguf")
    with pytest.raises(BadModelFile, match="expected at most 32 adapters, got 33"):
        find_adapters(tmp_path / "model.gguf")


@pytest.mark.full
def test_a_draft_model_is_read_for_its_memory(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")
    shutil.copy(TINY, tmp_path / "model.gguf")
    file = ModelFile(tmp_path / "model.gguf", tmp_path, 1)
    backend = make("llama_cpp")
    with pytest.raises(LoadError, match=r"parameter draft_model: 'small.gguf': No such file"):
        backend.memory_parts(file, "m", {"draft_model": "small.gguf"})
    shutil.copy(TINY, tmp_path / "small.gguf")
    parts = backend.memory_parts(file, "m", {"draft_model": "small.gguf"})
    assert parts["draft model"] == parts["weights"] + parts["KV cache"]


def test_a_draft_model_of_openvino_is_an_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = _gguf_model(monkeypatch, tmp_path, TINY.read_bytes())
    file = ModelFile(model / "1/model.gguf", model, 1)
    backend, parameters = make("openvino_genai"), {"draft_model": "draft"}
    with pytest.raises(LoadError, match=r"draft_model: 'draft': expected the folder of an OpenVINO export beside"):
        backend.memory_parts(file, "m", parameters)
    draft = model / "1/draft"
    draft.mkdir()
    (draft / "openvino_model.xml").write_bytes(bytes(1000))
    with pytest.raises(LoadError, match=r"draft_model: 'draft': No such file"):
        backend.memory_parts(file, "m", parameters)
    (draft / "openvino_tokenizer.xml").write_bytes(bytes(1000))
    assert backend.memory_parts(file, "m", parameters)["draft model"] == int(2000 * EXPORT_LOAD_FACTOR)
    (model / "1/openvino_vision_embeddings_model.xml").touch()
    with pytest.raises(LoadError, match="parameter draft_model: expected none for a model that takes pictures"):
        backend.memory_parts(file, "m", parameters)


@pytest.mark.full
def test_the_parts_of_sequences_are_rounded_up_in_the_memory_of_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")
    file = ModelFile(TINY, tmp_path, 1)
    backend, bytes_per_token = make("llama_cpp"), read_gguf_for_llama_cpp(TINY).bytes_per_token

    def cached_tokens(**parameters: str) -> int:
        return backend.memory_parts(file, "m", {"max_num_seqs": "4", **parameters})["KV cache"] // bytes_per_token

    assert cached_tokens(max_context="260", num_kv_blocks="33") == 4 * 512
    assert cached_tokens(max_context="260", num_kv_blocks="32") == 32 * 32


def test_a_file_with_adapters_goes_to_llama_cpp_also_if_the_other_engine_was_measured_as_the_faster_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = _gguf_model(monkeypatch, tmp_path, TINY.read_bytes())
    times = RuntimeTimes(tmp_path)
    times.put(model / "1/model.gguf", {"llama_cpp": 30.0, "openvino_genai": 10.0}, DEFAULT_MAX_NUM_SEQS)
    shutil.copytree(ADAPTERS, model / "1/adapters")
    inspected = inspect_model(new_config(), "talker", model, 1, runtime_times=times)
    assert inspected.backend.name == "llama_cpp"
    assert inspected.unlogged_notes == ("llama_cpp: fixed order for LoRA adapters",)


@pytest.mark.parametrize(
    ("kind", "name"), [(0, "F32"), (30, "BF16"), (6, "Q5_0"), (13, "Q5_K"), (20, "IQ4_NL"), (99, "type number 99")]
)
def test_an_unsupported_tensor_type_is_named_with_an_alternative(tmp_path: Path, kind: int, name: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(_with_tensor_type(kind))
    said = f"'blk.1.ffn_down.weight': expected one of the types F16, .*, got {name}: take the model's Q8_0, Q4_0"
    with pytest.raises(BadModelFile, match=said):
        read_gguf(path)


@given(place=st.integers(0, 2000), value=st.integers(0, 255))
def test_a_damaged_header_only_fails_the_load(tmp_path_factory: pytest.TempPathFactory, place: int, value: int) -> None:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    data = bytearray(TINY.read_bytes())
    data[place] = value
    path.write_bytes(data)
    with contextlib.suppress(BadModelFile):
        read_gguf(path)
    with contextlib.suppress(BadModelFile):
        read_gguf_for_llama_cpp(path)


@pytest.mark.parametrize(("backend", "extra"), [("openvino_genai", "llm"), ("llama_cpp", "llm-gguf")])
def test_without_the_library_the_error_names_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendMissing, match=rf"pip install '\.\[{extra}\]'"):
        make(backend)


def test_llama_cpp_is_tried_first_unless_the_configuration_names_the_other_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = _gguf_model(monkeypatch, tmp_path, TINY.read_bytes())
    config = new_config()
    assert [item.backend for item in candidates(config, "talker", model / "1")] == ["llama_cpp", "openvino_genai"]
    inspected = inspect_model(config, "talker", model, 1)
    assert inspected.backend.name == "llama_cpp"
    assert inspected.unlogged_notes == ("llama_cpp: fixed order",)
    assert inspected.has_alternatives
    assert not inspected.skipped
    config.backend = "openvino_genai"
    inspected = inspect_model(config, "talker", model, 1)
    assert inspected.backend.name == "openvino_genai"
    assert not inspected.unlogged_notes


def test_without_llama_cpp_openvino_serves_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = _gguf_model(monkeypatch, tmp_path, TINY.read_bytes(), "openvino_genai")
    inspected = inspect_model(new_config(), "talker", model, 1)
    assert inspected.backend.name == "openvino_genai"
    assert "backend 'llama_cpp' was skipped for 'openvino_genai': runtime llama_cpp is not" in inspected.skipped[0]


@pytest.mark.parametrize(
    ("max_num_seqs", "ms", "reason"),
    [
        (None, (30.0, 10.0), "openvino_genai: 3.0 times as fast as llama_cpp, measured"),
        ("1", (10.0, 30.0), "llama_cpp: fixed order, no other is 20 % faster, measured"),
        ("1", (11.0, 10.0), "llama_cpp: fixed order, no other is 20 % faster, measured"),
    ],
)
def test_measured_times_decide_which_engine_is_tried_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_num_seqs: str | None, ms: tuple[float, float], reason: str
) -> None:
    model = _gguf_model(monkeypatch, tmp_path, TINY.read_bytes())
    config = new_config()
    if max_num_seqs is not None:
        config.parameters["max_num_seqs"].string_value = max_num_seqs
    times = RuntimeTimes(tmp_path)
    at_once = int(max_num_seqs or DEFAULT_MAX_NUM_SEQS)
    times.put(model / "1" / "model.gguf", dict(zip(GGUF_ORDER, ms, strict=True)), at_once)
    inspected = inspect_model(config, "m", model, 1, runtime_times=times)
    assert inspected.backend.name == reason.partition(":")[0]
    assert any(note.startswith(reason) for note in (*inspected.notes, *inspected.unlogged_notes))


def test_the_default_number_of_sequences_is_the_same_for_the_choice_and_the_engines() -> None:
    assert read_settings("m", {}, LlmSize(0, 0, 0), 32).max_num_seqs == DEFAULT_MAX_NUM_SEQS


def test_a_type_that_openvino_cannot_read_goes_to_llama_cpp_also_if_it_was_measured_as_the_slower_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = _gguf_model(monkeypatch, tmp_path, _with_tensor_type(6))
    times = RuntimeTimes(tmp_path)
    times.put(model / "1/model.gguf", {"llama_cpp": 30.0, "openvino_genai": 10.0}, DEFAULT_MAX_NUM_SEQS)
    inspected = inspect_model(new_config(), "talker", model, 1, runtime_times=times)
    assert inspected.backend.name == "llama_cpp"
    assert len(inspected.skipped) == 1
    assert "backend 'openvino_genai' was skipped for 'llama_cpp': tensor 'blk.1.ffn_down" in inspected.skipped[0]


def test_without_llama_cpp_the_error_for_such_a_type_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = _gguf_model(monkeypatch, tmp_path, _with_tensor_type(6), "openvino_genai")
    with pytest.raises(
        LoadError, match=r"llama_cpp.*pip install '\.\[llm-gguf\]'.*OpenVINO GenAI reads there, got Q5_0"
    ):
        inspect_model(new_config(), "talker", model, 1)


def _gguf_model(monkeypatch: pytest.MonkeyPatch, folder: Path, content: bytes, *installed: str) -> Path:
    """Return the folder of a model, with none of the engines imported and those `installed`, by default all, there."""
    monkeypatch.setattr(backends_module, "_made", {})
    modules = installed or ("openvino_genai", "xllamacpp")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in modules else None)
    model = folder / "talker"
    (model / "1").mkdir(parents=True)
    (model / "1/model.gguf").write_bytes(content)
    return model


def _with_tensor_type(kind: int) -> bytes:
    data = TINY.read_bytes()
    place = data.index(b"blk.1.ffn_down.weight") + len(b"blk.1.ffn_down.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, place) == (1,), "expected F16 in the file of the tests"
    return data[:place] + struct.pack("<I", kind) + data[place + 4 :]


def test_the_memory_of_an_export_is_computed_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.bin").write_bytes(bytes(1000))
    assert read_export(tmp_path) == LlmSize(int(1000 * EXPORT_LOAD_FACTOR), 0, 0)
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30,
              "max_position_embeddings": 8192}  # fmt: skip
    text = json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    weight_bytes = int((1000 + len(text)) * EXPORT_LOAD_FACTOR)
    values = 2 * 30 * 3 * 64
    assert read_export(tmp_path) == LlmSize(weight_bytes, 8192, int(values * KV_BYTES_PER_VALUE), 576)


@pytest.mark.parametrize("text", ['{"num_attention_heads": 0}', "[" * 100_000, "1e999"])
def test_with_a_damaged_config_only_the_weights_are_counted(tmp_path: Path, text: str) -> None:
    if text == "1e999":
        text = (
            '{"num_attention_heads": 9, "hidden_size": 576, "num_hidden_layers": 30, "max_position_embeddings": 1e999}'
        )
    (tmp_path / "config.json").write_text(text)
    assert read_export(tmp_path) == LlmSize(int(len(text) * EXPORT_LOAD_FACTOR), 0, 0)


def test_the_memory_of_a_model_is_its_weights_and_its_full_cache() -> None:
    size = LlmSize(weight_bytes=300 << 20, context=8192, bytes_per_token=14_400, width=576)
    settings = read_settings("m", {"num_kv_blocks": "10", "max_num_batched_tokens": "64"}, size, 32)
    parts = memory_parts(settings, size, 32)
    assert (parts["weights"], parts["KV cache"]) == (300 << 20, 10 * 32 * 14_400)
    assert 0 < parts["activations"] < parts["process"]


@given(
    text=st.text(max_size=300),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3),
)
def test_streamed_text_ends_at_the_first_stop_string(text: str, sizes: list[int], stop: list[str]) -> None:
    data = list(text.encode())

    def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(tokens).decode("utf-8", "replace") for tokens in sequences]

    stream = IncrementalDetokenizer(decode, stop)
    pieces, place, turn = [], 0, 0
    while place < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.add_text(*decode([stream.add_tokens(data[place : place + size])])))
        place, turn = place + size, turn + 1
    pieces.append(stream.add_text(*decode([stream.add_tokens([])]), is_last=True))
    ends = [found for item in stop if (found := text.find(item)) >= 0]
    assert stream.is_stopped == bool(ends)
    said = "".join(pieces)
    if not ends:
        assert said == text
    else:
        # A longer stop string may begin earlier, but the piece that completed the first one ended the text.
        assert text.startswith(said)
        assert any(text.startswith(item, len(said)) for item in stop)


@pytest.mark.parametrize(
    ("text", "end_tokens", "sampling"),
    [
        ("{}", [], DEFAULT_SAMPLING),
        ('{"eos_token_id": 7, "transformers_version": "4.57.0", "repetition_penalty": 1.1}', [7],
         replace(DEFAULT_SAMPLING, repetition_penalty=1.1)),
        ('{"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}', [2, 3],
         Sampling(16, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)),
        ('{"do_sample": true, "eos_token_id": null, "temperature": null, "top_k": null}', [],
         Sampling(16, temperature=1.0)),
        ('{"top_k": 64, "top_p": 0.95}', [], Sampling(16, temperature=1.0, top_k=64, top_p=0.95)),
        ('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}', [], Sampling(16, temperature=0.0, top_p=0.9)),
    ],
)  # fmt: skip
def test_end_tokens_and_sampling_defaults_are_read_from_generation_config_json(
    tmp_path: Path, text: str, end_tokens: list[int], sampling: Sampling
) -> None:
    assert read_generation_config(tmp_path) == GenerationConfig(frozenset(), DEFAULT_SAMPLING)
    (tmp_path / "generation_config.json").write_text(text)
    expected = GenerationConfig(frozenset(end_tokens), sampling)
    assert read_generation_config(tmp_path) == expected
    assert read_generation_config(Path(shutil.copy(TINY, tmp_path))) == expected


def test_sampling_defaults_are_read_from_a_gguf_file_unless_a_generation_config_json_beside_it_states_them(
    tmp_path: Path, add_gguf_metadata: Callable[[Path, dict[str, float]], None]
) -> None:
    path = Path(shutil.copy(TINY, tmp_path / "model.gguf"))
    add_gguf_metadata(path, {"temp": 0.5, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.25, "top_k": 20})
    assert read_gguf(path).context == read_gguf(TINY).context
    stated = Sampling(16, temperature=0.5, top_p=0.75, min_p=0.125, repetition_penalty=1.25, top_k=20)
    assert read_generation_config(path).sampling == stated
    (tmp_path / "generation_config.json").write_text('{"top_k": 40}')
    assert read_generation_config(path).sampling == replace(stated, top_k=40)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert read_generation_config(path).sampling == replace(stated, temperature=0.0)


def test_a_gguf_file_that_states_top_p_alone_means_the_temperature_1(
    tmp_path: Path, add_gguf_metadata: Callable[[Path, dict[str, float]], None]
) -> None:
    path = Path(shutil.copy(TINY, tmp_path / "model.gguf"))
    add_gguf_metadata(path, {"top_p": 0.75})
    assert read_generation_config(path).sampling == Sampling(16, temperature=1.0, top_p=0.75)


def test_sampling_metadata_of_a_gguf_file_out_of_range_is_named(
    tmp_path: Path, add_gguf_metadata: Callable[[Path, dict[str, float]], None]
) -> None:
    path = Path(shutil.copy(TINY, tmp_path / "model.gguf"))
    add_gguf_metadata(path, {"temp": -1.0})
    with pytest.raises(
        BadModelFile, match=r"model\.gguf: general\.sampling: sampling parameter temperature: expected 0 to 100, got"
    ):
        read_generation_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "generation_config.json: expected a JSON object, got an error"),
        ("[]", "generation_config.json: expected a JSON object, got list"),
        ('{"eos_token_id": "two"}', "eos_token_id: expected a token or a list of tokens, got two"),
        ('{"eos_token_id": [2, -1]}', r"eos_token_id: expected a token or a list of tokens, got \[2, -1\]"),
        ('{"do_sample": "no"}', "do_sample: expected true or false, got no"),
        ('{"temperature": -1}', "temperature: expected 0 to 100, got '-1'"),
    ],
)
def test_a_damaged_generation_config_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(BadModelFile, match=message):
        read_generation_config(tmp_path)


LONG_PROMPT = """
import sys
from pathlib import Path
from edge_server.plugins.language.engines.model_size import read_gguf
from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine
from edge_server.plugins.language.engines.settings import memory_parts, read_settings
from edge_server.plugins.language.engines.token_engine import Sampling

path = Path(sys.argv[1])
size = read_gguf(path)
settings = read_settings("m", {"num_kv_blocks": "64"}, size, 32)
engine = OpenVinoEngine(path, settings)
engine.add(1, [100 + number * 7 % 30_000 for number in range(2_000)], Sampling(20))
while not engine.is_idle():
    engine.step()
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) << 10, sum(memory_parts(settings, size, 32).values()))
"""


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.skipif(
    "EDGE_TEST_LANGUAGE_MODEL" not in os.environ,
    reason="SmolLM2 is not here: tests/e2e/fetch_pipeline_models.sh fetches it",
)
def test_a_real_model_with_a_full_cache_stays_within_the_computed_memory() -> None:
    pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
    command = [sys.executable, "-c", LONG_PROMPT, os.environ["EDGE_TEST_LANGUAGE_MODEL"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    taken, computed = map(int, done.stdout.split())
    assert 0.7 * computed < taken <= computed


KILLED_WHILE_OPENING = """
import os, signal, sys
from pathlib import Path
from edge_server.plugins.language.engines.openvino_tokenizer import open_tokenizer
from edge_server.repository.disk.load_call_files import delete_abandoned

class Library:
    @staticmethod
    def Tokenizer(path, **options):
        delete_abandoned()
        assert path.parent.is_dir()
        print(path.parent, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

open_tokenizer(Library, Path("model.gguf"))
"""


def test_temporary_folders_of_killed_processes_are_deleted_at_the_next_start(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_OPENING], env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert Path(done.stdout.strip()).is_dir(), done.stderr
    delete_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
