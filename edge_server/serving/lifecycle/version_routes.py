"""Table of the versions of one model that serve: chooses the version for a request, whether or not the request names
one. Replaced as a whole, never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from edge_server.core.request_response import SequenceStep
from edge_server.core.version_lifecycle import VersionState
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.lifecycle.canary import CanaryTrial, parse_canary_terms, signature_difference


class RejectedCanary(NamedTuple):
    """A newest version that gets no more requests without a version; its next generation may again."""

    generation: int
    reason: str


class Routes(NamedTuple):
    """`ready` maps versions to their serving generation, highest first; never empty. `first` gets the requests without
    a version, except for the share of the trial's canary. `has_sequences`: there are several versions, and a sequence
    stays in the one in which it began; the share is one of the sequences."""

    ready: dict[int, ServedVersion]
    first: ServedVersion
    canary: ServedVersion | None = None
    trial: CanaryTrial | None = None
    has_sequences: bool = False

    @property
    def decides_each_request(self) -> bool:
        """Whether requests without a version may go to different versions."""
        return self.trial is not None or self.has_sequences

    def next(self, step: SequenceStep | None = None) -> ServedVersion:
        """Return the version for the next request without a version, which is this step of a sequence. Counts the
        request or the beginning of a sequence: call once for each."""
        if not self.has_sequences or step is None:
            return self._next_by_share()
        if not step.is_start:
            return next((item for item in self.ready.values() if item.has_sequence(step.id)), self.first)
        chosen = self._next_by_share()
        for item in self.ready.values():
            if item is not chosen and item.has_sequence(step.id):
                # The client has begun anew without an END. Nothing says later which of two sequences it means.
                item.end_sequence(step.id)
        return chosen

    def _next_by_share(self) -> ServedVersion:
        if self.canary is not None and self.trial is not None and self.trial.takes_next():
            return self.canary
        return self.first

    def share_of(self, version: ServedVersion) -> float:
        """Return the version's share of the requests without a version."""
        share = self.trial.terms.share if self.trial is not None else 0.0
        if version is self.canary:
            return share
        return 1.0 - share if version is self.first else 0.0


def ready_versions(loaded: Iterable[ServedVersion], without: ServedVersion | None) -> dict[int, ServedVersion]:
    """Return the serving generation of each version, highest version first."""
    ready = [item for item in loaded if item.state is VersionState.READY and item is not without]
    by_age = {item.version: item for item in sorted(ready, key=lambda item: item.generation)}
    return dict(sorted(by_age.items(), reverse=True))


def plan_routes(
    ready: dict[int, ServedVersion],
    before: Routes | None,
    rejected: RejectedCanary | None,
    on_failed: Callable[[CanaryTrial, str], None],
) -> tuple[Routes | None, RejectedCanary | None]:
    """Return the table for the ready versions, and the rejected canary if the newest version is one.

    A trial of the same two versions continues; any other begins anew, and the old one ends.
    """
    routes, rejected = _plan(ready, before, rejected, on_failed)
    old = before.trial if before is not None else None
    new = routes.trial if routes is not None else None
    if old is not new:
        if old is not None:
            old.end()
        if new is not None:
            new.begin()
    return routes, rejected


def _plan(
    ready: dict[int, ServedVersion],
    before: Routes | None,
    rejected: RejectedCanary | None,
    on_failed: Callable[[CanaryTrial, str], None],
) -> tuple[Routes | None, RejectedCanary | None]:
    if not ready:
        return None, rejected
    newest, *older = ready.values()
    terms = parse_canary_terms(newest.spec)
    batching = newest.spec.sequence
    has_sequences = bool(older) and batching is not None and not batching.is_iterative
    if terms is None or not older:
        return Routes(ready, newest, has_sequences=has_sequences), rejected
    stable = older[0]
    if rejected is None or rejected.generation != newest.generation:
        difference = signature_difference(newest.spec, stable.spec)
        rejected = None if difference is None else RejectedCanary(newest.generation, difference)
    if rejected is not None:
        return Routes(ready, stable, has_sequences=has_sequences), rejected
    trial = before.trial if before is not None else None
    if trial is None or trial.canary is not newest or trial.stable is not stable:
        trial = CanaryTrial(terms, newest, stable, on_failed)
    return Routes(ready, stable, newest, trial, has_sequences), None
