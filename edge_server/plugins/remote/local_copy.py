"""Local copy of a remote repository: downloads files into a folder, shows them to the server only when complete, and
removes old ones.

models/       the repository that is served; complete files are renamed into it
staging/      downloads: `<hash>.part` while incomplete, `<hash>` when complete
state.json    for each file in models/: its size and stamp in the store, and its time here
lock          held by the process that updates the copy
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from edge_server.errors import ServingFault
from edge_server.plugins.remote.grouped_listing import UnitKey
from edge_server.plugins.remote.object_store import RemoteFile
from edge_server.repository.disk.free_space import DiskFull, check_space
from edge_server.repository.disk.replace_file import replace_file, sync_folder
from edge_server.repository.disk.scan import parse_version

CHUNK_BYTES = 8 << 20

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)

Fetch = Callable[[RemoteFile, int, int], bytes]
Recorded = tuple[int, str, int]
"""Size, stamp in the store, and local modification time in nanoseconds of a file in the copy."""


class LocalDiskFault(ServingFault):
    """The local disk is full or cannot be written."""


class LocalCopy:
    """Owner of the folder of one copy. Used by one thread, while the scanner reads `models`."""

    def __init__(self, folder: Path) -> None:
        """Make the folders, readable by this user only. Raises LocalDiskFault."""
        self.models = folder / "models"
        self._folder = folder
        self._staging = folder / "staging"
        self._state_path = folder / "state.json"
        self._lock: IO[bytes] | None = None
        with _disk(f"the cache '{folder}' cannot be created"):
            for path in (folder, self.models, self._staging):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state: dict[UnitKey, dict[str, Recorded]] = {}
        self.is_warm = False
        self._read_state()

    def lock(self) -> bool:
        """Lock the copy for this process. Return False while another process has it."""
        if self._lock is None:
            with _disk(f"the cache '{self._folder}' cannot be locked"):
                file = open(self._folder / "lock", "wb")  # noqa: SIM115 - held until `close`
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.close()
                    return False
                self._lock = file
                # Another process may have changed it.
                self._read_state()
        return True

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- contents -----------------------------------------------------------------------------------------------

    def holds(self, key: UnitKey, files: Mapping[str, RemoteFile]) -> bool:
        """Return whether the copy has a unit with these files, unchanged since they were written."""
        known = self._state.get(key)
        if known is None or known.keys() != files.keys() or not self._unit_folder(key).is_dir():
            return False
        return all(self._is_intact(key, name, file) for name, file in files.items())

    def surplus(self, desired: Mapping[UnitKey, object]) -> list[UnitKey]:
        """Return the units in the copy that are not in `desired`. Raises LocalDiskFault."""
        return [key for key in self._present() if key not in desired]

    def is_empty(self) -> bool:
        return not self._present()

    def _present(self) -> list[UnitKey]:
        found: list[UnitKey] = []
        with _disk(f"'{self.models}' cannot be read"):
            for model in sorted(path for path in self.models.iterdir() if path.is_dir()):
                numbers = [parse_version(path.name) if path.is_dir() else None for path in model.iterdir()]
                found += [UnitKey(model.name, number) for number in sorted({n for n in numbers if n is not None})]
                if None in numbers or not numbers:
                    found.append(UnitKey(model.name, None))
        return found

    def _is_intact(self, key: UnitKey, name: str, file: RemoteFile) -> bool:
        known = self._state.get(key, {}).get(name)
        if known is None or known[:2] != (file.size, file.stamp):
            return False
        try:
            found = (self._unit_folder(key) / name).stat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (known[0], known[2])

    def _unit_folder(self, key: UnitKey) -> Path:
        return self.models / key.model if key.version is None else self.models / key.model / str(key.version)

    # -- downloads -------------------------------------------------------------------------------------------------

    def stage(self, key: UnitKey, files: Mapping[str, RemoteFile], fetch: Fetch) -> None:
        """Download all files of a unit into staging. Continues an earlier attempt.

        Raises the errors of `fetch`, and LocalDiskFault.
        """
        missing = {name: file for name, file in files.items() if not self._staged(key, name, file).exists()}
        for name, file in missing.items():
            if not (self._is_intact(key, name, file) and self._reuse(key, name, file)):
                self._download(key, name, file, fetch)

    def _reuse(self, key: UnitKey, name: str, file: RemoteFile) -> bool:
        """Link an unchanged file from the copy into staging. Return False if the file system has no hard links."""
        try:
            os.link(self._unit_folder(key) / name, self._staged(key, name, file))
        except OSError:
            return False
        return True

    def _download(self, key: UnitKey, name: str, file: RemoteFile, fetch: Fetch) -> None:
        target = self._staged(key, name, file)
        part = target.with_name(target.name + ".part")
        try:
            with _disk(f"'{file.path}' cannot be stored"), part.open("ab") as output:
                if output.tell() > file.size:
                    output.truncate(0)
                check_space(self._staging, file.size - output.tell(), f"'{file.path}'")
                while (start := output.tell()) < file.size:
                    output.write(fetch(file, start, min(start + CHUNK_BYTES, file.size)))
                    output.flush()
                os.fsync(output.fileno())
                os.replace(part, target)
        except (DiskFull, LocalDiskFault) as error:
            # Other programs need the disk too: delete a download that cannot be finished.
            part.unlink(missing_ok=True)
            raise LocalDiskFault(error.message) from None

    def _staged(self, key: UnitKey, name: str, file: RemoteFile) -> Path:
        text = "\0".join((key.model, str(key.version), name, str(file.size), file.stamp))
        return self._staging / hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()

    def install(self, key: UnitKey, files: Mapping[str, RemoteFile]) -> None:
        """Move a staged unit into the copy: a version in one step, other files one by one. Raises LocalDiskFault."""
        with _disk(f"model '{key.model}' cannot be written to the cache"):
            folder = self._unit_folder(key)
            if key.version is None:
                folder.mkdir(exist_ok=True)
                # First, because a new folder may have the name of an old file, or the reverse.
                self._remove_model_files(key, keep=set(files))
                self._move_staged(key, files, folder)
            else:
                self._install_version(key, files)
            self._state[key] = {
                name: (file.size, file.stamp, (folder / name).stat().st_mtime_ns) for name, file in files.items()
            }
        self._write_state()

    def _install_version(self, key: UnitKey, files: Mapping[str, RemoteFile]) -> None:
        new_folder = self._staging / f"new-{key.model}-{key.version}"
        shutil.rmtree(new_folder, ignore_errors=True)
        new_folder.mkdir()
        self._move_staged(key, files, new_folder)
        folder = self._unit_folder(key)
        folder.parent.mkdir(exist_ok=True)
        if folder.exists():
            exchange(new_folder, folder)
            shutil.rmtree(new_folder, ignore_errors=True)
        else:
            os.rename(new_folder, folder)
        sync_folder(folder.parent)

    def _move_staged(self, key: UnitKey, files: Mapping[str, RemoteFile], folder: Path) -> None:
        folders = {folder}
        for name, file in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self._staged(key, name, file), target)
            folders.add(target.parent)
        for path in folders:
            sync_folder(path)

    # -- deletion ---------------------------------------------------------------------------------------------------

    def remove(self, keys: list[UnitKey], desired: Mapping[UnitKey, object]) -> None:
        """Delete units. A model without a desired unit is removed in one step. Raises LocalDiskFault."""
        models = {key.model for key in desired}
        with _disk("removed models cannot be deleted from the cache"):
            for model in sorted({key.model for key in keys} - models):
                self._discard(self.models / model)
            for key in keys:
                if key.model in models:
                    if key.version is None:
                        self._remove_model_files(key, keep=set())
                    else:
                        self._discard(self._unit_folder(key))
        for key in keys:
            self._state.pop(key, None)
        self._write_state()

    def _discard(self, path: Path) -> None:
        trash = self._staging / f"trash-{path.parent.name}-{path.name}"
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _remove_model_files(self, key: UnitKey, keep: set[str]) -> None:
        folder = self._unit_folder(key)
        for parent, folders, names in os.walk(folder, topdown=True):
            if Path(parent) == folder:
                folders[:] = [name for name in folders if parse_version(name) is None]
            for name in names:
                path = Path(parent) / name
                if path.relative_to(folder).as_posix() not in keep:
                    path.unlink(missing_ok=True)
        for parent, _, _ in os.walk(folder, topdown=False):
            path = Path(parent)
            is_version = parse_version(path.relative_to(folder).parts[0]) is not None if path != folder else True
            if not is_version and not any(path.iterdir()):
                path.rmdir()

    def clean(self, desired: Mapping[UnitKey, Mapping[str, RemoteFile]]) -> None:
        """Delete unused files in staging, and store that the copy is complete. Raises LocalDiskFault."""
        kept = {self._staged(key, name, file).name for key, files in desired.items() for name, file in files.items()}
        with _disk(f"'{self._staging}' cannot be cleaned up"):
            for path in self._staging.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name.removesuffix(".part") not in kept:
                    path.unlink(missing_ok=True)
        if not self.is_warm:
            self.is_warm = True
            self._write_state()

    # -- state.json -----------------------------------------------------------------------------------------

    def _read_state(self) -> None:
        """Read state.json. If it is missing or damaged, everything is downloaded again."""
        try:
            document = json.loads(self._state_path.read_bytes())
            self._state = {
                UnitKey(model, int(version) if version else None): {
                    str(name): (int(size), str(stamp), int(time_ns)) for name, (size, stamp, time_ns) in files.items()
                }
                for model, versions in document["units"].items()
                for version, files in versions.items()
            }
            self.is_warm = bool(document["is_complete"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._state = {}
            self.is_warm = False

    def _write_state(self) -> None:
        units: dict[str, dict[str, Any]] = {}
        for key, files in self._state.items():
            units.setdefault(key.model, {})["" if key.version is None else str(key.version)] = files
        with _disk(f"'{self._state_path}' cannot be written"):
            replace_file(self._state_path, json.dumps({"units": units, "is_complete": self.is_warm}).encode())


@contextmanager
def _disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalDiskFault(f"{what}: {error.strerror or error}") from error


def exchange(first: Path, second: Path) -> None:
    """Swap two folders in one step. Without renameat2, in three steps; the second folder is absent for a moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is not None:
        if swap(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NO_EXCHANGE:
            raise OSError(number, os.strerror(number), str(second))
    aside = first.with_name(first.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(second, aside)
    os.rename(first, second)
    os.rename(aside, first)
