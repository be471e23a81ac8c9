"""Command line of a program of this package that runs in a process of its own."""

from __future__ import annotations

import os
import sys


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m MODULE` does, with the import path of this process.

    `-m` puts the current folder before all others, and would run a numpy.py that lies beside a downloaded model.
    """
    paths = [path or os.getcwd() for path in sys.path]
    run = f"run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths}; from runpy import run_module; {run}", *arguments]
