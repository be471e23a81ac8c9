"""Files of voices before they are opened, and phonemes: of Piper, of Kokoro, and of damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_server.backends.base import ModelFile
from edge_server.errors import BackendMissing, BadModelConfig, LoadError
from edge_server.plugins.speech.synthesis import espeak_phonemes
from edge_server.plugins.speech.synthesis.espeak_phonemes import split_phonemes
from edge_server.plugins.speech.synthesis.kokoro import KokoroModel
from edge_server.plugins.speech.synthesis.piper import PiperModel
from edge_server.plugins.speech.synthesis.voice_backend import VoiceBackend, list_names
from edge_server.repository.choice.backend_choice import candidates
from edge_server.repository.model_config.pbtxt import parse_text

PIPER = {
    "audio": {"sample_rate": 16_000},
    "espeak": {"voice": "de"},
    "language": {"code": "de_DE"},
    "dataset": "hans",
    "phoneme_type": "espeak",
    "inference": {"noise_scale": 0.5},
    "phoneme_id_map": {"^": [1], "$": [2], "_": [0], "a": [3], "b": [4, 5], "\u0303": [6]},
}


def write_onnx(path: Path, inputs: tuple[str, ...], output: str) -> None:
    """Write a graph of these inputs that gives the first one."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs]
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    node = helper.make_node("Identity", [inputs[0]], [output])
    onnx.save(helper.make_model(helper.make_graph([node], "voice", tensors, [result])), path)


@pytest.fixture
def piper(tmp_path: Path) -> Callable[..., PiperModel]:
    def make(
        inputs: tuple[str, ...] = ("input", "input_lengths", "scales"), parameters: Any = None, **values: Any
    ) -> PiperModel:
        folder = tmp_path / "hans/1"
        folder.mkdir(parents=True, exist_ok=True)
        write_onnx(folder / "de.onnx", inputs, "output")
        (folder / "de.onnx.json").write_text(json.dumps({**PIPER, **values}))
        return PiperModel(ModelFile(folder / "de.onnx.json", tmp_path / "hans", 1), parameters or {})

    return make


@pytest.fixture
def kokoro(tmp_path: Path) -> Callable[..., KokoroModel]:
    def make(inputs: tuple[str, ...] = ("tokens", "style", "speed"), **voices: Any) -> KokoroModel:
        folder = tmp_path / "many/1"
        folder.mkdir(parents=True, exist_ok=True)
        write_onnx(folder / "kokoro.onnx", inputs, "audio")
        np.savez(folder / "voices.npz", **(voices or {"af_a": np.zeros((510, 1, 256), np.float32)}))
        return KokoroModel(ModelFile(folder / "voices.npz", tmp_path / "many", 1), {})

    return make


def test_piper_has_one_voice_named_after_its_data(piper: Any) -> None:
    model = piper()
    assert model.languages == {"hans": "de-DE"}
    assert (model.sample_rate, model.espeak_language("hans"), model.onnx_file.name) == (16_000, "de", "de.onnx")


def test_piper_has_a_voice_for_each_speaker(piper: Any) -> None:
    inputs = ("input", "input_lengths", "scales", "sid")
    assert list(piper(inputs, num_speakers=2, speaker_id_map={"eva": 1, "adam": 0}).languages) == ["adam", "eva"]
    assert list(piper(inputs, num_speakers=3).languages) == ["0", "1", "2"]


def test_ids_of_piper_have_padding_between_them(piper: Any) -> None:
    model = piper()
    # Letters are decomposed; one that the voice does not know is left out.
    assert model.phoneme_ids("abã?") == [1, 0, 3, 0, 4, 5, 0, 3, 0, 6, 0, 2]
    assert model.phoneme_ids("??") == []
    assert piper(phoneme_map={"x": ["a", "b"]}).phoneme_ids("x") == [1, 0, 3, 0, 4, 5, 0, 2]


def test_a_speaker_and_a_speed_reach_the_graph_of_piper(piper: Any) -> None:
    given: dict[str, Any] = {}

    class Session:
        def run(self, inputs: dict[str, Any], outputs: list[str]) -> dict[str, Any]:
            given.update({name: array.tolist() for name, array in inputs.items()})
            return {"output": np.ones((1, 1, 1, 5), np.float32)}

    inputs = ("input", "input_lengths", "scales", "sid")
    model = piper(inputs, {"length_scale": "1.5"}, num_speakers=2, speaker_id_map={"eva": 1, "adam": 0})
    assert model.speak(Session(), "a", "eva", 2.0).shape == (5,)
    assert given == {
        "input": [[1, 0, 3, 0, 2]],
        "input_lengths": [5],
        "scales": [0.5, 0.75, pytest.approx(0.8)],
        "sid": [1],
    }
    assert model.speak(Session(), "?", "eva", 2.0).size == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"audio": {}}, "audio.sample_rate: expected a whole number, got none"),
        ({"audio": {"sample_rate": 10**9}}, "audio.sample_rate: expected 4000 to 192000, got 1000000000"),
        ({"audio": {"sample_rate": True}}, "audio.sample_rate: expected a whole number, got 'True'"),
        ({"espeak": []}, "espeak.voice: expected a text, got none"),
        ({"phoneme_type": "pinyin"}, "phoneme_type: expected espeak, got 'pinyin'"),
        ({"phoneme_id_map": {"^": [1], "_": [0]}}, "expected ids of ^, $ and _, there is none of $"),
        ({"phoneme_id_map": {"a": "b"}}, "phoneme_id_map: expected a list of numbers for 'a'"),
        ({"phoneme_id_map": {"a": [-1]}}, "phoneme_id_map: expected a list of numbers for 'a'"),
        ({"num_speakers": 10**9}, "num_speakers: expected 0 to 10000, got 1000000000"),
        (
            {"num_speakers": 2, "speaker_id_map": {"a": 7}},
            "expected names without commas, and numbers below 2, got 'a'",
        ),
        ({"inference": {"noise_w": 1e400}}, "inference.noise_w: expected a number from 0 to 10, got 'inf'"),
        ({"inputs": ("image",)}, "expected the inputs input, input_lengths, scales, and sid"),
        ({"parameters": {"length_scale": "0"}}, "parameter length_scale: expected a number from 0 to 10, got '0'"),
    ],
)
def test_a_wrong_value_of_piper_is_named(piper: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError) as error:
        piper(**values)
    assert message in error.value.message


def test_files_of_piper_that_are_none_are_refused(piper: Any, tmp_path: Path) -> None:
    piper()
    folder = tmp_path / "hans/1"
    for text, message in (("[]", "expected a JSON object"), ("{", "cannot be read as JSON"), ("[" * 99_999, "JSON")):
        (folder / "de.onnx.json").write_text(text)
        with pytest.raises(LoadError, match=message):
            PiperModel(ModelFile(folder / "de.onnx.json", tmp_path / "hans", 1), {})
    (folder / "de.onnx").write_bytes(b"no model")
    (folder / "de.onnx.json").write_text(json.dumps(PIPER))
    with pytest.raises(LoadError, match=r"'de\.onnx' cannot be read"):
        PiperModel(ModelFile(folder / "de.onnx.json", tmp_path / "hans", 1), {})
    (folder / "de.onnx").unlink()
    with pytest.raises(LoadError, match=r"expected 'de\.onnx' beside it"):
        PiperModel(ModelFile(folder / "de.onnx.json", tmp_path / "hans", 1), {})


def test_kokoro_has_the_voices_whose_language_espeak_knows(kokoro: Any) -> None:
    style = np.zeros((510, 1, 256), np.float32)
    model = kokoro(af_a=style, bm_b=style, jf_c=style, zm_d=style)
    assert model.languages == {"af_a": "en-US", "bm_b": "en-GB"}
    with pytest.raises(LoadError, match="expected voices whose names begin with a, b, e, f, h, i, p, given jf_c"):
        kokoro(jf_c=style)


def test_phonemes_of_kokoro_are_those_of_misaki(kokoro: Any) -> None:
    style = np.zeros((510, 1, 256), np.float32)
    model = kokoro(af_a=style, bm_b=style, ff_c=style)

    def letters(phonemes: str, voice: str) -> str:
        names = {number: letter for letter, number in model._ids.items()}
        return "".join(names[number] for number in model.tokens(phonemes, voice))

    assert letters("fˈa^ɪv bˈɜːdz, d^ʒˈo^ʊ!", "af_a") == "fˈIv bˈɜɹdz, ʤˈO!"
    assert letters("fˈa^ɪv bˈɜːdz, d^ʒˈə^ʊ!", "bm_b") == "fˈIv bˈɜːdz, ʤˈQ!"
    assert letters("bˈʌtn\u0329", "af_a") == "bˈʌtᵊn"
    assert letters("bɔ̃ʒˈuʁ", "ff_c") == "bɔ̃ʒˈuʁ"
    assert model.tokens("♥", "af_a") == []


def test_files_of_kokoro_that_are_none_are_refused(kokoro: Any, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="expected the inputs tokens or input_ids, style and speed, given image"):
        kokoro(inputs=("image",))
    with pytest.raises(LoadError, match="voice 'af_a': expected numbers of shape"):
        kokoro(af_a=np.zeros(100, np.float32)).load_voices(["af_a"])
    folder = tmp_path / "many/1"
    (folder / "config.json").write_text('{"vocab": {"a": "b"}}')
    with pytest.raises(LoadError, match="vocab: expected an object with the number of each phoneme"):
        kokoro()
    (folder / "config.json").write_text('{"vocab": {"a": 7}}')
    assert kokoro().tokens("ab", "af_a") == [7]
    (folder / "second.onnx").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"expected one ONNX file beside it, given kokoro.onnx, second.onnx"):
        kokoro()
    (folder / "second.onnx").unlink()
    (folder / "voices.npz").write_bytes(b"no archive")
    with pytest.raises(LoadError, match=r"expected a file of numpy\.savez"):
        KokoroModel(ModelFile(folder / "voices.npz", tmp_path / "many", 1), {})


def test_the_files_of_a_folder_name_the_backend(tmp_path: Path) -> None:
    def choose(*names: str) -> Any:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        (choice,) = candidates(parse_text(b"", "m"), "m", folder)
        return choice

    assert choose("model.onnx", "model.onnx.json") == ("piper", "model.onnx.json")
    assert choose("de_DE-hans.onnx", "de_DE-hans.onnx.json") == ("piper", "de_DE-hans.onnx.json")
    assert choose("kokoro-v1.0.onnx", "voices-v1.0.bin") == ("kokoro", "voices-v1.0.bin")
    assert choose("model.onnx", "voices.npz") == ("kokoro", "voices.npz")
    with pytest.raises(BadModelConfig):
        choose("a.onnx", "a.onnx.json", "b.onnx", "b.onnx.json")


def test_a_configuration_gets_the_tensors_and_voices_of_the_model(piper: Any) -> None:
    backend = VoiceBackend("piper", "model.onnx.json", PiperModel)
    file = ModelFile(piper().onnx_file.with_name("de.onnx.json"), Path("hans"), 1)
    text = backend.auto_complete(file, "{}")
    assert text is not None
    config = json.loads(text)
    assert {name: item["string_value"] for name, item in config["parameters"].items()} == {
        "voices": "hans", "languages": "de-DE",
    }  # fmt: skip
    assert [item["name"] for item in config["input"]] == ["text", "voice", "speed", "stream"]
    assert config["model_transaction_policy"] == {"decoupled": True}


def test_a_machine_without_espeak_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(espeak_phonemes, "_LIBRARY", "libespeak-of-nowhere.so.1")
    with pytest.raises(
        BackendMissing, match=r"^libespeak-of-nowhere\.so\.1 does not load .* apt install libespeak-ng1$"
    ):
        espeak_phonemes.Phonemizer()


def test_of_many_names_the_first_ones_are_listed() -> None:
    assert list_names(["a", "b"]) == "a, b"
    assert list_names(map(str, range(1000))).endswith("18, 19 and more")


def test_a_long_sentence_is_split_behind_marks_then_between_words() -> None:
    assert split_phonemes("one two, three four", 12) == ["one two,", "three four"]
    assert split_phonemes("one two three four", 10) == ["one two", "three four"]
    assert split_phonemes("onetwothreefour", 6) == ["onetwo", "threef", "our"]
    assert split_phonemes("", 6) == []
