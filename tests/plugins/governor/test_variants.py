"""Variant rule: becomes active if work is clearly short, ends in time, and switches less and less often."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.governor.variant_selector import VariantConstants, VariantRule


def _run(rule: VariantRule, looks: list[tuple[float, float, float | None]], period_s: float = 1.0) -> list[float]:
    """Show the rule (offered, allowed, room) after one another; return when it switched."""
    switched_s = []
    for index, look in enumerate(looks):
        before = rule.is_light
        if rule.step(*look, index * period_s) is not before:
            switched_s.append(index * period_s)
    return switched_s


def test_a_clear_lasting_shortage_activates_the_lighter_variant() -> None:
    assert _run(VariantRule(), [(1.0, 0.7, 0.0)] * 20) == [5.0]


def test_a_small_or_short_shortage_activates_no_variant() -> None:
    assert _run(VariantRule(), [(1.0, 0.85, 0.0)] * 100) == []
    assert _run(VariantRule(), ([(1.0, 0.5, 0.0)] * 4 + [(1.0, 1.0, 0.0)]) * 50) == []


def test_the_heavier_model_returns_once_there_was_room_for_a_minute() -> None:
    short, fits = (1.0, 0.5, 0.0), (1.0, 1.0, 15.0)
    assert _run(VariantRule(), [short] * 10 + [fits] * 2000) == [5.0, 605.0]
    assert _run(VariantRule(), [short] * 10 + [short] * 700 + [fits] * 2000) == [5.0, 770.0]


def test_too_small_a_margin_below_the_set_point_keeps_the_lighter_variant() -> None:
    assert _run(VariantRule(), [(1.0, 0.5, 0.0)] * 10 + [(1.0, 1.0, 5.0)] * 5000) == [5.0]


def test_without_a_temperature_the_allowed_rate_decides() -> None:
    assert _run(VariantRule(), [(1.0, 0.5, None)] * 10 + [(1.0, 1.0, None)] * 1000) == [5.0, 605.0]


def _edge(rule: VariantRule, hours: float) -> list[float]:
    """A load that fits by every sign as long as the lighter model runs, and is short as soon as the heavy one does."""
    switched_s = []
    for second in range(round(hours * 3600)):
        look = (1.0, 1.0, 15.0) if rule.is_light else (1.0, 0.5, 0.0)
        before = rule.is_light
        if rule.step(*look, float(second)) is not before:
            switched_s.append(float(second))
    return switched_s


def test_each_failed_return_doubles_the_wait_before_the_next() -> None:
    switched_s = _edge(VariantRule(), 8)
    light_s = [up - down for down, up in zip(switched_s[::2], switched_s[1::2], strict=False)]
    heavy_s = [down - up for up, down in zip(switched_s[1::2], switched_s[2::2], strict=False)]
    assert light_s[:4] == [600.0, 1200.0, 2400.0, 3600.0]
    assert set(light_s[4:]) == {3600.0}
    assert set(heavy_s) == {600.0}, "relief never waits longer than it must"


def test_a_lasting_return_resets_the_wait() -> None:
    rule = VariantRule()
    short, fits = [(1.0, 0.5, 0.0)], [(1.0, 1.0, 15.0)]
    first = _run(rule, short * 10 + fits * 700 + short * 600 + fits * 1300 + fits * 2000 + short * 10 + fits * 1000)
    down = first[4]
    assert first[5] - down <= 610.0


@given(seed=st.integers(0, 2**32 - 1), period_s=st.sampled_from([0.5, 2.0, 7.0]))
def test_no_two_switches_are_ever_less_than_ten_minutes_apart(seed: int, period_s: float) -> None:
    rnd = random.Random(seed)
    looks: list[tuple[float, float, float | None]] = []
    while len(looks) < 3000:
        look = (rnd.random(), rnd.random(), rnd.choice([None, rnd.uniform(-5, 40)]))
        looks += [look] * rnd.randrange(1, 200)
    rule = VariantRule()
    switched_s = _run(rule, looks, period_s)
    assert all(late - early >= 600.0 for early, late in itertools.pairwise(switched_s))
    assert rule.switch_count == len(switched_s)


def test_a_clock_jump_causes_at_most_one_switch() -> None:
    rule = VariantRule()
    rule.step(1.0, 0.5, 0.0, 0.0)
    assert rule.step(1.0, 0.5, 0.0, 1e6)
    assert rule.step(1.0, 1.0, 20.0, 2e6), "fitting has to be seen to last"


def test_times_can_be_configured() -> None:
    rule = VariantRule(VariantConstants(short_for_s=0.0, fits_for_s=0.0, rest_s=10.0))
    assert _run(rule, [(1.0, 0.5, 0.0)] + [(1.0, 1.0, 20.0)] * 30) == [0.0, 10.0]
