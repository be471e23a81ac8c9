"""Reader and writer of the Wyoming protocol's events: a line of JSON, then more JSON, then a payload, both optional.

The line has `type`, and may have `data` (an object), `data_length` and `payload_length` (in bytes). The format is
described by https://github.com/OHF-voice/wyoming (1.10). Lines and lengths come from a client, and are bounded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from edge_server.errors import EdgeServerError, InvalidRequest

MAX_JSON_BYTES = 64 << 10
"""Of the line, and of the JSON after it."""
MAX_PAYLOAD_BYTES = 1 << 20
"""Home Assistant sends about 2 kB of audio at a time."""

_WRITE_LIMIT_S = 30.0


class WyomingEvent(NamedTuple):
    """One message of either side."""

    type: str
    data: Mapping[str, Any]
    payload: bytes = b""


class EventStream:
    """One connection. The reader's limit has to be MAX_JSON_BYTES."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> WyomingEvent | None:
        """Return the next event, None at the end of the connection. Raises InvalidRequest for anything else."""
        try:
            line = await self._reader.readline()
            if not line:
                return None
            head = _json_object(line, "the line")
            kind, data = head.get("type"), head.get("data") or {}
            if not isinstance(kind, str) or not isinstance(data, dict):
                raise InvalidRequest("expected an event with a text as 'type' and an object as 'data'")
            more = await self._reader.readexactly(_length(head, "data_length", MAX_JSON_BYTES))
            if more:
                data = {**data, **_json_object(more, f"the data of '{kind[:40]}'")}
            payload = await self._reader.readexactly(_length(head, "payload_length", MAX_PAYLOAD_BYTES))
        except asyncio.IncompleteReadError:
            return None
        except ValueError:  # of readline
            raise InvalidRequest(f"expected a line of at most {MAX_JSON_BYTES} bytes") from None
        return WyomingEvent(kind, data, payload)

    async def write(self, kind: str, data: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send an event, and wait until the client has read most of it. Raises OSError if it has left or reads nothing
        for half a minute."""
        # A message may quote half of a pair of surrogates, which a client sent.
        text = json.dumps(data, ensure_ascii=False).encode(errors="replace")
        head = {"type": kind, "data_length": len(text), "payload_length": len(payload)}
        self._writer.write(json.dumps(head).encode() + b"\n" + text + payload)
        try:
            await asyncio.wait_for(self._writer.drain(), _WRITE_LIMIT_S)
        except asyncio.TimeoutError:
            raise TimeoutError("the client reads nothing") from None

    async def write_error(self, error: EdgeServerError) -> None:
        """Send an event `error`."""
        await self.write("error", {"text": error.message, "code": error.code.value})

    def close(self) -> None:
        self._writer.close()


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"expected a JSON object as {what}, got {text[:40]!r}")
    return value


def _length(head: Mapping[str, Any], name: str, most: int) -> int:
    value = head.get(name) or 0
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidRequest(f"{name}: expected 0 to {most}, got {str(value)[:40]}")
    return value
