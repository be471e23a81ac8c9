"""Canary: the newest version gets a share of the requests that name no version, while it is not slower and does not
fail more often than the version before it."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.errors import BadModelConfig

_WINDOW = 1024
"""How many of its latest requests a version is judged by."""

_JUDGE_EVERY = 32
"""The p99 is compared once for so many answers of the canary: sorting the windows for each would cost too much."""


_NOISE_NS = 1_000_000
"""A p99 that differs by less says nothing: waking a thread late costs as much, and tiny models take less in all."""


@dataclass(frozen=True, slots=True)
class CanaryTerms:
    """`share` 0..1 of the requests without a version. The canary falls back when, after `min_requests` of each version,
    its error rate is more than `max_error_rate` above the other's, or its p99 latency more than `max_p99_ratio` times
    the other's, and at least 1 ms above it. Failures that alone exceed the band are enough before that.
    """

    share: float
    max_error_rate: float = 0.05
    max_p99_ratio: float = 2.0
    min_requests: int = 100


def canary_terms(spec: ModelSpec) -> CanaryTerms | None:
    """Return the terms that the model's parameters state, None without `canary_share`. Raises BadModelConfig."""
    if "canary_share" not in spec.parameters:
        return None
    return CanaryTerms(
        share=_number(spec, "canary_share", 0.0, 0.0, 1.0),
        max_error_rate=_number(spec, "canary_max_error_rate", 0.05, 0.0, 1.0),
        max_p99_ratio=_number(spec, "canary_max_p99_ratio", 2.0, 1.0, 1e6),
        min_requests=int(_number(spec, "canary_min_requests", 100, 1, _WINDOW)),
    )


def _number(spec: ModelSpec, key: str, default: float, low: float, high: float) -> float:
    text = spec.parameters.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:  # false for nan
        raise BadModelConfig(
            f"model '{spec.name}': parameter {key} must be a number of {low:g} to {high:g}, got '{text[:80]}'"
        )
    return value


class ResultWindow:
    """The latest requests of one version: how long each took, and which failed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken_ns: deque[int | None] = deque(maxlen=_WINDOW)

    def add(self, taken_ns: int | None) -> None:
        """Note a request by its latency; None: it failed."""
        with self._lock:
            self._taken_ns.append(taken_ns)

    def summary(self) -> ResultSummary:
        with self._lock:
            taken_ns = list(self._taken_ns)
        answered = sorted(item for item in taken_ns if item is not None)
        p99_ns = answered[min(len(answered) * 99 // 100, len(answered) - 1)] if answered else 0
        return ResultSummary(len(taken_ns), len(taken_ns) - len(answered), p99_ns)


@dataclass(frozen=True, slots=True)
class ResultSummary:
    """`count` requests, `failed_count` among them; `p99_ns` is 0 when none was answered."""

    count: int
    failed_count: int
    p99_ns: int

    @property
    def error_rate(self) -> float:
        return self.failed_count / self.count if self.count else 0.0


def judge(terms: CanaryTerms, canary: ResultSummary, stable: ResultSummary) -> str | None:
    """Return why the canary should take no more requests, None while it keeps to its terms."""
    allowed = stable.error_rate + terms.max_error_rate
    if canary.failed_count > allowed * max(canary.count, terms.min_requests):
        return (
            f"{canary.failed_count} of its latest {canary.count} requests failed; "
            f"the version before it and canary_max_error_rate allow {allowed * 100:.1f} %"
        )
    if min(canary.count, stable.count) < terms.min_requests or not stable.p99_ns:
        return None
    if canary.p99_ns > max(stable.p99_ns * terms.max_p99_ratio, stable.p99_ns + _NOISE_NS):
        return (
            f"its p99 latency of {canary.p99_ns / 1e6:.1f} ms is more than {terms.max_p99_ratio:g} times that of the "
            f"version before it, {stable.p99_ns / 1e6:.1f} ms"
        )
    return None


class ObservedVersion(Protocol):
    """A version that tells how its requests end."""

    version: int
    generation: int
    spec: ModelSpec

    def observe(self, observer: Callable[[int | None], None] | None) -> None:
        """Call `observer` with the latency of each request, nanoseconds, or None for one that failed."""


class CanaryTrial:
    """One canary beside the version before it. Begins with `begin`, ends with `end`; both are the manager's to call.

    `on_failed(reason)` is called once, on the thread that answered the request which decided it.
    """

    def __init__(
        self,
        terms: CanaryTerms,
        canary: ObservedVersion,
        stable: ObservedVersion,
        on_failed: Callable[[CanaryTrial, str], None],
    ) -> None:
        self.terms = terms
        self.canary = canary
        self.stable = stable
        self._on_failed = on_failed
        self._count = itertools.count()
        self._canary_window = ResultWindow()
        self._stable_window = ResultWindow()
        self._judged = itertools.count(1)
        self._lock = threading.Lock()
        self._is_over = False

    def begin(self) -> None:
        self.canary.observe(self._observe_canary)
        self.stable.observe(self._stable_window.add)

    def end(self) -> None:
        with self._lock:
            self._is_over = True
        self.canary.observe(None)
        self.stable.observe(None)

    def takes_next(self) -> bool:
        """Return whether the next request without a version goes to the canary.

        Of any n requests in a row, n times the share go there, give or take one; no chance is involved.
        """
        number = next(self._count)
        share = self.terms.share
        return math.floor((number + 1) * share) > math.floor(number * share)

    def _observe_canary(self, taken_ns: int | None) -> None:
        self._canary_window.add(taken_ns)
        if taken_ns is not None and next(self._judged) % _JUDGE_EVERY:
            return
        reason = judge(self.terms, self._canary_window.summary(), self._stable_window.summary())
        if reason is None:
            return
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._on_failed(self, reason)


def promise_difference(newest: ModelSpec, before: ModelSpec) -> str | None:
    """Return how the inputs or outputs of two versions differ, None when clients can take one for the other."""
    for what, new, old in (("inputs", newest.inputs, before.inputs), ("outputs", newest.outputs, before.outputs)):
        if sorted(map(_promise, new)) != sorted(map(_promise, old)):
            return f"its {what} differ from those of the version before it"
    if newest.is_decoupled != before.is_decoupled or newest.max_batch_size != before.max_batch_size:
        return "its max_batch_size or transaction policy differs from that of the version before it"
    return None


def _promise(item: InputSpec | OutputSpec) -> tuple[str, str, tuple[int, ...]]:
    return item.name, item.dtype.value, item.dims
