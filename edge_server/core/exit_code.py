"""Exit codes of `edge-server` and its commands, such as the one for a wrong configuration. Scripts and service managers
use them to decide whether to restart."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """64, 75 and 78 are codes of sysexits.h, which systemd shows by name. 79 is the first free code above them.

    `systemd/edge-server.service` lists NO_RESTART_CODES as RestartPreventExitStatus. systemd restarts the server after
    all other codes except 0.
    """

    OK = 0
    FAILED = 1
    """The command ran but its task failed: requests did not finish, models did not load."""
    CANNOT_START = 2
    """The server cannot start for an external cause: a port is in use, a repository does not exist (yet). argparse also
    exits with 2."""
    USAGE = 64
    """The command does not exist."""
    UNKNOWN = 75
    """The command cannot say yet whether all is well: ask again later (EX_TEMPFAIL)."""
    CONFIG = 78
    """A flag, an environment variable or the configuration file is wrong. A restart does not help."""
    GPU_LOST = 79
    """A GPU fell off the bus or needs a reset, and its models could not move. A new process may find the GPU again."""


NO_RESTART_CODES = (ExitCode.USAGE, ExitCode.CONFIG)
"""Codes after which a restart without a change cannot succeed."""
