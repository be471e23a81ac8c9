"""The rows of the table of settings that say how much may run: the governor's and the rate limiter's."""

from __future__ import annotations

from edge_server.config.kinds import BOOLEAN, PATH, RATE_RESOURCE, choice, integer, number
from edge_server.config.setting import Setting

ENVELOPE = (
    Setting(
        "governor.is_enabled",
        "--governor",
        BOOLEAN,
        "Stay inside the heat and power that the box bears: shed the least important work before it throttles.",
    ),
    Setting(
        "governor.power_budget_watts",
        "--power-budget-watts",
        number(0, 100_000),
        "Watts that the box may draw on average; 0: what it enforces by itself, if it tells.",
    ),
    Setting(
        "governor.temperature_limit_c",
        "--temperature-limit",
        number(0, 150),
        "Degrees Celsius to stay at; 0: 4 below the point at which the box would slow itself down.",
    ),
    Setting(
        "governor.control_floor_percent",
        "--control-floor-percent",
        number(0, 100),
        "Part of full work that requests of class control keep in every state.",
    ),
    Setting(
        "governor.interval_ms",
        "--governor-interval-ms",
        integer(50, 2_000),
        "Milliseconds between two looks at the sensors.",
    ),
    Setting(
        "governor.load_wait_s",
        "--governor-load-wait-secs",
        number(0, 86_400),
        "Seconds that the load of a model waits at most for a hot box to cool.",
    ),
    Setting(
        "governor.sysfs_root",
        "--sysfs-root",
        PATH,
        "Folder under which /sys, /proc and /etc are looked for when sensors are read.",
    ),
    Setting(
        "governor.grants_clock_cap",
        "--grant-clock-cap",
        BOOLEAN,
        "Let the governor lower the GPU's highest clock, which needs the right to write it. It is put back at the end.",
    ),
    Setting(
        "rate_limit.mode",
        "--rate-limit",
        choice("off", "execution_count"),
        "execution_count: an instance runs only while the resources of its group's rate_limiter are free.",
    ),
    Setting(
        "rate_limit.resources",
        "--rate-limit-resource",
        RATE_RESOURCE,
        "How many of a resource there are, on one device or on each; repeatable. "
        "Without it: as many as the most demanding instance needs.",
        separator=";",
    ),
)
