"""Not rclpy: see the README beside."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class HistoryPolicy(enum.IntEnum):
    KEEP_LAST = 1
    KEEP_ALL = 2


class ReliabilityPolicy(enum.IntEnum):
    RELIABLE = 1
    BEST_EFFORT = 2


class DurabilityPolicy(enum.IntEnum):
    TRANSIENT_LOCAL = 1
    VOLATILE = 2


@dataclass(kw_only=True)
class QoSProfile:
    history: HistoryPolicy
    depth: int
    reliability: ReliabilityPolicy
    durability: DurabilityPolicy
