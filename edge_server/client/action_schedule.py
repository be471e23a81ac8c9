"""Schedule of a robot's next actions: the rows of the newest chunk, joined without a jump to those before it.

No threads, no clock: a tick is a call of the robot's loop. Row k of a chunk is for k ticks after its observation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Actions = npt.NDArray[np.float64]


class ActionSchedule:
    """Actions of the ticks from now on.

    A new chunk replaces the actions from the present tick on. Over `blend_steps` of them, it goes from the
    old actions to the new ones in equal parts. So the step between two actions is at most that of the old or the new
    ones, and 1 / (blend_steps + 1) of the distance between both. If the old actions have run out, the last one stands
    for them.
    """

    def __init__(self, blend_steps: int) -> None:
        if blend_steps < 0:
            raise ValueError(f"blend_steps: expected 0 or more, given {blend_steps}")
        self._blend_steps = blend_steps
        self._rows: Actions = np.empty((0, 0))
        self._first_tick = 0
        self._observed_tick = -1

    def clear(self) -> None:
        """Forget all actions, also the last one."""
        self._rows = np.empty((0, 0))
        self._observed_tick = -1

    def left(self, tick: int) -> int:
        """Return the number of actions from a tick on."""
        return max(0, self._first_tick + len(self._rows) - tick)

    def rest(self, tick: int) -> Actions:
        """Return the actions from a tick on, of shape (left, values of an action)."""
        return self._rows[max(0, tick - self._first_tick) :]

    def action(self, tick: int) -> Actions:
        """Return the action of a tick, or the last one if they have run out, of shape (values of an action,)."""
        action: Actions = self._rows[min(tick - self._first_tick, len(self._rows) - 1)]
        return action

    def add(self, chunk: npt.ArrayLike, observed_tick: int, tick: int) -> bool:
        """Take a chunk whose observation is from `observed_tick`, for the ticks from `tick` on. Return False for one
        that is of no use: no newer than the present one, or without a row for the present tick.

        Raises ValueError for a chunk that is not (steps, values), holds a value that is not finite, or has another
        number of values than the one before.
        """
        rows = np.asarray(chunk, np.float64)
        if rows.ndim != 2 or not rows.size:
            raise ValueError(f"expected a chunk of actions (steps, values), given shape {list(rows.shape)}")
        if not np.isfinite(rows).all():
            raise ValueError("the chunk has an action that is not finite")
        if len(self._rows) and rows.shape[1] != self._rows.shape[1]:
            raise ValueError(f"expected {self._rows.shape[1]} values in an action, given {rows.shape[1]}")
        if observed_tick <= self._observed_tick or tick - observed_tick >= len(rows):
            return False
        new = rows[tick - observed_tick :].copy()
        if len(self._rows):
            count = min(self._blend_steps, len(new))
            at = np.minimum(np.arange(count) + tick - self._first_tick, len(self._rows) - 1)
            weight = (np.arange(count) + 1.0)[:, None] / (self._blend_steps + 1)
            new[:count] = (1 - weight) * self._rows[at] + weight * new[:count]
        self._rows, self._first_tick, self._observed_tick = new, tick, observed_tick
        return True
