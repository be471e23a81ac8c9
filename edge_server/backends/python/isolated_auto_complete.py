"""Call of `auto_complete_config` in a temporary process, for isolated models."""

from __future__ import annotations

import logging

from edge_server.backends.base import ModelFile
from edge_server.backends.python.child_process import ModelChildProcess
from edge_server.backends.runtime_library import file_title
from edge_server.errors import LoadError


def completed_in_process(file: ModelFile, config_json: str) -> str | None:
    """Ask a model for its configuration. Raises LoadError, also for what the model raises."""
    child = ModelChildProcess(file)
    try:
        child.send(("complete", file, config_json))
        while True:
            message, _ = child.channel.receive()
            if message is None:
                continue
            kind, *rest = message
            if kind == "failed":
                raise rest[0]
            if kind == "completed":
                text: str | None = rest[0]
                return text
            if kind == "log":
                name, level, line = rest
                logging.getLogger(name).log(level, "%s", line)
    except (OSError, EOFError):
        raise LoadError(f"{file_title(file)}: its process {child.end()} in auto_complete_config") from None
    finally:
        child.channel.cut()
        child.end()
        child.close()
