"""Decoder of audio files to what Whisper hears: 16,000 samples a second of one channel, float32.

WAV files of whole numbers are read by the standard library, all others by FFmpeg in the package `av`, if it is
installed. The bytes are hostile: FFmpeg gets a list of the formats that it may read, none of which opens other files or
connections, and decoding ends where the file becomes longer than allowed. It runs in a model's child process.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import wave
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.runtime_errors import message_line
from edge_server.errors import InvalidRequest, install_hint

if TYPE_CHECKING:
    import numpy.typing as npt

SAMPLE_RATE = 16_000
"""Samples a second that Whisper was trained with."""

MIN_SECONDS = 0.1
"""Shortest audio. OpenAI's API has the same bound."""

MAX_WAV_CHUNKS = 1000
"""Most chunks of a WAV file to its sound, that of the sound included. Recorders write about ten. The standard library
takes 3 us for each, and an empty one has 8 bytes."""

SAMPLE_RATES = range(1_000, 384_001)
MAX_CHANNELS = 32
_BLOCK = 1 << 20
"""Samples of all channels that are joined to one at a time."""

_FORMATS = "aac,ac3,aiff,amr,amrnb,amrwb,asf,au,caf,flac,matroska,webm,mov,mp3,mp4,m4a,3gp,mpeg,ogg,wav,w64"
"""Names of FFmpeg's demuxers. Playlists (hls, concat, dash, sdp), which open other files, are not among them."""

_ZERO_CROSSINGS = 16
"""Of the sinc on each side. More make the filter steeper."""
_MAX_PHASES = 640
"""Filters for positions between two samples, as many as 11,025 samples a second need. A file may state any rate; those
that would need more take the filter before."""
_RESAMPLED_BLOCK = 1 << 18
"""Samples of the result that are computed together, which bounds the memory."""


def decode_audio(data: bytes, max_seconds: float) -> npt.NDArray[np.float32]:
    """Return the samples of a file. Raises InvalidRequest for anything but audio of MIN_SECONDS to `max_seconds`."""
    parts = _read_wav(data, max_seconds)
    samples = _join(_decode_with_ffmpeg(data) if parts is None else parts, max_seconds)
    if samples.size < MIN_SECONDS * SAMPLE_RATE:
        raise InvalidRequest(
            f"the audio file has {samples.size / SAMPLE_RATE:.3f} s of sound, expected {MIN_SECONDS} s at least"
        )
    return samples


def _join(parts: Iterator[npt.NDArray[np.float32]], max_seconds: float) -> npt.NDArray[np.float32]:
    """Return all parts as one array in [-1, 1]. Raises InvalidRequest when they become too long."""
    found: list[npt.NDArray[np.float32]] = []
    count = 0
    for part in parts:
        count += part.size
        if count > max_seconds * SAMPLE_RATE:
            raise _too_long(max_seconds)
        found.append(part)
    samples = np.concatenate(found) if found else np.empty(0, np.float32)
    return np.clip(np.nan_to_num(samples, copy=False), -1, 1)


def _too_long(max_seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"the audio file is longer than {max_seconds:g} s, which the model's parameter max_audio_s allows"
    )


def _read_wav(data: bytes, max_seconds: float) -> Iterator[npt.NDArray[np.float32]] | None:
    """Return the samples of a WAV file, None for a file of another format. Raises InvalidRequest."""
    if data[:4] == b"RIFF":
        _check_chunks(data)
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            _check_header(channels, rate)
            if width not in (1, 2, 3, 4):
                return None
            if file.getnframes() > max_seconds * rate and len(data) > max_seconds * rate * channels * width:
                raise _too_long(max_seconds)
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, RuntimeError):
        # The module raises a bare RuntimeError for a chunk that is longer than the file.
        return None
    frames = frames[: len(frames) // (channels * width) * channels * width]
    # A sample of 3 bytes becomes the upper bytes of one of 4. Samples of 1 byte have no sign.
    if width == 3:
        wide = np.zeros((len(frames) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, 3)
        whole: Any = wide.reshape(-1).view("<i4")
    else:
        whole = np.frombuffer(frames, {1: "u1", 2: "<i2", 4: "<i4"}[width])
    scale = {1: 1 << 7, 2: 1 << 15}.get(width, 1 << 31)
    # The mean of a block at a time: a file of several channels is not held as floats whole.
    mono = np.empty(whole.size // channels, np.float32)
    for begin in range(0, mono.size, _BLOCK):
        block = whole[begin * channels : (begin + _BLOCK) * channels].astype(np.float32)
        mono[begin : begin + _BLOCK] = block.reshape(-1, channels).mean(axis=1)
    if width == 1:
        mono -= scale
    mono /= scale
    return iter((resample(mono, rate, SAMPLE_RATE),))


def _check_chunks(data: bytes) -> None:
    place = 12
    for _ in range(MAX_WAV_CHUNKS):
        if place >= len(data) or data[place : place + 4] == b"data":
            return
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8 + size + size % 2
    raise InvalidRequest(f"the audio file has too many parts: expected its sound within {MAX_WAV_CHUNKS} chunks")


def _check_header(channels: int, rate: int) -> None:
    if rate not in SAMPLE_RATES or not 1 <= channels <= MAX_CHANNELS:
        raise InvalidRequest(
            f"the audio file has {channels} channels of {rate} samples a second, expected 1 to {MAX_CHANNELS} of "
            f"{SAMPLE_RATES[0]} to {SAMPLE_RATES[-1]}"
        )


def _decode_with_ffmpeg(data: bytes) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the samples of the first audio stream, a second or less at a time. Raises InvalidRequest."""
    if importlib.util.find_spec("av") is None:
        raise InvalidRequest(
            f"the file is not a WAV file of whole numbers (it begins with {data[:8]!r}); for other formats "
            f"{install_hint('sources')}"
        )
    av = importlib.import_module("av")
    try:
        with av.open(io.BytesIO(data), mode="r", options={"format_whitelist": _FORMATS}) as file:
            if not file.streams.audio:
                raise InvalidRequest("the file has no audio stream")
            stream = file.streams.audio[0]
            # FFmpeg would add two channels with 0.7 each: equal ones become louder, and are cut at 1.
            resampler = av.AudioResampler("fltp", None, SAMPLE_RATE)
            for frame in file.decode(stream):
                _check_header(frame.layout.nb_channels, frame.sample_rate)
                for part in resampler.resample(frame):
                    yield part.to_ndarray().mean(axis=0)
            for part in resampler.resample(None):
                yield part.to_ndarray().mean(axis=0)
        return
    except (av.error.FFmpegError, ValueError) as error:
        said = message_line(error)
    raise InvalidRequest(
        f"the file cannot be decoded as audio: {said}; it begins with {data[:8]!r}, expected one of the formats of "
        f"FFmpeg {_FORMATS}"
    )


def resample(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Return the samples (float32, one channel) at `new_rate`, filtered with a windowed sinc: what the new rate cannot
    hold is left out."""
    if rate == new_rate or not samples.size:
        return samples
    divisor = math.gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    cutoff = min(1.0, up / down)
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)
    # Sample n of the result lies `n * down % up` of `up` parts behind a given sample.
    phases = min(up, _MAX_PHASES)
    offsets = np.arange(-reach + 1, reach + 1)
    distance = (offsets[:, None] - np.arange(phases) / phases) * cutoff
    window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / _ZERO_CROSSINGS, -1, 1))
    filters = (np.sinc(distance) * window * cutoff).astype(np.float32)
    padded = np.pad(samples, reach)
    result = np.empty(-(-samples.size * up // down), np.float32)
    for begin in range(0, result.size, _RESAMPLED_BLOCK):
        position = np.arange(begin, min(begin + _RESAMPLED_BLOCK, result.size), dtype=np.int64) * down
        index, phase = position // up + reach, position % up * phases // up
        block = np.zeros(position.size, np.float32)
        for offset, weights in zip(offsets, filters, strict=True):
            block += padded[index + offset] * weights[phase]
        result[begin : begin + position.size] = block
    return result
