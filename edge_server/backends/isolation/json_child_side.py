"""Child-process side of the JSON-lines protocol of `JsonProcess`: reads the job from standard input, writes results,
and ends with its parent."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1
_MAX_OOM_SCORE = "1000"


def start_child() -> tuple[TextIO, dict[str, Any]]:
    """Return the output for messages, and the job from the first line of standard input."""
    kept = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    out = os.fdopen(kept, "w", encoding="utf-8")
    # A terminal sends Ctrl-C to all processes; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    _exit_with_parent(job["parent"])
    return out, job


def write_message(out: TextIO, fields: Mapping[str, object]) -> None:
    """Write one line of JSON."""
    # If the parent has exited, the signal set in `_exit_with_parent` ends this process.
    with suppress(BrokenPipeError):
        out.write(json.dumps(fields) + "\n")
        out.flush()


def _exit_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the parent exits, and first of all when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_MAX_OOM_SCORE)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def exit_at_once() -> int:
    """Exit without unloading libraries, because some crash when unloaded in the wrong order."""
    sys.stdout.flush()
    os._exit(0)
