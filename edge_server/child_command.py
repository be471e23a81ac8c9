"""Command line of a program of this package that runs in a process of its own."""

from __future__ import annotations

import os
import sys


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m MODULE` does, with the import path of this process.

    `-m` puts the current folder before all others, and would run a numpy.py that lies beside a downloaded model.
    Folders of packages are left out: cv2 adds its own for the time of its import, in which another thread may call
    this, and its `typing` would hide Python's.
    """
    paths = [path or os.getcwd() for path in sys.path]
    paths = [path for path in paths if not os.path.exists(os.path.join(path, "__init__.py"))]
    run = f"run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths}; from runpy import run_module; {run}", *arguments]
