"""Sink that writes pictures of detected objects into a folder, with a limit on its size.

One JPEG for each object that the model tracks. Without tracking: one for each class, from when an object of it appears
until none was seen for some seconds. A later picture replaces it if its score is better. Names begin with the time at
which the object appeared: 20260131T142501.250Z_SOURCE_LABEL_TRACK.jpg.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.sinks.sink_interface import Sink, SinkError, SinkMessage, write_failure_reason
from edge_server.plugins.vision.draw import annotated_jpeg
from edge_server.plugins.vision.perception_decoder import Perception
from edge_server.protocol.frame_messages import Detection, FrameResult

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ABSENT_S = 5.0
"""After this long without it, an object that appears is a new one."""

MIN_GAIN = 0.05
"""A picture is replaced only by one whose score is higher by this: scores of an object at rest vary a little."""

MAX_OBJECTS = 1024
"""Objects that are remembered; the one that was not seen for longest is forgotten first."""

_NAME = re.compile(r"[0-9]{8}T[0-9]{6}\.[0-9]{3}Z_[\w-]{1,200}\.jpg", re.ASCII)
_UNFINISHED = re.compile(r"\.[0-9]{8}T[0-9]{6}\.[0-9]{3}Z_[\w-]{1,200}\.jpg\.part", re.ASCII)


class _Candidate(NamedTuple):
    """An object of one result. `track` is 0 without tracking; `detection` is None for the class of a picture."""

    label: str
    track: int
    score: float
    detection: Detection | None


@dataclass(slots=True)
class _Object:
    """File and best score of an object, and when it was last seen, in nanoseconds since 1970."""

    file: str
    score: float = -math.inf
    seen_ns: int = 0


class SnapshotFolder(Sink):
    """Writes pictures into a folder, which is made if it is missing. At `max_bytes` the oldest ones are deleted.

    Only files with names as above are counted and deleted. `is_cropped`: only the object's box, instead of the whole
    frame with this box drawn in.
    """

    def __init__(self, path: str, max_bytes: int, *, is_cropped: bool) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._is_cropped = is_cropped
        self._sizes: dict[str, int] = {}
        self._names: list[str] = []
        """The files of the folder, the oldest first."""
        self._total = 0
        self._objects: dict[tuple[str, str, int], _Object] = {}
        """(Source, label, track) -> object, in the order in which they were last seen."""
        self._tracked: set[str] = set()
        """Sources whose objects have tracks: an object of them without one is not known well enough yet."""

    def open(self) -> None:
        try:
            self._path.mkdir(exist_ok=True)
            self._sizes = {}
            with os.scandir(self._path) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        self._sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
                    elif _UNFINISHED.fullmatch(entry.name):
                        (self._path / entry.name).unlink(missing_ok=True)
            self._names, self._total = sorted(self._sizes), sum(self._sizes.values())
            self._delete_oldest()
        except OSError as error:
            raise self._failure(error) from None

    def send(self, message: SinkMessage) -> bool:
        result = message.result
        if result is None:
            (self._tracked.add if message.is_tracked else self._tracked.discard)(message.source)
            return False
        if result.error_code:
            return False
        now_ns = result.times.received_unix_ns
        self._forget_absent(now_ns)
        is_written = False
        for candidate in self._candidates(message.source, result):
            # Without its label: the class of a tracked object may change.
            key = (message.source, "" if candidate.track else candidate.label, candidate.track)
            known = self._objects.pop(key, None) or _Object(_file_name(message.source, candidate, now_ns))
            known.seen_ns = now_ns
            self._objects[key] = known
            if candidate.score < known.score + MIN_GAIN or message.picture is None:
                continue
            if self._is_cropped and candidate.detection is not None:
                self._write(known.file, self._jpeg(message.picture, Perception(), candidate.detection))
            else:
                # Without other objects: two pictures of one frame must show which object each is of.
                marked = () if candidate.detection is None else (candidate.detection,)
                seen = Perception(result.classes, marked, result.mask, dense_map=result.dense_map)
                self._write(known.file, self._jpeg(message.picture, seen))
            known.score = candidate.score
            is_written = True
        return is_written

    def _candidates(self, source: str, result: FrameResult) -> Iterator[_Candidate]:
        """Yield the objects of a result, each once, with the best score."""
        if any(detection.track_id for detection in result.detections):
            self._tracked.add(source)
        is_tracked = source in self._tracked
        named = set()
        for one in sorted(result.detections, key=lambda detection: -detection.score):
            label = one.label or f"class{one.class_index}"
            name = one.track_id if is_tracked else label
            if name and name not in named:
                named.add(name)
                yield _Candidate(label, one.track_id, one.score, one)
        if result.classes and not result.detections:
            best = max(result.classes, key=lambda item: item.score)
            yield _Candidate(best.label or f"class{best.index}", 0, best.score, None)

    def _forget_absent(self, now_ns: int) -> None:
        while self._objects:
            key, oldest = next(iter(self._objects.items()))
            if len(self._objects) <= MAX_OBJECTS and now_ns - oldest.seen_ns < ABSENT_S * 1e9:
                break
            del self._objects[key]

    def _jpeg(
        self, picture: Callable[[], npt.NDArray[np.uint8]], seen: Perception, box: Detection | None = None
    ) -> bytes:
        """Return the frame with `seen` drawn in, or what is in the box."""
        try:
            pixels = picture()
            if box is not None:
                height, width = pixels.shape[:2]
                left, top = min(int(box.x_min), width - 1), min(int(box.y_min), height - 1)
                pixels = pixels[top : max(round(box.y_max), top + 1), left : max(round(box.x_max), left + 1)]
            return annotated_jpeg(pixels, seen)
        except InvalidRequest as error:
            raise SinkError(f"{self._path}: {error.message}") from None

    def _write(self, name: str, data: bytes) -> None:
        part = self._path / f".{name}.part"
        try:
            part.write_bytes(data)
            part.replace(self._path / name)
            if name not in self._sizes:
                bisect.insort(self._names, name)
            self._total += len(data) - self._sizes.get(name, 0)
            self._sizes[name] = len(data)
            self._delete_oldest()
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise self._failure(error) from None

    def _delete_oldest(self) -> None:
        while self._total > self._max_bytes:
            name = self._names.pop(0)
            self._total -= self._sizes.pop(name)
            (self._path / name).unlink(missing_ok=True)

    def _failure(self, error: OSError) -> SinkError:
        return SinkError(f"{self._path}: pictures cannot be written: {write_failure_reason(self._path, error)}")


def _file_name(source: str, candidate: _Candidate, now_ns: int) -> str:
    seconds, rest_ns = divmod(now_ns, 1_000_000_000)
    time = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y%m%dT%H%M%S")
    label = re.sub(r"[^\w-]", "-", candidate.label, flags=re.ASCII)[:64]
    parts = [re.sub(r"[^\w-]", "-", source), label, *([str(candidate.track)] if candidate.track else [])]
    return f"{time}.{rest_ns // 1_000_000:03}Z_{'_'.join(parts)}.jpg"
