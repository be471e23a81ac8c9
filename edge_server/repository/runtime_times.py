"""Store of measured times: how long one inference of a model file takes with each runtime, on this machine.

They choose the runtime for an ONNX or GGUF file whose configuration states neither `backend` nor `platform`. An entry
counts only for the same file content, the same processor and the same versions of the runtimes, and that of a language
model only for as many sequences at once. The server looks at the file `runtime_times.json` in the state folder at each
such load, so that commands can add to it.
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
from edge_server.repository.replace_file import replace_file

log = logging.getLogger(__name__)

FILE_NAME = "runtime_times.json"
MAX_FILE_BYTES = 1 << 20
MAX_ENTRIES = 500

MIN_RATIO = 1.2
"""A runtime replaces an earlier one of the fixed order only if it is 20 % faster."""

_DISTRIBUTIONS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "openvino_genai": ("openvino-genai",),
    "llama_cpp": ("xllamacpp",),
}
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
    language model that were continued together, 0 for another model.
    """

    digest: str
    size: int
    stamp: str
    processor: str
    day: str
    times: Mapping[str, tuple[str, float | None]]
    at_once: int = 0


class RuntimeTimes:
    """The store in one state folder. Thread-safe; several processes may use one folder."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME
        self._lock = threading.Lock()
        self._read_at: FileStamp | None = None
        self._entries: tuple[_Entry, ...] = ()
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
        """Return the order in which to try the backends for a file, by their measured times, and the reason.

        `at_once`: sequences that a language model continues together, 0 for another model. Returns None if no
        measurement is valid for the file. Only a file of a size that was measured is read.
        """
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
        others = tuple(name for name in order if name != best)
        return RuntimeChoice((best, *others), f"{ratio:.1f} times as fast as {first}, measured {entry.day}")

    def put(self, file: Path, times_ms: Mapping[str, float | None], at_once: int = 0) -> bool:
        """Store the milliseconds of one inference with each backend, None for one that cannot run the file.

        `at_once` as for `choose`. Returns whether it could be written; a warning says why not.
        """
        times = {name: (runtime_version(name), ms) for name, ms in times_ms.items()}
        try:
            found = file.stat()
            day = time.strftime("%Y-%m-%d")
            entry = _Entry(_digest(file), found.st_size, _stamp(found), processor(), day, times, at_once)
            replaced = entry.digest, entry.processor, at_once
            with self._lock:
                self._read()
                kept = [item for item in self._entries if (item.digest, item.processor, item.at_once) != replaced]
                self._entries = (entry, *kept)[:MAX_ENTRIES]
                _write(self._path, self._entries)
        except OSError as error:
            log.warning("the times of the runtimes for '%s' cannot be stored: %s", file, error)
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
        try:
            found = self._path.stat()
            if file_stamp(found) == self._read_at:
                return
            self._read_at, self._entries = file_stamp(found), ()
            if found.st_size > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self._entries = tuple(_entry(item) for item in content["measurements"][:MAX_ENTRIES])
        except FileNotFoundError:
            self._entries = ()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("'%s' is not used: %s; runtimes are chosen in the fixed order", self._path, error)


def runtime_version(backend: str) -> str:
    """Return the installed version of a backend's runtime, "" if it is not installed."""
    import importlib.metadata  # here, because it needs a megabyte that a server without measurements has no use for

    for name in _DISTRIBUTIONS.get(backend, (backend,)):
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


def _digest(file: Path) -> str:
    whole = hashlib.sha256()
    with open(file, "rb", buffering=0) as content:
        while chunk := content.read(_CHUNK_BYTES):
            whole.update(chunk)
    return whole.hexdigest()


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
    return _Entry(item["sha256"], size, str(item["stamp"]), str(item["processor"]), item["day"], times, at_once)


def _write(path: Path, entries: Sequence[_Entry]) -> None:
    """Keep the measurements. After a power cut they are repeated. Raises OSError."""
    measurements = [
        {
            "sha256": item.digest, "size": item.size, "stamp": item.stamp, "processor": item.processor,
            "day": item.day, "times": item.times, "at_once": item.at_once,
        }
        for item in entries
    ]  # fmt: skip
    replace_file(path, json.dumps({"measurements": measurements}, indent=1).encode(), is_durable=False)
