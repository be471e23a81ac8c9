"""Child's side of a trial: reads its job, writes JSON lines to its output, and ends when its parent ends."""

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
_FIRST_TO_GO = "1000"


def begin() -> tuple[TextIO, dict[str, Any]]:
    """Return where answers go, and the job, which is the first line of standard input."""
    out = _own_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the one that started this one decides
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    _depend_on(job["parent"])
    return out, job


def say(out: TextIO, fields: Mapping[str, object]) -> None:
    """Write one line."""
    # Who reads may be gone: then this process ends too, by the signal below.
    with suppress(BrokenPipeError):
        out.write(json.dumps(fields) + "\n")
        out.flush()


def _own_output() -> TextIO:
    """Return standard output, and let libraries that print write to standard error instead."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")


def _depend_on(parent: int) -> None:
    """End with the parent, and be the first to go when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave() -> int:
    """End the process, without unloading libraries: in the wrong order they crash, and everything has been said."""
    sys.stdout.flush()
    os._exit(0)
