"""Interface of admission control: asked before each request and camera frame, so that a plugin can reject work on a hot
machine."""

from __future__ import annotations

from typing import Protocol

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.status_reports import GovernorState


class AdmissionControl(Protocol):
    """Thread-safe; every method returns at once. The implementation calls `InferenceService.resume` when it allows
    more: nothing else starts the requests that were held back."""

    is_open: bool
    """True while everything is allowed. The other methods need not be called then."""

    allowed_fraction: float
    """The fraction of a model's instances, and of its largest batch, that may run: above 0, up to 1."""

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        """Admit a request that will compute for about `cost_s` seconds. Return the seconds charged for it.

        Call `correct_charge` exactly once for the charge. Raises Throttled with the reason and the time after which to
        retry.
        """

    def correct_charge(self, charged_s: float, took_s: float) -> None:
        """Correct the charge after the request took `took_s` seconds; 0 if it never ran."""

    def state(self) -> GovernorState:
        """Return the state that each result of a frame carries: heat, power and memory."""

    def refuse_frame(self, model: str, priority: int) -> str | None:
        """Return the reason why no frame of this priority (1 is the highest) may start, or None if it may.

        Asked before the frame is decoded, and charges nothing: its request is admitted as any other.
        """

    def count_refused(self, model: str, priority: int) -> None:
        """Count one more refused frame of a batch that was refused as one request."""


class NoAdmissionControl:
    """Admits everything: the server has no governor."""

    is_open = True
    allowed_fraction = 1.0
    _STATE = GovernorState()

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        return 0.0

    def correct_charge(self, charged_s: float, took_s: float) -> None:
        pass

    def state(self) -> GovernorState:
        return self._STATE

    def refuse_frame(self, model: str, priority: int) -> str | None:
        return None

    def count_refused(self, model: str, priority: int) -> None:
        pass


ADMIT_ALL = NoAdmissionControl()
