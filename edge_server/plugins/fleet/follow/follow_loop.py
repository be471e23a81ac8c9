"""Loop of a follower: makes the follower from its settings, and lets it look for releases again and again, in the
permitted hours."""

from __future__ import annotations

import logging
import math
import platform
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.follow.follower import Follower, Judge
from edge_server.plugins.fleet.follow.installed_models import InstalledModels
from edge_server.plugins.fleet.follow.site_files import SiteFiles
from edge_server.plugins.fleet.follow.trial import Trial
from edge_server.plugins.fleet.release import Box
from edge_server.plugins.fleet.settings import FollowConfig

log = logging.getLogger(__name__)

_SITE_TIMEOUT_S = 60.0
_TRIAL_TIMEOUT_S = 900.0
_FIRST_RETRY_S = 5.0
_MIN_DELAY = 0.8
"""Shortest wait between two rounds, as a fraction of the interval."""
_MAX_ROOT_BYTES = 512_000
_MAX_BOX_CHARS = 200

Hours = tuple[int, int]
"""Begin and end in minutes since midnight."""


def read_hours(text: str, flag: str = "--follow-hours") -> Hours | None:
    """Return the daily time that "22:00-05:30" names; None for "". Raises InvalidRequest."""
    if not text:
        return None
    found = re.fullmatch("([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", text)
    if found is None:
        raise InvalidRequest(f"{flag}: expected HH:MM-HH:MM, given '{text[:80]}'")
    numbers = [int(part) for part in found.groups()]
    return numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]


def are_in(hours: Hours | None, minute: int) -> bool:
    """Return whether a minute of the day lies in the hours, which may go over midnight."""
    if hours is None:
        return True
    begin, end = hours
    return begin <= minute < end if begin <= end else minute >= begin or minute < end


def this_box(config: FollowConfig, root: Path) -> Box:
    """Return this box, as releases select it. `root`: folder with the /proc that describes the machine.

    Raises InvalidRequest for a name that is too long or cannot be printed.
    """
    name = config.box or socket.gethostname()
    if not name.isprintable() or len(name) > _MAX_BOX_CHARS:
        raise InvalidRequest(f"--box-id: expected at most {_MAX_BOX_CHARS} characters, given '{name[:80]}'")
    machines = {platform.machine()}
    try:
        board = (root / "proc/device-tree/model").read_text("utf-8", "replace").lower()
    except OSError:
        board = ""
    if "jetson" in board:
        machines.update(re.findall("[a-z0-9]+", board))
    if (root / "proc/driver/nvidia").exists():
        machines.add("nvidia")
    groups = frozenset(group for group in (text.strip() for text in config.groups.split(",")) if group)
    return Box(name, groups, frozenset(machines))


def make_follower(
    config: FollowConfig, models: InstalledModels, root: Path, judge: Judge, root_flag: str = "--follow-root"
) -> Follower:
    """Return the follower of this box. Opens nothing.

    Raises EdgeServerError for wrong settings, a wrong root, and without the extra `fleet`.
    """
    from edge_server.plugins.fleet.follow.signed_repository import SignedRepository

    site = SiteFiles(config.url, config.max_kbytes_per_s * 1000, _SITE_TIMEOUT_S)
    if not config.root:
        raise InvalidRequest("--follow needs --follow-root, the file of root metadata that `edge-server publish` names")
    try:
        with open(config.root, "rb") as file:
            trusted = file.read(_MAX_ROOT_BYTES)
    except OSError as error:
        raise InvalidRequest(f"{root_flag}={config.root} cannot be read: {error.strerror}") from None
    repository = SignedRepository(site, models.folder / "metadata", trusted)
    return Follower(
        this_box(config, root), config.url, repository, models, Trial(models.folder / "trial", _TRIAL_TIMEOUT_S), judge
    )


class Rounds:
    """Repeats the rounds of a follower on the calling thread, at most until `stop`."""

    def __init__(
        self, follower: Follower, config: FollowConfig, refusal: Callable[[], str], on_end: Callable[[], None]
    ) -> None:
        """`refusal` says why no heavy work may begin now, "" if it may. `on_end` is called after each round. Raises
        InvalidRequest."""
        self._follower = follower
        self._interval_s = config.interval_s
        self._hours, self._hours_text = read_hours(config.hours), config.hours
        self._refusal = refusal
        self._on_end = on_end
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self._follower.stop()

    def run(self) -> None:
        failed_count = 0
        while not self._stopping.is_set():
            now = time.localtime()
            is_in_hours = are_in(self._hours, now.tm_hour * 60 + now.tm_min)
            refusal = self._refusal() if is_in_hours else f"downloads wait for {self._hours_text}"
            is_complete = self.run_once(refusal, self._interval_s)
            if self._follower.is_paused:
                continue
            failed_count = 0 if is_complete else failed_count + 1
            # Soon, and never later than usual: a release that is stopped leaves each box within one interval.
            retry_s = _FIRST_RETRY_S * 2.0 ** min(failed_count - 1, 20)
            delay_s = self._interval_s if is_complete else min(retry_s, self._interval_s)
            # Boxes that were switched on together do not ask together for long.
            self._stopping.wait(delay_s * random.uniform(_MIN_DELAY, 1.0))

    def run_once(self, refusal: str = "", download_s: float = math.inf) -> bool:
        try:
            return self._follower.follow_once(refusal, download_s)
        except Exception:
            # An unforeseen error must not end the rounds: the box would stay behind without a word.
            log.exception("a round of the follower failed")
            return False
        finally:
            self._on_end()
