"""Runner of a Python model's health check, on a thread of its own, because the check may hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from edge_server.backends.base import HEALTH_LIMIT_S
from edge_server.plugins.python_models.error_translation import MODEL_EXCEPTIONS, log_failure

log = logging.getLogger(__name__)


class HealthCheck:
    """Runs a health check that may hang, on a thread of its own.

    Callers that come during a check get its result. After a check exceeded its time limit, the model counts as
    unhealthy until that check returns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _CheckThread | None = None

    def is_healthy(self, check: Callable[[], bool], limit_s: float = HEALTH_LIMIT_S) -> bool:
        with self._lock:
            running = self._running
            if running is None or not running.is_alive():
                running = self._running = _CheckThread(check)
                try:
                    running.start()
                except RuntimeError:  # the system grants no further thread
                    return False
            elif running.is_late:
                return False
        running.join(limit_s)
        running.is_late = running.is_alive()
        return running.result and not running.is_late


class _CheckThread(threading.Thread):
    def __init__(self, check: Callable[[], bool]) -> None:
        super().__init__(name="is-ready", daemon=True)
        self._check = check
        self.result = False
        self.is_late = False

    def run(self) -> None:
        try:
            self.result = self._check()
        except MODEL_EXCEPTIONS as error:
            log_failure(log, "is_ready failed", error)
        finally:
            del self._check
