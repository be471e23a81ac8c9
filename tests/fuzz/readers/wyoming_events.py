"""Events of the Wyoming protocol, and the recordings that they make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from input_reader import InputReader

from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.plugins.speech.wyoming.event_stream import MAX_JSON_BYTES, EventStream, WyomingEvent
from edge_server.plugins.speech.wyoming.speech_to_text import SpeechToText

_LOOP = asyncio.new_event_loop()


class _Models:
    """A service without models."""

    def repository_index(self, *, only_ready: bool) -> list[Any]:
        return []


class _Writer:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass


def seeds() -> Iterable[bytes]:
    form = {"rate": 16000, "width": 2, "channels": 1}
    yield b"\0" + b"".join(
        _event(kind, data, payload)
        for kind, data, payload in (
            ("transcribe", {"language": "en", "name": "ear"}, b""),
            ("audio-start", form, b""),
            ("audio-chunk", form, b"\1\2\3\4"),
            ("audio-stop", {}, b""),
        )
    )
    yield b"\0" + json.dumps({"type": "audio-chunk", "data": form, "payload_length": 2}).encode() + b"\nab"
    yield b"\1\4type\5hello\3xyz"


def _event(kind: str, data: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(data).encode()
    head = {"type": kind, "data_length": len(text), "payload_length": len(payload)}
    return json.dumps(head).encode() + b"\n" + text + payload


def check(data: bytes) -> None:
    take = InputReader(data)
    work = _check_written(take) if take.byte() % 2 else _check_events(take)
    _LOOP.run_until_complete(work)


def _stream(data: bytes) -> EventStream:
    reader = asyncio.StreamReader(limit=MAX_JSON_BYTES, loop=_LOOP)
    reader.feed_data(data)
    reader.feed_eof()
    return EventStream(reader, _Writer())  # type: ignore[arg-type]


async def _check_events(take: InputReader) -> None:
    given = take.rest()
    stream = _stream(given)
    service = SpeechToText(_Models())  # type: ignore[arg-type]
    recording = service.connect()
    size = 0
    try:
        while (event := await stream.read()) is not None:
            size += len(event.payload)
            assert size <= len(given)
            if event.type in service.event_types:
                await recording.take(event, stream)
                assert 0 <= service.held_bytes <= size
    except EdgeServerError:
        pass
    recording.close()
    assert service.held_bytes == 0


async def _check_written(take: InputReader) -> None:
    """An event that is written is read again."""
    kind, name, value = (take.take(take.byte() & 31).decode("utf-8", "replace") for _ in range(3))
    payload = take.rest()
    stream = _stream(b"")
    await stream.write(kind, {name: value}, payload)
    written: Any = stream._writer
    try:
        found = await _stream(written.written).read()
    except InvalidRequest as error:
        raise AssertionError(error) from error
    assert found == WyomingEvent(kind, {name: value}, payload)
