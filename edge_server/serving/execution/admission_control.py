"""Admission control interface: asked before a batch runs, so that the governor can shed load."""

from __future__ import annotations

from typing import Protocol

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request


class AdmissionControl(Protocol):
    """Thread-safe; every method returns at once. Who lets it allow more calls `Manager.look_again` after that: nothing
    else tells what was held back."""

    is_open: bool
    """True as long as nothing is held back: then nobody needs to ask, and asking costs one look at this."""

    share: float
    """The part of a model's instances, and of its largest batch, that may run: above 0, up to 1."""

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        """Take up a request that will compute for about `cost_s` seconds, and return the seconds charged for it.

        What is charged must be settled, once. Raises Throttled, in plain words and with when to come back.
        """

    def settle(self, charged_s: float, took_s: float) -> None:
        """Put right what was charged, now that the request took `took_s` seconds; 0 when it never ran."""


class NoAdmissionControl:
    """The gate of a server that nothing governs."""

    is_open = True
    share = 1.0

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        return 0.0

    def settle(self, charged_s: float, took_s: float) -> None:
        pass


OPEN_GATE = NoAdmissionControl()
