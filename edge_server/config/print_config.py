"""Text of `serve --print-config`: the settings as they are used, as a file that --config reads back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from edge_server.config.merge_settings import ServeArguments
from edge_server.config.setting_sources import BACKENDS


def describe(arguments: ServeArguments) -> str:
    """Return the effective settings as TOML, each with its origin as a comment. Secrets are masked."""
    lines: list[str] = []
    section = ""
    for setting in arguments.declared.settings:
        if setting.name == BACKENDS:
            continue
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"]
        table = arguments.config.plugin_tables.get(section) or getattr(arguments.config, section)
        value = getattr(table, setting.field)
        origin = arguments.origins.get(setting.name, "default")
        lines.append(f"{setting.field} = {toml_text(value, setting.kind.show)}  # {origin}")
    for backend, settings in sorted(arguments.config.backends.items()):
        name = f"backends.{_key(backend)}" if backend else "backends"
        lines += ["", f"[{name}]  # {arguments.origins[BACKENDS]}"]
        lines += [f"{_key(key)} = {toml_text(value)}" for key, value in sorted(settings.items())]
    return "\n".join(lines[1:]) + "\n"


def _key(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_-]+", word) else json.dumps(word, ensure_ascii=False)


def toml_text(value: object, show: Callable[[Any], object] | None = None) -> str:
    if type(value) is tuple:
        return f"[{', '.join(toml_text(item, show) for item in value)}]"
    if value is None:
        value = ""
    elif show is not None:
        value = show(value)
    return json.dumps(value, ensure_ascii=False)
