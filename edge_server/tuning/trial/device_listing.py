"""List of a runtime's devices, made in a child process: `python -m edge_server.tuning.trial.device_listing`.

Answering loads the drivers of every device. What crashes or hangs in one costs that runtime's accelerators alone.
"""

from __future__ import annotations

import sys

from edge_server.backends import onnxruntime_providers, openvino_devices
from edge_server.errors import EdgeServerError
from edge_server.tuning.trial.accelerators import Reported
from edge_server.tuning.trial.child_process import CandidateProcess, ChildLimits
from edge_server.tuning.trial.child_side import begin, leave, say

MODULE = "edge_server.tuning.trial.device_listing"

_REPORTS = {"onnxruntime": onnxruntime_providers.reported, "openvino": openvino_devices.reported}


def survey(runtime: str, limits: ChildLimits) -> Reported:
    """Return the devices that `runtime` (onnxruntime or openvino) lists. Raises CandidateFailed."""
    child = CandidateProcess(limits, MODULE)
    try:
        answer = child.open({"runtime": runtime}, lambda text, percent: None)
    finally:
        child.kill()
    return {str(name): tuple(map(str, able)) for name, able in answer.items()}


def main() -> int:
    out, job = begin()
    try:
        say(out, {"done": _REPORTS[job["runtime"]]()})
    except EdgeServerError as error:
        say(out, {"failed": error.message, "kind": type(error).__name__})
    return leave()


if __name__ == "__main__":
    sys.exit(main())
