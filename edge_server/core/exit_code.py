"""The exit codes of `edge-server`, in one place: scripts and service managers decide by them whether to try again."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """64 and 78 are those of sysexits.h, which systemd names in its status lines; 79 is the first above them.

    `systemd/edge-server.service` names those of `NO_RESTART_CODES` as RestartPreventExitStatus; all others but 0 restart.
    """

    OK = 0
    FAILED = 1
    """It ran, and what was asked for failed: requests that did not end, models that do not load."""
    CANNOT_START = 2
    """Something outside keeps it from starting: a port is taken, a repository is not there (yet). argparse's too."""
    USAGE = 64
    """There is no such command."""
    CONFIG = 78
    """A flag, a variable or the configuration file is wrong: only a change of it helps."""
    GPU_LOST = 79
    """A GPU fell off the bus or needs a reset, and its models could not be moved: a new process may find it again."""


NO_RESTART_CODES = (ExitCode.USAGE, ExitCode.CONFIG)
"""What a restart without a change cannot heal."""
