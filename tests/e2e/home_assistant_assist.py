"""Home Assistant's core in a process of its own: its Wyoming integration and its Assist pipeline, over a server.

Run by the Python of fetch_home_assistant_assist.sh. `home_assistant_assist.py FOLDER PORT hear RECORDING` sends the
recording, a WAV file, through an assistant as a microphone would, and prints JSON: the events of the pipeline, and the
languages. `... speak FILE TEXT` writes a text as speech to a WAV file, and prints the languages and voices.
"""

from __future__ import annotations

import asyncio
import json
import sys
import wave
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from homeassistant import bootstrap, config_entries, core, loader
from homeassistant.components import assist_pipeline, stt, tts
from homeassistant.setup import async_setup_component

CHUNK_S = 0.02


async def microphone(path: str) -> AsyncIterator[bytes]:
    """Yield the recording, then silence until it is no longer asked for."""
    with wave.open(path) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (16_000, 2, 1)
        size = int(CHUNK_S * file.getframerate())
        while len(chunk := file.readframes(size)) == 2 * size:
            yield chunk
    while True:
        yield bytes(2 * size)
        await asyncio.sleep(0)


async def main(folder: str, port: int, action: str, *arguments: str) -> None:
    (Path(folder) / "configuration.yaml").touch()
    hass = core.HomeAssistant(folder)
    hass.config.skip_pip = True
    loader.async_setup(hass)
    hass.config_entries = config_entries.ConfigEntries(hass, {})
    await bootstrap.async_load_base_functionality(hass)
    # The web server, which the integrations need for their pages only.
    hass.http = SimpleNamespace(register_view=lambda view: None)
    hass.config.components |= {"http"}
    assert await async_setup_component(hass, "homeassistant", {})
    entry = config_entries.ConfigEntry(
        version=1, minor_version=1, domain="wyoming", title="ear", data={"host": "127.0.0.1", "port": port},
        source="user", unique_id=None, options={}, discovery_keys=MappingProxyType({}), subentries_data=(),
    )  # fmt: skip
    await hass.config_entries.async_add(entry)
    await hass.async_start()
    assert entry.state is config_entries.ConfigEntryState.LOADED, (entry.state, entry.reason)
    print(json.dumps(await {"hear": hear, "speak": speak}[action](hass, *arguments), default=str))
    await hass.async_stop()


async def hear(hass: core.HomeAssistant, recording: str) -> Mapping[str, Any]:
    (ear,) = [state.entity_id for state in hass.states.async_all("stt")]
    pipeline = assist_pipeline.async_get_pipeline(hass)
    await assist_pipeline.async_update_pipeline(hass, pipeline, stt_engine=ear, stt_language="en")
    events: list[Mapping[str, Any]] = []
    await assist_pipeline.async_pipeline_from_audio_stream(
        hass,
        context=core.Context(),
        event_callback=lambda event: events.append({"type": event.type, "data": event.data}),
        stt_metadata=stt.SpeechMetadata(
            language="", format=stt.AudioFormats.WAV, codec=stt.AudioCodecs.PCM,
            bit_rate=stt.AudioBitRates.BITRATE_16, sample_rate=stt.AudioSampleRates.SAMPLERATE_16000,
            channel=stt.AudioChannels.CHANNEL_MONO,
        ),
        stt_stream=microphone(recording),
        end_stage=assist_pipeline.PipelineStage.STT,
    )  # fmt: skip
    engine = stt.async_get_speech_to_text_entity(hass, ear)
    return {"entity": ear, "languages": engine.supported_languages, "events": events}


async def speak(hass: core.HomeAssistant, file: str, text: str) -> Mapping[str, Any]:
    (mouth,) = [state.entity_id for state in hass.states.async_all("tts")]
    options = {tts.ATTR_PREFERRED_FORMAT: "wav"}
    source = tts.generate_media_source_id(hass, text, engine=mouth, language="en-US", options=options)
    extension, audio = await tts.async_get_media_source_audio(hass, source)
    assert extension == "wav"
    Path(file).write_bytes(audio)
    engine = hass.data["tts"].get_entity(mouth)
    languages = sorted(engine.supported_languages)
    voices = {language: engine.async_get_supported_voices(language) for language in languages}
    return {"entity": mouth, "voices": {key: [one.voice_id for one in value] for key, value in voices.items()}}


asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
