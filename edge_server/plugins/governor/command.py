"""`edge-server governor`: simulate strategies that limit heat, and replay recorded temperatures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edge_server.cli.console import Progress, render
from edge_server.cli.options import CommandParser, add_alias
from edge_server.core.priority import PriorityClass
from edge_server.plugins.governor.control_policy import PolicyConstants
from edge_server.plugins.governor.simulation.plots import draw_replay, draw_simulation
from edge_server.plugins.governor.simulation.replay import COLUMNS, StatePeriod, read_recording, replay_policy
from edge_server.plugins.governor.simulation.simulator import SCENARIOS, Scenario, SimulationResult, Strategy, simulate
from edge_server.plugins.governor.simulation.thermal_model import ThermalModelConstants

COLUMN_TITLES = ("WAY", "HOTTEST C", "THROTTLED", "CONTROL", "NORMAL", "BULK", "LATE", "SWITCHES", "J EACH")
REPLAY_COLUMN_TITLES = ("FROM", "TO", "STATE", "LEAST SHARE", "HOTTEST C", "WHY")
_MAX_SECONDS = 86_400.0


def run(arguments: Sequence[str]) -> int:
    """Simulate or replay, print a table, and write the chart of --svg. Return 0, or 2 for invalid options."""
    parser = CommandParser(
        prog="edge-server governor",
        description="Test the governor's control policy on a simulated board, or on recorded temperatures.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    simulated = _add_simulate(actions)
    replayed = _add_replay(actions)
    options = parser.parse_args(arguments)
    if options.action == "simulate":
        return _simulate(simulated, options)
    return _replay(replayed, options)


def _add_simulate(actions: Any) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        "simulate",
        allow_abbrev=False,
        help="run scenarios and compare strategies against heat",
        description="The table shows for each strategy: the highest chip temperature after the first two minutes, the "
        "fraction of time in which the kernel throttled, the fraction of requests of each class answered before their "
        "deadline, late answers, switches between model variants, and joules per answer in time.",
    )
    action.add_argument("--scenario", choices=[*SCENARIOS, "all"], default="ambient-45", help="default: %(default)s")
    action.add_argument("--seconds", type=float, metavar="SECONDS", help="simulated time; default: one hour")
    svg = action.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves of the scenario")
    add_alias(action, "--picture", svg)
    action.add_argument("--seed", type=int, default=1, metavar="N", help="seed of noise and arrivals")
    action.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"a constant of the board: {_constant_names()}"
    )
    action.add_argument("--json", action="store_true", help="print the results as JSON")
    return action


def _add_replay(actions: Any) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        "replay",
        allow_abbrev=False,
        help="run the control policy on recorded temperatures",
        description=f"TRACE is a CSV file with a first line of {', '.join(COLUMNS)}; the last two may be absent, and "
        "an empty cell is a failed reading. Open loop: the policy's decisions do not change the recorded temperatures.",
    )
    action.add_argument("trace", type=Path, metavar="TRACE.csv")
    action.add_argument(
        "--trip-c", type=float, metavar="C", help="throttling temperature of the board, if not in the trace"
    )
    action.add_argument("--temperature-limit", type=float, default=0.0, metavar="C", help="as of `edge-server serve`")
    action.add_argument("--power-budget-watts", type=float, default=0.0, metavar="W", help="as of `edge-server serve`")
    svg = action.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves")
    add_alias(action, "--picture", svg)
    action.add_argument("--json", action="store_true", help="print the states as JSON")
    return action


def _simulate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
    if options.svg is not None and len(names) > 1:
        parser.error("--svg draws one scenario; name it")
    if options.seconds is not None and not 240.0 <= options.seconds <= _MAX_SECONDS:
        parser.error(f"--seconds must lie between 240 and {_MAX_SECONDS:g}, given {options.seconds:g}")
    constants = _constants(parser, options.set)
    results: list[dict[str, object]] = []
    progress = Progress(sys.stderr)
    for index, name in enumerate(names):

        def show(share: float, text: str, index: int = index) -> None:
            progress.show((index + share) / len(names), text)

        outcomes = _compare(SCENARIOS[name], options.seconds, constants, options.seed, show)
        progress.close()
        results += [_result_as_json(item) for item in outcomes]
        if not options.json:
            print(_table(name, outcomes), flush=True)
        if options.svg is not None:
            _write_file(parser, options.svg, draw_simulation(outcomes, constants.trip_c))
    if options.json:
        print(json.dumps(results))
    return 0


def _replay(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    for name in ("trip_c", "temperature_limit", "power_budget_watts"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < 1e5:
            parser.error(f"--{name.replace('_', '-')}: expected a number of 0 or more, given {value:g}")
    try:
        with options.trace.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            samples = read_recording(lines, options.trace.name)
    except OSError as error:
        parser.error(f"{options.trace}: {error.strerror}")
    tuning = PolicyConstants(temperature_limit_c=options.temperature_limit, power_limit_w=options.power_budget_watts)
    if options.trip_c:
        tuning = tuning._replace(default_trip_c=options.trip_c)
    replayed = replay_policy(samples, tuning)
    if options.svg is not None:
        _write_file(parser, options.svg, draw_replay(options.trace.name, replayed))
    if options.json:
        print(json.dumps([_period_as_json(item) for item in replayed.periods]))
        return 0
    print(render(REPLAY_COLUMN_TITLES, [_period_row(item) for item in replayed.periods], sys.stdout))
    return 0


def _write_file(parser: argparse.ArgumentParser, path: Path, chart: str) -> None:
    try:
        path.write_text(chart, encoding="utf-8")
    except OSError as error:
        parser.error(f"--svg {path}: {error.strerror}")


def _period_as_json(item: StatePeriod) -> dict[str, object]:
    return {
        "from_s": item.from_s,
        "to_s": item.to_s,
        "state": item.level.name,
        "least_share": round(item.least_share, 3),
        "hottest_c": item.hottest_c,
        "detail": item.detail,
    }


def _period_row(item: StatePeriod) -> tuple[str, ...]:
    hottest = "-" if item.hottest_c is None else f"{item.hottest_c:.1f}"
    return (f"{item.from_s:.1f}", f"{item.to_s:.1f}", item.level.name, f"{item.least_share:.0%}", hottest, item.detail)


def _constant_names() -> str:
    return ", ".join(f"{item.name} ({item.default:g})" for item in dataclasses.fields(ThermalModelConstants))


def _constants(parser: argparse.ArgumentParser, pairs: Sequence[str]) -> ThermalModelConstants:
    whole = {item.name for item in dataclasses.fields(ThermalModelConstants) if isinstance(item.default, int)}
    names = [item.name for item in dataclasses.fields(ThermalModelConstants)]
    given: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in names:
            parser.error(f"--set: there is no constant '{name}'; there are {', '.join(names)}")
        try:
            given[name] = int(text) if name in whole else float(text)
        except ValueError:
            parser.error(f"--set {name}: expected a number, given '{text}'")
    try:
        return dataclasses.replace(ThermalModelConstants(), **given)
    except ValueError as error:
        parser.error(f"--set: {error}")


def _compare(
    scenario: Scenario,
    seconds: float | None,
    constants: ThermalModelConstants,
    seed: int,
    show: Callable[[float, str], None],
) -> list[SimulationResult]:
    """Simulate the scenario with each strategy. Calls `show` with the finished fraction and a description."""
    if seconds is not None:
        scenario = scenario._replace(duration_s=seconds)
    outcomes = []
    for done, strategy in enumerate(Strategy):

        def report(share: float, done: int = done, strategy: Strategy = strategy) -> None:
            show((done + share) / len(Strategy), f"{scenario.name}: {strategy.value}")

        outcomes.append(simulate(scenario, strategy, constants=constants, seed=seed, on_progress=report))
    return outcomes


def _result_as_json(outcome: SimulationResult) -> dict[str, object]:
    return {
        "scenario": outcome.scenario,
        "strategy": outcome.strategy.name.lower(),
        "hottest_c": round(outcome.hottest_c, 2),
        "throttled_part": round(outcome.throttled_part, 4),
        "on_time_part": {item.name.lower(): round(outcome.on_time_part(item), 4) for item in PriorityClass},
        "late": outcome.late,
        "variant_switches": outcome.switches,
        "joules_per_answer": round(_joules_each(outcome), 3),
    }


def _joules_each(outcome: SimulationResult) -> float:
    return outcome.energy_j / max(1, sum(outcome.on_time.values()))


def _table(name: str, outcomes: Sequence[SimulationResult]) -> str:
    rows = [
        (
            outcome.strategy.value,
            f"{outcome.hottest_c:.1f}",
            f"{outcome.throttled_part:.0%}",
            *(f"{outcome.on_time_part(item):.1%}" for item in PriorityClass),
            str(outcome.late),
            str(outcome.switches),
            f"{_joules_each(outcome):.2f}",
        )
        for outcome in outcomes
    ]
    return f"scenario {name}, set-point {outcomes[0].set_point_c:g} °C\n{render(COLUMN_TITLES, rows, sys.stdout)}"
