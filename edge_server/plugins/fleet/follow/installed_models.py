"""Models that a follower installed in a model repository: stages the files of a release, swaps them in by renames, and
restores the ones before.

.follow/metadata/       what TUF trusts
.follow/parts/          downloads, by SHA-256
.follow/staged/MODEL/   complete files that are tried
.follow/kept/MODEL/     the files before the last exchange
.follow/state.json      releases that failed here, and those that are on probation
MODEL/.release.json     in an installed model: its release. Thus the record and the files change in one step

Each folder may be left by a process that was killed, at any step; `recover` completes or undoes that step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edge_server.errors import InvalidRequest
from edge_server.repository.disk.replace_file import replace_file, sync_folder
from edge_server.repository.trust.checksum_file import digest_file

log = logging.getLogger(__name__)

FOLDER = ".follow"
MARK = ".release.json"

MAX_FAILED = 200
"""Failed releases that are remembered; the oldest are forgotten."""


class Installed(NamedTuple):
    """The release in a model's folder. `digest` identifies its content."""

    path: str
    digest: str
    files: Mapping[str, str]


class Probation(NamedTuple):
    """A release that was exchanged in, and has not served yet. `starts` counts the starts of the server with it."""

    path: str
    digest: str
    starts: int


class FailedRelease(NamedTuple):
    """Why a release is not tried again on this box."""

    path: str
    reason: str
    time_s: float


class InstalledModels:
    """The models of one follower in `repository`. One thread uses it; `locked` keeps other processes away."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.folder = repository / FOLDER
        self.parts = self.folder / "parts"
        self._staged = self.folder / "staged"
        self._kept = self.folder / "kept"
        self._state_path = self.folder / "state.json"
        self.failures: dict[str, FailedRelease] = {}
        """Digest of a release -> its failure."""
        self.probations: dict[str, Probation] = {}
        """Model -> its release on probation."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one follower at a time into the repository. Raises InvalidRequest if there is another, or no folder."""
        try:
            for folder in (self.folder, self.parts, self._staged, self._kept):
                folder.mkdir(mode=0o700, exist_ok=True)
            file = open(self.folder / "lock", "wb")  # noqa: SIM115 - held until the end
        except OSError as error:
            raise InvalidRequest(f"'{self.repository}' cannot be followed into: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidRequest(f"another process follows into '{self.repository}'") from None
            self._read_state()
            yield

    def recover(self) -> None:
        """Complete what a killed process left. Raises OSError."""
        self._delete_staged()
        before = dict(self.probations)
        for kept in sorted(self._kept.iterdir()):
            model = kept.name
            if not os.path.lexists(self.repository / model) and model in self.probations:
                # Killed between the two renames of an exchange.
                del self.probations[model]
                os.rename(kept, self.repository / model)
        for model, probation in list(self.probations.items()):
            installed = self.installed(model)
            if installed is None or installed.digest != probation.digest:
                del self.probations[model]
        if self.probations != before:
            self._try_write_state()

    def installed(self, model: str) -> Installed | None:
        """Return the release that a follower put here; None if the model is not there, or somebody else's."""
        try:
            found = json.loads((self.repository / model / MARK).read_bytes())
            return Installed(str(found["path"]), str(found["digest"]), dict(found["files"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def rename_release(self, model: str, path: str) -> None:
        """Note that the files of an installed model are those of another release. Raises OSError."""
        installed = self.installed(model)
        assert installed is not None
        mark = json.dumps(installed._replace(path=path)._asdict())
        replace_file(self.repository / model / MARK, mark.encode())

    def installed_models(self) -> dict[str, Installed]:
        names = sorted(path.parent.name for path in self.repository.glob(f"*/{MARK}"))
        found = {name: self.installed(name) for name in names}
        return {name: installed for name, installed in found.items() if installed is not None}

    def find_copies(self, model: str, digests: frozenset[str]) -> None:
        """Link files with these SHA-256 that are here already into `parts`. Raises OSError."""
        missing = {digest for digest in digests if not (self.parts / digest).exists()}
        for folder in (self.repository / model, self._kept / model):
            try:
                files = json.loads((folder / MARK).read_bytes())["files"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            for name, digest in files.items():
                # Read again: the file may have been edited, or be damaged.
                if digest in missing and (folder / name).is_file() and digest_file(folder / name)[0].hex() == digest:
                    with contextlib.suppress(FileExistsError):
                        os.link(folder / name, self.parts / digest)
                    missing.discard(digest)

    def stage(self, model: str, installed: Installed) -> Path:
        """Make the folder of a release from the files in `parts`, and return it. Raises OSError."""
        folder = self._staged / model
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, digest in installed.files.items():
            target = folder / name
            (target.parent if digest else target).mkdir(parents=True, exist_ok=True)
            if digest:
                os.link(self.parts / digest, target)
        (folder / MARK).write_text(json.dumps(installed._asdict()))
        return folder

    def exchange(self, model: str, installed: Installed) -> None:
        """Put the staged folder in the place of the model's, and keep the earlier one. Raises OSError."""
        # One sync for all files: a loss of power after the renames must not leave empty files in a complete model.
        os.sync()
        target, kept = self.repository / model, self._kept / model
        # First: what is kept during a probation is what `recover` may put back.
        shutil.rmtree(kept, ignore_errors=True)
        self.probations[model] = Probation(installed.path, installed.digest, 0)
        self._write_state()
        # Two renames and no exchange in one step: watchdog 7.1 stops watching after one (renameat2).
        if os.path.lexists(target):
            os.rename(target, kept)
        os.rename(self._staged / model, target)
        sync_folder(self.repository)

    def confirm(self, model: str) -> None:
        """End a probation. The earlier files stay until the next exchange."""
        del self.probations[model]
        self._try_write_state()

    def count_start(self, model: str) -> int:
        """Count a start of the server with a release on probation, and return the count. Raises OSError."""
        probation = self.probations[model]
        self.probations[model] = probation._replace(starts=probation.starts + 1)
        self._write_state()
        return self.probations[model].starts

    def fail(self, digest: str, failure: FailedRelease) -> None:
        """Remember that a release failed here."""
        self.failures.pop(digest, None)
        self.failures[digest] = failure
        while len(self.failures) > MAX_FAILED:
            del self.failures[next(iter(self.failures))]
        self._try_write_state()

    def forget_failures(self) -> None:
        """Let releases that failed here be tried again."""
        self.failures.clear()
        self._try_write_state()

    def undo(self, model: str) -> None:
        """Put the files before the last exchange back, or remove the model if there were none. Raises OSError."""
        target, kept, discarded = self.repository / model, self._kept / model, self._staged / f"{model}.failed"
        shutil.rmtree(discarded, ignore_errors=True)
        if os.path.lexists(target):
            os.rename(target, discarded)
        if os.path.lexists(kept):
            os.rename(kept, target)
        sync_folder(self.repository)
        shutil.rmtree(discarded, ignore_errors=True)
        self.probations.pop(model, None)
        self._try_write_state()

    def remove(self, model: str) -> None:
        """Remove an installed model; its files are kept until the next exchange. Raises OSError."""
        kept = self._kept / model
        shutil.rmtree(kept, ignore_errors=True)
        os.rename(self.repository / model, kept)
        sync_folder(self.repository)
        if self.probations.pop(model, None) is not None:
            self._try_write_state()

    def clean(self, needed: frozenset[str] = frozenset()) -> None:
        """Delete what is staged, and downloads of other files than these. Raises OSError."""
        self._delete_staged()
        for path in self.parts.iterdir():
            if path.name.removesuffix(".part") not in needed:
                path.unlink()

    def _delete_staged(self) -> None:
        for path in self._staged.iterdir():
            shutil.rmtree(path)

    def _read_state(self) -> None:
        """Read state.json. A damaged one counts as empty: a failed release is then tried once more."""
        try:
            state: Any = json.loads(self._state_path.read_bytes())
            self.failures = {str(key): FailedRelease(*value) for key, value in state["failures"].items()}
            self.probations = {str(key): Probation(*value) for key, value in state["probations"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.failures, self.probations = {}, {}

    def _try_write_state(self) -> None:
        """Write what a later process can do without: it judges or tries a release once more."""
        try:
            self._write_state()
        except OSError as error:
            log.warning("'%s' cannot be written: %s", self._state_path, error.strerror)

    def _write_state(self) -> None:
        replace_file(self._state_path, json.dumps({"failures": self.failures, "probations": self.probations}).encode())
