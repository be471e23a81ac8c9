"""State of the releases for the fleet's page: how far each has come on the boxes; it can also lead the rollouts of a
signed repository.

Without the folder of the signed repository, the boxes alone say which releases there are.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.file_stamp import FileStamp, file_stamp
from edge_server.plugins.fleet.page.box_record import BoxRecord
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
_MAX_NAMED_BYTES = 256 << 10
"""Most bytes of these names and their reasons, of all releases together."""
_MAX_RELEASES = 100
"""Most releases without a signed repository: boxes may claim any number of models."""


class RolloutState:
    """The signed repository in `repository`, read again when it has changed.

    `keys`: folder of the private keys, without which nothing is changed.
    """

    def __init__(self, repository: Path | None = None, keys: Path | None = None) -> None:
        """Raises EdgeServerError for a folder that is no signed repository, and without the extra `fleet`."""
        self._repository = repository
        self.has_repository = repository is not None
        self._keys = keys
        self._lock = threading.Lock()
        """Held while the repository is read or written: by one of the worker threads."""
        self._stamp: FileStamp | None = None
        self._newest: Mapping[str, Release] = {}
        self.problem = ""
        """Why the repository cannot be read, "" if it can."""
        if repository is not None:
            self._read(repository)

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
            stamp = file_stamp((repository / "metadata" / "timestamp.json").stat())
        except OSError as error:
            raise InvalidRequest(f"'{repository}' is no signed repository: {error.strerror}") from None
        if stamp != self._stamp:
            with open_publisher(repository, None) as publisher:
                self._newest = newest_releases(publisher)
            self._stamp, self.problem = stamp, ""

    def describe(self, boxes: Sequence[BoxRecord]) -> tuple[list[dict[str, object]], int]:
        """Return the newest release of each model, with its progress on the boxes that answer, and how many there are.

        Without a signed repository these are the releases that most boxes want, _MAX_RELEASES at most.
        """
        following = [box for box in boxes if box.releases is not None]
        reports, now_s = [_report_of(box) for box in following], time.time()
        if self._repository is None:
            progress, count = _progress_by_boxes(reports)
        else:
            progress = [see_progress(release, reports, now_s) for _, release in sorted(self._newest.items())]
            count = len(progress)
        left = _MAX_NAMED_BYTES
        found = []
        for item in progress:
            waiting, left = _named(item.waiting, left)
            failed, left = _named(item.failed, left)
            is_led = self._repository is not None and bool(item.release.waves)
            found.append({**_describe(item, following, is_led=is_led), "waiting": waiting, "failed": failed})
        return found, count

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


def _progress_by_boxes(reports: Sequence[Mapping[str, Any]]) -> tuple[list[ReleaseProgress], int]:
    """Return the progress of each model's newest release that a box wants, of the _MAX_RELEASES models that most boxes
    want, and how many models there are."""
    wanted: dict[str, list[Mapping[str, Any]]] = {}
    for report in reports:
        for path in {model["wanted"] for model in report["follow"]["models"].values()}:
            wanted.setdefault(path, []).append(report)
    newest: dict[str, tuple[int, str]] = {}
    for path in wanted:
        model, _, number = release_name(path).rpartition("/")
        if not model or not (number.isascii() and number.isdigit()) or len(number) > 9:
            continue  # no follower reports such a name
        newest[model] = max(newest.get(model, (-1, "")), (int(number), path))
    chosen = sorted(newest, key=lambda model: (-len(wanted[newest[model][1]]), model))[:_MAX_RELEASES]
    found = []
    for model in sorted(chosen):
        release_number, path = newest[model]
        found.append(see_progress(Release(path, model, release_number), wanted[path], 0.0))
    return found, len(newest)


def _named(boxes: Mapping[str, str], left: int) -> tuple[list[tuple[str, str]], int]:
    """Return boxes and their reasons, as many as `left` bytes of JSON hold, _MAX_NAMED at most, and what is left."""
    found = []
    for item in list(boxes.items())[:_MAX_NAMED]:
        size = len(json.dumps(item))
        if size > left:
            break
        left -= size
        found.append(item)
    return found, left


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
    }
