"""List of the plugins in the folder `plugins/`, and the formats of model files that they declare."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, NamedTuple


class ModelFormat(NamedTuple):
    """Format of model files, by the well-known name of the file or folder in a version folder."""

    file_name: str
    backends: tuple[str, ...]
    """Those that read it, the preferred one first. Backends of several declarations of one name are added up."""
    rank: int = 0
    """Of several well-known files in a folder the one of the highest rank decides, of equal ones the core's."""
    beside: str = ""
    """Name of the model's file if this file is not the model but lies beside it: its presence names the backend."""
    ending: str = ""
    """Ending of other names of the file: the only file with it counts as the well-known one."""
    other_suffixes: tuple[str, ...] = ()
    """Suffixes that exporters write instead of the well-known name's."""
    writer: str = ""
    """Program that writes such files, if other files have this suffix too."""
    holds_code: bool = False
    """Whether opening or running the model runs code of its author, or operators that read and write any file."""
    platform: str = ""
    """Triton's platform, which a configuration for the first backend gets."""
    is_timed: bool = False
    """Whether measured times choose among the backends."""
    timing: str = ""
    """"module:function" that returns for a version folder and the parameters of its configuration why times do not
    choose ("" if they do), and how many sequences they are measured with. Empty: they choose, for a single run."""


@functools.cache
def plugin_objects() -> tuple[Any, ...]:
    """Return the object PLUGIN, an `edge_server.plugin.Plugin`, of each folder in `plugins/`, by name.

    Parts below `plugin` ask here. The entry modules are found by their place, so that no part names a plugin.
    """
    folder = Path(__file__).parent / "plugins"
    names = sorted(path.parent.name for path in folder.glob("*/plugin.py"))
    return tuple(importlib.import_module(f"edge_server.plugins.{name}.plugin").PLUGIN for name in names)
