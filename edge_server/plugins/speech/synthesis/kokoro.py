"""Backend `kokoro`: Kokoro-82M, a model of many voices.

The folder has one ONNX file, and the voices in a file of numpy that holds an array for each: `voices.npz`, or
`voices-v1.0.bin` and `voices.bin`, as kokoro-onnx names them. A `config.json` beside them may have a `vocab`, the
number of each phoneme; else that of Kokoro 1.0 is used.

The first letter of a voice's name tells its language. Voices of Japanese and Chinese are left out: their phonemes are
not those of espeak-ng. English ones were trained with the phonemes of misaki, to which those of espeak-ng are
converted. Sources: https://huggingface.co/hexgrad/Kokoro-82M, misaki 0.9, kokoro-onnx 0.6.1. Parameters: those of
`voice_backend`.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge_server.backends.base import Array, Backend, ModelFile, Session
from edge_server.backends.runtime_errors import existing_file, file_title, message_line
from edge_server.errors import LoadError
from edge_server.plugins.speech.speech_backend import read_json
from edge_server.plugins.speech.synthesis.espeak_phonemes import TIE
from edge_server.plugins.speech.synthesis.voice_backend import VoiceBackend, VoiceModel, graph_tensors

_STYLE_SIZE = 256
_MAX_TOKENS = 510
"""Of one run, without the padding at both ends."""
_BEST = "af_heart"
"""The default voice: its authors grade it highest."""
_MAX_VOICES = 1000
_MAX_VOICES_BYTES = 1 << 28
_ONNX_FLOAT = 1
"""TensorProto.FLOAT."""

_VOCABULARY_1_0 = {
    1: ";:,.!?", 9: "—…\"()“” \u0303ʣʥʦʨᵝꭧAI", 31: "O", 33: "Q", 35: "ST", 39: "W", 41: "Yᵊabcdef",
    50: "hijklmnopqrstuvwxyzɑɐɒæ", 75: "βɔɕç", 80: "ɖðʤə", 85: "ɚɛɜ", 90: "ɟ", 92: "ɡ", 99: "ɥ", 101: "ɨɪʝ",
    110: "ɯɰŋɳɲɴø", 118: "ɸθœ", 123: "ɹ", 125: "ɾɻ", 128: "ʁɽʂʃʈʧ", 135: "ʊʋ", 138: "ʌɣɤ", 142: "χʎ", 147: "ʒʔ",
    156: "ˈˌː", 162: "ʰ", 164: "ʲ", 169: "↓", 171: "→↗↘", 177: "ᵻ",
}  # fmt: skip
"""Number of a phoneme -> it and those that follow."""


class _Language(NamedTuple):
    code: str
    espeak: str


_LANGUAGES = {
    "a": _Language("en-US", "en-us"), "b": _Language("en-GB", "en-gb"), "e": _Language("es-ES", "es"),
    "f": _Language("fr-FR", "fr"), "h": _Language("hi-IN", "hi"), "i": _Language("it-IT", "it"),
    "p": _Language("pt-BR", "pt-br"),
}  # fmt: skip
"""First letter of a voice -> its language."""

_OF_ALL = {
    "aɪ": "I", "aʊ": "W", "dz": "ʣ", "dʒ": "ʤ", "eɪ": "A", "oʊ": "O", "əʊ": "Q", "ts": "ʦ", "tʃ": "ʧ", "ɔɪ": "Y",
}  # fmt: skip
"""Sounds of espeak-ng with a tie between their letters -> phonemes of the model."""
_OF_ENGLISH = {
    "ʔˌn\u0329": "tᵊn", "ʔn": "tᵊn", "ʲO": "jO", "ʲQ": "jQ", f"ə{TIE}l": "ᵊl", "\u0303": "", "e": "A", "r": "ɹ",
    "x": "k", "ç": "k", "ɐ": "ə", "ɚ": "əɹ", "ɬ": "l", "ʔ": "t", "ʲ": "",
}  # fmt: skip
_OF_BRITISH = {f"e{TIE}ə": "ɛː", "iə": "ɪə"}
_OF_AMERICAN = {"ɜːɹ": "ɜɹ", "ɜː": "ɜɹ", "ɪə": "iə", "ː": ""}


def make(name: str) -> Backend:
    return VoiceBackend(name, "voices.npz", KokoroModel)


class KokoroModel(VoiceModel):
    sample_rate = 24_000
    max_phonemes = _MAX_TOKENS
    has_ties = True

    def __init__(self, file: ModelFile, parameters: Mapping[str, str]) -> None:
        """Raises LoadError."""
        self._title = file_title(file)
        self._voices_file = existing_file(file, "voices.npz")
        models = sorted(self._voices_file.parent.glob("*.onnx"))
        if len(models) != 1:
            given = ", ".join(path.name for path in models[:8]) or "none"
            raise LoadError(f"{self._title}: expected one ONNX file beside it, given {given}")
        self.onnx_file = models[0]
        inputs, outputs = graph_tensors(self._title, self.onnx_file)
        self._tokens_input = "input_ids" if "input_ids" in inputs else "tokens"
        if set(inputs) != {self._tokens_input, "style", "speed"} or not outputs:
            raise LoadError(
                f"{self._title}: '{self.onnx_file.name}': expected the inputs tokens or input_ids, style and speed, "
                f"given {', '.join(inputs)[:200]}"
            )
        self._output = next(iter(outputs))
        self._speed_type = np.float32 if inputs["speed"] == _ONNX_FLOAT else np.int32
        try:
            with zipfile.ZipFile(self._voices_file) as archive:
                members = archive.infolist()
        except (OSError, zipfile.BadZipFile) as error:
            raise LoadError(f"{self._title}: expected a file of numpy.savez: {message_line(error)}") from None
        names = sorted(member.filename.removesuffix(".npy") for member in members)
        names.sort(key=lambda name: name != _BEST)
        if len(names) > _MAX_VOICES or sum(member.file_size for member in members) > _MAX_VOICES_BYTES:
            raise LoadError(
                f"{self._title}: expected at most {_MAX_VOICES} voices and {_MAX_VOICES_BYTES >> 20} MiB, "
                f"given {len(names)} voices"
            )
        self.languages = {
            name: _LANGUAGES[name[0]].code for name in names if name[:1] in _LANGUAGES and "," not in name
        }
        if not self.languages:
            raise LoadError(
                f"{self._title}: expected voices whose names begin with {', '.join(_LANGUAGES)}, given "
                f"{', '.join(names[:8])}"
            )
        self._ids = self._read_vocabulary()
        self._styles: dict[str, Array] = {}

    def espeak_language(self, voice: str) -> str:
        return _LANGUAGES[voice[0]].espeak

    def speak(self, session: Session, phonemes: str, voice: str, speed: float) -> Array:
        tokens = self.tokens(phonemes, voice)
        if not tokens:
            return np.empty(0, np.float32)
        style = self._styles[voice]
        inputs: dict[str, Array] = {
            self._tokens_input: np.array([[0, *tokens, 0]], np.int64),
            # A voice has a style for each length.
            "style": style[min(len(tokens), len(style)) - 1].reshape(1, _STYLE_SIZE),
            "speed": np.array([speed if self._speed_type is np.float32 else max(1, round(speed))], self._speed_type),
        }
        return session.run(inputs, [self._output])[self._output].ravel()

    def tokens(self, phonemes: str, voice: str) -> list[int]:
        """Return the numbers of the phonemes of a sentence that the model knows, without the padding at both ends."""
        for sound, phoneme in _OF_ALL.items():
            phonemes = phonemes.replace(TIE.join(sound), phoneme)
        if voice[0] in "ab":
            for old, new in {**_OF_ENGLISH, **(_OF_BRITISH if voice[0] == "b" else _OF_AMERICAN)}.items():
                phonemes = phonemes.replace(old, new)
            # The mark of a consonant that is a syllable of its own stands behind it.
            phonemes = re.sub("(\\S)\u0329", r"ᵊ\1", phonemes).replace("o", "ɔ")
        return [self._ids[letter] for letter in phonemes if letter in self._ids][:_MAX_TOKENS]

    def load_voices(self, voices: Sequence[str]) -> None:
        with np.load(self._voices_file, allow_pickle=False) as arrays:
            for voice in voices:
                style = arrays[voice]
                if style.dtype.kind != "f" or not style.size or style.size % _STYLE_SIZE:
                    raise LoadError(
                        f"{self._title}: voice '{voice}': expected numbers of shape [lengths, 1, {_STYLE_SIZE}], "
                        f"given {style.dtype} of {list(style.shape)}"
                    )
                self._styles[voice] = style.reshape(-1, _STYLE_SIZE).astype(np.float32)

    def _read_vocabulary(self) -> dict[str, int]:
        """Return the number of each phoneme. Raises LoadError."""
        path = self._voices_file.with_name("config.json")
        if not path.is_file():
            return {
                letter: number
                for first, letters in _VOCABULARY_1_0.items()
                for number, letter in enumerate(letters, first)
            }
        title = f"{self._title}: '{path.name}'"
        vocabulary = read_json(title, path).get("vocab")
        if not isinstance(vocabulary, dict) or not all(isinstance(number, int) for number in vocabulary.values()):
            raise LoadError(f"{title}: vocab: expected an object with the number of each phoneme")
        return vocabulary
