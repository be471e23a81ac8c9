"""Digests of the files of served versions, by which operators compare servers, and a scan tells a touched file from a
changed one.

The digest of a version is the SHA-256 of the lines that sha256sum(1) prints for its files, sorted by path: all files of
the version's folder, and the model's files outside its versions. Left out are hidden files and the lists of
`edge-server sign`. docs/operations.md has the commands that print the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from edge_server.file_stamp import file_stamp
from edge_server.repository.disk.file_fingerprint import is_ignored
from edge_server.repository.disk.replace_file import replace_file
from edge_server.repository.disk.scan import ModelDirectory
from edge_server.repository.trust.checksum_file import FILE_NAME, SIGNATURE_NAME

log = logging.getLogger(__name__)

CACHE_NAME = "digests.json"
MAX_CACHED_FILES = 10_000

_CHUNK_BYTES = 1 << 20
_UNKNOWN = ("", 0, "")
_LOWEST_PRIORITY = 19
"""Nice value: serving goes first."""


class ContentDigests:
    """Digests of served versions, computed by a thread of the lowest priority. Thread-safe.

    `find(name)` scans one model's folder; None if there is none. `state_dir` keeps the digests of files over restarts,
    by size, change time and inode; None: in memory only.
    """

    def __init__(self, find: Callable[[str], ModelDirectory | None], state_dir: Path | None = None) -> None:
        self._find = find
        self._cache_path = None if state_dir is None else state_dir / CACHE_NAME
        self._files: dict[str, str] | None = None
        """Stamp of a file (device, inode, size, times) -> SHA-256 of its content. None until it is read."""
        self._digests: dict[tuple[str, int], tuple[str, int, str]] = {}
        """Model and version -> fingerprint and change time of the files, and digest."""
        self._reading = threading.Lock()
        self._waiting: dict[tuple[str, int], None] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def compute(self, name: str, version: int) -> None:
        """Compute the digest of a version that was loaded, if its files have changed. Returns at once."""
        with self._lock:
            if self._is_closed:
                return
            self._waiting[name, version] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="content_digests", daemon=True)
                self._thread.start()

    def get(self, name: str, version: int, fingerprint: str) -> str:
        """Return "sha256:..." for a loaded version with this fingerprint; "" if it is not computed yet, or if the
        version was loaded with a configuration or files of a load request."""
        found, _, digest = self._digests.get((name, version), _UNKNOWN)
        # Behind the fingerprint of the files stands a mark of a renewal ("+") or of an ensemble's members; a "." begins
        # that of a configuration in place of the file's, a "~" that of other content.
        is_of_files = bool(found) and fingerprint.startswith(found) and fingerprint[len(found) :][:1] not in (".", "~")
        return digest if is_of_files else ""

    def has_changed(self, model: ModelDirectory, version: int, since_ns: int) -> bool:
        """Return whether the files of a version differ from those that it was loaded from, which had the change time
        `since_ns`. Reads files with a new change time on the calling thread. True if the former content is not known:
        nothing was loaded from it, or its digest is not computed yet."""
        fingerprint = model.fingerprint_of(version)
        found = self._digests.get((model.name, version), _UNKNOWN)
        if found[:2] != (fingerprint, since_ns):
            return True
        try:
            digest = self._digest(model.path, version)
        except OSError:
            return True
        if digest != found[2]:
            return True
        self._digests[model.name, version] = fingerprint, model.changed_ns_of(version), digest
        return False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to compute."""
        with self._lock:
            return self._thread is None

    def close(self) -> None:
        """Stop after the file that is being read."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._lock:
                if not self._waiting:
                    # An idle server keeps no thread for this.
                    self._thread = None
                    return
                name, version = next(iter(self._waiting))
                del self._waiting[name, version]
            try:
                self._compute(name, version)
            except OSError as error:
                # The files are being exchanged: the next load begins again.
                log.debug("model '%s': its files cannot be read for a digest: %s", name, error)

    def _compute(self, name: str, version: int) -> None:
        before = self._find_files(name, version)
        if before is None or self._digests.get((name, version), _UNKNOWN)[:2] == before[1:]:
            return
        digest = self._digest(before[0], version)
        if not self._is_closed and self._find_files(name, version) == before:
            self._digests[name, version] = *before[1:], digest

    def _find_files(self, name: str, version: int) -> tuple[Path, str, int] | None:
        """Return the model's folder, and fingerprint and change time of the version; None if it is not there any
        more."""
        model = self._find(name)
        try:
            return None if model is None else (model.path, model.fingerprint_of(version), model.changed_ns_of(version))
        except KeyError:
            return None

    def _digest(self, folder: Path, version: int) -> str:
        with self._reading:
            return f"sha256:{self._digest_of_files(folder, version)}"

    def _digest_of_files(self, folder: Path, version: int) -> str:
        whole = hashlib.sha256()
        is_new = False
        if self._files is None:
            self._files = _read_cache(self._cache_path)
        for path in _files_of(folder, version):
            stamp = ".".join(map(str, file_stamp(path.stat())))
            digest = self._files.get(stamp)
            if digest is None:
                digest = self._read(path)
                self._files[stamp], is_new = digest, True
            whole.update(f"{digest}  ".encode() + os.fsencode(path.relative_to(folder)) + b"\n")
        while len(self._files) > MAX_CACHED_FILES:
            del self._files[next(iter(self._files))]
        if is_new and self._cache_path is not None and not self._is_closed:
            _write_cache(self._cache_path, self._files)
        return whole.hexdigest()

    def _read(self, path: Path) -> str:
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while not self._is_closed and (chunk := file.read(_CHUNK_BYTES)):
                digest.update(chunk)
        return digest.hexdigest()


def _files_of(folder: Path, version: int) -> Iterator[Path]:
    """Yield the files of a version and those outside the versions, sorted by their path's bytes."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        if Path(place) == folder:
            folders[:] = [name for name in folders if not name.isdecimal() or name == str(version)]
        folders[:] = [name for name in folders if not is_ignored(name)]
        found += [
            Path(place, name) for name in names if not is_ignored(name) and name not in (FILE_NAME, SIGNATURE_NAME)
        ]
    yield from sorted(found, key=lambda path: os.fsencode(path.relative_to(folder)))


def _read_cache(path: Path | None) -> dict[str, str]:
    try:
        if path is None:
            return {}
        content = json.loads(path.read_text())["files"]
        return {str(stamp): str(digest) for stamp, digest in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("'%s' is not used: %s; the digests are computed again", path, error)
        return {}


def _write_cache(path: Path, files: Mapping[str, str]) -> None:
    """Keep the digests. It is only a cache: what a power cut loses is computed again."""
    try:
        replace_file(path, json.dumps({"files": files}).encode(), is_durable=False)
    except OSError as error:
        log.warning("digests cannot be kept in '%s': %s", path, error.strerror)
