"""Audio files as they reach a model: WAV of every width, other rates, files that FFmpeg reads, and hostile ones."""

from __future__ import annotations

import io
import struct
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.speech import audio_file
from edge_server.plugins.speech.audio_file import MAX_WAV_CHUNKS, SAMPLE_RATE, decode_audio, resample


def tone(hertz: float, seconds: float, rate: int = SAMPLE_RATE) -> Any:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize(("width", "error"), [(1, 0.01), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_wav_samples_of_every_width_are_read(make_wav: Any, width: int, error: float) -> None:
    heard = decode_audio(make_wav(tone(440, 0.5), width=width), 60)
    assert heard.dtype == np.float32
    assert np.abs(heard - tone(440, 0.5)).max() < error


def test_channels_become_one_by_their_mean(make_wav: Any) -> None:
    left = tone(440, 0.5)
    heard = decode_audio(make_wav(np.stack([left, np.zeros_like(left)], axis=1)), 60)
    assert np.abs(heard - left / 2).max() < 1e-3


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_a_tone_of_a_usual_rate_is_the_same_tone_at_the_models_rate(rate: int) -> None:
    heard = resample(tone(1_000, 0.5, rate), rate, SAMPLE_RATE)
    assert heard.size == SAMPLE_RATE // 2
    inner = slice(500, -500)  # the filter has nothing to mix with at the ends
    assert np.abs(heard - tone(1_000, 0.5))[inner].max() < 2e-3


def test_a_tone_that_the_models_rate_cannot_hold_is_filtered_out() -> None:
    heard = resample(tone(10_000, 0.5, 48_000), 48_000, SAMPLE_RATE)
    assert np.abs(heard[500:-500]).max() < 2e-3


@pytest.mark.parametrize("rate", [16_001, 44_099, 383_993])
def test_an_odd_rate_takes_little_memory_and_is_the_same_tone(rate: int) -> None:
    given = tone(1_000, 0.25, rate)
    tracemalloc.start()
    try:
        heard = resample(given, rate, SAMPLE_RATE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20, "a filter for each of 16,000 phases took up to ten times this"
    assert np.abs(heard - tone(1_000, heard.size / SAMPLE_RATE)[: heard.size])[500:-500].max() < 2e-3


def test_blocks_of_a_long_file_join_without_a_seam() -> None:
    heard = resample(tone(1_000, 40, 8_000), 8_000, SAMPLE_RATE)
    assert np.abs(heard - tone(1_000, 40))[500:-500].max() < 2e-3


def test_a_file_that_is_too_long_or_too_short_is_refused(make_wav: Any) -> None:
    with pytest.raises(InvalidRequest, match="longer than 1 s, which the model's parameter max_audio_s allows"):
        decode_audio(make_wav(tone(440, 1.1)), 1)
    with pytest.raises(InvalidRequest, match=r"has 0\.050 s of sound, expected 0\.1 s at least"):
        decode_audio(make_wav(tone(440, 0.05)), 1)


def test_a_header_out_of_range_is_refused(make_wav: Any) -> None:
    with pytest.raises(InvalidRequest, match="1 channels of 999 samples a second, expected 1 to 32 of 1000 to 384000"):
        decode_audio(make_wav(tone(440, 0.5), rate=999), 1)


def test_a_wav_file_that_is_cut_short_gives_what_is_there(make_wav: Any) -> None:
    data = make_wav(tone(440, 0.5))
    heard = decode_audio(data[: len(data) // 2 + 1], 60)
    assert 0.2 * SAMPLE_RATE < heard.size < 0.3 * SAMPLE_RATE


def test_a_chunk_that_is_longer_than_its_file_is_refused(monkeypatch: pytest.MonkeyPatch, make_wav: Any) -> None:
    monkeypatch.setattr(audio_file.importlib.util, "find_spec", lambda name: None)
    data = make_wav(tone(440, 0.5))
    place = data.index(b"data")
    with pytest.raises(InvalidRequest, match="is not a WAV file"):
        decode_audio(data[:place] + b"LIST" + struct.pack("<I", len(data)) + data[place:], 60)


def test_a_wav_file_with_many_chunks_before_its_sound_is_refused(make_wav: Any) -> None:
    data = make_wav(tone(440, 0.5))
    place = data.index(b"data")
    odd = b"LIST" + struct.pack("<I", 3) + b"odd\0"
    for chunk in (b"junk" + bytes(4), odd):
        assert decode_audio(data[:place] + chunk * (MAX_WAV_CHUNKS - 2) + data[place:], 60).size
        with pytest.raises(InvalidRequest, match=f"expected its sound within {MAX_WAV_CHUNKS} chunks"):
            decode_audio(data[:place] + chunk * (MAX_WAV_CHUNKS - 1) + data[place:], 60)


def test_without_av_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"begins with b'fLaC'.*install the extra sources"):
        decode_audio(b"fLaC", 1)


def encoded(container: str, codec: str, samples: Any, rate: int) -> bytes:
    av = pytest.importorskip("av", reason="needs av, of the extra test-all")
    output = io.BytesIO()
    with av.open(output, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.round(samples * 32767).astype(np.int16)[None], "s16", "mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    return output.getvalue()


@pytest.mark.full
@pytest.mark.parametrize(
    ("container", "codec"), [("flac", "flac"), ("ogg", "libopus"), ("mp3", "mp3"), ("mp4", "aac"), ("webm", "libopus")]
)
def test_formats_that_ffmpeg_reads_give_the_same_tone(container: str, codec: str) -> None:
    heard = decode_audio(encoded(container, codec, tone(1_000, 1, 48_000), 48_000), 60)
    assert 0.95 * SAMPLE_RATE < heard.size < 1.1 * SAMPLE_RATE
    spectrum = np.abs(np.fft.rfft(heard[:SAMPLE_RATE]))
    assert abs(int(spectrum.argmax()) * SAMPLE_RATE / min(heard.size, SAMPLE_RATE) - 1_000) < 5


@pytest.mark.full
def test_a_compressed_file_is_not_decoded_beyond_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="longer than 1 s"):
        decode_audio(encoded("flac", "flac", np.zeros(48_000 * 5), 48_000), 1)


@pytest.mark.full
def test_wav_of_floats_is_read_and_no_sample_is_out_of_range() -> None:
    pytest.importorskip("av", reason="needs av, of the extra test-all")
    samples = np.array([np.nan, np.inf, -7.0, 0.25] * 1000, "<f4").tobytes()
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(samples), b"WAVE", b"fmt ", 16, 3, 1, 16_000, 64_000,
                         4, 32, b"data", len(samples))  # fmt: skip
    heard = decode_audio(header + samples, 1)
    assert heard.size == 4000
    assert np.abs(heard).max() <= 1


@pytest.mark.full
def test_channels_of_what_ffmpeg_reads_become_one_by_their_mean_too() -> None:
    """FFmpeg's own mix made two equal channels 1.4 times as loud, and cut them at 1."""
    pytest.importorskip("av", reason="needs av, of the extra test-all")
    samples = np.repeat((1.8 * tone(440, 0.5))[:, None], 2, axis=1).astype("<f4").tobytes()
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(samples), b"WAVE", b"fmt ", 16, 3, 2, 16_000, 128_000,
                         8, 32, b"data", len(samples))  # fmt: skip
    assert np.abs(decode_audio(header + samples, 1) - 1.8 * tone(440, 0.5)).max() < 1e-6


@pytest.mark.full
def test_no_format_opens_another_file(tmp_path: Path, make_wav: Any) -> None:
    pytest.importorskip("av", reason="needs av, of the extra test-all")
    secret = tmp_path / "secret.wav"
    secret.write_bytes(make_wav(tone(440, 0.5)))
    lists = (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {secret}\n",
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 9 RTP/AVP 0\na=file:{secret}\n",
    )
    for text in lists:
        with pytest.raises(InvalidRequest, match="cannot be decoded as audio"):
            decode_audio(text.encode(), 1)


@pytest.mark.full
@pytest.mark.parametrize("data", [b"\0" * 5000, b"ID3" + b"\xff" * 5000, b"RIFF\xff\xff\xff\xffWAVEfmt ", b"x"])
def test_a_file_without_audio_is_a_wrong_request(data: bytes) -> None:
    pytest.importorskip("av", reason="needs av, of the extra test-all")
    with pytest.raises(InvalidRequest):
        decode_audio(data, 1)
