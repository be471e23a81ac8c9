"""Writer of the annotated pictures that the server returns: a video, or one JPEG file per answered frame."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.sources.source_interface import opencv
from edge_server.protocol.frame_messages import Buffer

VIDEO_ENDINGS = (".mp4", ".m4v", ".mov", ".avi", ".mkv")
_WAITING = 8


class OutputError(InvalidRequest):
    """The output cannot be written."""


class AnnotatedWriter(Protocol):
    """Writes the annotated JPEG pictures of one stream, in order."""

    def write(self, seq: int, jpeg: Buffer) -> None:
        """Write one picture. Raises OutputError."""

    def close(self) -> None:
        """Finish the output. Raises OutputError."""


class JpegFiles:
    """Writes one file per frame, named by its number, with the bytes from the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_empty = not any(folder.iterdir())
        except OSError as error:
            raise OutputError(f"{folder}: cannot be written to: {error.strerror}") from error
        if not is_empty:
            raise OutputError(f"{folder}: expected a new or empty folder, because nothing is overwritten")

    def write(self, seq: int, jpeg: Buffer) -> None:
        path = self._folder / f"{seq:08}.jpg"
        try:
            path.write_bytes(jpeg)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Do nothing: each file is closed after writing."""


class Video:
    """Writes a video of the answered frames at a constant rate. Dropped frames are missing."""

    def __init__(self, path: Path, fps: float) -> None:
        """Check the path. The file is created with the first picture, which sets the size. Raises OutputError."""
        self._path = path
        self._fps = fps
        self._size: tuple[int, int] | None = None
        self._writer: Any = None
        self._cv2 = opencv()
        if path.exists():
            raise OutputError(f"{path}: exists already, and nothing is overwritten")
        if not path.parent.is_dir():
            raise OutputError(f"{path}: there is no folder {path.parent}")

    def write(self, seq: int, jpeg: Buffer) -> None:
        pixels = self._cv2.imdecode(np.frombuffer(jpeg, np.uint8), self._cv2.IMREAD_COLOR)
        if pixels is None:
            raise OutputError(f"{self._path}: the annotated picture of frame {seq} does not decode")
        size = (int(pixels.shape[1]), int(pixels.shape[0]))
        if self._writer is None:
            self._open(size)
        if size != self._size:
            raise OutputError(
                f"{self._path}: expected pictures of {self._size}, as the first one, frame {seq} is {size}; "
                "name a folder as --output for pictures of several sizes"
            )
        self._writer.write(pixels)

    def _open(self, size: tuple[int, int]) -> None:
        code = "MJPG" if self._path.suffix.lower() == ".avi" else "mp4v"
        self._writer = self._cv2.VideoWriter(str(self._path), self._cv2.VideoWriter_fourcc(*code), self._fps, size)
        if not self._writer.isOpened():
            raise OutputError(f"{self._path}: OpenCV cannot write a video of {size[0]}x{size[1]} there")
        self._size = size

    def close(self) -> None:
        if self._writer is not None:
            self._writer.release()


def open_writer(path: Path, fps: float, number: int, count: int) -> AnnotatedWriter:
    """Return the writer for stream `number` of `count`. With several streams, the number is added to the name.

    A name with the extension of a video gives a video, any other name a folder. Raises OutputError, and Unsupported if
    a video needs OpenCV and it is missing.
    """
    if count > 1:
        path = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return Video(path, fps) if path.suffix.lower() in VIDEO_ENDINGS else JpegFiles(path)


class WritingThread:
    """Writes pictures in a separate thread. If the disk is too slow, `put` blocks.

    After the first failure, nothing more is written; `error` holds it.
    """

    def __init__(self, writer: AnnotatedWriter) -> None:
        self._writer = writer
        self._queue: queue.Queue[tuple[int, Buffer] | None] = queue.Queue(_WAITING)
        self.written = 0
        self.error: OutputError | None = None
        self._thread = threading.Thread(target=self._write_queued, name="stream-output", daemon=True)
        self._thread.start()

    def put(self, seq: int, jpeg: Buffer) -> None:
        self._queue.put((seq, jpeg))

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._queue.put(None)
        self._thread.join()

    def _write_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            # After a failure, keep emptying the queue so that `put` does not block.
            if self.error is None:
                try:
                    self._writer.write(*item)
                    self.written += 1
                except OutputError as error:
                    self.error = error
        self._writer.close()
