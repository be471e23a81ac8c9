"""Writer of the files of `optimize`, `analyze` and `perf`: reports, and the best configuration of a model as
`configs/NAME.pbtxt`, for `--model-config-name=NAME`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from edge_server.errors import AlreadyExists, InvalidRequest, ServingFault
from edge_server.repository.disk.replace_file import replace_file
from edge_server.repository.model_config.pbtxt import ConfigMessage, parse_text

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def variant_path(model_dir: Path, name: str, *, may_overwrite: bool) -> Path:
    """Return the path of a configuration variant, after checking that it can be written.

    Raises InvalidRequest for an invalid name, AlreadyExists for an existing file, ServingFault without permission.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"--write: expected letters, digits, '_', '.' and '-', given '{name[:200]}'")
    path = model_dir / "configs" / f"{name}.pbtxt"
    if path.exists() and not may_overwrite:
        raise AlreadyExists(f"'{path}' exists already; --overwrite replaces it")
    folder = path.parent if path.parent.is_dir() else model_dir
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServingFault(f"'{path}' cannot be written: no permission to write in '{folder}'")
    return path


def write_variant(path: Path, config: ConfigMessage, model: str, remarks: Sequence[str] = ()) -> None:
    """Write the remarks and the configuration atomically. Raises ServingFault."""
    text = "".join(f"# {' '.join(line.split())}\n" for line in remarks) + "\n" * bool(remarks) + str(config)
    if parse_text(text.encode(), model, path.name) != config:
        raise ServingFault(f"model '{model}': the configuration does not survive being written as text")
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise ServingFault(f"'{path}' cannot be written: {error.strerror}") from error


def write_report(flag: str, path: Path, text: str) -> None:
    """Write a report to the file that a flag names. Raises InvalidRequest."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{flag} {path}: cannot be written: {error.strerror}") from None
