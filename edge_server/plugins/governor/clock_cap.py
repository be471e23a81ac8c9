"""Rule for an upper limit on the GPU's clock: lowers the limit in steps, as the last measure against heat, if the
operator permits it.

A lower clock does the same work with less power, because the voltage falls too. But it slows down all classes,
including control. So it is the last measure, and is removed slowly.
"""

from __future__ import annotations

import atexit
import json
import logging
from pathlib import Path
from typing import Protocol

from edge_server.plugins.governor.control_policy import PolicyDecision, ThermalLevel

_log = logging.getLogger(__name__)


_STEP, _LOWEST = 0.1, 0.5
"""Change of the cap, and the lowest cap, as parts of the highest clock."""
_SHORT_SHARE, _SHORT_S = 0.6, 10.0
"""The cap goes down one step after the share was below this for so many seconds."""
_FITS_S = 60.0
"""The cap goes up one step after so many seconds without any limit on the work."""


class ClockRule:
    """Decides when the cap changes. No clock, no I/O."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._direction = 0
        self.part = 1.0
        """The cap as a part of the highest clock; 1: no cap."""

    def step(self, decision: PolicyDecision, now_s: float) -> float:
        """Return the cap from now on, as a part of the highest clock."""
        is_short = decision.share < _SHORT_SHARE and decision.level >= ThermalLevel.WARM and not decision.lost
        fits = decision.share >= 1.0 and decision.level is ThermalLevel.NORMAL
        direction = -1 if is_short and self.part > _LOWEST else int(fits and self.part < 1.0)
        if direction != self._direction or not direction:
            self._direction, self._since_s = direction, now_s
            return self.part
        if self._since_s is not None and now_s - self._since_s >= (_SHORT_S if direction < 0 else _FITS_S):
            self.part = min(1.0, max(_LOWEST, round(self.part + direction * _STEP, 6)))
            self._since_s = now_s
        return self.part


class ClockActuator(Protocol):
    """Upper clock limit of one GPU or of all GPUs. Methods raise OSError, also PermissionError, with a clear text."""

    def highest_hz(self) -> int | None:
        """Return the highest clock without a cap; None: there is no clock to cap (yet)."""

    def cap(self, at_hz: int) -> int:
        """Limit the clock to `at_hz` or the next step below. Return the limit in effect."""

    def release(self) -> None:
        """Restore the limit from before the first cap."""

    def memo(self) -> dict[str, int]:
        """Return the values that `restore` needs in another process."""

    def restore(self, memo: dict[str, int]) -> None:
        """Restore the limit from before the cap of an earlier process."""


class ClockCap:
    """Applies the rule. `cap_hz` is the cap in effect, None: no cap. `problem` says why the clock cannot be capped.

    The clock limit is restored by `close`, at an orderly exit of the process, or, after a crash, by the next process.
    For this, `state_file` outlives the process; None: no such file.
    """

    def __init__(self, actuator: ClockActuator, state_file: Path | None = None) -> None:
        self.cap_hz: int | None = None
        self.problem = ""
        self._actuator = actuator
        self._state_file = state_file
        self._rule = ClockRule()
        self._is_closed = False
        if state_file is not None and state_file.exists():
            try:
                memo = json.loads(state_file.read_text())
                actuator.restore({str(key): int(value) for key, value in memo.items()})
                state_file.unlink()
            except (OSError, ValueError, AttributeError, TypeError) as error:
                _log.warning("the clock cap of an earlier run could not be removed: %s", error)
            else:
                _log.info("removed the clock cap of an earlier run")
        atexit.register(self.close)

    def step(self, decision: PolicyDecision, now_s: float) -> None:
        """Apply the rule to a decision."""
        if self._is_closed:
            return
        before = self._rule.part
        part = self._rule.step(decision, now_s)
        if part == before:
            return
        try:
            self._apply(part)
        except OSError as error:
            # Tried only once: a missing permission will also be missing the next time.
            self._is_closed = True
            self.problem = f"the clock cannot be capped: {error}"
            _log.warning("--grant-clock-cap: %s", self.problem)

    def close(self) -> None:
        """Restore the clock limit. May be called again."""
        atexit.unregister(self.close)
        self._is_closed = True
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
        # A file that still exists holds the original limit: an earlier cap could not be removed.
        is_first = self._state_file is None or not self._state_file.exists()
        try:
            if self._state_file is not None and is_first:
                self._state_file.write_text(json.dumps(self._actuator.memo()))
            self.cap_hz = self._actuator.cap(int(highest_hz * part))
        except OSError:
            if is_first:
                # There is no cap, so the next process must not restore a limit: it may overwrite a newer one.
                self._delete_state_file()
            raise

    def _release(self) -> None:
        self._actuator.release()
        self.cap_hz = None
        self._delete_state_file()

    def _delete_state_file(self) -> None:
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)
