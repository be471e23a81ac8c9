"""Source that sends the picture files of a folder unchanged; the server decodes them."""

from __future__ import annotations

import re
from pathlib import Path

from edge_server.plugins.cameras.sources.source_interface import SourceError, SourcePicture

FORMATS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png"}
"""File extension -> format in a CompressedImage."""


class PictureFolder:
    """The JPEG and PNG files of one folder, sorted by name. Digits in names are compared as numbers."""

    is_live = False
    fps = 0.0

    def __init__(self, path: Path) -> None:
        try:
            found = [item for item in path.iterdir() if item.suffix.lower() in FORMATS and item.is_file()]
        except OSError as error:
            raise SourceError(f"{path}: the folder cannot be read: {error.strerror}") from error
        if not found:
            raise SourceError(f"{path}: expected pictures ({', '.join(FORMATS)}), found none")
        self._paths = sorted(found, key=natural_order)
        self._next = 0
        self.length = len(found)
        self.title = f"{path} with {len(found)} picture{'s' if len(found) > 1 else ''}"

    def read(self) -> SourcePicture | None:
        if self._next == len(self._paths):
            return None
        path = self._paths[self._next]
        self._next += 1
        try:
            return SourcePicture(file=path.read_bytes(), format=FORMATS[path.suffix.lower()], name=path.name)
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}") from error

    def rewind(self) -> None:
        self._next = 0

    def close(self) -> None:
        """Do nothing."""


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key that orders frame2 before frame10."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(0, int(part), part) if index % 2 else (1, 0, part.lower()) for index, part in enumerate(parts)]
