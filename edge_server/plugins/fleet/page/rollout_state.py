"""Releases for the page: how far each has come on the boxes; it can lead the rollouts of a signed repository.

Without the folder of the signed repository, the boxes alone say which releases there are.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.plugins.fleet.page.box_record import BoxRecord, FollowedRelease
from edge_server.plugins.fleet.publish.rollout import (
    ACTIONS,
    ReleaseProgress,
    lead,
    newest_releases,
    open_publisher,
    see_progress,
)
from edge_server.plugins.fleet.release import Release, release_name

_MAX_NAMED = 200
"""Most boxes of a release that are named, each for waiting and failed."""


class RolloutState:
    """The signed repository in `repository`, read again when it has changed.

    `keys`: folder of the private keys, without which nothing is changed.
    """

    def __init__(self, repository: Path | None = None, keys: Path | None = None) -> None:
        """Raises EdgeServerError for a folder that is no signed repository, and without the extra `fleet`."""
        self._repository = repository
        self._keys = keys
        self._lock = threading.Lock()
        """Held while the repository is read or written: by one of the worker threads."""
        self._stamp: tuple[int, int] | None = None
        self._newest: Mapping[str, Release] = {}
        self.problem = ""
        """Why the repository cannot be read, "" if it can."""
        if repository is not None:
            self._read(repository)

    @property
    def has_repository(self) -> bool:
        return self._repository is not None

    def refresh(self) -> None:
        """Read the repository if it has changed. *Blocking*."""
        if self._repository is None:
            return
        with self._lock:
            try:
                self._read(self._repository)
            except EdgeServerError as error:
                self.problem = error.message

    def _read(self, repository: Path) -> None:
        try:
            found = (repository / "metadata" / "timestamp.json").stat()
        except OSError as error:
            raise InvalidRequest(f"'{repository}' is no signed repository: {error.strerror}") from None
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp != self._stamp:
            with open_publisher(repository, None) as publisher:
                self._newest = newest_releases(publisher)
            self._stamp, self.problem = stamp, ""

    def describe(self, boxes: Sequence[BoxRecord]) -> list[dict[str, object]]:
        """Return the newest release of each model, and its progress on the boxes that answer."""
        following = [box for box in boxes if box.releases is not None]
        if self._repository is None:
            return [_describe(progress, following, is_led=False) for progress in _progress_by_boxes(following)]
        reports, now_s = [_report_of(box) for box in following], time.time()
        progress = [see_progress(release, reports, now_s) for _, release in sorted(self._newest.items())]
        return [_describe(item, following, is_led=bool(item.release.waves)) for item in progress]

    def lead(self, model: str, action: str, seen: str, wave: int, boxes: Sequence[BoxRecord]) -> list[str]:
        """Do an action of ACTIONS with a model's newest release, and return a line for each change. *Blocking*.

        `seen` (MODEL/NUMBER) and `wave` are what the caller saw. Raises InvalidRequest if that is not so any more, and
        other EdgeServerErrors.
        """
        if self._repository is None or self._keys is None:
            raise InvalidRequest("this page leads no rollouts: start it with --repository and --keys")
        if action not in ACTIONS:
            raise InvalidRequest(f"expected one of {', '.join(ACTIONS)}, given '{action[:80]}'")
        with self._lock, open_publisher(self._repository, self._keys) as publisher:
            release = newest_releases(publisher).get(model)
            if release is None or release.name != seen or release.wave != wave:
                raise InvalidRequest(f"'{seen[:80]}' has changed since the page showed it: look again")
            now = datetime.now(timezone.utc)
            reports = [_report_of(box) for box in boxes if box.releases is not None]
            progress = see_progress(release, reports, now.timestamp())
            changed = lead(action, publisher, [progress], now.timestamp())
            if not changed:
                raise InvalidRequest(
                    f"{seen}: its next wave needs one box at least that has it, and none that waits or failed"
                )
            publisher.commit(now)
        self.refresh()
        return changed


def _report_of(box: BoxRecord) -> dict[str, Any]:
    releases = box.releases or {}
    follow = {
        "box": box.name,
        "groups": box.groups,
        "machines": box.machines,
        "problem": box.follow_problem,
        "models": {model: release._asdict() for model, release in releases.items()},
    }
    return {"ready": box.is_ready, "follow": follow}


def _progress_by_boxes(boxes: Sequence[BoxRecord]) -> list[ReleaseProgress]:
    """Return the progress of each model's newest release that a box wants."""
    wanted: dict[str, list[tuple[BoxRecord, FollowedRelease]]] = {}
    for box in boxes:
        for release in (box.releases or {}).values():
            wanted.setdefault(release.wanted, []).append((box, release))
    newest: dict[str, ReleaseProgress] = {}
    for path, followers in wanted.items():
        model, _, number = release_name(path).rpartition("/")
        if not model or not (number.isascii() and number.isdigit()) or len(number) > 9:
            continue  # no follower reports such a name
        if model in newest and newest[model].release.number >= int(number):
            continue
        everybody = Release(
            path, model, int(number), groups=None, machines=None, ids=None, stopped_at=None, percent=100.0, waves=(),
            wave=0, wave_since_s=0.0, not_before_s=0.0, max_latency_ms=None, max_slowdown=None, tolerance=None,
        )  # fmt: skip
        newest[model] = see_progress(everybody, [_report_of(box) for box, _ in followers], 0.0)
    return [newest[model] for model in sorted(newest)]


def _describe(progress: ReleaseProgress, boxes: Sequence[BoxRecord], *, is_led: bool) -> dict[str, object]:
    release = progress.release
    says = [(box.releases or {}).get(release.model) for box in boxes]
    digests = Counter(item.digest for item in says if item is not None and item.wanted == release.path and item.digest)
    return {
        "model": release.model,
        "release": release.name,
        "digest": digests.most_common(1)[0][0] if digests else "",
        "wave": release.wave,
        "waves": release.waves[:100],
        "since_s": release.wave_since_s or None,
        "is_led": is_led,
        "is_stopped": release.stopped_at is not None,
        "can_continue": progress.can_continue,
        "installed_count": len(progress.installed),
        "waiting_count": len(progress.waiting),
        "failed_count": len(progress.failed),
        "waiting": list(progress.waiting.items())[:_MAX_NAMED],
        "failed": list(progress.failed.items())[:_MAX_NAMED],
    }
