"""Parser of the calls of OpenAI's API for text to speech: makes an inference request of a JSON body.

The format is https://platform.openai.com/docs/api-reference/audio/createSpeech. A member that is not supported and
might change the answer is an error that names it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.frontends.json_text import parse_object
from edge_server.plugins.language.openai.completion_request import BadMember, check_names, read_model
from edge_server.plugins.speech.synthesis.audio_encoder import FORMATS, check_encodable
from edge_server.protocol.raw_tensors import Buffer

_DEFAULT_FORMAT = "mp3"
_MEMBERS = frozenset({"model", "input", "voice", "response_format", "speed", "stream_format"})
_VOICES_OF_OPENAI = frozenset({
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
})  # fmt: skip
"""Names that clients offer which know no others."""


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One text to speak. `voice` "" is the model's default."""

    model: str
    text: str
    voice: str
    speed: float
    response_format: str
    is_event_stream: bool

    def inference_request(self, spec: ModelSpec) -> Request:
        """Return the request to the model. Raises BadMember if the model cannot take it."""
        inputs = {item.name for item in spec.inputs}
        if not gives_speech(spec):
            raise BadMember(
                "model",
                f"model '{spec.name}' gives no speech: it needs an input 'text', and the outputs 'audio' (FP32) and "
                "'sample_rate'",
            )
        voice = self.voice
        if voice in _VOICES_OF_OPENAI and voice not in {name for name, _ in voices_of(spec)}:
            voice = ""
        values: dict[str, tuple[DType, Any]] = {
            "text": (DType.BYTES, np.array([self.text.encode()], object)),
            "voice": (DType.BYTES, np.array([voice.encode()], object)),
            "speed": (DType.FP32, np.array([self.speed], np.float32)),
            "stream": (DType.BOOL, np.array([True])),
        }
        tensors = {name: Tensor(name, kind, array) for name, (kind, array) in values.items() if name in inputs}
        return Request(model=spec.name, id=f"speech-{uuid.uuid4().hex}", inputs=tensors)


def gives_speech(spec: ModelSpec) -> bool:
    """Return whether a model turns text into speech, as its inputs and outputs say."""
    audio = spec.output("audio")
    has_rate = spec.output("sample_rate") is not None
    return spec.input("text") is not None and audio is not None and audio.dtype is DType.FP32 and has_rate


def voices_of(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return the names and languages (as en-US, or "") of a model's voices, as its parameters say, the default
    first."""
    names, languages = (
        [part.strip() for part in spec.parameters.get(key, "").split(",")] for key in ("voices", "languages")
    )
    languages += [""] * (len(names) - len(languages))
    return [(name, language) for name, language in zip(names, languages, strict=False) if name]


def read_speech_request(body: Buffer) -> SpeechRequest:
    """Return the call of a body. Raises InvalidRequest."""
    members = parse_object(body)
    check_names(members, _MEMBERS)
    text = _text(members, "input", "")
    if not text.strip():
        raise BadMember("input", "'input': expected a text to speak, got none")
    voice, speed = members.get("voice"), members.get("speed")
    if not isinstance(voice, dict):
        voice = {"id": voice}
    if speed is not None and (
        isinstance(speed, bool) or not isinstance(speed, int | float) or not math.isfinite(speed)
    ):
        raise BadMember("speed", f"'speed': expected a number, got {str(speed)[:40]!r}")
    response_format = _choice(members, "response_format", FORMATS, _DEFAULT_FORMAT)
    check_encodable(response_format)
    return SpeechRequest(
        model=read_model(members),
        text=text,
        voice=_text(voice, "id", "", shown="voice"),
        speed=1.0 if speed is None else float(speed),
        response_format=response_format,
        is_event_stream=_choice(members, "stream_format", ("audio", "sse"), "audio") == "sse",
    )


def _text(members: Mapping[str, Any], name: str, default: str, shown: str = "") -> str:
    value = members.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadMember(shown or name, f"'{shown or name}': expected a text, got {str(value)[:40]!r}")
    return value


def _choice(members: Mapping[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    value = _text(members, name, default)
    if value not in choices:
        raise BadMember(name, f"'{name}': expected {', '.join(choices)}, got '{value[:40]}'")
    return value
