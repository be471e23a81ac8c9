"""Text to speech over the Wyoming protocol: the client sends a text, whole or while it is written, and gets audio.

A client names a voice, or a language, or neither. A voice has the name of its model, and of a model with several voices
MODEL:VOICE. While a text is being written (`synthesize-start`, chunks, `synthesize-stop`), each sentence is spoken when
it is complete.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edge_server.errors import InvalidRequest, UnknownModel
from edge_server.plugins.speech.model_call import spoken_parts
from edge_server.plugins.speech.synthesis.audio_encoder import to_pcm
from edge_server.plugins.speech.synthesis.speech_request import SpeechRequest, gives_speech, voices_of
from edge_server.plugins.speech.synthesis.voice_backend import list_names
from edge_server.plugins.speech.wyoming.event_stream import EventStream, WyomingEvent
from edge_server.plugins.speech.wyoming.port import ServiceConnection, WyomingService, describe_item

_CHUNK_BYTES = 8192
_LONGEST_WAIT = 1000
"""Characters of an unfinished sentence that are spoken without its end."""
_SENTENCE_END = re.compile(r".*(?:[.!?][\"')\]]*\s|[。！？]|\n)", re.DOTALL)


class OfferedVoice(NamedTuple):
    """A voice as clients see it. `voice` "" is the only one of a model that names none."""

    name: str
    model: str
    voice: str
    language: str


class TextToSpeech(WyomingService):
    event_types = frozenset({"synthesize", "synthesize-start", "synthesize-chunk", "synthesize-stop"})

    def programs(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        voices = [
            describe_item(item.name, item.name, languages=[item.language] if item.language else [])
            for item in self.voices()
        ]
        if not voices:
            return {}
        abilities = {"voices": voices, "supports_synthesize_streaming": True}
        return {"tts": [describe_item(name="edge_server", description="Text to speech of edge_server", **abilities)]}

    def connect(self) -> ServiceConnection:
        return _Speaker(self)

    def voices(self) -> list[OfferedVoice]:
        """Return the voices of the models that serve, by name of the model."""
        found = []
        for spec in filter(gives_speech, self.ready_specs()):
            voices = voices_of(spec) or [("", "")]
            for voice, language in voices:
                name = spec.name if len(voices) == 1 else f"{spec.name}:{voice}"
                found.append(OfferedVoice(name, spec.name, voice, language))
        return found

    def choose_voice(self, wanted: object) -> OfferedVoice:
        """Return the voice for `voice` of an event, which may have a name and a speaker, or a language. Raises
        UnknownModel, InvalidRequest."""
        data = wanted if isinstance(wanted, dict) else {}
        name, speaker, language = (_text(data, key) for key in ("name", "speaker", "language"))
        voices = self.voices()
        if not voices:
            raise UnknownModel("no model for text to speech is ready")
        if name:
            names = (f"{name}:{speaker}", name) if speaker else (name,)
            for item in voices:
                if item.name in names:
                    return item
            raise UnknownModel(f"voice: expected {list_names(item.name for item in voices)}, got '{name[:80]}'")
        if not language:
            return voices[0]
        language = language.lower().replace("_", "-")
        for item in voices:
            if item.language.lower() == language:
                return item
        for item in voices:
            if item.language.lower().partition("-")[0] == language.partition("-")[0]:
                return item
        languages = sorted({item.language for item in voices if item.language})
        raise InvalidRequest(f"language: expected {list_names(languages)}, got '{language[:40]}'")


class _Speaker(ServiceConnection):
    """Speaks the texts of one client, one at a time."""

    def __init__(self, owner: TextToSpeech) -> None:
        self._owner = owner
        self._voice: OfferedVoice | None = None
        """Of the text that is being written; None while there is none."""
        self._unspoken = ""
        self._rate = 0
        """Samples a second of the audio that has begun; 0: none has."""

    async def take(self, event: WyomingEvent, stream: EventStream) -> None:
        data = event.data
        if data.get("text_format") not in (None, "text"):
            raise InvalidRequest(f"text_format: expected text, got {str(data['text_format'])[:40]!r}")
        if event.type == "synthesize-start":
            self.close()
            self._voice = self._owner.choose_voice(data.get("voice"))
        elif event.type == "synthesize" and self._voice is None:
            await self._speak(self._owner.choose_voice(data.get("voice")), _text(data, "text"), stream)
            await self._end_audio(stream)
        elif event.type == "synthesize-chunk" and self._voice is not None:
            await self._speak_written(self._voice, _text(data, "text"), stream)
        elif event.type == "synthesize-stop" and self._voice is not None:
            voice, self._voice = self._voice, None
            await self._speak(voice, self._unspoken, stream)
            await self._end_audio(stream)
            await stream.write("synthesize-stopped", {})
        # `synthesize` within a text that is being written is the whole text, for servers that know no other.

    def close(self) -> None:
        self._voice, self._unspoken, self._rate = None, "", 0

    async def _speak_written(self, voice: OfferedVoice, text: str, stream: EventStream) -> None:
        """Speak the sentences that the text completes."""
        text = self._unspoken + text
        match = _SENTENCE_END.match(text)
        end = match.end() if match else 0
        if len(text) - end > _LONGEST_WAIT:
            end = len(text)
        self._unspoken = text[end:]
        await self._speak(voice, text[:end], stream)

    async def _speak(self, voice: OfferedVoice, text: str, stream: EventStream) -> None:
        if not text.strip():
            return
        call = SpeechRequest(voice.model, text, voice.voice, speed=1.0, response_format="pcm", is_event_stream=False)
        async with contextlib.aclosing(spoken_parts(self._owner.service, self._owner.dispatch, call)) as parts:
            async for part in parts:
                if not part.samples.size:
                    continue
                form = {"rate": part.rate, "width": 2, "channels": 1}
                if not self._rate:
                    self._rate = part.rate
                    await stream.write("audio-start", form)
                audio = to_pcm(part.samples).tobytes()
                for begin in range(0, len(audio), _CHUNK_BYTES):
                    await stream.write("audio-chunk", form, audio[begin : begin + _CHUNK_BYTES])

    async def _end_audio(self, stream: EventStream) -> None:
        if not self._rate:  # there was nothing to speak, for which clients wait all the same
            await stream.write("audio-start", {"rate": 16_000, "width": 2, "channels": 1})
        self._rate = 0
        await stream.write("audio-stop", {})


def _text(data: Mapping[str, Any], name: str) -> str:
    """Return a text of an event, "" if there is none. Raises InvalidRequest."""
    value = data.get(name) or ""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:  # half of a pair of surrogates
        pass
    raise InvalidRequest(f"{name}: expected a text, got {ascii(value)[:40]}")
