"""Check that a file name from a configuration or a client does not lead out of the model's folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from edge_server.errors import BadModelConfig

MAX_PATH_CHARS = 1024
MAX_NAME_BYTES = 255
"""Longest name of a file or folder (NAME_MAX of Linux)."""


def check_relative(name: str, prefix: str) -> PurePosixPath:
    """Return `name` as a relative path that cannot leave the folder it is joined to. Checks the text only.

    `prefix` begins the error's sentence: "model 'm': default_model_filename". Raises BadModelConfig for an
    absolute path, "..", an empty one, control characters, backslashes, or a name of more than MAX_NAME_BYTES.
    """
    path = PurePosixPath(name)
    is_clean = all(char.isprintable() and char != "\\" for char in name)
    if not is_clean or not path.parts or path.is_absolute() or ".." in path.parts or len(name) > MAX_PATH_CHARS:
        raise BadModelConfig(f"{prefix}: expected a relative path inside the model's directory, given {name[:80]!r}")
    longest = max(len(os.fsencode(part)) for part in path.parts)
    if longest > MAX_NAME_BYTES:
        raise BadModelConfig(f"{prefix}: expected names of at most {MAX_NAME_BYTES} bytes, given one of {longest}")
    return path


def find_inside(folder: Path, name: str, prefix: str) -> Path:
    """Return the file `name` inside `folder`, links followed. Raises BadModelConfig if it is absent or outside."""
    relative = check_relative(name, prefix)
    root = folder.resolve()
    try:
        found = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        raise BadModelConfig(f"{prefix}: file '{name}' does not exist in '{folder}'") from None
    if not found.is_relative_to(root):
        raise BadModelConfig(f"{prefix}: '{name}' is a link to a file outside the model's directory")
    return found
