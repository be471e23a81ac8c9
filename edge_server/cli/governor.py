"""`edge-server governor simulate`: how ways to deal with heat compare, on a box made of numbers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_server.cli.table import render
from edge_server.governor.picture import draw
from edge_server.governor.plant import PlantConstants
from edge_server.governor.rates import PriorityClass
from edge_server.governor.simulate import SCENARIOS, Outcome, Scenario, Strategy, simulate

HEADS = ("WAY", "HOTTEST C", "THROTTLED", "CONTROL", "NORMAL", "BULK", "LATE", "SWITCHES", "J EACH")
_MAX_SECONDS = 86_400.0


def run(arguments: Sequence[str]) -> int:
    """Simulate, print a table and write the picture if asked to. 0 when done, 2 for options that make no sense."""
    parser = argparse.ArgumentParser(
        prog="edge-server governor",
        description="Try the governor's law on a simulated box. The table tells, for each way to deal with heat, the "
        "hottest chip after the first two minutes, the part of the time in which the kernel throttled, and which part "
        "of the requests of each class was answered before its deadline.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    action = actions.add_parser("simulate", allow_abbrev=False, help="run scenarios and compare")
    action.add_argument("--scenario", choices=[*SCENARIOS, "all"], default="ambient-45", help="default: %(default)s")
    action.add_argument("--seconds", type=float, metavar="S", help="simulated time, default one hour")
    action.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the curves of the scenario")
    action.add_argument("--seed", type=int, default=1, metavar="N", help="of noise and arrivals")
    action.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"a constant of the box: {_constant_names()}"
    )
    action.add_argument("--json", action="store_true", help="print the sums as JSON")
    options = parser.parse_args(arguments)
    names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
    if options.picture is not None and len(names) > 1:
        parser.error("--picture draws one scenario; name it")
    if options.seconds is not None and not 240.0 <= options.seconds <= _MAX_SECONDS:
        parser.error(f"--seconds must lie between 240 and {_MAX_SECONDS:g}, given {options.seconds:g}")
    constants = _constants(parser, options.set)
    for name in names:
        outcomes = _compare(SCENARIOS[name], options.seconds, constants, options.seed)
        print(json.dumps([_sums(item) for item in outcomes]) if options.json else _table(name, outcomes), flush=True)
        if options.picture is not None:
            options.picture.write_text(draw(outcomes, constants.trip_c))
    return 0


def _constant_names() -> str:
    return ", ".join(f"{item.name} ({item.default:g})" for item in dataclasses.fields(PlantConstants))


def _constants(parser: argparse.ArgumentParser, pairs: Sequence[str]) -> PlantConstants:
    whole = {item.name for item in dataclasses.fields(PlantConstants) if isinstance(item.default, int)}
    names = [item.name for item in dataclasses.fields(PlantConstants)]
    given: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in names:
            parser.error(f"--set: there is no constant '{name}'; there are {', '.join(names)}")
        try:
            given[name] = int(text) if name in whole else float(text)
        except ValueError:
            parser.error(f"--set {name}: expected a number, given '{text}'")
        if not 0 < given[name] < 1e6:
            parser.error(f"--set {name}: expected a number above 0, given '{text}'")
    return dataclasses.replace(PlantConstants(), **given)


def _compare(scenario: Scenario, seconds: float | None, constants: PlantConstants, seed: int) -> list[Outcome]:
    if seconds is not None:
        scenario = dataclasses.replace(scenario, duration_s=seconds)
    outcomes = []
    for strategy in Strategy:
        if sys.stderr.isatty():
            print(f"\r\033[K{scenario.name}: {strategy.value} ...", end="", file=sys.stderr, flush=True)
        outcomes.append(simulate(scenario, strategy, constants=constants, seed=seed))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return outcomes


def _sums(outcome: Outcome) -> dict[str, object]:
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


def _joules_each(outcome: Outcome) -> float:
    return outcome.energy_j / max(1, sum(outcome.on_time.values()))


def _table(name: str, outcomes: Sequence[Outcome]) -> str:
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
    return f"scenario {name}, set-point {outcomes[0].set_point_c:g} °C\n{render(HEADS, rows)}"
