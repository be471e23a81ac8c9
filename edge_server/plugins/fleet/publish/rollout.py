"""Staged rollout of a release in waves: its progress by the reports of the boxes, and its next step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.release import Box, Release

if TYPE_CHECKING:
    from edge_server.plugins.fleet.publish.publisher import Publisher

ACTIONS = ("continue", "stop", "rollback")
"""What `lead` does."""


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

    def left_s(self, after_s: float, now_s: float) -> float:
        """Return how many seconds more the wave must last, of `after_s` in all."""
        return self.release.wave_since_s + after_s - now_s


@contextlib.contextmanager
def open_publisher(repository: Path, keys: Path | None, name: str = "") -> Iterator[Publisher]:
    """Open a signed repository, and keep other processes from writing it. `keys` are needed to commit; `name`: see
    Publisher. Raises EdgeServerError."""
    from edge_server.plugins.fleet.publish.publisher import Publisher
    from edge_server.plugins.fleet.publish.repository_metadata import locked
    from edge_server.plugins.fleet.publish.signing_keys import SigningKeys

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
        state = follow["models"].get(release.model, {})
        is_installed = state.get("installed") == release.path
        if not release.concerns(box, now_s, is_installed=is_installed):
            continue
        # None: the box has no server that could say.
        if is_installed and report["ready"] is not False:
            progress.installed.append(box.id)
        elif is_installed:
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
        release = item.release
        if action == "rollback":
            publisher.withdraw(release.path)
            changed.append(f"{release.name}: withdrawn")
        elif action == "stop":
            publisher.change(release._replace(stopped_at=frozenset(item.installed)))
            changed.append(f"{release.name}: stopped; boxes that have it keep it ({len(item.installed)} reported)")
        elif action == "continue" and item.can_continue and item.left_s(after_s, now_s) <= 0:
            publisher.change(release._replace(wave=release.wave + 1, wave_since_s=int(now_s)))
            changed.append(
                f"{release.name}: wave {release.wave + 2} of {len(release.waves)}, {release.waves[release.wave + 1]}"
            )
    return changed
