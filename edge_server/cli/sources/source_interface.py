"""Interface of picture sources, and their shared code."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import InvalidRequest
from edge_server.vision import decode

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class SourceError(InvalidRequest):
    """A source cannot be opened, or what it holds cannot be read."""


@dataclass(frozen=True, slots=True)
class SourcePicture:
    """One picture: `pixels`, 8-bit BGR `(height, width, 3)`, or the `file` of one as it was found, in `format`."""

    pixels: npt.NDArray[np.uint8] | None = None
    file: bytes = b""
    format: str = ""
    name: str = ""


class Source(Protocol):
    """Pictures one after the other, read by one thread at a time.

    `title` says in words what it is. `fps` is its own rate, 0 where it has none. `length` is how many pictures it
    holds, as far as it can tell, 0 where it has no end. `is_live`: it gives each picture when it comes, and waiting
    before reading would only make it older.
    """

    title: str
    fps: float
    length: int
    is_live: bool

    def read(self) -> SourcePicture | None:
        """Return the next picture, None at the end. Raises SourceError where it breaks off."""

    def rewind(self) -> None:
        """Begin again. Raises SourceError where that cannot be done."""

    def close(self) -> None:
        """Give back what it holds. Nothing is read after it."""


def opencv() -> ModuleType:
    """Return the module cv2, silenced. Raises Unsupported, with what to install, where it is missing."""
    cv2 = decode.opencv()
    # What it would print by itself about a file it cannot open comes up as an error of ours, and lines of FFmpeg about
    # damaged pictures would tear the table. FFmpeg's level is taken from the environment alone; -8 is quiet.
    os.putenv("OPENCV_FFMPEG_LOGLEVEL", "-8")
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2
