"""Store of the model versions that operators chose to keep serving, in memory or, if the server has a state directory,
in a file there."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from edge_server.errors import ServingFault
from edge_server.repository.disk.replace_file import replace_file
from edge_server.repository.disk.scan import MAX_VERSION, is_model_name

log = logging.getLogger(__name__)

FILE_NAME = "pins.json"


class VersionPins:
    """Pinned version of each model. Thread-safe. `folder` None keeps them in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        """Read the stored pins. A damaged file is ignored with a warning, and replaced by the next pin.

        Raises ServingFault if the folder cannot be created.
        """
        self._path = None if folder is None else folder / FILE_NAME
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        if folder is None or self._path is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServingFault(f"the state directory '{folder}' cannot be created: {error.strerror}") from None
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            # The models can serve without it, on a file system that became read-only too.
            log.warning(
                "the state directory '%s' cannot be written: %s. Rollbacks fail, and digests and measured times are "
                "lost at a restart; let the server's user write there", folder, error.strerror,
            )  # fmt: skip
        for scratch in folder.glob(f".{FILE_NAME}.*"):
            # From a server that was killed during a write.
            with contextlib.suppress(OSError):
                scratch.unlink()
        self._versions = _read(self._path)

    @property
    def is_durable(self) -> bool:
        return self._path is not None

    def get(self, name: str) -> int | None:
        return self._versions.get(name)

    def all(self) -> dict[str, int]:
        return dict(self._versions)

    def put(self, name: str, version: int | None) -> int | None:
        """Pin a model, or unpin it with None. Return the version it was pinned to before.

        The file is written first. If that fails, nothing changes. Raises ServingFault.
        """
        with self._lock:
            versions = dict(self._versions)
            before = versions.pop(name, None)
            if version is not None:
                versions[name] = version
            if self._path is not None and versions != self._versions:
                _write(self._path, versions)
            self._versions = versions
        return before


def _read(path: Path) -> dict[str, int]:
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("no version is pinned: '%s' cannot be read: %s", path, error)
        return {}


def _checked(content: object) -> dict[str, int]:
    pins = content.get("pins") if isinstance(content, dict) else None
    if not isinstance(pins, dict):
        raise ValueError("expected an object with the member 'pins'")
    for name, version in pins.items():
        if not is_model_name(name) or type(version) is not int or not 0 <= version <= MAX_VERSION:
            raise ValueError(f"expected model names and versions in 'pins', found {name[:80]!r}: {str(version)[:80]}")
    return pins


def _write(path: Path, versions: Mapping[str, int]) -> None:
    text = json.dumps({"pins": dict(sorted(versions.items()))}, indent=1) + "\n"
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ServingFault(f"the pin cannot be kept in '{path}': {error.strerror}") from None
