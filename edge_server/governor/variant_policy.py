"""When a lighter model stands in for a heavier one, and when the heavier one comes back. Pure.

Going down is worth it when the share that the law allows falls clearly short of what is asked for; coming back when the
heavy model would fit again, by prediction, for a good while. Each change is followed by a rest in which nothing
changes. A return that did not last doubles the rest before the next return, not before the relief: so a box at the edge
of its envelope changes ever more rarely, and what it does meanwhile is answer, with the lighter model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VariantTuning:
    """Times in seconds. `short_below`: allowed work as a part of the offered one below which it is short.
    `room_c`: degrees below the set-point that the way back asks for. `rest_s` is the least time between two changes,
    `longest_rest_s` the most that is waited before the next try to return."""

    short_below: float = 0.8
    short_for_s: float = 5.0
    fits_for_s: float = 60.0
    room_c: float = 10.0
    rest_s: float = 600.0
    longest_rest_s: float = 3600.0


class VariantRule:
    """The rule for one model that names a variant."""

    def __init__(self, tuning: VariantTuning = VariantTuning()) -> None:
        self._tuning = tuning
        self._rest_before_return_s = tuning.rest_s
        self._changed_s: float | None = None
        self._since_s: float | None = None
        self.is_light = False
        self.switch_count = 0

    def step(self, offered: float, allowed: float, room_c: float | None, now_s: float) -> bool:
        """Return whether the lighter model answers from now on.

        `offered` is the computing time that the work asked for would take with the *heavy* model, `allowed` what the
        law leaves to this model, both in seconds a second. `room_c` is how far the temperature lies below its
        set-point, None where it is not known: what the law allows while the light model runs says little of what it
        would allow the heavy one.
        """
        tuning = self._tuning
        is_short = allowed < tuning.short_below * offered
        fits = allowed >= offered and (room_c is None or room_c >= tuning.room_c)
        wishes_change = fits if self.is_light else is_short
        if not wishes_change:
            self._since_s = None
            return self.is_light
        if self._since_s is None:
            self._since_s = now_s
        lasts_s = tuning.fits_for_s if self.is_light else tuning.short_for_s
        rest_s = self._rest_before_return_s if self.is_light else tuning.rest_s
        is_rested = self._changed_s is None or now_s - self._changed_s >= rest_s
        if is_rested and now_s - self._since_s >= lasts_s:
            self._change(now_s)
        return self.is_light

    def _change(self, now_s: float) -> None:
        tuning = self._tuning
        if not self.is_light and self._changed_s is not None:
            has_bounced = now_s - self._changed_s < 2 * tuning.rest_s
            doubled_s = min(2 * self._rest_before_return_s, tuning.longest_rest_s)
            self._rest_before_return_s = doubled_s if has_bounced else tuning.rest_s
        self.is_light = not self.is_light
        self.switch_count += 1
        self._changed_s = now_s
        self._since_s = None
