"""Delay of model loads while the machine is hot, for a limited time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_server.core.model_spec import ModelFile
from edge_server.plugin import LoadCheck
from edge_server.plugins.governor.control_policy import PolicyDecision, ThermalLevel

_log = logging.getLogger(__name__)

_CHECK_PERIOD_S = 0.2


class LoadThrottle:
    """Checks the memory first and then the governor's state. Called on loader threads, which may wait here.

    If the machine does not cool within `wait_s`, the model is loaded all the same: serving it matters more than a small
    rise in temperature. In the state CRITICAL nothing is loaded, because the machine is about to switch itself off.
    """

    def __init__(
        self,
        decision: Callable[[], PolicyDecision],
        wait_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decision = decision
        self._wait_s = wait_s
        self._clock = clock
        self._is_closed = threading.Event()

    def wrap(self, check_memory: LoadCheck) -> LoadCheck:
        """Return a check that calls `check_memory`, waits here, and then calls `check_memory` again."""

        def check(file: ModelFile, instance_count: int) -> str | None:
            return check_memory(file, instance_count) or self._wait(file) or check_memory(file, instance_count)

        return check

    def close(self) -> None:
        """End all waits: the server stops."""
        self._is_closed.set()

    def _wait(self, file: ModelFile) -> str | None:
        """Wait until loads are allowed. Return the reason if the model must not be loaded, else None."""
        decision = self._decision()
        if decision.may_load:
            return None
        until_s = self._clock() + self._wait_s
        if decision.level < ThermalLevel.CRITICAL:
            _log.info(
                "model in '%s' waits for the box to cool, for at most %g s: it is %s: %s",
                file.model_dir, self._wait_s, decision.level.name, decision.detail,
            )  # fmt: skip
        while not decision.may_load:
            if decision.level >= ThermalLevel.CRITICAL:
                return f"the box is {decision.level.name}: {decision.detail}"
            if self._clock() >= until_s:
                _log.warning(
                    "model in '%s' is loaded although the box is %s: it waited %g s (--governor-load-wait-secs)",
                    file.model_dir, decision.level.name, self._wait_s,
                )  # fmt: skip
                return None
            if self._is_closed.wait(_CHECK_PERIOD_S):
                return "the server stops"
            decision = self._decision()
        return None
