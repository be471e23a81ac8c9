"""Main program of the engine build process: `python -m edge_server.backends.tensorrt.build_process_main`.

It reads one job as JSON from standard input and tells what it does in lines of JSON on standard output: any number of
{"phase", "percent"}, then one {"end"}: "built", "verified", "cancelled" or "failed". SIGTERM takes the job back. It
runs at the lowest priority, is the first to go when memory runs out, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from edge_server.backends.runtime_library import words
from edge_server.backends.tensorrt.cuda_driver import CudaFault
from edge_server.backends.tensorrt.engine_build import BuildCancelled, BuildEnvironment, BuildFault, build
from edge_server.backends.tensorrt.engine_options import order_from_json
from edge_server.backends.tensorrt.library_adapter import EngineFault, load_library
from edge_server.backends.tensorrt.verify_engine import Mismatch, load_samples, verify
from edge_server.core.tensorrt_engine import EngineOrder
from edge_server.errors import EdgeServerError

_PR_SET_PDEATHSIG = 1
_LOWEST = 19
_FIRST_TO_GO = "1000"


class Lines:
    """Writes the lines; from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, **fields: object) -> None:
        # Who reads may be gone: then this process ends too, by the signal below.
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._stream.write(json.dumps(fields) + "\n")
            self._stream.flush()


def main() -> int:
    lines = Lines(_own_output())
    cancelled = _listen()
    job: dict[str, Any] = json.load(sys.stdin)
    _step_back(job["parent"])
    order = order_from_json(job["order"])
    try:
        end = _build(order, job, lines, cancelled) if job["task"] == "build" else _verify(order, job)
    except BuildCancelled:
        end = {"end": "cancelled"}
    except BuildFault as error:
        end = {"end": "failed", "reason": str(error), "is_final": error.is_final}
    except EdgeServerError as error:
        end = {"end": "failed", "reason": error.message, "is_final": True}
    except Mismatch as error:
        end = {"end": "failed", "reason": f"the engine is not used: {error}", "is_final": True}
    except (ValueError, OSError) as error:
        end = {"end": "failed", "reason": f"the model cannot be read: {words(error)}", "is_final": True}
    except (EngineFault, CudaFault) as error:
        end = {"end": "failed", "reason": words(error), "is_final": False}
    lines.write(**end)
    # Libraries that are unloaded in the wrong order crash; everything is on disk by now.
    os._exit(0)


def _build(order: EngineOrder, job: dict[str, Any], lines: Lines, cancelled: threading.Event) -> dict[str, object]:
    major, minor = job["capability"]
    site = BuildEnvironment(Path(job["folder"]), (major, minor), Path(job["timing_cache"]), job["pool_bytes"])
    built = build(
        order,
        site,
        load_library(order.library),
        lambda phase, percent: lines.write(phase=phase, percent=percent),
        cancelled.is_set,
    )
    return {"end": "built", "plan_sha256": built.sha256, "bytes": built.byte_count, "seconds": built.took_s}


def _verify(order: EngineOrder, job: dict[str, Any]) -> dict[str, object]:
    samples = load_samples(Path(job["samples"]))
    worst = verify(order, Path(job["plan"]), samples, load_library(order.library), has_rows=job["has_rows"])
    return {"end": "verified", "difference": worst}


def _own_output() -> TextIO:
    """Return standard output, and let libraries that print write to standard error instead."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")


def _listen() -> threading.Event:
    """Return the event that SIGTERM sets. A thread waits for it: the main thread may be inside TensorRT for minutes."""
    cancelled = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        cancelled.set()

    threading.Thread(target=wait, daemon=True).start()
    return cancelled


def _step_back(parent: int) -> None:
    """Take the last place in every queue, and end with the parent."""
    os.nice(_LOWEST)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
