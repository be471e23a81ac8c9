"""Declarations of the governor's settings: limits of temperature and power, the interval of control, and others."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.config.setting import BOOLEAN, PATH, integer, number, setting


@dataclass(frozen=True, slots=True)
class GovernorConfig:
    """Governor, which keeps the machine within its heat and power limits."""

    is_enabled: bool = setting(
        True,
        "--governor",
        BOOLEAN,
        "Keep the box within its heat and power limits: shed the least important requests before it throttles.",
    )
    power_budget_watts: float = setting(
        0.0,
        "--power-budget-watts",
        number(0, 100_000),
        "Watts that the box may draw on average; 0: the limit that the box itself enforces, if it reports one.",
    )
    temperature_limit_c: float = setting(
        0.0,
        "--temperature-limit",
        number(0, 150),
        "Temperature limit in degrees Celsius; 0: 4 degrees below the point at which the box throttles itself.",
    )
    control_floor_percent: float = setting(
        20.0,
        "--control-floor-percent",
        number(0, 100),
        "Per cent of full throughput that requests of class control keep in every state; 0: none. Robots that need "
        "more keep what they need, up to 80.",
    )
    interval_ms: int = setting(
        500, "--governor-interval-ms", integer(50, 2_000), "Milliseconds between two readings of the sensors."
    )
    load_wait_s: float = setting(
        60.0,
        "--governor-load-wait-secs",
        number(0, 86_400),
        "Most seconds that the load of a model waits for a hot box to cool.",
    )
    sysfs_root: str = setting(
        "/",
        "--sysfs-root",
        PATH,
        "Folder that contains /sys, /proc and /etc for reading sensors; other than / for tests and recorded boxes.",
    )
    grants_clock_cap: bool = setting(
        False,
        "--grant-clock-cap",
        BOOLEAN,
        "Let the governor lower the GPU's highest clock, which needs write permission. It is restored at the end.",
    )
