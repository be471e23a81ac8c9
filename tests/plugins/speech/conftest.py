"""Fixtures for speech: the front end of tests/frontends, and WAV files."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.frontends import conftest as front_end

open_site, site = front_end.open_site, front_end.site


def wav_file(samples: Any, rate: int = 16_000, width: int = 2) -> bytes:
    """Return a WAV file of samples in [-1, 1], of shape (frames,) or (frames, channels)."""
    samples = np.asarray(samples, np.float64)
    whole = np.round(samples * ((1 << (8 * width - 1)) - 1)).astype(np.int64)
    if width == 1:
        whole += 128
    frames = whole.reshape(-1, 1).astype("<i8").view(np.uint8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1 if samples.ndim == 1 else samples.shape[1], width, rate, 0, "NONE", ""))
        writer.writeframes(frames)
    return file.getvalue()


@pytest.fixture
def make_wav() -> Callable[..., bytes]:
    return wav_file
