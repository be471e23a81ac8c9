"""Check that the recogniser that a text detector names is there, for the log, `edge-server status` and `edge-server
check`.

A detector serves without its recogniser, since most pictures have no text and the recogniser may come later.
"""

from __future__ import annotations

import logging
import threading

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import InvalidRequest
from edge_server.plugins.vision.text_reading import make_recogniser
from edge_server.serving.lifecycle.router import Router

log = logging.getLogger(__name__)

KEY = "detection_text_model"


def find_text_model_problem(router: Router, detector: ModelSpec) -> str:
    """Return why nothing can read the lines that a model finds; "" if something can, or if it names no recogniser.

    A recogniser that is being loaded, or that a request would load, is no problem.
    """
    name = detector.all_parameters.get(KEY, "")
    if not name:
        return ""
    serving = router.ready_versions(name)
    if serving:
        try:
            make_recogniser(serving[0].spec)
        except InvalidRequest as error:
            return f"its lines are not read: {KEY}: {error.message}"
        return ""
    entries = [entry for entry in router.index() if entry.name == name]
    if router.offered_versions(name) or any(entry.state == "LOADING" for entry in entries):
        return ""
    reason = next((entry.reason for entry in reversed(entries) if entry.reason), "")
    state = f"does not serve: {reason}" if reason else "is not loaded"
    return f"its lines are not read: {KEY} names model '{name}', which {state}"


class TextModelLog:
    """Logs problems with recognisers when they come and when they are gone. Thread-safe."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.Lock()
        self._logged: dict[str, str] = {}

    def update(self, detectors: list[ModelSpec]) -> None:
        """Log what has changed, given all serving detectors that name a recogniser."""
        with self._lock:
            found = {spec.name: find_text_model_problem(self._router, spec) for spec in detectors}
            for name, problem in found.items():
                if problem and problem != self._logged.get(name):
                    log.warning("model '%s': %s", name, problem)
                elif not problem and self._logged.get(name):
                    log.info("model '%s': its lines are read now", name)
            self._logged = found
