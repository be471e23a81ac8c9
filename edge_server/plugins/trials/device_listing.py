"""Query of the devices that a runtime can use, in a child process, because a driver may crash.

Listing loads the drivers of all devices. If a driver crashes or hangs, only this runtime's accelerators are lost.
"""

from __future__ import annotations

import sys

from edge_server.backends.isolation.json_child_side import exit_at_once, start_child, write_message
from edge_server.backends.onnxruntime import providers
from edge_server.backends.openvino import devices
from edge_server.errors import EdgeServerError
from edge_server.plugins.trials.accelerator_candidates import ReportedDevices
from edge_server.plugins.trials.candidate_process import CandidateProcess, ChildLimits

MODULE = "edge_server.plugins.trials.device_listing"

_REPORTS = {"onnxruntime": providers.reported, "openvino": devices.reported}


def list_devices(runtime: str, limits: ChildLimits) -> ReportedDevices:
    """Return the devices of `runtime` (onnxruntime or openvino). Raises CandidateFailed."""
    child = CandidateProcess(limits, MODULE)
    try:
        reported = child.open({"runtime": runtime}, lambda text, percent: None)
    finally:
        child.kill()
    return {str(name): tuple(map(str, capabilities)) for name, capabilities in reported.items()}


def main() -> int:
    out, job = start_child()
    try:
        write_message(out, {"done": _REPORTS[job["runtime"]]()})
    except EdgeServerError as error:
        write_message(out, {"failed": error.message, "kind": type(error).__name__})
    return exit_at_once()


if __name__ == "__main__":
    sys.exit(main())
