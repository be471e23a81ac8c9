"""Store of measurements: how long one inference of a model file takes with each runtime, on this machine, whether the
runtimes answer alike, and how the model does in other precisions.

They choose the runtime for an ONNX or GGUF file whose configuration states neither `backend` nor `platform`. An entry
counts only for the same file content, the same processor and the same versions of the runtimes, and that of a language
model only for as many sequences at once. The server looks at the file `runtime_times.json` at each such load, so that
commands can add to it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edge_server.core.model_spec import ModelFile
from edge_server.file_stamp import FileStamp, file_stamp
from edge_server.own_plugins import plugin_objects
from edge_server.repository.disk.replace_file import replace_file

log = logging.getLogger(__name__)

FILE_NAME = "runtime_times.json"
MAX_ENTRIES = 500

MIN_RATIO = 1.2
"""A runtime replaces an earlier one of the fixed order only if it is 20 % faster."""

_DISTRIBUTIONS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
}
"""Of the core's backends; see `Plugin.distributions`."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_CHUNK_BYTES = 1 << 20


class RuntimeChoice(NamedTuple):
    """Backends in the order in which they are tried, and the reason for the first one."""

    order: tuple[str, ...]
    reason: str


class _Entry(NamedTuple):
    """Times of one file. `times`: backend -> its version, and milliseconds, None if it could not run the file.

    `stamp` identifies the file without reading it: device, inode, size and change times. `at_once`: sequences of a
    language model that were continued together, 0 for another model. `disagreement`: how the answers of another
    runtime differ from those of the first of the fixed order, "" if they agree.
    """

    digest: str
    size: int
    stamp: str
    processor: str
    day: str
    times: Mapping[str, tuple[str, float | None]]
    at_once: int = 0
    disagreement: str = ""


class _Opened(NamedTuple):
    """A file that a process of a backend's runtime has opened before, and was not ended by it."""

    digest: str
    size: int
    stamp: str
    backend: str
    version: str


class _Precisions(NamedTuple):
    """How a file's model does in other precisions, as text for people."""

    digest: str
    size: int
    stamp: str
    processor: str
    note: str


class RuntimeTimes:
    """The store in one folder, which is made for the first entry. Thread-safe; several processes may use one folder.

    If the folder cannot be written, it keeps its entries in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._is_in_memory = False
        self._lock = threading.Lock()
        self._read_at: FileStamp | None = None
        self._entries: tuple[_Entry, ...] = ()
        self._opened: tuple[_Opened, ...] = ()
        self._precisions: tuple[_Precisions, ...] = ()
        self._unmeasured: dict[ModelFile, None] = {}

    @property
    def has_unmeasured(self) -> bool:
        return bool(self._unmeasured)

    def take_unmeasured(self) -> list[ModelFile]:
        """Return the files for which `choose` has found no measurement since the last call, without language models."""
        with self._lock:
            found, self._unmeasured = list(self._unmeasured), {}
            return found

    def choose(self, file: ModelFile, order: Sequence[str], at_once: int = 0) -> RuntimeChoice | None:
        """Return the order in which to try the backends for a file, and the reason; None if no measurement is valid for
        it. A faster one goes first only if it gave the same answers as the first of `order`. `at_once`: sequences that
        a language model continues together, else 0. Only a file of a size that was measured is read."""
        with self._lock:
            self._read()
            entry = self._find(file.path, order, at_once)
            if entry is None and not at_once and len(self._unmeasured) < MAX_ENTRIES:
                self._unmeasured[file] = None
        if entry is None:
            return None
        times = {name: ms for name in order if (ms := entry.times.get(name, ("", None))[1]) is not None}
        if not times:
            return RuntimeChoice(tuple(order), f"fixed order, as no trial worked on {entry.day}")
        first = next(name for name in order if name in times)
        best = min(times, key=lambda name: times[name])
        ratio = times[first] / times[best]
        if ratio < MIN_RATIO:
            return RuntimeChoice(tuple(order), f"fixed order, no other is 20 % faster, measured {entry.day}")
        if entry.disagreement:
            return RuntimeChoice(
                tuple(order), f"fixed order, though {best} is {ratio:.1f} times as fast: {entry.disagreement}"
            )
        others = tuple(name for name in order if name != best)
        return RuntimeChoice((best, *others), f"{ratio:.1f} times as fast as {first}, measured {entry.day}")

    def put(self, file: Path, times_ms: Mapping[str, float | None], at_once: int = 0, disagreement: str = "") -> bool:
        """Store the milliseconds of one inference with each backend, None for one that cannot run the file.

        `at_once` as for `choose`. `disagreement`: how their answers differ, "" if they agree. Returns whether
        it could be written; one warning says why not.
        """
        times = {name: (runtime_version(name), ms) for name, ms in times_ms.items()}
        try:
            found = file.stat()
            day = time.strftime("%Y-%m-%d")
            entry = _Entry(_digest(file), found.st_size, _stamp(found), processor(), day, times, at_once, disagreement)
        except OSError as error:
            log.warning("the times of the runtimes for '%s' cannot be kept: %s", file, error)
            return False
        replaced = entry.digest, entry.processor, at_once
        with self._lock:
            self._read()
            kept = [item for item in self._entries if (item.digest, item.processor, item.at_once) != replaced]
            self._entries = (entry, *kept)[:MAX_ENTRIES]
            return self._write_entries()

    def put_precisions(self, file: Path, note: str) -> bool:
        """Store how a file's model does in other precisions here. Returns as `put`."""
        try:
            found = file.stat()
            entry = _Precisions(_digest(file), found.st_size, _stamp(found), processor(), note)
        except OSError as error:
            log.warning("the trial of precisions for '%s' cannot be kept: %s", file, error)
            return False
        with self._lock:
            self._read()
            kept = [
                item for item in self._precisions if (item.digest, item.processor) != (entry.digest, entry.processor)
            ]
            self._precisions = (entry, *kept)[:MAX_ENTRIES]
            return self._write_entries()

    def precision_note(self, file: Path) -> str:
        """Return the note of `put_precisions` for a file on this processor, or "". Only a file of a size that was tried
        is read."""
        with self._lock:
            self._read()
            known = self._precisions
        try:
            found = file.stat()
            near = [item for item in known if (item.size, item.processor) == (found.st_size, processor())]
            if not near:
                return ""
            stamp = _stamp(found)
            digest = next((item.digest for item in near if item.stamp == stamp), "") or _digest(file)
        except OSError:
            return ""  # the load reports it
        return next((item.note for item in near if item.digest == digest), "")

    def has_opened(self, path: Path, backend: str) -> bool:
        """Return whether this version of a backend's runtime has opened a model's file or folder before. Raises
        OSError."""
        version = runtime_version(backend)
        with self._lock:
            self._read()
            known = [item for item in self._opened if (item.backend, item.version) == (backend, version)]
        files = _parts(path)
        stamp, size = _stamps(files)
        if any(item.stamp == stamp for item in known):
            return True
        return any(item.size == size for item in known) and _digest(*files) in {item.digest for item in known}

    def put_opened(self, path: Path, backend: str) -> None:
        """Store that a backend's runtime has opened a model's file or folder. Raises OSError."""
        files = _parts(path)
        entry = _Opened(_digest(*files), *_stamps(files)[::-1], backend, runtime_version(backend))
        with self._lock:
            self._read()
            kept = [item for item in self._opened if (item.digest, item.backend) != (entry.digest, backend)]
            self._opened = (entry, *kept)[:MAX_ENTRIES]
            self._write_entries()

    def _write_entries(self) -> bool:
        if self._is_in_memory:
            return False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, self._entries, self._opened, self._precisions)
        except OSError as error:
            self._is_in_memory = True
            log.warning("times of runtimes are kept in memory, as '%s' cannot be written: %s", self._path, error)
            return False
        return True

    def _find(self, file: Path, order: Sequence[str], at_once: int) -> _Entry | None:
        try:
            found = file.stat()
            known = (found.st_size, at_once, processor())
            near = [item for item in self._entries if (item.size, item.at_once, item.processor) == known]
            if not near:
                return None
            stamp = _stamp(found)
            entry = next((item for item in near if item.stamp == stamp), None)
            if entry is None:
                digest = _digest(file)
                entry = next((item for item in near if item.digest == digest), None)
        except OSError:
            return None  # the load reports it
        if entry is None:
            return None
        # A runtime that was installed, updated or removed since asks for a new measurement.
        measured = {name: entry.times.get(name, ("", None))[0] for name in order}
        return entry if measured == {name: runtime_version(name) for name in order} else None

    def _read(self) -> None:
        """Read the file if it has changed. A damaged one counts as empty."""
        if self._is_in_memory:
            return
        try:
            found = self._path.stat()
            if file_stamp(found) == self._read_at:
                return
            self._read_at, self._entries, self._opened, self._precisions = file_stamp(found), (), (), ()
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self._entries = tuple(_entry(item) for item in content["measurements"][:MAX_ENTRIES])
            self._opened = tuple(_opened(item) for item in content["opened"][:MAX_ENTRIES])
            self._precisions = tuple(_precisions(item) for item in content.get("precisions", [])[:MAX_ENTRIES])
        except (FileNotFoundError, NotADirectoryError):
            self._entries, self._opened, self._precisions = (), (), ()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # A file of an earlier server, for one.
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            log.warning("'%s' is not used: %s; runtimes are chosen in the fixed order", self._path, reason)


def runtime_version(backend: str) -> str:
    """Return the installed version of a backend's runtime, "" if it is not installed."""
    import importlib.metadata  # here, because it needs a megabyte that a server without measurements has no use for

    known: dict[str, Sequence[str]] = dict(_DISTRIBUTIONS)
    for plugin in plugin_objects():
        known |= plugin.distributions
    for name in known.get(backend, (backend,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@functools.cache
def processor() -> str:
    """Return the machine's processor or board, and the number of cores."""
    found = ""
    for path, pattern in (("/proc/device-tree/model", r"([^\0]+)"), ("/proc/cpuinfo", r"(?m)^model name\s*:\s*(.+)$")):
        try:
            match = re.search(pattern, Path(path).read_text(errors="replace"))
        except OSError:
            continue
        if match:
            found = match[1].strip()
            break
    return f"{os.uname().machine} {found} x{os.cpu_count()}"


def _digest(*files: Path) -> str:
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb", buffering=0) as content:
            while chunk := content.read(_CHUNK_BYTES):
                whole.update(chunk)
    return whole.hexdigest()


def _parts(path: Path) -> list[Path]:
    """Return the files of a model: those in a folder, or one file, and the weights beside an OpenVINO IR."""
    if path.is_dir():
        return sorted(item for item in path.rglob("*") if item.is_file())
    weights = path.with_suffix(".bin")
    return [path, weights] if path.suffix == ".xml" and weights.exists() else [path]


def _stamps(files: Sequence[Path]) -> tuple[str, int]:
    """Return a text that identifies files, made without reading them, and the sum of their sizes."""
    found = [file.stat() for file in files]
    return " ".join(map(_stamp, found)), sum(state.st_size for state in found)


def _stamp(found: os.stat_result) -> str:
    return ".".join(map(str, file_stamp(found)))


def _entry(item: Any) -> _Entry:
    """Return one entry of the file. Raises ValueError, KeyError, TypeError or AttributeError."""
    times = {}
    for name, (version, ms) in item["times"].items():
        if ms is not None and not 0 < float(ms) < 1e9:
            raise ValueError(f"expected milliseconds above 0, found {ms!r}")
        times[str(name)] = str(version), None if ms is None else float(ms)
    if _DIGEST.fullmatch(item["sha256"]) is None or _DAY.fullmatch(item["day"]) is None:
        raise ValueError("expected 'sha256' and a 'day' such as 2026-11-25")
    size, at_once = int(item["size"]), int(item.get("at_once", 0))
    stamp, made_on, disagreement = str(item["stamp"]), str(item["processor"]), str(item["disagreement"])
    return _Entry(item["sha256"], size, stamp, made_on, item["day"], times, at_once, disagreement)


def _opened(item: Any) -> _Opened:
    """Return one opened file of the store. Raises ValueError, KeyError or TypeError."""
    digest, stamp, backend, version = (str(item[key]) for key in ("digest", "stamp", "backend", "version"))
    return _Opened(digest, int(item["size"]), stamp, backend, version)


def _precisions(item: Any) -> _Precisions:
    """Return one entry of the file. Raises ValueError, KeyError or TypeError."""
    digest, stamp, made_on, note = (str(item[key]) for key in ("digest", "stamp", "processor", "note"))
    return _Precisions(digest, int(item["size"]), stamp, made_on, note)


def _write(path: Path, entries: Sequence[_Entry], opened: Sequence[_Opened], precisions: Sequence[_Precisions]) -> None:
    """Keep the measurements. After a power cut they are repeated. Raises OSError."""
    measurements = [
        {
            "sha256": item.digest, "size": item.size, "stamp": item.stamp, "processor": item.processor,
            "day": item.day, "times": item.times, "at_once": item.at_once, "disagreement": item.disagreement,
        }
        for item in entries
    ]  # fmt: skip
    document = {
        "measurements": measurements,
        "opened": [item._asdict() for item in opened],
        "precisions": [item._asdict() for item in precisions],
    }
    replace_file(path, json.dumps(document, indent=1).encode(), is_durable=False)
