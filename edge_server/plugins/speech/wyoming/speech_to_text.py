"""Speech to text over the Wyoming protocol: the client sends audio as it is recorded, and after its end gets the text.

Home Assistant names a language and no model: the first model by name that knows the language transcribes.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import InvalidRequest, QueueFull, UnknownModel
from edge_server.plugins.speech.audio_file import MAX_CHANNELS, MIN_SECONDS, SAMPLE_RATES
from edge_server.plugins.speech.model_call import run_transcription
from edge_server.plugins.speech.transcription_request import TranscriptionRequest, takes_speech
from edge_server.plugins.speech.transcription_response import Transcript
from edge_server.plugins.speech.wyoming.event_stream import EventStream, WyomingEvent
from edge_server.plugins.speech.wyoming.port import ServiceConnection, WyomingService, describe_item
from edge_server.service import InferenceService

MAX_AUDIO_BYTES = 8 << 20
"""Of one recording: four minutes as Home Assistant sends them."""
MAX_HELD_BYTES = 64 << 20
"""Of all recordings together, until they are transcribed."""

_WIDTHS = (2, 3, 4)


class SpeechToText(WyomingService):
    event_types = frozenset({"transcribe", "audio-start", "audio-chunk", "audio-stop"})

    def __init__(self, service: InferenceService) -> None:
        super().__init__(service)
        self.held_bytes = 0

    def programs(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        models = [
            describe_item(spec.name, f"Model {spec.name}", languages=languages_of(spec)) for spec in self.models()
        ]
        if not models:
            return {}
        # The client decides where a command ends.
        abilities = {"supports_transcript_streaming": True, "requires_external_vad": True}
        return {
            "asr": [
                describe_item(
                    name="edge_server", description="Speech to text of edge_server", models=models, **abilities
                )
            ]
        }

    def connect(self) -> ServiceConnection:
        return _Recording(self)

    def models(self) -> list[ModelSpec]:
        """Return the models that serve and take speech, by name."""
        return [spec for spec in self.ready_specs() if takes_speech(spec)]

    def choose_model(self, name: str, language: str) -> tuple[str, str]:
        """Return the model for a client that names it, or a language, or neither, and the language as the model names
        it. Raises UnknownModel, InvalidRequest."""
        models = self.models()
        known = [spec for spec in models if name in ("", spec.name)]
        if not known:
            given = ", ".join(f"'{spec.name}'" for spec in models) or "none"
            raise UnknownModel(f"expected one of the ready models for speech, which are {given}, got '{name[:80]}'")
        if not language:
            return known[0].name, ""
        # Home Assistant may add a region: de-CH.
        language = language.lower().replace("_", "-")
        for code in (language, language.partition("-")[0]):
            for spec in known:
                if code in languages_of(spec):
                    return spec.name, code
        names = sorted({code for spec in known for code in languages_of(spec)})
        raise InvalidRequest(f"language: expected {', '.join(names)}, got '{language[:40]}'")


def languages_of(spec: ModelSpec) -> list[str]:
    """Return the codes of the languages that a model knows."""
    return [code for code in spec.parameters.get("languages", "").replace(" ", "").split(",") if code]


class _AudioFormat(NamedTuple):
    """Samples a second, bytes of a sample, and channels."""

    rate: int
    width: int
    channels: int


class _Recording(ServiceConnection):
    """Collects the audio of one client, again and again."""

    def __init__(self, owner: SpeechToText) -> None:
        self._owner = owner
        self._name = self._language = ""
        self._parts: list[bytes] = []
        self._format: _AudioFormat | None = None
        self._size = 0

    async def take(self, event: WyomingEvent, stream: EventStream) -> None:
        if event.type == "transcribe":
            self._name, self._language = (_text(event.data, name) for name in ("name", "language"))
        elif event.type == "audio-start":
            self.close()
        elif event.type == "audio-chunk":
            self._add(_audio_format(event.data), event.payload)
        else:
            try:
                await self._transcribe(stream)
            finally:
                self.close()

    def close(self) -> None:
        self._owner.held_bytes -= self._size
        self._parts, self._format, self._size = [], None, 0

    def _add(self, form: _AudioFormat, audio: bytes) -> None:
        if self._format not in (None, form):
            raise InvalidRequest(f"audio-chunk: expected the format of the chunks before, {self._format}, got {form}")
        if self._size + len(audio) > MAX_AUDIO_BYTES:
            raise InvalidRequest(f"audio-chunk: expected a recording of at most {MAX_AUDIO_BYTES} bytes")
        if self._owner.held_bytes + len(audio) > MAX_HELD_BYTES:
            raise QueueFull(f"recordings of {MAX_HELD_BYTES} bytes are held, which is the maximum")
        self._format = form
        self._parts.append(audio)
        self._size += len(audio)
        self._owner.held_bytes += len(audio)

    async def _transcribe(self, stream: EventStream) -> None:
        model, language = self._owner.choose_model(self._name, self._language)
        heard = Transcript(language=language)
        await stream.write("transcript-start", {"language": language or None})
        form = self._format
        if form is not None and self._size >= MIN_SECONDS * form.rate * form.width * form.channels:

            async def send_part(heard: Transcript) -> None:
                if heard.delta:
                    await stream.write("transcript-chunk", {"text": heard.delta})

            call = TranscriptionRequest(model, "transcribe", self._wav_file(form), language, is_stream=True)
            heard = await run_transcription(self._owner.service, call, self._owner.dispatch, send_part)
        await stream.write("transcript", {"text": heard.text.strip(), "language": heard.language or None})
        await stream.write("transcript-stop", {})

    def _wav_file(self, form: _AudioFormat) -> bytes:
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((form.channels, form.width, form.rate, 0, "NONE", ""))
            writer.writeframes(b"".join(self._parts))
        return file.getvalue()


def _audio_format(data: Mapping[str, Any]) -> _AudioFormat:
    rate, width, channels = (data.get(name) for name in _AudioFormat._fields)
    if (
        type(rate) is not int
        or type(channels) is not int
        or rate not in SAMPLE_RATES
        or width not in _WIDTHS
        or not 1 <= channels <= MAX_CHANNELS
    ):
        raise InvalidRequest(
            f"audio-chunk: expected a rate of {SAMPLE_RATES[0]} to {SAMPLE_RATES[-1]}, a width of 2 to 4 and 1 to "
            f"{MAX_CHANNELS} channels, got {str(rate)[:20]}, {str(width)[:20]} and {str(channels)[:20]}"
        )
    return _AudioFormat(rate, int(width), channels)


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"transcribe: expected a text as '{name}', got {str(value)[:40]}")
    return (value or "").strip()
