"""`edge-server fleet rollout ACTION`: lead releases through their waves, by what the boxes say."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.cli.console import render, wrap
from edge_server.cli.options import float_range
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.box_report import BoxReport
from edge_server.plugins.fleet.follow.release import Box, Release

if TYPE_CHECKING:
    from edge_server.plugins.fleet.follow.publisher import Publisher

ACTIONS = ("status", "continue", "stop", "rollback")


class ReleaseProgress(NamedTuple):
    """How far a release has come, by what the boxes of its present wave say."""

    release: Release
    installed: list[str]
    """Ids of boxes."""
    waiting: dict[str, str]
    """Id -> reason, "" if the box gives none; as in `failed`."""
    failed: dict[str, str]

    @property
    def can_continue(self) -> bool:
        has_next = self.release.wave < len(self.release.waves) - 1 and self.release.stopped_at is None
        return has_next and bool(self.installed) and not self.waiting and not self.failed


def add_parser(commands: Any, add_hosts: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the subcommand. `add_hosts` adds the arguments that name the servers of the boxes."""
    parser = commands.add_parser(
        "rollout",
        help="lead releases through their waves",
        description="Show how far the newest releases of a signed repository have come on the boxes (status), publish "
        "the next wave if all boxes of this one that answer have it, and none failed (continue), let no further box "
        "have it (stop), or withdraw it (rollback). Exits with 1 if a box failed, does not answer or cannot read "
        "the repository, or if a wave is not complete.",
        allow_abbrev=False,
    )
    parser.add_argument("action", type=_action, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="folder of `edge-server publish`")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="folder of the private keys; `status` needs none")
    parser.add_argument("--publisher", default="", metavar="NAME", help="releases of NAME of `edge-server fleet keys`")
    parser.add_argument("--model", default="", metavar="NAME", help="only this model; stop and rollback need it")
    parser.add_argument(
        "--after-secs", type=float_range(0, 1e9), default=0.0, metavar="N",
        help="seconds that a wave must have lasted before `continue` publishes the next one; default: 0",
    )  # fmt: skip
    add_hosts(parser)


def _action(text: str) -> str:
    if text not in ACTIONS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(ACTIONS)}, given '{text[:80]}'")
    return text


def run(options: argparse.Namespace, reports: Sequence[BoxReport]) -> int:
    """Do the action and print the state. Return the exit code. Raises EdgeServerError."""
    if options.action != "status" and options.keys is None:
        raise InvalidRequest(f"rollout {options.action} needs --keys=DIR")
    if options.action in ("stop", "rollback") and not options.model:
        raise InvalidRequest(f"rollout {options.action} needs --model=NAME")
    with open_publisher(options.repository, options.keys, options.publisher) as publisher:
        return _lead(options, publisher, reports)


def _lead(options: argparse.Namespace, publisher: Publisher, reports: Sequence[BoxReport]) -> int:
    newest = newest_releases(publisher)
    if options.model:
        if options.model not in newest:
            raise InvalidRequest(f"the repository has no model '{options.model}'; it has {', '.join(newest) or 'none'}")
        newest = {options.model: newest[options.model]}
    now = datetime.now(timezone.utc)
    silent: dict[str, str] = {}
    boxes: list[Mapping[str, Any]] = []
    for box in reports:
        if box.error or box.report is None:
            silent[box.name] = box.error
        elif box.follow is None:
            silent[box.name] = "its server does not follow a signed repository"
        else:
            boxes.append(box.report)
    progress = [see_progress(release, boxes, now.timestamp()) for _, release in sorted(newest.items())]
    silent |= find_problems(progress, boxes)
    print("\n".join(_lines(progress, silent)))
    changed = lead(options.action, publisher, progress, now.timestamp(), options.after_secs)
    if changed:
        publisher.commit(now)
        print("\n".join(changed))
    if options.action in ("stop", "rollback"):
        return 0
    return 1 if silent or any(item.failed or item.waiting for item in progress) else 0


@contextlib.contextmanager
def open_publisher(repository: Path, keys: Path | None, name: str = "") -> Iterator[Publisher]:
    """Open a signed repository, and keep other processes from writing it. `keys` are needed to commit; `name`: see
    Publisher. Raises EdgeServerError."""
    from edge_server.plugins.fleet.follow.publisher import Publisher
    from edge_server.plugins.fleet.follow.repository_metadata import locked
    from edge_server.plugins.fleet.follow.signing_keys import SigningKeys

    if not (repository / "metadata").is_dir():
        raise InvalidRequest(f"'{repository}' is no signed repository")
    with locked(repository):
        yield Publisher(repository, SigningKeys(keys or Path()), name)


def newest_releases(publisher: Publisher) -> dict[str, Release]:
    """Return model -> its newest release."""
    newest: dict[str, Release] = {}
    for release in publisher.releases().values():
        if release.number >= newest.get(release.model, release).number:
            newest[release.model] = release
    return newest


def see_progress(release: Release, reports: Sequence[Mapping[str, Any]], now_s: float) -> ReleaseProgress:
    """Return the state of a release on the boxes that it is for now."""
    progress = ReleaseProgress(release, [], {}, {})
    for report in reports:
        follow = report["follow"]
        box = Box(follow["box"], frozenset(follow["groups"]), frozenset(follow["machines"]))
        if not release.concerns(box, now_s):
            continue
        state = follow["models"].get(release.model, {})
        # None: the box has no server that could say.
        if state.get("installed") == release.path and report["ready"] is not False:
            progress.installed.append(box.id)
        elif state.get("installed") == release.path:
            progress.failed[box.id] = "the server is not ready"
        elif state.get("wanted") == release.path and state["state"] in ("failed", "foreign"):
            progress.failed[box.id] = state["reason"]
        else:
            progress.waiting[box.id] = state.get("reason", "") or follow["problem"]
    return progress


def find_problems(progress: Sequence[ReleaseProgress], reports: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return box -> why it cannot read the signed repository whole, without the boxes on which a release waits."""
    waiting = {box for item in progress for box in item.waiting}
    follows = [report["follow"] for report in reports]
    return {
        follow["box"]: follow["problem"] for follow in follows if follow["problem"] and follow["box"] not in waiting
    }


def lead(
    action: str, publisher: Publisher, progress: Sequence[ReleaseProgress], now_s: float, after_s: float = 0.0
) -> list[str]:
    """Change the releases as the action, one of ACTIONS, says. Return a line for each change; the caller commits.

    `after_s`: how long a wave must have lasted before the next one. Boxes that do not answer do not hold a rollout up:
    they get what is newest when they are back.
    """
    changed = []
    for item in progress:
        release, name = item.release, item.release.path.removesuffix(".json")
        if action == "rollback":
            publisher.withdraw(release.path)
            changed.append(f"{name}: withdrawn")
        elif action == "stop":
            publisher.change(release._replace(stopped_at=frozenset(item.installed)))
            changed.append(f"{name}: stopped at {len(item.installed)} boxes")
        elif action == "continue" and item.can_continue:
            left_s = release.wave_since_s + after_s - now_s
            if left_s > 0:
                print(f"{name}: its wave lasts {left_s:.0f} s more")
                continue
            publisher.change(release._replace(wave=release.wave + 1, wave_since_s=int(now_s)))
            changed.append(
                f"{name}: wave {release.wave + 2} of {len(release.waves)}, {release.waves[release.wave + 1]}"
            )
    return changed


def _lines(progress: Sequence[ReleaseProgress], silent: Mapping[str, str]) -> list[str]:
    titles = ("RELEASE", "WAVE", "SINCE", "INSTALLED", "WAITING", "FAILED")
    rows, lines = [], []
    for item in progress:
        release, name = item.release, item.release.path.removesuffix(".json")
        wave, since = "-", "-"
        if release.waves:
            wave = f"{release.wave + 1} of {len(release.waves)}: {release.waves[release.wave]}"
            wave += "" if release.stopped_at is None else " (stopped)"
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(release.wave_since_s))
        rows.append((name, wave, since, *(str(len(each)) for each in (item.installed, item.waiting, item.failed))))
        lines += [f"{name} waits on {box}: {reason}" for box, reason in item.waiting.items() if reason]
        lines += [f"{name} failed on {box}: {reason}" for box, reason in item.failed.items()]
    lines += [f"{host}: {reason}" for host, reason in silent.items()]
    return [render(titles, rows, sys.stdout), *(wrap(line, sys.stdout) for line in lines)]
