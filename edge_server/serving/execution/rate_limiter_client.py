"""Rate limiter client: requests and returns resources for the instances of one scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edge_server.serving.execution.instance import Instance
from edge_server.serving.execution.rate_limiter import RateLimiter, ResourceDemand


class RateLimiterClient:
    """Called under the scheduler's lock, but for `enter`, `leave` and `wake_next`.

    An instance waits for its turn just as long as there is a batch that is due: one that waited in vain would keep
    others from theirs.
    """

    def __init__(self, limiter: RateLimiter, model: str, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self._model = model
        self._wake = wake
        self._demands: dict[Instance, ResourceDemand] = {}
        self._refused: set[ResourceDemand] = set()
        self.wake_next = limiter.wake_next

    def enter(self, instances: Iterable[Instance]) -> None:
        """Make known what they need. Raises BadModelConfig when that could never be granted; `leave` is needed then."""
        for instance in instances:
            if instance.needs:
                demand = ResourceDemand(self._model, instance.needs, instance.rate_priority, self._wake)
                self._limiter.enter(demand)
                self._demands[instance] = demand

    def leave(self) -> None:
        """Give up every claim, also of what still runs."""
        demands, self._demands = self._demands, {}
        for demand in demands.values():
            self._limiter.leave(demand)

    def choose(self, free: Sequence[Instance]) -> Instance | None:
        """Return the latest of the free instances that may run now; None when all have to wait for their turn."""
        for instance in reversed(free):
            demand = self._demands.get(instance)
            if demand is None:
                return instance
            if self._limiter.take(demand):
                self._refused.discard(demand)
                return instance
            self._refused.add(demand)
        return None

    def give_back(self, instance: Instance) -> None:
        """Return the resources that the instance held during its run."""
        demand = self._demands.get(instance)
        if demand is not None:
            self._limiter.give_back(demand)

    def wait_only(self, instances: Iterable[Instance]) -> None:
        """Let others go before the instances that are not named: there is no batch for them to run now."""
        named = {self._demands.get(instance) for instance in instances}
        for demand in [demand for demand in self._refused if demand not in named]:
            self._refused.discard(demand)
            self._limiter.withdraw(demand)

    def stop_waiting(self) -> None:
        """Let others go first: there is no batch to run now."""
        while self._refused:
            self._limiter.withdraw(self._refused.pop())
