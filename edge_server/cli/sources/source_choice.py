"""Choice of the picture source for a command-line argument."""

from __future__ import annotations

import re
from pathlib import Path

from edge_server.cli.sources.demo import Demo
from edge_server.cli.sources.folder import PictureFolder
from edge_server.cli.sources.pattern import DEFAULT_SIZE, Pattern
from edge_server.cli.sources.source_interface import Source, SourceError
from edge_server.cli.sources.video import VideoCamera, VideoFile


def open_source(text: str, *, fps: float = 0.0, size: tuple[int, int] | None = None) -> Source:
    """Open "demo", "pattern", a folder of pictures, a camera such as /dev/video0, or a video file.

    `fps` and `size` are requested from a camera; the pattern uses `size` too, as `(width, height)`. Raises SourceError
    for any other text, and Unsupported if OpenCV is needed and missing.
    """
    if text == "pattern":
        return Pattern(size or DEFAULT_SIZE)
    if text == "demo" and size is None:
        return Demo()
    path = Path(text)
    if re.fullmatch(r"/dev/.+", text):
        return VideoCamera(path, fps, size)
    if size is not None:
        raise SourceError(f"--size is for 'pattern' and cameras; the pictures of {text} have a fixed size")
    if path.is_dir():
        return PictureFolder(path)
    if not path.exists():
        raise SourceError(
            f"{text}: expected a video file, a folder of pictures, /dev/videoN, 'demo' or 'pattern'; no such file"
        )
    return VideoFile(path)
