"""Writer of the chosen configuration to `configs/NAME.pbtxt`, for `--model-config-name=NAME`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from edge_server.errors import AlreadyExists, InvalidRequest, ServingFault
from edge_server.repository.pbtxt import ConfigMessage, parse_text

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def place_for(model_dir: Path, name: str, *, may_overwrite: bool) -> Path:
    """Return the file that a variant goes to, found to be writable. Raises InvalidRequest for a name that is none,
    AlreadyExists for one that is taken, ServingFault where nothing can be written."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"--write: expected letters, digits, '_', '.' and '-', given '{name[:200]}'")
    path = model_dir / "configs" / f"{name}.pbtxt"
    if path.exists() and not may_overwrite:
        raise AlreadyExists(f"'{path}' is there already; --overwrite replaces it")
    folder = path.parent if path.parent.is_dir() else model_dir
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServingFault(f"'{path}' cannot be written: no permission to write in '{folder}'")
    return path


def write(path: Path, config: ConfigMessage, model: str, remarks: Sequence[str]) -> None:
    """Write the configuration, whole or not at all, below the remarks. Raises ServingFault."""
    text = "".join(f"# {' '.join(line.split())}\n" for line in remarks) + "\n" + str(config)
    if parse_text(text.encode(), model, path.name) != config:
        raise ServingFault(f"model '{model}': the configuration does not survive being written as text")
    # Hidden: a server that watches the repository passes it over.
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise ServingFault(f"'{path}' cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # it is in its place, or was never made
            draft.unlink()
