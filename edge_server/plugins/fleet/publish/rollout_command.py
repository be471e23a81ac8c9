"""Command `edge-server fleet rollout ACTION`: shows the staged rollouts of a signed repository, continues, stops or
rolls back one."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_server.cli.console import render, wrap
from edge_server.cli.options import float_range
from edge_server.core.exit_code import ExitCode
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.publish import rollout
from edge_server.plugins.fleet.reports.box_options import add_box_options, open_boxes
from edge_server.plugins.fleet.reports.box_report import BoxReport

_ACTIONS = ("status", *rollout.ACTIONS)


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "rollout",
        help="lead releases through their waves",
        description="Show how far the newest releases of a signed repository have come on the boxes (status), publish "
        "the next wave if all boxes of this one that answer have it, and none failed (continue), let no further box "
        "have it (stop), or withdraw it (rollback). Exits with 1 if a box failed, does not answer or cannot read "
        "the repository, or if a wave is not complete or has not lasted --after-secs.",
        allow_abbrev=False,
    )
    parser.add_argument("action", type=_action, metavar="ACTION", help=", ".join(_ACTIONS))
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="folder of `edge-server publish`")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="folder of the private keys; `status` needs none")
    parser.add_argument("--publisher", default="", metavar="NAME", help="releases of NAME of `edge-server fleet keys`")
    parser.add_argument("--model", default="", metavar="NAME", help="only this model; stop and rollback need it")
    parser.add_argument(
        "--after-secs", type=float_range(0, 1e9), default=0.0, metavar="N",
        help="seconds that a wave must have lasted before `continue` publishes the next one; default: 0",
    )  # fmt: skip
    add_box_options(parser)
    parser.set_defaults(run=run)


def _action(text: str) -> str:
    if text not in _ACTIONS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_ACTIONS)}, given '{text[:80]}'")
    return text


def run(options: argparse.Namespace) -> int:
    """Print the state and do the action. Return the exit code. Raises ArgumentTypeError and EdgeServerError."""
    if options.action != "status" and options.keys is None:
        raise InvalidRequest(f"rollout {options.action} needs --keys=DIR")
    if options.action in ("stop", "rollback") and not options.model:
        raise InvalidRequest(f"rollout {options.action} needs --model=NAME")
    with contextlib.closing(open_boxes(options)) as boxes:
        reports, silent = _sort(boxes.read())
    with rollout.open_publisher(options.repository, options.keys, options.publisher) as publisher:
        newest = rollout.newest_releases(publisher)
        if options.model:
            if options.model not in newest:
                listed = ", ".join(newest) or "none"
                raise InvalidRequest(f"the repository has no model '{options.model}'; it has {listed}")
            newest = {options.model: newest[options.model]}
        now = datetime.now(timezone.utc)
        progress = [rollout.see_progress(release, reports, now.timestamp()) for _, release in sorted(newest.items())]
        silent |= rollout.find_problems(progress, reports)
        print("\n".join(_lines(progress, silent)))
        lasts = False
        if options.action == "continue":
            for item in progress:
                left_s = item.left_s(options.after_secs, now.timestamp())
                if item.can_continue and left_s > 0:
                    lasts = True
                    print(f"{item.release.name}: its wave lasts {left_s:.0f} s more")
        changed = rollout.lead(options.action, publisher, progress, now.timestamp(), options.after_secs)
        if changed:
            publisher.commit(now)
            print("\n".join(changed))
    if options.action in ("stop", "rollback"):
        return ExitCode.OK
    is_held = lasts or bool(silent) or any(item.failed or item.waiting for item in progress)
    return ExitCode.FAILED if is_held else ExitCode.OK


def _sort(boxes: Sequence[BoxReport]) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """Return the reports of the boxes that follow, and box -> why there is none of the others."""
    reports: list[Mapping[str, Any]] = []
    silent: dict[str, str] = {}
    for box in boxes:
        if box.error or box.report is None:
            silent[box.name] = box.error
        elif box.follow is None:
            silent[box.name] = "its server does not follow a signed repository"
        else:
            reports.append(box.report)
    return reports, silent


def _lines(progress: Sequence[rollout.ReleaseProgress], silent: Mapping[str, str]) -> list[str]:
    titles = ("RELEASE", "WAVE", "SINCE", "INSTALLED", "WAITING", "FAILED")
    rows, lines = [], []
    for item in progress:
        release, name = item.release, item.release.name
        wave, since = "-", "-"
        if release.waves:
            wave = f"{release.wave + 1} of {len(release.waves)}: {release.waves[release.wave]}"
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(release.wave_since_s))
        if release.stopped_at is not None:
            wave += " (stopped)"
        rows.append((name, wave, since, *(str(len(each)) for each in (item.installed, item.waiting, item.failed))))
        lines += [f"{name} waits on {box}: {reason}" for box, reason in item.waiting.items() if reason]
        lines += [f"{name} failed on {box}: {reason}" for box, reason in item.failed.items()]
    lines += [f"{host}: {reason}" for host, reason in silent.items()]
    return [render(titles, rows, sys.stdout), *(wrap(line, sys.stdout) for line in lines)]
