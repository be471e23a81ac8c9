"""The last actuator, used only where the operator grants it: a cap on the GPU's clock, notch by notch.

A lower clock does the same work with less power, since the voltage falls with it; but it slows every class down,
control too. So it comes after everything else, and is let go slowly.
"""

from __future__ import annotations

import atexit
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_server.governor.control_policy import PolicyDecision, ThermalLevel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClockTuning:
    """Times in seconds. A notch is `notch` of the highest clock; the cap never goes below `lowest` of it.

    It goes down a notch when the share was below `short_share` for `short_for_s`, and up one when nothing was held
    back for `fits_for_s`.
    """

    notch: float = 0.1
    lowest: float = 0.5
    short_share: float = 0.6
    short_for_s: float = 10.0
    fits_for_s: float = 60.0


class ClockRule:
    """When the cap moves. Pure."""

    def __init__(self, tuning: ClockTuning = ClockTuning()) -> None:
        self._tuning = tuning
        self._since_s: float | None = None
        self._wish = 0
        self.part = 1.0
        """Of the highest clock; 1: no cap."""

    def step(self, decision: PolicyDecision, now_s: float) -> float:
        tuning = self._tuning
        is_short = decision.share < tuning.short_share and decision.level >= ThermalLevel.WARM and not decision.lost
        fits = decision.share >= 1.0 and decision.level is ThermalLevel.NORMAL
        wish = -1 if is_short and self.part > tuning.lowest else int(fits and self.part < 1.0)
        if wish != self._wish or not wish:
            self._wish, self._since_s = wish, now_s
            return self.part
        if self._since_s is not None and now_s - self._since_s >= (
            tuning.short_for_s if wish < 0 else tuning.fits_for_s
        ):
            moved = round(self.part + wish * tuning.notch, 6)
            self.part = min(1.0, max(tuning.lowest, moved))
            self._since_s = now_s
        return self.part


class ClockActuator(Protocol):
    """One GPU's, or all GPUs', upper clock limit. Raises OSError, PermissionError among it, in plain words."""

    def highest_hz(self) -> int | None:
        """Return the clock that may be reached without a cap; None: there is nothing to cap (yet)."""

    def cap(self, at_hz: int) -> int:
        """Keep the clock at or below `at_hz` as far as its steps allow; return what holds now."""

    def release(self) -> None:
        """Put back what was there before the first cap."""

    def memo(self) -> dict[str, int]:
        """Return what `restore` needs to do the same in another process."""

    def restore(self, memo: dict[str, int]) -> None:
        """Put back what an earlier process left behind."""


class ClockCap(Protocol):
    """What the loop needs. `cap_hz` is what holds now, None for no cap; `problem` why there can be none."""

    cap_hz: int | None
    problem: str

    def step(self, decision: PolicyDecision, now_s: float) -> None: ...

    def close(self) -> None: ...


class NoClockCap:
    """The operator grants none."""

    cap_hz: int | None = None
    problem = ""

    def step(self, decision: PolicyDecision, now_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class GrantedClockCap:
    """Applies the rule. The clock is let go by `close`, by an orderly end of the process, and, when that was killed,
    by the next one: `memory` is a file that outlives it, None for none."""

    def __init__(self, actuator: ClockActuator, memory: Path | None = None, rule: ClockRule | None = None) -> None:
        self.cap_hz: int | None = None
        self.problem = ""
        self._actuator = actuator
        self._memory = memory
        self._rule = rule or ClockRule()
        self._is_over = False
        self._restore_left_behind()
        atexit.register(self.close)

    def step(self, decision: PolicyDecision, now_s: float) -> None:
        if self._is_over:
            return
        before = self._rule.part
        part = self._rule.step(decision, now_s)
        if part == before:
            return
        try:
            self._apply(part)
        except OSError as error:
            # Asked once: what is not granted now will not be granted the next time.
            self._is_over = True
            self.problem = f"the clock cannot be capped: {error}"
            _log.warning("--grant-clock-cap: %s", self.problem)

    def close(self) -> None:
        """Let the clock go. May be called again."""
        atexit.unregister(self.close)
        self._is_over = True
        if self.cap_hz is None:
            return
        try:
            self._release()
        except OSError as error:
            _log.error("the GPU's clock is still capped at %d MHz: %s", self.cap_hz // 1_000_000, error)

    def _apply(self, part: float) -> None:
        if part >= 1.0:
            self._release()
            return
        highest_hz = self._actuator.highest_hz()
        if highest_hz is None:
            raise OSError("there is no GPU clock to cap on this box")
        if self.cap_hz is not None:
            self.cap_hz = self._actuator.cap(int(highest_hz * part))
            return
        # What an earlier run left behind, and could not be lifted, is what there is to go back to.
        is_first = self._memory is None or not self._memory.exists()
        try:
            if self._memory is not None and is_first:
                self._memory.write_text(json.dumps(self._actuator.memo()))
            self.cap_hz = self._actuator.cap(int(highest_hz * part))
        except OSError:
            if is_first:
                # There is no cap: the next process must not try to lift one, over what was set since.
                self._forget()
            raise

    def _release(self) -> None:
        self._actuator.release()
        self.cap_hz = None
        self._forget()

    def _forget(self) -> None:
        if self._memory is not None:
            self._memory.unlink(missing_ok=True)

    def _restore_left_behind(self) -> None:
        """Let go of what a process capped that did not come to its end."""
        if self._memory is None or not self._memory.exists():
            return
        try:
            memo = json.loads(self._memory.read_text())
            self._actuator.restore({str(key): int(value) for key, value in memo.items()})
            self._memory.unlink()
        except (OSError, ValueError, AttributeError, TypeError) as error:
            _log.warning("a clock cap that an earlier run left behind could not be lifted: %s", error)
        else:
            _log.info("lifted a clock cap that an earlier run had left behind")
