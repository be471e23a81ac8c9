"""Parsers of a backend's options in a model's `parameters`: whole numbers, switches, `isolation` and the priority of
the process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from edge_server.errors import BadModelConfig, LoadError


def whole_number(model: str, options: Mapping[str, str], key: str, default: int, least: int = 0) -> int:
    """Return an integer option, `default` if it is unset. Raises LoadError unless it is a number >= `least`."""
    if key not in options:
        return default
    text = options[key].strip()
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise LoadError(f"model '{model}': parameter {key} must be a whole number from {least}, got '{text[:80]}'")
    return value


def yes_or_no(model: str, options: Mapping[str, str], key: str, default: bool) -> bool:
    """Return a switch: 1/0, true/false, yes/no, on/off in any case. Raises LoadError for other words."""
    if key not in options:
        return default
    text = options[key].strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise LoadError(f"model '{model}': parameter {key} must be yes or no, got '{text[:80]}'")


def set_niceness(model: str, options: Mapping[str, str], default: int) -> None:
    """Lower the priority of this process by the parameter `niceness`. Raises LoadError for a value out of range."""
    niceness = whole_number(model, options, "niceness", default, 0)
    if niceness > 19:
        raise LoadError(f"model '{model}': parameter niceness: expected 0 to 19, got {niceness}")
    os.nice(niceness)


def is_isolated(model: str, parameters: Mapping[str, str]) -> bool:
    """Return whether the parameter `isolation` asks for child processes. Raises BadModelConfig for an unknown value."""
    word = parameters.get("isolation", "none").strip().lower()
    if word not in ("none", "process"):
        raise BadModelConfig(f"model '{model}': parameter isolation must be none or process, got '{word[:80]}'")
    return word == "process"
