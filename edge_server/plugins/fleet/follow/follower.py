"""Follower of one box: fetches the releases that concern the box, tries them, puts them into its model repository, and
takes back those that do not serve."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault
from edge_server.plugins.fleet.follow.installed_models import FailedRelease, Installed, InstalledModels
from edge_server.plugins.fleet.follow.site_files import DownloadPaused, SiteUnavailable
from edge_server.plugins.fleet.follow.trial import Rejected, Trial
from edge_server.plugins.fleet.release import Box, Release, choose
from edge_server.plugins.fleet.reports.box_report import FollowedModel
from edge_server.repository.disk.free_space import DiskFull, check_space

if TYPE_CHECKING:
    from edge_server.plugins.fleet.follow.signed_repository import SignedRepository

log = logging.getLogger(__name__)

_MAX_STARTS = 1
"""Starts of the server with a release on probation, before it counts as what ends the server."""

_FIRST_PAUSE_S = 5.0
_MAX_PAUSE_S = 3600.0


class _Foreign(EdgeServerError):
    """The model is there, and did not come from the signed repository."""


class _Pause(NamedTuple):
    """Until when a release is not downloaded again, whose files were wrong or did not fit: bytes cost money."""

    digest: str
    length_s: float
    end_s: float
    """By the monotonic clock."""
    reason: str


class Judge(Protocol):
    """Says whether the server serves the files that were exchanged in."""

    def expect(self, model: str) -> None:
        """The files of a model are about to be exchanged."""

    def wait(self, model: str, files: Mapping[str, str]) -> str | None:
        """Wait until the server serves these files (path -> SHA-256). Return why it does not, "" if it does, None if
        it is stopping. Raises ServingFault if this machine is the reason, not the files."""


class NoServer(Judge):
    """For a box whose server is another process: the trial alone decides."""

    def expect(self, model: str) -> None: ...

    def wait(self, model: str, files: Mapping[str, str]) -> str | None:
        return ""


class Report(NamedTuple):
    """What a follower knows after its last round. `problem` is why the round was not complete, "" if it was."""

    box: Box
    repository: str
    models: Mapping[str, FollowedModel]
    problem: str
    checked_s: float
    """When the metadata were last complete and valid, in seconds since the epoch; 0: never."""

    def as_json(self) -> dict[str, Any]:
        return {
            "box": self.box.id,
            "groups": sorted(self.box.groups),
            "machines": sorted(self.box.machines),
            "repository": self.repository,
            "models": {name: model._asdict() for name, model in self.models.items()},
            "problem": self.problem,
            "checked_s": self.checked_s,
        }


class Follower:
    """`follow_once` is called by one thread again and again, `report` and `stop` by any."""

    def __init__(
        self, box: Box, address: str, repository: SignedRepository, models: InstalledModels, trial: Trial, judge: Judge
    ) -> None:
        self._box = box
        self._repository = repository
        self._models = models
        self._trial = trial
        self._judge = judge
        self._is_stopping = False
        self._pauses: dict[str, _Pause] = {}
        """By model."""
        self.report = Report(box, address, {}, "no round has ended yet", 0.0)
        self.is_paused = False
        """Whether the last round ended in a download that goes on."""

    def stop(self) -> None:
        """End a download and a trial. What was downloaded is kept."""
        self._is_stopping = True
        self._repository.stop()
        self._trial.stop()

    def begin(self) -> None:
        """Undo what a killed process left, and releases with which the server ended before it served. Called before
        the server scans its repository. Raises OSError."""
        self._models.recover()
        for model, probation in list(self._models.probations.items()):
            try:
                starts = self._models.count_start(model)
            except OSError as error:
                # As on a full disk. Uncounted, a release that ends the server would do so without end.
                self._models.undo(model)
                log.error("release '%s' is put back until later: its start cannot be noted: %s", probation.path, error)
                continue
            if starts > _MAX_STARTS:
                self._take_back(model, "the server ended each time before it served this release")

    def judge_probations(self) -> None:
        """Wait until the releases that an earlier process exchanged in serve, and take back those that do not."""
        for model in list(self._models.probations):
            with contextlib.suppress(ServingFault):  # The next round tries it again.
                self._judge_exchanged(model)

    def follow_once(self, refusal: str = "", download_s: float = math.inf) -> bool:
        """Do one round. Return whether all that concerns this box is installed or has failed.

        `refusal` says why nothing new may be installed now. What was withdrawn, or is not for this box any more, goes
        all the same. After `download_s` seconds downloads pause, so that the next round sees what is newest.
        """
        self.is_paused = False
        try:
            problem = self._do_round(refusal, download_s)
        except (EdgeServerError, OSError) as error:
            problem = self._explain(error)
        is_new = problem != self.report.problem and not self.is_paused
        if problem and is_new and not self._is_stopping:
            log.warning("%s; what is installed is served", problem)
        self.report = self.report._replace(problem=problem)
        return not problem

    def _do_round(self, refusal: str, download_s: float) -> str:
        """Return why the round is not complete, "" if it is. Raises EdgeServerError and OSError."""
        states: dict[str, FollowedModel] = {}
        releases = self._repository.refresh()
        self._repository.limit_downloads(download_s)
        present = self._models.installed_models()
        wanted = choose(releases, self._box, time.time(), {installed.path for installed in present.values()})
        checked_s, problem = time.time(), next(iter(self._repository.unreadable.values()), "")
        needed: set[str] = set()
        for model, installed in present.items():
            if model not in wanted and (kept := self._remove_unwanted(model, installed)):
                states[model] = kept
        for model, chosen in sorted(wanted.items()):
            digest = ""  # a list of another publisher may name none
            try:
                digest = self._repository.digest(chosen[0])
                failure = self._follow_model(model, chosen, needed, refusal)
                state, reason = ("failed", failure) if failure else ("installed", "")
            except _Foreign as error:
                state, reason = "foreign", error.message
            except (EdgeServerError, OSError) as error:
                state, reason = "waiting", self._explain(error)
                problem = problem or reason
            newest = chosen[0]
            wave = f"{newest.wave + 1} of {len(newest.waves)}" if newest.waves else ""
            states[model] = self._state_of(model, newest.path, digest, state, reason, wave)
        if not problem:
            self._models.clean(frozenset(needed))
        self.report = self.report._replace(models=states, checked_s=checked_s)
        return problem

    def _remove_unwanted(self, model: str, installed: Installed) -> FollowedModel | None:
        """Remove a model that no release wants here. Return its state if it is kept, as its list cannot be read."""
        reason = self._repository.unreadable.get(self._repository.publisher_of(model), "")
        if reason:
            return self._state_of(model, installed.path, installed.digest, "waiting", reason)
        self._models.remove(model)
        log.info("release '%s' is not for this box any more: model '%s' is removed", installed.path, model)
        return None

    def _follow_model(self, model: str, releases: Sequence[Release], needed: set[str], refusal: str) -> str:
        """Install the newest release that has not failed here. Return why the newest one failed, "" if it did not.

        With `refusal` only if the installed one is none of them. `needed` gets the files of one that waits. Raises
        EdgeServerError and OSError if it is to be tried again, InterruptedError after `stop`.
        """
        installed = self._models.installed(model)
        if installed is None and (self._models.repository / model).exists():
            raise _Foreign(f"'{self._models.repository / model}' is not from this repository: remove it first")
        digests = {self._repository.digest(release) for release in releases}
        is_refused = bool(refusal) and (installed is None or installed.digest in digests)
        first_failure = ""
        for release in releases:
            digest = self._repository.digest(release)
            if installed is not None and installed.digest == digest:
                if installed.path != release.path:
                    # The same files under another number, as after a change that was taken back.
                    self._models.rename_release(model, release.path)
                break
            reason = self._models.failures[digest].reason if digest in self._models.failures else ""
            if not reason:
                if is_refused:
                    raise ServingFault(refusal)
                pause = self._pauses.get(model)
                if pause is not None and pause.digest == digest and time.monotonic() < pause.end_s:
                    raise ServingFault(pause.reason)
                try:
                    reason = self._install(release, digest, needed)
                except (Rejected, InvalidRequest) as error:
                    reason = error.message
                    self._models.fail(digest, FailedRelease(release.path, reason, time.time()))
                    log.error("release '%s' is not installed: %s", release.path, reason)
                except (SiteUnavailable, InterruptedError):
                    raise  # The next round resumes it, and loses no byte.
                except (EdgeServerError, OSError) as error:
                    self._pause(model, digest, self._explain(error))
                    raise
            if not reason:
                break
            first_failure = first_failure or f"release '{release.path}': {reason}"
        return first_failure

    def _pause(self, model: str, digest: str, reason: str) -> None:
        pause = self._pauses.get(model)
        is_again = pause is not None and pause.digest == digest
        length_s = min(pause.length_s * 2, _MAX_PAUSE_S) if pause is not None and is_again else _FIRST_PAUSE_S
        self._pauses[model] = _Pause(digest, length_s, time.monotonic() + length_s, reason)

    def _install(self, release: Release, digest: str, needed: set[str]) -> str:
        """Return why the server does not serve the release, "" if it does. Raises as `_follow_model`, and Rejected."""
        files = self._repository.files(release, self._models.parts)
        digests = frozenset(filter(None, files.values()))
        needed |= {digest, *digests}
        self._models.find_copies(release.model, digests)
        size = self._repository.missing_bytes(release, digests, self._models.parts)
        check_space(self._models.parts, size, f"release '{release.path}'")
        self._repository.fetch(release, digests, self._models.parts)
        new = Installed(release.path, digest, files)
        staged = self._models.stage(release.model, new)
        needed -= {digest, *digests}
        serving = self._models.installed(release.model)
        is_return = serving is not None and int(PurePosixPath(serving.path).stem) > release.number
        note = self._trial.run(release, staged, self._models.repository, is_return=is_return)
        log.info("release '%s' is tried: %s", release.path, note)
        self._judge.expect(release.model)
        self._models.exchange(release.model, new)
        return self._judge_exchanged(release.model)

    def _judge_exchanged(self, model: str) -> str:
        """Return why a release was taken back, "" if it serves or the server is stopping. Raises ServingFault for one
        that was taken back until this machine can serve it."""
        probation, installed = self._models.probations[model], self._models.installed(model)
        assert installed is not None
        try:
            reason = self._judge.wait(model, installed.files)
        except ServingFault as error:
            self._models.undo(model)
            log.error("release '%s' is put back until later: %s", probation.path, error.message)
            raise
        if reason is None:
            return ""
        if reason:
            self._take_back(model, reason)
            return reason
        self._models.confirm(model)
        log.info("release '%s' serves", probation.path)
        return ""

    def _take_back(self, model: str, reason: str) -> None:
        probation = self._models.probations[model]
        # First, and by renames: the disk may be full.
        self._models.undo(model)
        self._models.fail(probation.digest, FailedRelease(probation.path, reason, time.time()))
        log.error("release '%s' is taken back: %s", probation.path, reason)

    def _state_of(self, model: str, wanted: str, digest: str, state: str, reason: str, wave: str = "") -> FollowedModel:
        installed, before = self._models.installed(model), self.report.models.get(model)
        since_s = time.time()
        if state == "failed" and digest in self._models.failures:
            since_s = self._models.failures[digest].time_s
        elif before is not None and (before.wanted, before.state) == (wanted, state):
            since_s = before.since_s
        return FollowedModel(wanted, state, reason, installed.path if installed else "", digest, wave, since_s)

    def _explain(self, error: EdgeServerError | OSError) -> str:
        """Return the reason. If it is the disk, what was downloaded and is not installed is deleted before."""
        if isinstance(error, InterruptedError):
            return "stopped"
        self.is_paused |= isinstance(error, DownloadPaused)
        if isinstance(error, DiskFull | OSError):
            with contextlib.suppress(OSError):
                self._models.clean()
        if isinstance(error, EdgeServerError):
            return error.message
        return f"'{error.filename or self._models.folder}': {error.strerror or error}"
