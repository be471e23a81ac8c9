"""`edge-server fleet status`: show many running servers in one table, and which of them serve other versions or
configurations than the rest.

It asks each server over HTTP for what `edge-server status` shows, or reads what boxes report to an MQTT broker. There
is no server or database of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.cli import expected_versions
from edge_server.cli.console import render, wrap
from edge_server.core.exit_code import ExitCode
from edge_server.plugins.fleet.reports.box_options import add_box_options, open_boxes
from edge_server.plugins.fleet.reports.box_report import BoxReport, find_release_failures
from edge_server.plugins.fleet.reports.version_differences import (
    find_differences,
    find_other_runtimes,
    find_unknown,
    served_versions,
)

COLUMN_TITLES = ("HOST", "STATE", "SERVER", "MODELS", "TEMPERATURE", "WORK ALLOWED", "STREAMS", "DROPPED", "FAILED")
OPTIONAL_COLUMNS = ("STREAMS", "SERVER", "TEMPERATURE")


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "status",
        help="show many servers in one table",
        description="Show the status of many running servers in one table, and which differ from most of the others. "
        "The servers are asked at the same time, or have reported to an MQTT broker. Exits with 0 if all are ready, "
        "serve the same versions of the same files, no version failed on any and each --expect is met on all; with "
        f"{ExitCode.UNKNOWN} if nothing is wrong, but a server does not know the SHA-256 of files that are compared "
        "(yet); else with 1.",
        allow_abbrev=False,
    )
    add_box_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    expected_versions.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table. Return the exit code: see the description above.

    Raises ArgumentTypeError and EdgeServerError.
    """

    def are_settled(hosts: Sequence[Mapping[str, Any]]) -> bool:
        return not _exit_code(hosts) and not any(expected_versions.is_loading(host["report"]) for host in hosts)

    with contextlib.closing(open_boxes(options)) as boxes:
        hosts = expected_versions.wait_until_well(lambda: _look(boxes.read(), options), are_settled, options.wait)
    print(json.dumps({"hosts": hosts}, indent=1) if options.json else "\n".join(_lines(hosts)))
    return _exit_code(hosts)


def _look(boxes: Sequence[BoxReport], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the report of each box, the versions in which it differs from most others, those that another runtime
    runs than there, those that cannot be compared, and its problems."""
    reports = {box.name: box.report for box in boxes if box.report is not None and not box.error}
    # A box without a server says nothing of what it serves.
    serving = {name: report for name, report in reports.items() if report["ready"] is not None}
    served = {name: served_versions(report) for name, report in serving.items()}
    differences, unknown, runtimes = find_differences(served), find_unknown(served), find_other_runtimes(serving)
    return [
        {
            "url": box.name,
            "error": box.error,
            "differs": differences.get(box.name, []),
            "runtimes": runtimes.get(box.name, []),
            "unknown": [
                *unknown.get(box.name, ()),
                *(expected_versions.find_unknown(reports[box.name], options.expect) if box.name in reports else ()),
            ],
            "problems": _find_problems(reports[box.name], options) if box.name in reports else [],
            "report": reports.get(box.name),
        }
        for box in boxes
    ]


def _find_problems(report: Mapping[str, Any], options: argparse.Namespace) -> list[str]:
    problems = expected_versions.find_failures(report) + expected_versions.find_unmet(report, options.expect)
    # Over HTTP the plugin's lines say it.
    if "plugins" in report:
        return problems
    return problems + [f"follow: {text}" for text in find_release_failures(report["follow"])]


def _exit_code(hosts: Sequence[Mapping[str, Any]]) -> ExitCode:
    return expected_versions.exit_code(
        is_wrong=any(host["error"] or host["differs"] or host["problems"] for host in hosts),
        is_unknown=any(host["unknown"] for host in hosts),
    )


def _lines(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [render(COLUMN_TITLES, [_row(host) for host in hosts], sys.stdout, optional=OPTIONAL_COLUMNS)]
    for host in hosts:
        name = _host(host["url"])
        if host["error"]:
            lines.append(wrap(f"{name}: {host['error']}", sys.stdout))
        lines += [wrap(f"{name} differs: {text}", sys.stdout) for text in host["differs"]]
        lines += [wrap(f"{name} runs {text}", sys.stdout) for text in host["runtimes"]]
        lines += [wrap(f"{name} is not known to be equal: {text}", sys.stdout) for text in host["unknown"]]
        lines += [wrap(f"{name}: {text}", sys.stdout) for text in host["problems"]]
    return lines


def _row(host: Mapping[str, Any]) -> tuple[str, ...]:
    name, report = _host(host["url"]), host["report"]
    if report is None:
        return (name, "NO ANSWER", *[""] * (len(COLUMN_TITLES) - 2))
    names = {model["name"] for model in report["models"] if not expected_versions.is_removed(model)}
    ready = {model["name"] for model in report["models"] if model["state"] == "READY"}
    streams = report.get("streams")
    failed = sum(model["inference_stats"]["fail"]["count"] for model in report["models"] if "inference_stats" in model)
    governor = report.get("governor", {})
    temperature = governor.get("temperature_c")
    is_on = governor.get("enabled", False)
    return (
        name,
        {True: "READY", False: "NOT READY", None: "NO SERVER"}[report["ready"]],
        report["version"],
        f"{len(ready)} of {len(names)}",
        "-" if temperature is None else f"{temperature:.0f} °C",
        f"{governor['share']:.0%} {governor['state']}" if is_on else "-",
        "-" if streams is None else str(len(streams)),
        "-" if streams is None else str(sum(sum(stream["dropped"].values()) for stream in streams)),
        str(failed),
    )


def _host(url: str) -> str:
    return url.removeprefix("http://")
