"""Lookup of requests to one model version in the response cache, and storage of the responses that the model computed.

A hit is not queued or batched. Admission control is not asked, so it is neither charged for energy nor refused for
heat. It is answered in the order that the model promises. Two equal requests at the same time are both computed, as in
Triton. Only a single, final response without an error is stored.

If the lookup may take time (a store in another process, or a large input on a thread that must not be held), a thread
of the cache does it, and the request continues from there. A lookup that exceeds the store's time limit is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.core.tensor import fits
from edge_server.errors import BadModelConfig
from edge_server.serving.cache.cached_response import CachedResponse
from edge_server.serving.cache.request_key import RequestKeys, input_bytes
from edge_server.serving.cache.response_cache import ResponseCache
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.timer import Alarm, Timer

log = logging.getLogger(__name__)

_QUICK_BYTES = 256 << 10
"""Inputs up to this size are hashed at once on any thread, in a fraction of a millisecond."""

NO_CACHE = "response_cache is enabled, but the server has no cache (--cache-config=local,size=BYTES gives it one)"

OnLookupDone = Callable[[Response | None], None]
"""Continues a request after its lookup: with the answer, or None if there is none. Called once."""


def check_cacheable(spec: ModelSpec) -> None:
    """Raise BadModelConfig for a model with a response cache whose answers depend on more than the request."""
    for is_kind, kind in ((spec.is_decoupled, "decoupled"), (spec.sequence is not None, "sequence")):
        if spec.is_cached and is_kind:
            raise BadModelConfig(
                f"model '{spec.name}': response_cache.enable: expected false for a {kind} model, given true"
            )


def check_members_cacheable(spec: ModelSpec, members: Iterable[ModelSpec]) -> None:
    """Raise BadModelConfig for an ensemble with a response cache when a member's answers could not be cached."""
    check_cacheable(spec)
    for member in members:
        if spec.is_cached and (member.is_decoupled or member.sequence is not None):
            kind = "decoupled" if member.is_decoupled else "a sequence model"
            raise BadModelConfig(
                f"ensemble '{spec.name}': response_cache.enable: expected members that can be cached, "
                f"given '{member.name}', which is {kind}"
            )


class CacheLookup:
    """The cache as one version uses it. Thread-safe."""

    def __init__(
        self,
        cache: ResponseCache,
        keys: RequestKeys,
        spec: ModelSpec,
        version: int,
        counters: VersionCounters,
        timer: Timer,
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._spec = spec
        self._version = version
        self.counters = counters
        self._timer = timer
        self._expected_outputs = {item.name: (item.dtype, spec.wire_dims(item.dims)) for item in spec.outputs}
        counters.is_cached = True

    def call(self, request: Request, sink: ResponseSink) -> CachedSink | None:
        """Return the sink that replaces the request's own during lookup and run; None for a request that may not be
        answered from the cache, because it belongs to a sequence."""
        return CachedSink(self, request, sink) if request.sequence is None else None

    def is_quick(self, request: Request, *, may_wait: bool) -> bool:
        """Return whether to look up on the calling thread, with `find`; otherwise use `begin`."""
        return not self._cache.is_remote and (may_wait or input_bytes(request) <= _QUICK_BYTES)

    def find(self, call: CachedSink) -> Response | None:
        """Look the request up now."""
        if not self._cache.is_available():
            return None
        key, answer = self._read_store(call)
        return self._found(call, key, answer)

    def begin(self, call: CachedSink, on_done: OnLookupDone) -> None:
        """Look the request up on another thread. The answer or the time limit, whichever is first, calls `on_done`; on
        this thread and at once if the store is not reachable."""
        if not self._cache.is_available():
            on_done(None)
            return
        lookup = _PendingLookup(on_done)
        if self._cache.is_remote:
            when_ns = time.monotonic_ns() + int(self._cache.limit_s * 1e9)
            lookup.alarm = self._timer.call_at(when_ns, lambda: self._finish_without_answer(lookup))
        if not self._cache.post(lambda: self._look_up_later(call, lookup)):
            self._finish_without_answer(lookup)

    def store(self, call: CachedSink, response: Response) -> None:
        """Count a request that was computed, and store its answer."""
        started_ns = time.monotonic_ns()
        if call.key is not None and response.outputs and not call.has_more:
            try:
                self._cache.store(call.key, response)
            except Exception:
                # The client has its answer: a failure to store it must not reach the client.
                log.exception("model '%s': an answer could not be stored in the response cache", self._spec.name)
        self.counters.record_cache_miss(call.spent_ns + time.monotonic_ns() - started_ns)

    def _read_store(self, call: CachedSink) -> tuple[bytes, CachedResponse | None]:
        key = self._keys.key(call.request)
        answer = self._cache.get(key)
        if answer is not None and self._cache.is_remote and not self._matches_model(answer, call.request):
            self._cache.count_corrupt(key, f"it is no answer of model '{self._spec.name}'")
            answer = None
        return key, answer

    def _matches_model(self, answer: CachedResponse, request: Request) -> bool:
        """Return whether the model could have given this answer. Other programs with access to the store may write
        anything there."""
        for item in answer.outputs:
            dtype, dims = self._expected_outputs.get(item.name, (None, ()))
            is_wanted = not request.outputs or item.name in request.outputs
            if dtype is not item.dtype or not is_wanted or not fits(item.array.shape, dims):
                return False
        return len({item.name for item in answer.outputs}) == len(answer.outputs) > 0

    def _look_up_later(self, call: CachedSink, lookup: _PendingLookup) -> None:
        key, answer = None, None
        try:
            if not lookup.is_over:
                key, answer = self._read_store(call)
        except Exception:
            # The request waits for this, and is then computed.
            log.exception("model '%s': a request could not be looked up in the response cache", self._spec.name)
        if lookup.take():
            lookup.on_done(self._found(call, key, answer))

    def _finish_without_answer(self, lookup: _PendingLookup) -> None:
        if lookup.take():
            lookup.on_done(None)

    def _found(self, call: CachedSink, key: bytes | None, answer: CachedResponse | None) -> Response | None:
        """Record the result, and return it as the answer to this request."""
        call.key = key
        call.spent_ns = time.monotonic_ns() - call.arrived_ns
        if answer is None:
            return None
        call.is_hit = True
        request = call.request
        return Response(request.model, self._version, request.id, answer.outputs, answer.parameters, spec=self._spec)


class CachedSink:
    """Sink of a request whose answer may be cached: counts, stores, and passes the response to the caller's sink."""

    __slots__ = ("_lookup", "_sink", "arrived_ns", "has_more", "is_hit", "key", "request", "spent_ns")

    def __init__(self, lookup: CacheLookup, request: Request, sink: ResponseSink) -> None:
        self._lookup = lookup
        self._sink = sink
        self.request = request
        self.arrived_ns = time.monotonic_ns()
        self.key: bytes | None = None
        """None: nothing was looked up, and nothing will be stored."""
        self.spent_ns = 0
        self.is_hit = False
        self.has_more = False
        """Whether there was a response before the final one; the answer is then not a single response."""

    def __call__(self, response: Response) -> None:
        # Counted before it is sent, so that the statistics include every answer that a client has.
        if not response.is_final:
            self.has_more = True
        elif response.error is None:
            if self.is_hit:
                self._lookup.counters.record_cache_hit(self.arrived_ns, time.monotonic_ns(), self.spent_ns)
            else:
                self._lookup.store(self, response)
        self._sink(response)


class _PendingLookup:
    """A lookup on another thread: its result and the time limit race for the request."""

    __slots__ = ("_lock", "alarm", "is_over", "on_done")

    def __init__(self, on_done: OnLookupDone) -> None:
        self.on_done = on_done
        self.alarm: Alarm | None = None
        self.is_over = False
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Claim the right to continue the request. True for exactly one caller."""
        if not self._lock.acquire(blocking=False):
            return False
        self.is_over = True
        if self.alarm is not None:
            self.alarm.cancel()
        return True
