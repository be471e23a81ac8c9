"""First opening of a new model file in a child process, so that a file that crashes its runtime does not end the
server."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from edge_server.errors import LoadError
from edge_server.repository.choice.runtime_times import RuntimeTimes
from edge_server.repository.model_config.pbtxt import ConfigMessage, write_json

log = logging.getLogger(__name__)

MODULE = "edge_server.repository.choice.first_opening_main"

TIMEOUT_S = 600.0
"""A file that takes longer is opened without it: a process that hangs must not hold up the other models for ever."""


class FirstOpenings:
    """Opens files that `known` does not hold in child processes, one at a time. Thread-safe.

    `settings` are the server's for each backend.
    """

    def __init__(self, known: RuntimeTimes, settings: Mapping[str, Mapping[str, str]]) -> None:
        self._known = known
        self._settings = settings
        self._lock = threading.Lock()

    def check(self, config: ConfigMessage, model_dir: Path, version: int, path: Path, backend: str) -> None:
        """Open the file `path` of a version with a backend in a child process, unless that was done before.

        *Blocking* for as long as that takes, about a second for a small model. Raises LoadError if it ends the process.
        Other errors are left to the caller's own opening.
        """
        if self._is_known(path, backend):
            return
        with self._lock:
            if self._is_known(path, backend):  # the thread that had the lock has opened the same file
                return
            stated = type(config)()
            stated.CopyFrom(config)
            stated.backend, stated.platform = backend, ""
            stated.default_model_filename = path.relative_to(model_dir / str(version)).as_posix()
            job = {
                "root": str(model_dir.parent), "model": model_dir.name, "version": version,
                "config_json": write_json(stated), "parent": os.getpid(),
                "settings": {name: dict(values) for name, values in self._settings.items()},
            }  # fmt: skip
            if end := _open_in_child(job):
                raise LoadError(
                    f"model '{model_dir.name}' version {version}, file '{path.name}': {backend} ends the "
                    f"process that opens it: a child process {end}"
                )
            try:
                self._known.put_opened(path, backend)
            except OSError as error:
                log.debug("'%s' is not remembered: %s", path, error)

    def _is_known(self, path: Path, backend: str) -> bool:
        try:
            return self._known.has_opened(path, backend)
        except OSError:
            return True  # the opening reports it


def _open_in_child(job: Mapping[str, object]) -> str:
    """Return how the process ended that opened a model, "" if it was not ended by that."""
    # Here, because a server whose files are all known, or that has none, starts without it.
    from edge_server.backends.isolation.json_child_process import JsonProcess, ReceiveTimeout

    try:
        child = JsonProcess(MODULE)
    except OSError as error:
        log.warning("model '%s' is not opened in a process of its own first: %s", job["model"], error.strerror)
        return ""
    try:
        child.send(job)
        if child.receive(TIMEOUT_S) is not None:
            return ""
        child.join()
        return child.exit_description()
    except ReceiveTimeout:
        log.warning("model '%s' is opened here: a process of its own needs over %.0f s", job["model"], TIMEOUT_S)
        return ""
    finally:
        child.kill()
