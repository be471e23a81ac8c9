"""Reader of TOML files, with the standard library's parser or, below Python 3.11, with tomli."""

from __future__ import annotations

import sys
from typing import Any

from edge_server.config.setting import ConfigError


def read_toml(path: str, flag: str) -> dict[str, Any]:
    """Return the document of a file. Raises ConfigError, which names `flag`, if it cannot be read or is not TOML."""
    try:
        with open(path, "rb") as file:
            return parse_toml(file.read().decode())
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read '{path}': {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{flag}: '{path}' is not TOML: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the document of a text. Raises ValueError if it is not TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    document: dict[str, Any] = tomllib.loads(text)
    return document
