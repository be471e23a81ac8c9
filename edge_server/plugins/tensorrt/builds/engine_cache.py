"""Store of built engines on disk: verified engines, unfinished builds, and the lock that lets one process build an
engine.

    <folder>/engines/<digest>/engine.plan, engine.json      verified: written once, never changed
    <folder>/work/<digest>/...                              being built, or built and not yet verified
    <folder>/work/<digest>.lock                             there, and locked, while a process builds it, see `claim`
    <folder>/timing/<library>-<version>-<gpu>.cache         what TensorRT measured, for the next build

A verified engine comes into its place by one rename. `engine.json` holds the key's fields, the plan's hash, which is
checked before the plan is opened, and how the engine was verified. Engines are programs: the folder is this user's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from edge_server.file_stamp import FileStamp, file_stamp
from edge_server.plugins.tensorrt.builds.engine_key import EngineKey, describe_differences
from edge_server.plugins.tensorrt.builds.onnx_to_engine import PLAN
from edge_server.repository.disk.replace_file import replace_file

log = logging.getLogger(__name__)

ENGINE_FACTS = "engine.json"
BUILD_FACTS = "build.json"
LOCK = ".lock"

_ABANDONED_S = 7 * 86_400.0


class EngineCacheFault(Exception):
    """The folder cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class CachedEngine:
    """A verified engine. `facts` is the content of engine.json."""

    plan: Path
    facts: Mapping[str, object]


class EngineCache:
    """One folder, for any number of processes. Only the process with the claim may use the folder of a build below
    work/.

    `limit_bytes`: above it, the engines that were not used for longest are deleted; 0: none is. Thread-safe.
    """

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sound: dict[str, FileStamp] = {}

    def open(self) -> None:
        """Make the folder, and delete what a crash left. Raises EngineCacheFault."""
        try:
            for name in ("engines", "work", "timing"):
                (self._folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            probe = self._folder / "work" / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise EngineCacheFault(f"engines cannot be kept in '{self._folder}': {error.strerror}") from error
        for path in (self._folder / "work").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    self._tidy(path)

    def _tidy(self, path: Path) -> None:
        """Delete what a crash left of a build, including its lock file. Raises OSError."""
        taken = claim(self._lock_file(path.name.removesuffix(LOCK)))
        if taken is not None:
            with taken:
                if path.suffix != LOCK:
                    shutil.rmtree(path)

    def claim(self, key: EngineKey) -> BuildLock | None:
        """Return the right to build an engine, None while another process has it. Call `find` again when it is granted:
        the other may have built it meanwhile. Raises EngineCacheFault."""
        path = self._lock_file(key.digest)
        try:
            # The cache may have been deleted by hand.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return claim(path)
        except OSError as error:
            raise EngineCacheFault(f"'{path}' cannot be locked: {error.strerror}") from error

    def holder(self, key: EngineKey) -> str:
        """Return the process that may build an engine, as text."""
        return holder(self._lock_file(key.digest))

    def _lock_file(self, digest: str) -> Path:
        return self._folder / "work" / f"{digest}{LOCK}"

    def find(self, key: EngineKey) -> CachedEngine | None:
        """Return the verified engine with that key; a damaged one is deleted."""
        folder = self._folder / "engines" / key.digest
        plan = folder / PLAN
        facts = _read(folder / ENGINE_FACTS)
        if facts is None or not plan.is_file():
            return None
        try:
            is_sound = self._is_sound(key.digest, plan, str(facts.get("plan_sha256")))
        except OSError as error:
            # Deleted by another process since the check above; or a disk error, and the engine took long to build.
            log.warning("the engine '%s' cannot be read: %s", plan, error.strerror)
            return None
        if not is_sound:
            self.drop(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)
        return CachedEngine(plan, facts)

    def why_missing(self, key: EngineKey, model: str, version: int) -> str:
        """Return the differences to the nearest engine that was built for this version, "" if there is none."""
        nearest: tuple[str, ...] = ()
        for path in (self._folder / "engines").glob(f"*/{ENGINE_FACTS}"):
            facts = _read(path) or {}
            of_entry = facts.get("key")
            if facts.get("model") != model or facts.get("version") != version or not isinstance(of_entry, dict):
                continue
            differences = key.differences(of_entry)
            if differences and (not nearest or len(differences) < len(nearest)):
                nearest = differences
        return describe_differences(nearest)

    def work_folder(self, key: EngineKey) -> Path:
        """Return the folder in which the engine is built; needs the claim. Raises EngineCacheFault."""
        folder = self._folder / "work" / key.digest
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.utime(folder)
        except OSError as error:
            raise EngineCacheFault(f"engines cannot be built in '{folder}': {error.strerror}") from error
        return folder

    def built(self, key: EngineKey) -> Mapping[str, object] | None:
        """Return the facts of an engine that was built but not verified, None if there is none."""
        folder = self._folder / "work" / key.digest
        facts = _read(folder / BUILD_FACTS)
        plan = folder / PLAN
        try:
            is_whole = facts is not None and plan.is_file() and _sha256(plan) == facts.get("plan_sha256")
        except OSError:
            return None
        return facts if is_whole else None

    def note_built(self, key: EngineKey, facts: Mapping[str, object]) -> None:
        """Record that the plan in the work folder is complete. Raises EngineCacheFault."""
        self._write(self._folder / "work" / key.digest / BUILD_FACTS, {**facts, "key": dict(key.fields)})

    def commit(self, key: EngineKey, facts: Mapping[str, object]) -> CachedEngine:
        """Move a verified engine into its place; needs the claim. Raises EngineCacheFault."""
        work, place = self._folder / "work" / key.digest, self._folder / "engines" / key.digest
        self._write(work / ENGINE_FACTS, {**facts, "key": dict(key.fields)})
        (work / BUILD_FACTS).unlink(missing_ok=True)
        try:
            with self._lock:
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if place.exists():
                    shutil.rmtree(place)
                for path in work.iterdir():
                    if path.name not in (PLAN, ENGINE_FACTS):
                        path.unlink()
                os.replace(work, place)
                self._sound.pop(key.digest, None)
        except OSError as error:
            raise EngineCacheFault(f"the engine cannot be put into '{place}': {error.strerror}") from error
        self._prune(key.digest)
        return CachedEngine(place / PLAN, facts)

    def drop(self, key: EngineKey) -> None:
        """Delete a verified engine. An engine that another process builds in its place stays."""
        with self._lock:
            self._sound.pop(key.digest, None)
            shutil.rmtree(self._folder / "engines" / key.digest, ignore_errors=True)

    def discard(self, key: EngineKey) -> None:
        """Delete an engine that was built and will not be verified again; needs the claim."""
        shutil.rmtree(self._folder / "work" / key.digest, ignore_errors=True)

    def timing_file(self, key: EngineKey) -> Path:
        """Return where measurements for this library, version and GPU are kept."""
        parts = [str(key.fields[name]) for name in ("library", "library_version", "device", "capability", "tpc_mask")]
        name = re.sub(r"[^A-Za-z0-9.]+", "_", "-".join(filter(None, parts)))
        return self._folder / "timing" / f"{name}.cache"

    def size(self) -> tuple[int, int]:
        """Return the number of verified engines, and their bytes."""
        sizes = [size for _, size, _ in self._entries()]
        return len(sizes), sum(sizes)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """Return, for each engine, its time of last use, its bytes, and its folder."""
        found: list[tuple[float, int, Path]] = []
        try:
            folders = list((self._folder / "engines").iterdir())
        except OSError:
            # The cache was deleted by hand: there are no engines, and the metrics page says so.
            return found
        for folder in folders:
            with contextlib.suppress(OSError):
                found.append((folder.stat().st_mtime, (folder / PLAN).stat().st_size, folder))
        return found

    def _prune(self, kept: str) -> None:
        if not self._limit_bytes:
            return
        with self._lock:
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            for _, size, folder in entries:
                if total <= self._limit_bytes:
                    break
                if folder.name != kept:
                    # An engine in use is in memory: its file is not needed until the next load.
                    shutil.rmtree(folder, ignore_errors=True)
                    total -= size

    def _is_sound(self, digest: str, plan: Path, expected: str) -> bool:
        """Return whether the plan has its verified hash. It is read once, and again only if the file changes."""
        mark = file_stamp(plan.stat())
        with self._lock:
            if self._sound.get(digest) == mark:
                return True
        if _sha256(plan) != expected:
            return False
        with self._lock:
            self._sound[digest] = mark
        return True

    def _write(self, path: Path, facts: Mapping[str, object]) -> None:
        try:
            replace_file(path, json.dumps(facts, indent=1).encode())
        except OSError as error:
            raise EngineCacheFault(f"'{path}' cannot be written: {error.strerror}") from error


def _read(path: Path) -> dict[str, object] | None:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _sha256(path: Path) -> str:
    """Return the hash of a file. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


log = logging.getLogger(__name__)

_NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
_MAX_HOLDER_BYTES = 300


class BuildLock:
    """The right to build one engine; without a guarantee on file systems without locks."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Let other processes build it. May be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        # Closing alone would leave the lock to a forked child that inherited the descriptor.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def __enter__(self) -> BuildLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(path: Path) -> BuildLock | None:
    """Return the lock of the file at `path`, None while another process, or another part of this one, has it. Returns
    at once. Raises OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return BuildLock(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("'%s' cannot be locked: another server may build the same engine: %s", path, error.strerror)
            return BuildLock(path, None)
        # Its holder released and deleted it after this process opened it, and before it was locked.
        os.close(descriptor)


def holder(path: Path) -> str:
    """Return the holder of the lock as text."""
    try:
        text = path.read_bytes()[:_MAX_HOLDER_BYTES].decode(errors="replace")
    except OSError:
        text = ""
    return text if text and text.isprintable() else "another process"


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
