"""Requests of one scheduler to the rate limiter: acquires the resources of an instance before a run, and releases
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edge_server.serving.execution.instance import Instance
from edge_server.serving.execution.rate_limiter import RateLimiter, ResourceDemand


class RateLimiterClient:
    """Call `register`, `unregister` and `wake_next` without the scheduler's lock, the other methods under it.

    An instance leaves the rate limiter's queue when it has no batch to run, so that it does not hold up others.
    """

    def __init__(self, limiter: RateLimiter, model: str, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self._model = model
        self._wake = wake
        self._demands: dict[Instance, ResourceDemand] = {}
        self._waiting: set[ResourceDemand] = set()
        self.wake_next = limiter.wake_next

    def register(self, instances: Iterable[Instance]) -> None:
        """Register the needed resources. Raises BadModelConfig if they can never be granted; `unregister` is needed
        then."""
        for instance in instances:
            if instance.needs:
                demand = ResourceDemand(self._model, instance.needs, instance.rate_priority, self._wake)
                self._limiter.register(demand)
                self._demands[instance] = demand

    def unregister(self) -> None:
        """Release all resources, also those of running batches."""
        demands, self._demands = self._demands, {}
        for demand in demands.values():
            self._limiter.unregister(demand)

    def acquire(self, free: Sequence[Instance]) -> Instance | None:
        """Acquire the resources of one free instance, the one freed last first. Return it; None: all of them must
        wait."""
        for instance in reversed(free):
            demand = self._demands.get(instance)
            if demand is None:
                return instance
            if self._limiter.acquire(demand):
                self._waiting.discard(demand)
                return instance
            self._waiting.add(demand)
        return None

    def release(self, instance: Instance) -> None:
        """Return the resources that the instance held during its run."""
        demand = self._demands.get(instance)
        if demand is not None:
            self._limiter.release(demand)

    def withdraw_others(self, instances: Iterable[Instance]) -> None:
        """Take all other instances out of the limiter's queue: they have no batch to run now."""
        kept = {self._demands.get(instance) for instance in instances}
        for demand in [demand for demand in self._waiting if demand not in kept]:
            self._waiting.discard(demand)
            self._limiter.withdraw(demand)

    def withdraw_all(self) -> None:
        """Take all instances out of the limiter's queue: there is no batch to run now."""
        while self._waiting:
            self._limiter.withdraw(self._waiting.pop())
