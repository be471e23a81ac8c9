"""Rule of canary releases: the newest version gets a fraction of the requests until it proves slower or less reliable
than the one before."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.errors import BadModelConfig
from edge_server.record import record
from edge_server.serving.execution.served_version import ServedVersion

_WINDOW = 1024
"""Number of a version's latest requests that are compared."""

_JUDGE_EVERY = 32
"""The p99 is compared once for so many answers of the canary: sorting the windows for each answer would cost too
much."""


_NOISE_NS = 1_000_000
"""A smaller difference of the p99 means nothing: waking a thread late costs as much, and tiny models take less in
all."""


class CanaryTerms(NamedTuple):
    """Terms of a canary. `share` 0..1 of the requests without a version. After `min_requests` of each version the
    canary falls back if its error rate is more than `max_error_rate` above the other's, or if its p99 latency is more
    than `max_p99_ratio` times the other's and at least 1 ms above it. Failures that alone exceed the error rate are
    enough before that."""

    share: float
    max_error_rate: float = 0.05
    max_p99_ratio: float = 2.0
    min_requests: int = 100


def parse_canary_terms(spec: ModelSpec) -> CanaryTerms | None:
    """Return the terms in the model's parameters; None without `canary_share`. Raises BadModelConfig."""
    if "canary_share" not in spec.parameters:
        return None
    return CanaryTerms(
        share=_parse_number(spec, "canary_share", 0.0, 0.0, 1.0),
        max_error_rate=_parse_number(spec, "canary_max_error_rate", 0.05, 0.0, 1.0),
        max_p99_ratio=_parse_number(spec, "canary_max_p99_ratio", 2.0, 1.0, 1e6),
        min_requests=int(_parse_number(spec, "canary_min_requests", 100, 1, _WINDOW)),
    )


def _parse_number(spec: ModelSpec, key: str, default: float, low: float, high: float) -> float:
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
    """Latencies and failures of the latest requests of one version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies_ns: deque[int | None] = deque(maxlen=_WINDOW)

    def add(self, latency_ns: int | None) -> None:
        """Record a request's latency; None: it failed."""
        with self._lock:
            self._latencies_ns.append(latency_ns)

    def summary(self) -> ResultSummary:
        with self._lock:
            latencies_ns = list(self._latencies_ns)
        answered = sorted(item for item in latencies_ns if item is not None)
        p99_ns = answered[min(len(answered) * 99 // 100, len(answered) - 1)] if answered else 0
        return ResultSummary(len(latencies_ns), len(latencies_ns) - len(answered), p99_ns)


@record(frozen=True, slots=True)
class ResultSummary:
    """`count` requests, `failed_count` among them; `p99_ns` is 0 when none was answered."""

    count: int
    failed_count: int
    p99_ns: int

    @property
    def error_rate(self) -> float:
        return self.failed_count / self.count if self.count else 0.0


def judge(terms: CanaryTerms, canary: ResultSummary, stable: ResultSummary) -> str | None:
    """Return why the canary should get no more requests; None while it meets its terms."""
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


class CanaryTrial:
    """One canary beside the version before it. The table calls `begin` and `end`.

    `on_failed(reason)` is called once, on the thread that answered the deciding request.
    """

    def __init__(
        self,
        terms: CanaryTerms,
        canary: ServedVersion,
        stable: ServedVersion,
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

        Of any n requests in a row, n times the share go there, plus or minus one; there is no randomness.
        """
        number = next(self._count)
        share = self.terms.share
        return math.floor((number + 1) * share) > math.floor(number * share)

    def _observe_canary(self, latency_ns: int | None) -> None:
        self._canary_window.add(latency_ns)
        if latency_ns is not None and next(self._judged) % _JUDGE_EVERY:
            return
        reason = judge(self.terms, self._canary_window.summary(), self._stable_window.summary())
        if reason is None:
            return
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._on_failed(self, reason)


def signature_difference(newest: ModelSpec, before: ModelSpec) -> str | None:
    """Return how the inputs or outputs of two versions differ; None if clients can use either."""
    for part, new, old in (("inputs", newest.inputs, before.inputs), ("outputs", newest.outputs, before.outputs)):
        if sorted(map(_signature, new)) != sorted(map(_signature, old)):
            return f"its {part} differ from those of the version before it"
    if newest.is_decoupled != before.is_decoupled or newest.max_batch_size != before.max_batch_size:
        return "its max_batch_size or transaction policy differs from that of the version before it"
    return None


def _signature(item: InputSpec | OutputSpec) -> tuple[str, str, tuple[int, ...]]:
    return item.name, item.dtype.value, item.dims
