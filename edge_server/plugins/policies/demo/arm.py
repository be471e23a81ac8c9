"""Arm with two joints in a plane, its target that moves on an eight, and the controller that a policy imitates.

Lengths are in metres, angles in radians, times in seconds. A command is two joint angles; each joint follows it as a
critically damped servo, so it lags by LAG_S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.float64]"

DT_S = 0.02
"""Time between two commands."""

UPPER_M, LOWER_M = 0.4, 0.35
PERIOD_S = 4.0
_STIFFNESS, _DAMPING = 400.0, 40.0
LAG_S = _DAMPING / _STIFFNESS
_SUBSTEPS = 4
_CORRECTION = 0.5
_CORRECTION_S = 0.2


def target(time_s: npt.ArrayLike) -> Array:
    """Return the target's position at each time, (..., 2)."""
    angle = 2 * np.pi * np.asarray(time_s, np.float64) / PERIOD_S
    return np.stack([0.45 + 0.12 * np.sin(angle), 0.1 + 0.1 * np.sin(2 * angle)], -1)


def joint_angles(tip: Array) -> Array:
    """Return the angles that bring the tip to a position within reach, (..., 2): elbow below."""
    x, y = tip[..., 0], tip[..., 1]
    cosine = (x**2 + y**2 - UPPER_M**2 - LOWER_M**2) / (2 * UPPER_M * LOWER_M)
    elbow = np.arccos(np.clip(cosine, -1, 1))
    shoulder = np.arctan2(y, x) - np.arctan2(LOWER_M * np.sin(elbow), UPPER_M + LOWER_M * np.cos(elbow))
    return np.stack([shoulder, elbow], -1)


def positions(angles: Array) -> tuple[Array, Array]:
    """Return the positions of the elbow and the tip for joint angles (..., 2)."""
    shoulder, both = angles[..., 0], angles[..., 0] + angles[..., 1]
    elbow = UPPER_M * np.stack([np.cos(shoulder), np.sin(shoulder)], -1)
    return elbow, elbow + LOWER_M * np.stack([np.cos(both), np.sin(both)], -1)


class Arm:
    """The arm at one time. Starts at rest with its tip on the target. Small pushes disturb it."""

    def __init__(self, seed: int = 0, push: float = 4.0) -> None:
        """`push`: standard deviation of the disturbing acceleration, in radians per second squared."""
        self.time_s = 0.0
        self.angles = joint_angles(target(0.0))
        self.speeds = np.zeros(2)
        self._random = np.random.default_rng(seed)
        self._push = push

    def observe(self) -> Array:
        """Return the observation for a policy: joint angles and speeds, position and speed of the target; (8,)."""
        return observation(self.time_s, self.angles, self.speeds)

    def follow(self, command: Array) -> None:
        """Move for one tick toward the commanded angles, (2,)."""
        push = self._random.normal(scale=self._push, size=2)
        for _ in range(_SUBSTEPS):
            acceleration = _STIFFNESS * (command - self.angles) - _DAMPING * self.speeds + push
            self.speeds = self.speeds + acceleration * DT_S / _SUBSTEPS
            self.angles = self.angles + self.speeds * DT_S / _SUBSTEPS
        self.time_s += DT_S

    def error_m(self) -> float:
        """Return the distance from the tip to the target."""
        return float(np.linalg.norm(positions(self.angles)[1] - target(self.time_s)))


def observation(time_s: npt.ArrayLike, angles: Array, speeds: Array) -> Array:
    """Return the observations for times, angles and speeds, (..., 8)."""
    place = target(time_s)
    speed = (target(np.asarray(time_s) + 1e-3) - place) / 1e-3
    return np.concatenate([angles, speeds, place, speed], -1)


def controller(time_s: npt.ArrayLike, angles: Array, steps: int) -> Array:
    """Return the commands of the known controller for the next ticks, (..., steps, 2): the target's path as angles,
    ahead by the lag of the joints, and a part of the present error, which fades."""
    times = np.asarray(time_s)[..., None] + np.arange(steps) * DT_S
    path = joint_angles(target(times + LAG_S))
    error = (joint_angles(target(time_s)) - angles)[..., None, :]
    fading = np.exp(-np.arange(steps) * DT_S / _CORRECTION_S)[:, None]
    commands: Array = path + _CORRECTION * error * fading
    return commands
