"""Loads and engine builds while the box is hot: they wait, not for ever, and say so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_server.core.model_spec import ModelFile
from edge_server.governor.control_policy import PolicyDecision, ThermalLevel

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2

AskRoom = Callable[[ModelFile, int], str | None]
"""Says why a model's file in so many instances is not to be loaded now; None when it may be."""


class CoolRoom:
    """Asks for memory first, then whether the box is cool enough. Called on loading threads, which may wait here.

    A box that does not cool within `wait_s` loads all the same: what is served later is worth more than a degree. One
    that is about to switch itself off loads nothing.
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
        self._is_ending = threading.Event()

    def after(self, ask_memory: AskRoom) -> AskRoom:
        """Return what asks for memory, and then waits here."""

        def ask(file: ModelFile, instance_count: int) -> str | None:
            return ask_memory(file, instance_count) or self._refusal(file) or ask_memory(file, instance_count)

        return ask

    def end(self) -> None:
        """Let nobody wait any more: the server stops."""
        self._is_ending.set()

    def _refusal(self, file: ModelFile) -> str | None:
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
            if self._is_ending.wait(_LOOK_AGAIN_S):
                return "the server stops"
            decision = self._decision()
        return None
