"""Base of the backends for text to speech: tensors, parameters, and a session that speaks a text sentence by
sentence.

A child process makes phonemes with the library espeak-ng, which reads hostile texts, and runs the ONNX file with the
backend `onnxruntime`. The end of the process gives the memory back. Parameters:

- `voices`: names of the voices to offer, with commas between them. The first is the default. Unset: all of the model.
- `languages` of these voices, in the same order. Unset: as the model says.
- `max_text_characters` (4096): longest text.
- `niceness` (5) of the process.
- those of the backend `onnxruntime`, such as `intra_op_thread_count`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from edge_server.backends import load_backend, onnx_file_info
from edge_server.backends.base import (
    Array,
    Execution,
    ModelFile,
    ModelSignature,
    OpenJob,
    RequestSession,
    Session,
)
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.option_parsers import whole_number
from edge_server.backends.runtime_errors import message_line, open_with_library
from edge_server.errors import InvalidRequest, LoadError
from edge_server.plugins.speech.speech_backend import (
    SpeechBackend,
    SpeechSession,
    lower_priority,
    read_flag,
    read_text,
)
from edge_server.plugins.speech.synthesis.espeak_phonemes import Phonemizer

MIN_SPEED, MAX_SPEED = 0.25, 4.0
_DEFAULT_MAX_CHARACTERS = 4096
"""These are OpenAI's bounds."""
_LIMIT_OF_MAX_CHARACTERS = 20_000
"""About 25 minutes of speech, which the server holds at 6 MB a minute if the client reads nothing."""
_MAX_LISTED = 20
"""Voices that a message names. A model may have a thousand."""
_PROCESS_BYTES = 100 << 20
"""Of the child process with its libraries."""
_LOAD_FACTOR = 2.0
"""Memory of the weights and of the numbers between the layers / the file."""


class VoiceModel(ABC):
    """A model's files, except for the weights, as the server and the child process read them."""

    onnx_file: Path
    sample_rate: int
    languages: Mapping[str, str]
    """Voice -> its language, as en-US. The first voice is the default."""
    max_phonemes: int
    """Longest text of one run, in characters."""
    has_ties = False
    """Whether the phonemes have ties between the letters of one sound."""

    def load_voices(self, voices: Sequence[str]) -> None:
        """Read what `speak` needs of some voices, in the child process. May raise any exception."""
        return

    @abstractmethod
    def espeak_language(self, voice: str) -> str:
        """Return the language of a voice as espeak-ng names it."""

    @abstractmethod
    def speak(self, session: Session, phonemes: str, voice: str, speed: float) -> Array:
        """Return the samples of a sentence, FP32 of any length, none if the model knows none of the phonemes. Raises
        BackendError."""


ModelReader: TypeAlias = Callable[[ModelFile, Mapping[str, str]], VoiceModel]
"""Reads the files of a model, given its parameters. Raises LoadError."""


class VoiceBackend(SpeechBackend):
    inputs = (("text", "STRING"), ("voice", "STRING"), ("speed", "FP32"), ("stream", "BOOL"))
    outputs = (("audio", "FP32", [-1]), ("sample_rate", "INT32", [1]))

    def __init__(self, name: str, default_filename: str, read_model: ModelReader) -> None:
        """`read_model` must be picklable. Raises BackendMissing."""
        super().__init__(name, "onnxruntime", "onnxruntime")
        self.default_filename = default_filename
        self._read_model = read_model

    def complete_parameters(self, file: ModelFile, parameters: dict[str, Any]) -> None:
        languages = self._read_model(file, {}).languages
        voices = parameters.setdefault("voices", {"string_value": ", ".join(languages)})
        known = [languages.get(voice, "") for voice in voice_names(voices.get("string_value", ""))]
        parameters.setdefault("languages", {"string_value": ", ".join(known)})

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        self._read_model(file, parameters)
        return None

    def memory_parts(self, file: ModelFile, model: str, parameters: Mapping[str, str]) -> Mapping[str, int]:
        weights = self._read_model(file, parameters).onnx_file.stat().st_size
        return {"process": _PROCESS_BYTES, "weights": int(weights * _LOAD_FACTOR)}

    def open(self, job: OpenJob) -> RequestSession:
        return IsolatedSession(job, partial(open_voices, read_model=self._read_model))


def open_voices(job: OpenJob, read_model: ModelReader) -> RequestSession:
    """Open a model in this process. Raises LoadError. For the child process."""
    lower_priority(job)
    model = read_model(job.file, job.spec.parameters)
    return open_with_library(job.file, job.spec.backend, lambda: VoiceSession(job, model))


class VoiceSession(SpeechSession):
    def __init__(self, job: OpenJob, model: VoiceModel) -> None:
        """Raises LoadError, BackendMissing."""
        self._name = job.spec.name
        self._model = model
        self._max_characters = whole_number(
            self._name, job.spec.parameters, "max_text_characters", _DEFAULT_MAX_CHARACTERS, 1
        )
        if self._max_characters > _LIMIT_OF_MAX_CHARACTERS:
            raise LoadError(
                f"model '{self._name}': parameter max_text_characters: expected at most {_LIMIT_OF_MAX_CHARACTERS}, "
                f"got {self._max_characters}"
            )
        self._voices = voice_names(job.spec.parameters.get("voices", "")) or list(model.languages)
        for voice in self._voices:
            if voice not in model.languages:
                raise LoadError(
                    f"model '{self._name}': parameter voices: expected some of {list_names(model.languages)}, "
                    f"got '{voice[:80]}'"
                )
        model.load_voices(self._voices)
        self._phonemizer = Phonemizer(has_ties=model.has_ties)
        for voice in self._voices:
            self._phonemizer.set_language(model.espeak_language(voice))
        file = job.file._replace(path=model.onnx_file)
        session = load_backend("onnxruntime").open(dataclasses.replace(job, file=file))
        assert isinstance(session, Session)
        self._session = session
        self.info = dataclasses.replace(session.info, is_bound=False, only_computes=False)

    def close(self) -> None:
        self._session.close()

    def answer(self, execution: Execution, inputs: Mapping[str, Array]) -> None:
        """Send the audio of each sentence as it is made, or that of the text. Raises InvalidRequest, BackendError."""
        text, voice = read_text(inputs, "text"), read_text(inputs, "voice") or self._voices[0]
        if len(text) > self._max_characters:
            raise InvalidRequest(
                f"text: expected at most {self._max_characters} characters, which the model's parameter "
                f"max_text_characters allows, got {len(text)}"
            )
        if voice not in self._voices:
            raise InvalidRequest(f"voice: model '{self._name}' has {list_names(self._voices)}, got '{voice[:40]}'")
        speed = float(inputs["speed"][0]) if "speed" in inputs else 1.0
        if not math.isfinite(speed) or not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(f"speed: expected {MIN_SPEED:g} to {MAX_SPEED:g}, got {speed:g}")
        is_stream = read_flag(inputs, "stream")
        self._phonemizer.set_language(self._model.espeak_language(voice))
        sentences = self._phonemizer.sentences(text, self._model.max_phonemes)
        parts: list[Array] = [np.empty(0, np.float32)]
        for index, sentence in enumerate(sentences):
            if execution.is_cancelled():
                execution.finish()
                return
            part = self._model.speak(self._session, sentence, voice, speed)
            if is_stream and part.size and index < len(sentences) - 1:
                execution.send(self._outputs(part))
            else:
                parts.append(part)
        execution.send(self._outputs(np.concatenate(parts)), is_final=True)

    def _outputs(self, samples: Array) -> dict[str, Array]:
        return {"audio": samples, "sample_rate": np.array([self._model.sample_rate], np.int32)}


def voice_names(text: str) -> list[str]:
    """Return the names in a text with commas between them: a value of the parameters `voices` and `languages`."""
    return [name for part in text.split(",") if (name := part.strip())]


def list_names(names: Iterable[str]) -> str:
    """Return names with commas between them, of many the first ones."""
    shown = list(itertools.islice(names, _MAX_LISTED + 1))
    return ", ".join(shown[:_MAX_LISTED]) + (" and more" if len(shown) > _MAX_LISTED else "")


def graph_tensors(title: str, path: Path) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the inputs and the outputs of an ONNX file: name -> TensorProto.DataType number. Raises LoadError."""
    try:
        inputs, outputs = onnx_file_info.declared(path)
    except (OSError, ValueError) as error:
        said = message_line(error)
    else:
        return {item.name: item.element for item in inputs}, {item.name: item.element for item in outputs}
    raise LoadError(f"{title}: '{path.name}' cannot be read: {said}")
