"""Simulated arm with two joints in a plane, its target that moves on an eight, a controller, and a loop in real time.

Lengths are in metres, angles in radians, times in seconds. A command is two joint angles; each joint follows it as a
critically damped servo, so it lags by LAG_S.
"""

from __future__ import annotations

import math
import threading
import time

import numpy as np

DT_S = 0.02
"""Time between two commands."""

UPPER_M, LOWER_M = 0.4, 0.35
PERIOD_S = 4.0
STIFFNESS, DAMPING = 400.0, 40.0
LAG_S = DAMPING / STIFFNESS
SUBSTEPS = 4
SETTLED_TICKS = 100


def target(time_s):
    """Return the target's position at each time, (..., 2)."""
    angle = 2 * np.pi * np.asarray(time_s, np.float64) / PERIOD_S
    return np.stack([0.45 + 0.12 * np.sin(angle), 0.1 + 0.1 * np.sin(2 * angle)], -1)


def joint_angles(tip):
    """Return the angles that bring the tip to a position within reach, (..., 2): elbow below."""
    x, y = tip[..., 0], tip[..., 1]
    cosine = (x**2 + y**2 - UPPER_M**2 - LOWER_M**2) / (2 * UPPER_M * LOWER_M)
    elbow = np.arccos(np.clip(cosine, -1, 1))
    shoulder = np.arctan2(y, x) - np.arctan2(LOWER_M * np.sin(elbow), UPPER_M + LOWER_M * np.cos(elbow))
    return np.stack([shoulder, elbow], -1)


def positions(angles):
    """Return the positions of the elbow and the tip for joint angles (..., 2)."""
    shoulder, both = angles[..., 0], angles[..., 0] + angles[..., 1]
    elbow = UPPER_M * np.stack([np.cos(shoulder), np.sin(shoulder)], -1)
    return elbow, elbow + LOWER_M * np.stack([np.cos(both), np.sin(both)], -1)


def observation(time_s, angles, speeds):
    """Return joint angles and speeds, position and speed of the target: (..., 8)."""
    place = target(time_s)
    speed = (target(np.asarray(time_s) + 1e-3) - place) / 1e-3
    return np.concatenate([angles, speeds, place, speed], -1)


def controller(time_s, angles, steps):
    """Return the commands of the known controller for the next ticks, (..., steps, 2): the target's path as angles,
    ahead by the lag of the joints, and a half of the present error, which fades."""
    ahead_s = np.arange(steps) * DT_S
    path = joint_angles(target(np.asarray(time_s)[..., None] + ahead_s + LAG_S))
    error = (joint_angles(target(time_s)) - angles)[..., None, :]
    return path + 0.5 * error * np.exp(-ahead_s / 0.2)[:, None]


class Arm:
    """The arm at one time, and how it did so far. Starts at rest with its tip on the target. Small pushes disturb it.

    `dry_ticks`: ticks without a new command, in which the arm kept the last one. The errors are distances of the tip
    from the target; those of the first two seconds do not count.
    """

    def __init__(self, seed=0):
        self.time_s = 0.0
        self.angles = joint_angles(target(0.0))
        self.speeds = np.zeros(2)
        self.ticks = self.dry_ticks = 0
        self.largest_error_mm = 0.0
        self._square_sum_m = 0.0
        self._random = np.random.default_rng(seed)

    def observe(self):
        """Return the observation for a policy, (8,)."""
        return observation(self.time_s, self.angles, self.speeds).astype(np.float32)

    def follow(self, command):
        """Move for one tick toward the commanded angles, (2,)."""
        push = self._random.normal(scale=4.0, size=2)  # radians per second squared
        for _ in range(SUBSTEPS):
            acceleration = STIFFNESS * (command - self.angles) - DAMPING * self.speeds + push
            self.speeds = self.speeds + acceleration * DT_S / SUBSTEPS
            self.angles = self.angles + self.speeds * DT_S / SUBSTEPS
        self.time_s += DT_S
        self.ticks += 1
        if self.ticks > SETTLED_TICKS:
            self._square_sum_m += self.error_m() ** 2
            self.largest_error_mm = max(self.largest_error_mm, 1000 * self.error_m())

    def error_m(self):
        """Return the distance from the tip to the target."""
        return float(np.linalg.norm(positions(self.angles)[1] - target(self.time_s)))

    def mean_error_mm(self):
        """Return the root of the mean square of the distances so far."""
        return 1000 * math.sqrt(self._square_sum_m / max(1, self.ticks - SETTLED_TICKS))


def run_loop(arm, step, seconds, is_over=None):
    """Move the arm by the commands of `step(observation)` for some seconds, or until the event `is_over`. Return it."""
    is_over = is_over or threading.Event()
    command = arm.angles
    step({"observation/state": arm.observe()})  # the first answer comes before the clock runs
    began_s = time.monotonic()
    while arm.ticks * DT_S < seconds and not is_over.wait(max(0.0, began_s + arm.ticks * DT_S - time.monotonic())):
        wanted = step({"observation/state": arm.observe()})
        missed = int((time.monotonic() - began_s) / DT_S) - arm.ticks
        for _ in range(missed):
            arm.follow(command)
            arm.dry_ticks += 1
        command = wanted
        arm.follow(command)
    return arm
