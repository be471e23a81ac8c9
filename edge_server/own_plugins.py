"""List of the plugins in the folder `plugins/`."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any


@functools.cache
def plugin_objects() -> tuple[Any, ...]:
    """Return the object PLUGIN, an `edge_server.plugin.Plugin`, of each folder in `plugins/`, by name.

    Parts below `plugin` ask here. The entry modules are found by their place, so that no part names a plugin.
    """
    folder = Path(__file__).parent / "plugins"
    names = sorted(path.parent.name for path in folder.glob("*/plugin.py"))
    return tuple(importlib.import_module(f"edge_server.plugins.{name}.plugin").PLUGIN for name in names)
