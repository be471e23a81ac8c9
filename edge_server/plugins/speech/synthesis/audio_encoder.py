"""Encoders of samples to the audio formats of OpenAI's API, piece by piece: WAV and PCM in numpy, others by FFmpeg in
the package `av`, if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from edge_server.backends.base import Array
from edge_server.errors import InvalidRequest, install_hint
from edge_server.plugins.speech.audio_file import resample

PCM_RATE = 24_000
"""Samples a second of PCM, which says nothing about itself: clients expect OpenAI's."""

_UNKNOWN_SIZE = 0xFFFFFFFF
"""In the header of a WAV file that is sent before its end is known. OpenAI's server sends the same."""


class _FfmpegFormat(NamedTuple):
    """`rate` 0: that of the model. `options` are the container's."""

    content_type: str
    container: str
    codec: str
    rate: int = 0
    options: Mapping[str, str] = MappingProxyType({})


_FFMPEG_FORMATS = {
    # Without a first frame that would state the length, and could not be written at the end.
    "mp3": _FfmpegFormat("audio/mpeg", "mp3", "libmp3lame", options={"write_xing": "0"}),
    # In microseconds. A page of the usual second would hold the audio up.
    "opus": _FfmpegFormat("audio/ogg", "ogg", "libopus", 48_000, {"page_duration": "200000"}),
    "aac": _FfmpegFormat("audio/aac", "adts", "aac"),
    "flac": _FfmpegFormat("audio/flac", "flac", "flac"),
}

FORMATS = ("wav", "pcm", *_FFMPEG_FORMATS)


class AudioEncoder(ABC):
    """Encodes the audio of one answer, of one channel and FP32 in [-1, 1]. Values beyond are clipped."""

    content_type: str

    @abstractmethod
    def encode(self, samples: Array, *, is_last: bool) -> bytes:
        """Encode samples, and return the bytes that are complete. The last call, and only it, has `is_last`."""


def make_encoder(response_format: str, rate: int) -> AudioEncoder:
    """Return an encoder for one of FORMATS, of audio with `rate` samples a second. Raises InvalidRequest if the package
    `av` is missing."""
    if response_format == "wav":
        return _WavEncoder(rate)
    if response_format == "pcm":
        return _PcmEncoder(rate)
    return _FfmpegEncoder(_FFMPEG_FORMATS[response_format], rate)


def check_encodable(response_format: str) -> None:
    """Raise InvalidRequest for a format that this installation cannot encode."""
    if response_format in _FFMPEG_FORMATS and importlib.util.find_spec("av") is None:
        raise InvalidRequest(
            f"'response_format': {response_format} needs the package av, wav and pcm do not; {install_hint('sources')}"
        )


def to_pcm(samples: Array) -> Array:
    """Return samples as INT16, little-endian. Values beyond [-1, 1] are clipped."""
    return np.round(np.clip(samples.astype(np.float32), -1, 1) * 32767).astype("<i2")


class _PcmEncoder(AudioEncoder):
    content_type = "audio/pcm"

    def __init__(self, rate: int) -> None:
        self._rate = rate

    def encode(self, samples: Array, *, is_last: bool) -> bytes:
        return to_pcm(resample(samples.astype(np.float32), self._rate, PCM_RATE)).tobytes()


class _WavEncoder(AudioEncoder):
    content_type = "audio/wav"

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._has_begun = False

    def encode(self, samples: Array, *, is_last: bool) -> bytes:
        data = to_pcm(samples).tobytes()
        if self._has_begun:
            return data
        self._has_begun = True
        size = len(data) if is_last else _UNKNOWN_SIZE
        whole = size + 36 if is_last else _UNKNOWN_SIZE
        head = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", whole, b"WAVEfmt ", 16, 1, 1, self._rate, self._rate * 2, 2, 16,
                           b"data", size)  # fmt: skip
        return head + data


class _Output:
    """File that FFmpeg writes into. It cannot be searched, so no header is written anew."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class _FfmpegEncoder(AudioEncoder):
    def __init__(self, form: _FfmpegFormat, rate: int) -> None:
        self._av: Any = importlib.import_module("av")
        self.content_type = form.content_type
        self._rate = rate
        self._output = _Output()
        self._container = self._av.open(self._output, "w", format=form.container, options=dict(form.options))
        self._stream = self._container.add_stream(form.codec, rate=form.rate or rate, layout="mono")

    def encode(self, samples: Array, *, is_last: bool) -> bytes:
        if samples.size:
            frame = self._av.AudioFrame.from_ndarray(to_pcm(samples).reshape(1, -1), format="s16", layout="mono")
            frame.sample_rate = self._rate
            self._container.mux(self._stream.encode(frame))
        if is_last:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        return self._output.take()
