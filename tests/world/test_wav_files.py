"""The WAV files of SciPy's own tests: the sound that SciPy reads, as one channel at the model's rate."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.speech import audio_file
from edge_server.plugins.speech.audio_file import SAMPLE_RATE, decode_audio, resample

pytestmark = pytest.mark.full

_EDGE = 20
"""Samples at both ends that depend on what a filter takes for the sound before and after the file."""
_BIG_ENDIAN = "RIFX, which FFmpeg does not read"
_FEW = "five samples: FFmpeg's filter gives none of so few"
_BITS = "whole numbers of a width that FFmpeg does not read"
EXCEPTIONS = {
    "test-44100Hz-2ch-32bit-float-be.wav": _BIG_ENDIAN,
    "test-44100Hz-be-1ch-4bytes.wav": _BIG_ENDIAN,
    "test-8000Hz-be-3ch-5S-24bit.wav": _FEW,
    "test-8000Hz-le-3ch-5S-24bit-rf64.wav": _FEW,
    "test-8000Hz-le-3ch-5S-64bit.wav": _FEW,
    "test-8000Hz-le-3ch-5S-36bit.wav": _BITS,
    "test-8000Hz-le-3ch-5S-45bit.wav": _BITS,
    "test-8000Hz-le-3ch-5S-53bit.wav": _BITS,
}
DAMAGED = {
    "test-44100Hz-le-1ch-4bytes-early-eof-no-data.wav",
    "test-44100Hz-le-1ch-4bytes-incomplete-chunk.wav",
}


def mono(samples: Any) -> Any:
    """Return samples of any type and number of channels as one channel in [-1, 1]."""
    values = samples.astype(np.float64)
    if samples.dtype == np.uint8:
        values = (values - 128) / 128
    elif samples.dtype.kind == "i":
        values /= -float(np.iinfo(samples.dtype).min)
    return (values.mean(axis=1) if values.ndim == 2 else values).astype(np.float32)


def test_the_sound_of_each_file_is_scipys(monkeypatch: pytest.MonkeyPatch) -> None:
    scipy = pytest.importorskip("scipy", reason="needs scipy, of the extra test-all")
    pytest.importorskip("av", reason="needs av, of the extra test-all")
    from scipy.io import wavfile

    # The files are shorter than a request may be.
    monkeypatch.setattr(audio_file, "MIN_SECONDS", 0)
    refused, wrong, right = set(), set(), 0
    for file in sorted((Path(scipy.__file__).parent / "io/tests/data").glob("*.wav")):
        try:
            heard = decode_audio(file.read_bytes(), 60)
        except InvalidRequest:
            refused.add(file.name)
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of chunks that SciPy does not know
                rate, samples = wavfile.read(file)
        except ValueError:
            continue  # SciPy reads no mu-law, and refuses a header that contradicts itself.
        expected = np.clip(resample(mono(samples), rate, SAMPLE_RATE), -1, 1)
        differences = np.abs(heard - expected) if heard.size == expected.size else np.ones(1 + 2 * _EDGE)
        if differences.max() < 0.06 and differences[_EDGE:-_EDGE].max(initial=0) < 0.003:
            right += 1
        else:
            wrong.add(file.name)
    assert refused >= DAMAGED
    assert refused | wrong == DAMAGED | set(EXCEPTIONS)
    assert right >= 10
