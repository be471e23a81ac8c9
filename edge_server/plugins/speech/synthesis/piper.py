"""Backend `piper`: voices of Piper, which are VITS models.

A voice is an ONNX file, and a JSON file with `.json` behind its name: `en_US-joe-medium.onnx.json`. Read are
`audio.sample_rate`, `espeak.voice`, `phoneme_type`, `phoneme_id_map`, `phoneme_map`, `num_speakers`, `speaker_id_map`,
`language.code`, `dataset` and `inference`. A model of several speakers has a voice for each. The format is that of
https://github.com/rhasspy/piper. Parameters beside those of `voice_backend`:

- `noise_scale` and `noise_w`: variation of the sound and of the lengths of the phonemes. With 0 for both a text always
  sounds the same.
- `length_scale`: 2 speaks half as fast.

Their defaults are those of the JSON file.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from edge_server.backends.base import Array, Backend, ModelFile, Session
from edge_server.backends.runtime_errors import existing_file, file_title
from edge_server.errors import LoadError
from edge_server.plugins.speech.speech_backend import read_json
from edge_server.plugins.speech.synthesis.voice_backend import VoiceBackend, VoiceModel, graph_tensors

T = TypeVar("T")

_BEGIN, _END, _PAD = "^", "$", "_"
_RATES = range(4_000, 192_001)
_MAX_SPEAKERS = 10_000
_MAX_ID = 1 << 16
_SCALES = {"noise_scale": 0.667, "length_scale": 1.0, "noise_w": 0.8}
"""In the order of the model's input, with Piper's defaults."""
_MAX_SCALE = 10.0


def make(name: str) -> Backend:
    return VoiceBackend(name, "model.onnx.json", PiperModel)


class PiperModel(VoiceModel):
    max_phonemes = 400
    """The memory of the encoder grows with the square of the length."""

    def __init__(self, file: ModelFile, parameters: Mapping[str, str]) -> None:
        """Raises LoadError."""
        json_file = existing_file(file, "model.onnx.json")
        if json_file.suffix == ".onnx":  # named in the configuration
            json_file = json_file.with_name(f"{json_file.name}.json")
        self._title = f"{file_title(file)}: '{json_file.name}'"
        self.onnx_file = json_file.with_name(json_file.name.removesuffix(".json"))
        if self.onnx_file.suffix != ".onnx" or not self.onnx_file.is_file():
            raise LoadError(f"{self._title}: expected '{self.onnx_file.name}' beside it, there is no such file")
        self._values = read_json(self._title, json_file)
        inputs, outputs = graph_tensors(self._title, self.onnx_file)
        self._takes_speaker = "sid" in inputs
        if set(inputs) - {"sid"} != {"input", "input_lengths", "scales"} or "output" not in outputs:
            raise LoadError(
                f"{self._title}: '{self.onnx_file.name}': expected the inputs input, input_lengths, scales, and sid of "
                f"several speakers, and an output 'output', given {', '.join((*inputs, *outputs))[:200]}"
            )
        kind = self._value("phoneme_type", str, "espeak")
        if kind != "espeak":
            raise LoadError(f"{self._title}: phoneme_type: expected espeak, got '{kind[:40]}'")
        self.sample_rate = self._value("audio.sample_rate", int)
        if self.sample_rate not in _RATES:
            raise LoadError(
                f"{self._title}: audio.sample_rate: expected {_RATES[0]} to {_RATES[-1]}, got {self.sample_rate}"
            )
        self._espeak_language = self._value("espeak.voice", str)
        self._ids = {name: self._phoneme_ids(name, ids) for name, ids in self._value("phoneme_id_map", dict).items()}
        if missing := [name for name in (_BEGIN, _END, _PAD) if name not in self._ids]:
            raise LoadError(f"{self._title}: phoneme_id_map: expected ids of ^, $ and _, there is none of {missing[0]}")
        self._replaced = {
            name: "".join(map(str, others)) if isinstance(others, list) else str(others)
            for name, others in self._value("phoneme_map", dict, {}).items()
        }
        self._scales = np.array([self._scale(name, parameters, usual) for name, usual in _SCALES.items()], np.float32)
        self._speakers = self._read_speakers()
        language = self._value("language.code", str, self._espeak_language).replace("_", "-")
        self.languages = dict.fromkeys(self._speakers, language)

    def espeak_language(self, voice: str) -> str:
        return self._espeak_language

    def speak(self, session: Session, phonemes: str, voice: str, speed: float) -> Array:
        ids = self.phoneme_ids(phonemes)
        if not ids:
            return np.empty(0, np.float32)
        inputs: dict[str, Array] = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": self._scales * np.array([1, 1 / speed, 1], np.float32),
        }
        if self._takes_speaker:
            inputs["sid"] = np.array([self._speakers[voice]], np.int64)
        return session.run(inputs, ["output"])["output"].ravel()

    def phoneme_ids(self, phonemes: str) -> list[int]:
        """Return the ids of a sentence: of each letter and each mark, with padding between them. Empty if the model
        knows none of them."""
        pad = self._ids[_PAD]
        found: list[int] = []
        for letter in unicodedata.normalize("NFD", phonemes):
            for known in self._replaced.get(letter, letter):
                if known in self._ids:
                    found += [*self._ids[known], *pad]
        return [*self._ids[_BEGIN], *pad, *found, *self._ids[_END]] if found else []

    def _read_speakers(self) -> dict[str, int]:
        """Return the number of each voice."""
        count = self._value("num_speakers", int, 1)
        if not 0 <= count <= _MAX_SPEAKERS:
            raise LoadError(f"{self._title}: num_speakers: expected 0 to {_MAX_SPEAKERS}, got {count}")
        if count <= 1:
            return {self._value("dataset", str, "default").replace(",", " ").strip() or "default": 0}
        numbers = self._value("speaker_id_map", dict, {}) or {str(number): number for number in range(count)}
        for name, number in numbers.items():
            if not isinstance(number, int) or not 0 <= number < count or "," in name or name != name.strip():
                raise LoadError(
                    f"{self._title}: speaker_id_map: expected names without commas, and numbers below {count}, "
                    f"got '{name[:40]}': {str(number)[:40]}"
                )
        return dict(sorted(numbers.items(), key=lambda item: item[1]))

    def _phoneme_ids(self, name: str, ids: object) -> list[int]:
        if isinstance(ids, list) and 0 < len(ids) < 10 and all(isinstance(i, int) and 0 <= i < _MAX_ID for i in ids):
            return ids
        raise LoadError(f"{self._title}: phoneme_id_map: expected a list of numbers for '{name[:40]}'")

    def _scale(self, name: str, parameters: Mapping[str, str], usual: float) -> float:
        """Return a scale: of the parameters, else of the file."""
        source = f"{self._title}: inference.{name}"
        value: object = self._value("inference", dict, {}).get(name, usual)
        if name in parameters:
            source, value = f"parameter {name}", parameters[name]
        try:
            scale = float(value) if isinstance(value, str | int | float) else math.nan
        except (ValueError, OverflowError):
            scale = math.nan
        if not 0 <= scale <= _MAX_SCALE or (name == "length_scale" and not scale):
            raise LoadError(f"{source}: expected a number from 0 to {_MAX_SCALE:g}, got '{str(value)[:40]}'")
        return scale

    def _value(self, path: str, kind: type[T], usual: T | None = None) -> T:
        """Return a value of the file, `usual` if there is none. Raises LoadError."""
        value: Any = self._values
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None and usual is not None:
            return usual
        if not isinstance(value, kind) or isinstance(value, bool):
            given = "none" if value is None else f"'{str(value)[:40]}'"
            names = {int: "a whole number", str: "a text", dict: "an object"}
            raise LoadError(f"{self._title}: {path}: expected {names[kind]}, got {given}")
        return value
