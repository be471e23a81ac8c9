"""Options --expect and --wait of `status` and `fleet status`: parse which model versions should serve, and compare a
server with them."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edge_server.cli.model_text import reason_line
from edge_server.cli.options import float_range
from edge_server.core.exit_code import ExitCode
from edge_server.core.status_reports import UNLOADED, IndexEntry, find_failed

POLL_S = 1.0
"""Time between two looks of --wait."""

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class Expectation:
    """A version that should serve. `digest` is the beginning of its SHA-256 in hexadecimal digits, "" for any."""

    model: str
    version: str
    digest: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --expect and --wait."""
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        type=parse_expectation,
        metavar="MODEL=VERSION[@DIGEST]",
        help="exit with 1 unless this version serves, and its files have this SHA-256 (its first eight digits or "
        f"more); with {ExitCode.UNKNOWN} if the SHA-256 is not known yet. Repeatable.",
    )
    parser.add_argument(
        "--wait",
        type=float_range(0.0, 86_400),
        default=0.0,
        metavar="SECONDS",
        help="ask again until nothing is wrong, unknown or loading, for at most SECONDS",
    )


def parse_expectation(text: str) -> Expectation:
    """Parse MODEL=VERSION[@DIGEST]. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([^=]+)=(0|[1-9][0-9]{0,18})(?:@(?:sha256:)?([0-9a-f]{8,64}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected MODEL=VERSION or MODEL=VERSION@DIGEST, got '{text}'")
    return Expectation(found[1], found[2], found[3] or "")


def find_failures(report: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a server: it is not ready, versions failed to load or were rejected, or a plugin says
    that something failed."""
    problems = ["the server is not ready"] if report["ready"] is False else []
    for entry in find_failed_entries(report):
        problems.append(reason_line(entry.name, entry.version, entry.reason or "is not served"))
    for plugin in report.get("plugins", ()):
        if plugin["error"]:
            problems.append(f"plugin {plugin['name']}: {plugin['error']}")
        for row in plugin["rows"]:
            if row.get("state") == "failed":
                problems.append(f"{row['title'] or plugin['name']}: {row['text']}")
    return problems


def is_loading(report: Mapping[str, Any]) -> bool:
    """Return whether a version is being loaded."""
    return any(model["state"] == "LOADING" for model in report["models"])


def find_failed_entries(report: Mapping[str, Any]) -> list[IndexEntry]:
    """Return the entries of a report whose newest files do not serve."""
    return find_failed(IndexEntry(row["name"], row["version"], row["state"], row["reason"]) for row in report["models"])


def is_removed(model: Mapping[str, Any]) -> bool:
    """Return whether a row of a report is a version that was removed, replaced or unloaded on request."""
    return bool(model["state"] == "UNAVAILABLE" and model["reason"] == UNLOADED)


def find_unmet(report: Mapping[str, Any], expected: Sequence[Expectation]) -> list[str]:
    """Return the expectations that a server does not meet, each with what serves instead."""
    problems = []
    for wanted in expected:
        serving = _serving_digests(report, wanted.model)
        digest = serving.get(wanted.version)
        if digest is None:
            found = ", ".join(f"version {version}" for version in sorted(serving)) or "no version"
            problems.append(f"{wanted.model}: version {wanted.version} is expected, {found} serves")
        elif digest and not digest.startswith(wanted.digest):
            problems.append(
                f"{wanted.model} version {wanted.version}: files with the SHA-256 {wanted.digest} are expected, "
                f"{digest} serves"
            )
    return problems


def find_unknown(report: Mapping[str, Any], expected: Sequence[Expectation]) -> list[str]:
    """Return the expectations that a server cannot be compared with: it does not know the SHA-256 of its files."""
    return [
        f"{wanted.model} version {wanted.version}: files with the SHA-256 {wanted.digest} are expected, the server "
        "does not know that of its files"
        for wanted in expected
        if wanted.digest and _serving_digests(report, wanted.model).get(wanted.version) == ""
    ]


def _serving_digests(report: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return version -> SHA-256 of its files, "" where it is not known, for the serving versions of a model."""
    return {
        str(model["version"]): str(model.get("digest", "")).removeprefix("sha256:")
        for model in report["models"]
        if model["name"] == name and model["state"] == "READY"
    }


def exit_code(*, is_wrong: bool, is_unknown: bool) -> ExitCode:
    """Return the exit code of the commands: what is wrong counts for more than what is not known."""
    if is_wrong:
        return ExitCode.FAILED
    return ExitCode.UNKNOWN if is_unknown else ExitCode.OK


def wait_until_well(look: Callable[[], Seen], is_well: Callable[[Seen], bool], timeout_s: float) -> Seen:
    """Return the result of the first look that is well, or of the last look within the time."""
    end_s = time.monotonic() + timeout_s
    while True:
        seen = look()
        left_s = end_s - time.monotonic()
        if is_well(seen) or left_s <= 0:
            return seen
        time.sleep(min(POLL_S, left_s))
