"""Charts of simulations and replays, each as one self-contained SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_server.cli.svg_charts import (
    ChartColumn,
    ChartPanel,
    ChartRow,
    draw_sheet,
    mean,
    reduce_points,
)
from edge_server.core.priority import PriorityClass
from edge_server.plugins.governor.control_policy import ThermalLevel
from edge_server.plugins.governor.simulation.replay import PolicyReplay
from edge_server.plugins.governor.simulation.simulator import SimulationResult

_CLASSES = {PriorityClass.CONTROL: "#1d4e89", PriorityClass.NORMAL: "#4fa3c7", PriorityClass.BULK: "#bcd9e8"}
_LEVELS = {
    ThermalLevel.NORMAL: "#d7ead9",
    ThermalLevel.WARM: "#fbe7a1",
    ThermalLevel.HOT: "#f4b266",
    ThermalLevel.THROTTLED: "#d9534f",
    ThermalLevel.CRITICAL: "#7b1e3a",
}
_CHIP, _AMBIENT, _LIMIT, _SET_POINT, _CLOCK = "#2b2d33", "#5b8def", "#c0392b", "#2e8b57", "#c0392b"
_THROTTLED = "#e57373"
_REPLAY_WIDTH = 720.0


def draw_simulation(outcomes: Sequence[SimulationResult], trip_c: float) -> str:
    """Return the SVG of the results of one scenario, side by side. The kernel throttles at `trip_c`."""
    low_c = min(min(outcome.trace.ambient_c) for outcome in outcomes)
    high_c = max(trip_c, max(max(outcome.trace.chip_c) for outcome in outcomes))
    most_w = max(max(outcome.trace.power_w) for outcome in outcomes)
    most = max(sum(outcome.offered.values()) / outcome.seconds for outcome in outcomes)

    def column(outcome: SimulationResult) -> ChartColumn:
        rows = (
            ChartRow("chip, °C", _below(low_c), high_c + 8, lambda panel: _temperature(outcome, trip_c, panel)),
            ChartRow("power, W", 0, most_w * 1.08, lambda panel: _power(outcome, panel)),
            ChartRow("share of full work allowed, and clock", 0, 1.05, lambda panel: _share(outcome, panel)),
            ChartRow("responses in time, per second", 0, most * 1.12, lambda panel: _responses(outcome, panel)),
        )
        served = ", ".join(f"{item.name.lower()} {outcome.on_time_part(item):.1%}" for item in PriorityClass)
        facts = (
            f"hottest {outcome.hottest_c:.1f} °C, throttled {outcome.throttled_part:.0%} of the time",
            f"in time: {served}",
        )
        return ChartColumn(outcome.strategy.value, facts, rows, outcome.seconds)

    keys = [(f"{item.name.lower()}", color) for item, color in _CLASSES.items()]
    return draw_sheet(
        f"Simulated box, scenario {outcomes[0].scenario}",
        [column(outcome) for outcome in outcomes],
        [*keys, ("clocks lowered by the kernel", _THROTTLED), ("ambient", _AMBIENT)],
    )


def draw_replay(name: str, replayed: PolicyReplay) -> str:
    """Return the SVG of a replay: the recording and the decisions of the policy."""
    seen_c = [item for item in (*replayed.temperature_c, *replayed.set_point_c) if item is not None] or [0.0, 100.0]
    watts = [item for item in replayed.power_w if item is not None]

    def temperature(panel: ChartPanel) -> str:
        set_points = panel.line(replayed.time_s, replayed.set_point_c, _SET_POINT, "5 3")
        last_c = next((item for item in reversed(replayed.set_point_c) if item is not None), None)
        note = "" if last_c is None else panel.note(last_c, "set-point", _SET_POINT, is_below=True)
        return panel.line(replayed.time_s, replayed.temperature_c, _CHIP) + set_points + note

    def share(panel: ChartPanel) -> str:
        return panel.line(replayed.time_s, replayed.share, _CHIP)

    def states(panel: ChartPanel) -> str:
        parts = (panel.fill_period(item.from_s, item.to_s, _LEVELS[item.level]) for item in replayed.periods)
        return "".join(parts)

    rows = [
        ChartRow("recorded temperature, °C", _below(min(seen_c)), max(seen_c) + 8, temperature),
        ChartRow("share that the policy would allow", 0, 1.05, share),
        ChartRow("state", 0, 1, states, shows_numbers=False),
    ]
    if watts:
        row = ChartRow(
            "recorded power, W", 0, max(watts) * 1.08 or 1.0,
            lambda panel: panel.line(replayed.time_s, replayed.power_w, _CHIP),
        )  # fmt: skip
        rows.insert(1, row)
    facts = (f"{len(replayed.time_s)} readings", f"least share {min(replayed.share):.0%}")
    column = ChartColumn("replayed, open loop", facts, rows, replayed.time_s[-1] or 1.0, _REPLAY_WIDTH)
    return draw_sheet(f"Replay of {name}", [column], [(level.name, color) for level, color in _LEVELS.items()])


def _below(lowest: float) -> float:
    return 10 * ((lowest - 2) // 10)


def _temperature(outcome: SimulationResult, trip_c: float, panel: ChartPanel) -> str:
    trace = outcome.trace
    slowed = "".join(panel.fill_period(start, end, _THROTTLED, 0.28) for start, end in _throttled_periods(outcome))
    limits = panel.level(trip_c, f"trip {trip_c:g}", _LIMIT)
    limits += panel.level(outcome.set_point_c, f"set-point {outcome.set_point_c:g}", _SET_POINT, is_below=True)
    ambient = panel.line(*reduce_points(trace.time_s, trace.ambient_c, mean), _AMBIENT)
    return slowed + limits + ambient + panel.line(*reduce_points(trace.time_s, trace.chip_c, max), _CHIP)


def _throttled_periods(outcome: SimulationResult) -> Iterator[tuple[float, float]]:
    """Yield start and end of each period in which the kernel throttled. Gaps too short to see are ignored."""
    start_s = end_s = None
    shortest_s = outcome.seconds / 300
    for at_s, clock in zip(outcome.trace.time_s, outcome.trace.clock, strict=True):
        if clock >= 1.0:
            continue
        if start_s is not None and end_s is not None and at_s - end_s > shortest_s:
            yield start_s, end_s
            start_s = None
        start_s = at_s if start_s is None else start_s
        end_s = at_s
    if start_s is not None and end_s is not None:
        yield start_s, end_s


def _power(outcome: SimulationResult, panel: ChartPanel) -> str:
    return panel.line(*reduce_points(outcome.trace.time_s, outcome.trace.power_w, mean), _CHIP)


def _share(outcome: SimulationResult, panel: ChartPanel) -> str:
    trace = outcome.trace
    times, clocks = reduce_points(trace.time_s, trace.clock, mean)
    drawn = panel.line(*reduce_points(trace.time_s, trace.share, mean), _CHIP)
    if min(clocks) < 1.0:
        drawn += panel.line(times, clocks, _CLOCK, "3 2") + panel.note(0.05, "clock", _CLOCK, at_start=True)
    return drawn


def _responses(outcome: SimulationResult, panel: ChartPanel) -> str:
    """Draw the responses of the classes as a stack, control at the bottom, and a line of all requests."""
    trace = outcome.trace
    period_s = trace.time_s[1] - trace.time_s[0]
    parts = []
    below: list[float] = []
    for priority in PriorityClass:
        times, values = reduce_points(trace.time_s, [count / period_s for count in trace.on_time[priority]], mean)
        below = below or [0.0] * len(values)
        above = [low + value for low, value in zip(below, values, strict=True)]
        parts.append(panel.band(times, below, above, _CLASSES[priority]))
        below = above
    requested = sum(outcome.offered.values()) / outcome.seconds
    return "".join(parts) + panel.level(requested, "requested", "#6b7280")
