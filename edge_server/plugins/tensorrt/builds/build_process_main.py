"""Main program of the child process that builds a TensorRT engine, or that compares the outputs of a new engine with
those of another runtime.

`python -m edge_server.plugins.tensorrt.builds.build_process_main` reads one job as JSON from standard input and writes
lines of JSON to standard output: any number of {"phase", "percent"}, then one {"end"}: "built", "verified", "cancelled"
or "failed". SIGTERM cancels the job. The process has the lowest priority, is the first to be killed when memory runs
out, and ends with its parent.
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

from edge_server.backends.cuda.cuda_driver import CudaFault
from edge_server.backends.isolation.npz_tensor_files import load_tensors
from edge_server.backends.runtime_errors import message_line
from edge_server.errors import EdgeServerError
from edge_server.plugins.tensorrt.builds.onnx_to_engine import (
    BuildCancelled,
    BuildEnvironment,
    BuildFault,
    build_engine,
    lacks_memory,
)
from edge_server.plugins.tensorrt.builds.verify_engine import Mismatch, verify_engine
from edge_server.plugins.tensorrt.engine_options import order_from_json
from edge_server.plugins.tensorrt.engine_order import EngineOrder
from edge_server.plugins.tensorrt.library_adapter import EngineFault, StartFault, load_library

_PR_SET_PDEATHSIG = 1
_LOWEST_PRIORITY = 19
_HIGHEST_OOM_SCORE = "1000"


class ReportLines:
    """Writes lines of JSON. Any thread may call it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, **fields: object) -> None:
        # If the parent is gone, a signal ends this process too: see below.
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._stream.write(json.dumps(fields) + "\n")
            self._stream.flush()


def main() -> int:
    # Standard output is for the lines. Libraries that print write to standard error instead.
    output = os.dup(1)
    os.dup2(2, 1)
    lines = ReportLines(os.fdopen(output, "w", encoding="utf-8"))
    cancelled = _event_of_sigterm()
    job: dict[str, Any] = json.load(sys.stdin)
    _lower_priority_and_follow(job["parent"])
    order = order_from_json(job["order"])
    try:
        if job["task"] == "build":
            end = _build(order, job, lines, cancelled)
        else:
            samples, expected = (load_tensors(Path(job[key])) for key in ("samples", "expected"))
            library = load_library(order.library)
            worst = verify_engine(order, Path(job["plan"]), samples, expected, library, has_rows=job["has_rows"])
            end = {"end": "verified", "difference": worst}
    except BuildCancelled:
        end = {"end": "cancelled"}
    except BuildFault as error:
        end = {"end": "failed", "reason": str(error), "is_final": error.is_final}
    except EdgeServerError as error:
        end = {"end": "failed", "reason": error.message, "is_final": True}
    except Mismatch as error:
        end = {"end": "failed", "reason": f"the engine is not used: {error}", "is_final": True}
    except (ValueError, OSError) as error:
        end = {"end": "failed", "reason": f"the model cannot be read: {message_line(error)}", "is_final": True}
    except StartFault as error:
        end = {"end": "failed", "reason": str(error), "is_final": not lacks_memory(str(error))}
    except (EngineFault, CudaFault, RuntimeError, TypeError) as error:
        # The last two are those of TensorRT's bindings.
        end = {"end": "failed", "reason": message_line(error), "is_final": False}
    lines.write(**end)
    # Without the interpreter's exit: libraries that are unloaded in the wrong order crash. All files are written.
    os._exit(0)


def _build(
    order: EngineOrder, job: dict[str, Any], lines: ReportLines, cancelled: threading.Event
) -> dict[str, object]:
    major, minor = job["capability"]
    environment = BuildEnvironment(Path(job["folder"]), (major, minor), Path(job["timing_cache"]), job["pool_bytes"])
    built = build_engine(
        order,
        environment,
        load_library(order.library),
        lambda phase, percent: lines.write(phase=phase, percent=percent),
        cancelled.is_set,
    )
    return {
        "end": "built", "plan_sha256": built.sha256, "bytes": built.byte_count, "seconds": built.took_s,
        "dla_layers": built.dla_layers,
    }  # fmt: skip


def _event_of_sigterm() -> threading.Event:
    """Return an event that SIGTERM sets. A thread waits for it: the main thread may be inside TensorRT for minutes."""
    cancelled = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        cancelled.set()

    threading.Thread(target=wait, daemon=True).start()
    return cancelled


def _lower_priority_and_follow(parent: int) -> None:
    """Take the lowest priority, and end with the parent process."""
    os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_HIGHEST_OOM_SCORE)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
