"""Choice of the class for a source of pictures, by its URL, its path, or the words `demo` and `pattern`."""

from __future__ import annotations

import re
from pathlib import Path

from edge_server.plugins.cameras.sources.folder import PictureFolder
from edge_server.plugins.cameras.sources.generated import DEFAULT_SIZE, Demo, Pattern
from edge_server.plugins.cameras.sources.local_camera import VideoCamera
from edge_server.plugins.cameras.sources.mjpeg import MjpegCamera
from edge_server.plugins.cameras.sources.rtsp import open_rtsp
from edge_server.plugins.cameras.sources.source_interface import Source, SourceError
from edge_server.plugins.cameras.sources.video_file import VideoFile


def open_source(
    text: str,
    *,
    fps: float = 0.0,
    size: tuple[int, int] | None = None,
    decoder: str = "auto",
    transport: str = "tcp",
    ca: str = "",
) -> Source:
    """Open "demo", "pattern", a folder of pictures, a camera such as /dev/video0, a video file, or a network camera.

    A network camera is rtsp:// or rtsps://, or http(s):// for Motion JPEG. `fps` and `size` are requested from a camera
    of this machine; the pattern uses `size` too, as `(width, height)`. `decoder`, `transport` and `ca` are
    those of `open_rtsp`.
    Raises SourceError for any other text and for a source that does not open, and Unsupported if a package is missing.
    """
    if transport != "tcp" and not text.startswith("rtsp://"):
        raise SourceError(f"--transport={transport} is for sources rtsp://")
    if ca and not text.startswith(("rtsps://", "https://")):
        raise SourceError("--ca is for sources rtsps:// and https://")
    if text == "pattern":
        return Pattern(size or DEFAULT_SIZE)
    if text == "demo" and size is None:
        return Demo()
    path = Path(text)
    if re.fullmatch(r"/dev/.+", text):
        return VideoCamera(path, fps, size)
    if size is not None:
        raise SourceError(f"--size is for 'pattern' and cameras of this machine; the pictures of {text} have one")
    if text.startswith(("rtsp://", "rtsps://")):
        return open_rtsp(text, decoder, transport, ca)
    if text.startswith(("http://", "https://")):
        return MjpegCamera(text, ca)
    if path.is_dir():
        return PictureFolder(path)
    if not path.exists():
        raise SourceError(
            f"{text}: expected rtsp://, http://, a video file, a folder of pictures, /dev/videoN, 'demo' or 'pattern'; "
            "no such file"
        )
    return VideoFile(path)
