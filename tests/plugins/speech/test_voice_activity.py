"""Windows of speech, from the probabilities that a detector gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.speech.audio_file import SAMPLE_RATE
from edge_server.plugins.speech.voice_activity import MAX_WINDOW_S, Span, make_windows, time_in_audio

FRAME_S = 0.032


def windows_of(*parts: tuple[float, float]) -> list[list[tuple[float, float]]]:
    """Return the windows of audio, in seconds, for parts of (seconds, probability)."""
    probabilities = np.concatenate([np.full(round(seconds / FRAME_S), value, "f") for seconds, value in parts])
    size = probabilities.size * 512
    return [
        [(round(begin / SAMPLE_RATE, 1), round(end / SAMPLE_RATE, 1)) for begin, end in window]
        for window in make_windows(probabilities, size)
    ]


def test_silence_and_clicks_have_no_window() -> None:
    assert windows_of((40, 0.1)) == []
    assert windows_of((4, 0.4), (0.064, 0.9), (4, 0.1)) == []


def test_speech_has_a_margin_within_the_audio() -> None:
    assert windows_of((5, 0.0), (3, 0.9), (5, 0.0)) == [[(4.6, 8.4)]]
    assert windows_of((0.2, 0.0), (3, 0.9), (0.1, 0.0)) == [[(0.0, 3.3)]]


def test_short_pauses_are_kept_and_long_ones_left_out() -> None:
    assert windows_of((3, 0.9), (1.5, 0.0), (3, 0.9)) == [[(0.0, 7.5)]]
    assert windows_of((3, 0.9), (15, 0.0), (3, 0.9)) == [[(0.0, 3.4), (17.6, 21.0)]]


def test_a_dip_that_is_no_silence_ends_nothing() -> None:
    assert windows_of((3, 0.9), (3, 0.4), (3, 0.9)) == [[(0.0, 9.0)]]


def test_what_does_not_fit_into_a_window_begins_the_next_one() -> None:
    assert windows_of((20, 0.9), (10, 0.0), (20, 0.9)) == [[(0.0, 20.4)], [(29.6, 50.0)]]


def test_long_speech_is_cut_where_it_is_quietest() -> None:
    ((first,), (second,)) = windows_of((25, 0.9), (0.5, 0.4), (20, 0.9))
    assert first[1] == second[0] == pytest.approx(25.2, abs=0.3)


def test_times_in_a_window_become_times_of_the_audio() -> None:
    parts = [Span(16_000, 48_000), Span(160_000, 176_000)]
    assert [time_in_audio(parts, seconds) for seconds in (0, 1, 2, 2.5, 3, 9)] == [1, 2, 3, 10.5, 11, 11]


@given(st.lists(st.tuples(st.integers(1, 1200), st.sampled_from([0.0, 0.3, 0.45, 0.9])), min_size=1, max_size=12))
def test_windows_are_in_order_and_short_enough(parts: list[tuple[int, float]]) -> None:
    probabilities = np.concatenate([np.full(count, value, "f") for count, value in parts])
    size = probabilities.size * 512 - 100
    windows = make_windows(probabilities, size)
    edges = [edge for window in windows for span in window for edge in span]
    assert edges == sorted(edges)
    assert all(0 <= edge <= size for edge in edges)
    for window in windows:
        assert 0 < sum(end - begin for begin, end in window) <= MAX_WINDOW_S * SAMPLE_RATE
    # All that is surely speech is in a window, but for sounds that are too short.
    loud = np.flatnonzero(np.convolve(probabilities >= 0.5, np.ones(5), "valid") == 5) * 512
    covered = np.zeros(size, bool)
    for window in windows:
        for begin, end in window:
            covered[begin:end] = True
    assert covered[loud].all()
