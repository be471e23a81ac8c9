"""Installation of a downloaded model into a repository: complete or not at all, whenever the process is killed.

The files are prepared in `.pull-NAME`, a hidden staging folder of the repository that servers ignore:

downloads/    what was downloaded; it stays for the next attempt if the transfer broke, with the file `resumable`
unpacked/     what archives hold
model/NAME    the model
replaced      the model that was there, until the new one is in its place
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edge_server.errors import AlreadyExists, InvalidRequest
from edge_server.plugins.remote.pull.archive import PullFailed
from edge_server.plugins.remote.pull.resumable_download import Interrupted
from edge_server.repository.disk.file_fingerprint import is_ignored
from edge_server.repository.disk.free_space import DiskFull
from edge_server.repository.disk.replace_file import sync_folder
from edge_server.repository.disk.scan import Scanner, is_model_name, parse_version

MAX_NAME_BYTES = 200
_PREFIX = ".pull-"

Fill = Callable[[Path, Path, Path], None]
"""Downloads into the first folder, which may hold files of an earlier attempt, unpacks into the second, which is empty,
and makes the third, the model. Raises PullFailed and OSError."""


def check_name(name: str) -> None:
    """Raise InvalidRequest for a name that no model can have."""
    if not is_model_name(name) or is_ignored(name) or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise InvalidRequest(
            f"name '{name[:80]}' cannot be used: expected 1 to {MAX_NAME_BYTES} bytes without spaces, slashes, "
            "? # % and a leading dot; choose another with --name"
        )


@contextlib.contextmanager
def locked(repository: Path) -> Iterator[None]:
    """Let one pull at a time into a repository. Raises InvalidRequest if there is none, or another pull runs."""
    try:
        descriptor = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidRequest(
            f"--model-repository={repository} cannot be opened: {error.strerror}; expected an existing folder"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(f"another pull into '{repository}' is running; wait for its end") from None
        yield
    finally:
        os.close(descriptor)


def install(repository: Path, name: str, source: str, fill: Fill, *, replaces: bool) -> Sequence[int]:
    """Install the model that `fill` makes from `source`, and return its versions. The caller has locked the repository.

    What killed pulls left is removed before. Raises PullFailed, DiskFull, and AlreadyExists unless it `replaces` the
    model.
    """
    target, work = repository / name, repository / f"{_PREFIX}{name}"
    resumable, downloads, unpacked, model = work / "resumable", work / "downloads", work / "unpacked", work / "model"
    _clean_up(repository, resumed=work)
    if os.path.lexists(target) and not replaces:
        if not resumable.exists():
            _discard(work)
        raise AlreadyExists(f"'{target}' exists: use --replace to replace it, or --name for another name")
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        resumable.unlink(missing_ok=True)
        for folder in (unpacked, model):
            folder.mkdir()
        fill(downloads, unpacked, model / name)
        found = Scanner([model]).find(name)
        if found is None or found.problem:
            raise PullFailed(
                f"'{source}' holds no model that can be served: {found.problem if found else 'it is empty'}"
            )
        # One sync for all files. A loss of power after the renames must not leave empty files in a complete model.
        os.sync()
        # Two renames and no exchange in one step: watchdog 7.1 stops watching after an exchange (renameat2).
        if os.path.lexists(target):
            os.rename(target, work / "replaced")
        os.rename(model / name, target)
        sync_folder(repository)
    except Interrupted:
        with contextlib.suppress(OSError):
            if any(downloads.iterdir()):
                resumable.touch()
        if not resumable.exists():
            _discard(work)
        raise
    except (PullFailed, DiskFull):
        _discard(work)
        raise
    except OSError as error:
        # Other programs need the disk too: nothing is kept when it is full.
        _discard(work)
        raise PullFailed(f"'{error.filename or work}' cannot be written: {error.strerror or error}") from None
    _discard(work)
    return [version.number for version in found.versions]


def remove_other_files(folder: Path, kept: set[str]) -> None:
    """Delete the files of a folder whose names are not among `kept`. Raises OSError."""
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()


def find_model_folder(folder: Path) -> Path:
    """Return the folder with the versions: `folder`, or the only folder in it if that is no version."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if len(entries) == 1 and entries[0].is_dir() and parse_version(entries[0].name) is None:
        return entries[0]
    return folder


def _clean_up(repository: Path, resumed: Path) -> None:
    """Remove what killed pulls left: this process has the lock, so no staging folder belongs to a living one.

    Of `resumed`, and of each folder whose pull ended with the advice to run it again, the download stays. Raises
    PullFailed if a model that was being replaced cannot be put back.
    """
    for work in sorted(repository.glob(f"{_PREFIX}*")):
        try:
            _restore(work)
        except OSError as error:
            raise PullFailed(f"'{work / 'replaced'}' cannot be put back: {error.strerror}") from None
        if work == resumed or (work / "resumable").exists():
            for name in ("unpacked", "model", "replaced"):
                shutil.rmtree(work / name, ignore_errors=True)
        else:
            shutil.rmtree(work, ignore_errors=True)


def _restore(work: Path) -> None:
    """Move a replaced model back if nothing is in its place. Raises OSError."""
    replaced, target = work / "replaced", work.with_name(work.name.removeprefix(_PREFIX))
    if os.path.lexists(replaced) and not os.path.lexists(target):
        os.rename(replaced, target)


def _discard(work: Path) -> None:
    """Delete a staging folder, unless it holds a replaced model that cannot be put back: the next pull tries again."""
    with contextlib.suppress(OSError):
        _restore(work)
        shutil.rmtree(work, ignore_errors=True)
