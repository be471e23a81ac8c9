"""Triton's rate limiter: an instance runs only while it holds the resources that its configuration names.

A resource is a name and a count. It stands for something that too many runs must not use at once: memory bandwidth, an
accelerator, watts. In config.pbtxt, `instance_group { rate_limiter { resources [ { name: "R1" count: 4 } ] } }` says
what an instance holds while it runs. Resources are counted for each device, or once for all devices if they are
`global`; the CPU is one device. The available count is that of `--rate-limit-resource=name:count[:device]`, where a
count for one device has precedence. Otherwise it is the largest count that an instance asks for.

Instances that wait for the same resource get it by weight: an instance of priority 2 runs half as often as one of
priority 1. Triton compares counts of runs since the start, so a model that is loaded later first catches up with all of
them. Here an unused turn is not owed (start-time fair queueing). An instance that needs much is not overtaken by
instances that need little: the resources for the next in turn are kept for it.

The limiter calls nothing while it holds its lock. A scheduler calls `acquire` under its own lock (scheduler, then
limiter; never the other way). After it released that lock, it calls `wake_next`, which wakes every demand that can run
now.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

from edge_server.core.model_spec import RateResource
from edge_server.errors import BadModelConfig

ResourceKey: TypeAlias = "tuple[str, int | None]"
"""Name and device; device None is one count for all devices: a global resource."""

CPU = -1
"""The device of instances that use no accelerator."""


class ResourceDemand:
    """Resources that one instance of `model` needs to run. `wake` is called, without any lock held, when it may ask
    again."""

    __slots__ = ("model", "needs", "order", "priority", "turn", "wake")

    def __init__(
        self, model: str, needs: Mapping[ResourceKey, int], priority: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        self.needs = needs
        self.priority = priority
        self.wake = wake
        self.turn = 0
        """The lowest value is next: the grants so far, weighted by priority, counted from when it began to ask."""
        self.order = 0
        """Order of two demands with the same turn."""


def needs_of(resources: tuple[RateResource, ...], device_id: int | None) -> dict[ResourceKey, int]:
    """Return the resources that an instance needs; `device_id` None: it runs on the CPU."""
    device = CPU if device_id is None else device_id
    needs: dict[ResourceKey, int] = {}
    for item in resources:
        if item.count:
            key = (item.name, None if item.is_global else device)
            needs[key] = needs.get(key, 0) + item.count
    return needs


class RateLimiter:
    """Thread-safe. `counts` are the configured ones; a count with device None applies to each device."""

    def __init__(self, counts: Mapping[ResourceKey, int]) -> None:
        self._lock = threading.Lock()
        self._configured = dict(counts)
        self._demands: set[ResourceDemand] = set()
        self._holding: set[ResourceDemand] = set()
        self._waiting: set[ResourceDemand] = set()
        self._used: dict[ResourceKey, int] = {}
        self._turns: dict[ResourceKey, int] = {}
        self._orders = itertools.count(1)

    def register(self, demand: ResourceDemand) -> None:
        """Register a demand. Raises BadModelConfig if it could never be granted."""
        for key, count in demand.needs.items():
            configured = self._configured_count(key)
            if configured is not None and count > configured:
                raise BadModelConfig(
                    f"model '{demand.model}': instance_group.rate_limiter asks for {count} of resource '{key[0]}'"
                    f"{_describe_device(key)}, and --rate-limit-resource grants {configured}"
                )
        with self._lock:
            self._check_scope(demand)
            self._demands.add(demand)
        # Without a configured count the largest demand is the count, and it may just have grown.
        self.wake_next()

    def unregister(self, demand: ResourceDemand) -> None:
        """Remove a demand and release its resources."""
        with self._lock:
            self._demands.discard(demand)
            self._waiting.discard(demand)
            self._release(demand)
        self.wake_next()

    def acquire(self, demand: ResourceDemand) -> bool:
        """Grant the resources of a demand, or queue it and return False. Call `wake_next` soon."""
        with self._lock:
            if demand not in self._demands:
                return False
            if demand not in self._waiting:
                # It begins to ask. Turns that it did not use before do not count, or it would block the others now.
                demand.turn = max(demand.turn, *(self._turns.get(key, 0) for key in demand.needs))
                demand.order = next(self._orders)
            is_behind = any(
                (other.turn, other.order) < (demand.turn, demand.order)
                and not other.needs.keys().isdisjoint(demand.needs)
                for other in self._waiting
            )
            if is_behind or not self._is_available(demand):
                self._waiting.add(demand)
                return False
            self._waiting.discard(demand)
            self._holding.add(demand)
            for key, count in demand.needs.items():
                self._used[key] = self._used.get(key, 0) + count
                self._turns[key] = max(self._turns.get(key, 0), demand.turn)
            demand.turn += demand.priority
            return True

    def release(self, demand: ResourceDemand) -> None:
        """Return the resources that `acquire` granted. Call `wake_next` soon; the caller may take them again first."""
        with self._lock:
            self._release(demand)

    def withdraw(self, demand: ResourceDemand) -> None:
        """Remove the demand from the queue: there is nothing to run. Call `wake_next` soon."""
        with self._lock:
            self._waiting.discard(demand)

    def wake_next(self) -> None:
        """Wake the waiting demands that can be granted now. Call it without a scheduler's lock.

        A woken demand takes its resources or leaves the queue, so the loop ends.
        """
        while self._waiting:
            woken: list[ResourceDemand] = []
            claimed: set[ResourceKey] = set()
            with self._lock:
                # Each that fits and is first in turn for its resources.
                for demand in sorted(self._waiting, key=lambda item: (item.turn, item.order)):
                    if claimed.isdisjoint(demand.needs) and self._is_available(demand):
                        woken.append(demand)
                    claimed.update(demand.needs)
            if not woken:
                return
            for demand in woken:
                demand.wake()

    def _release(self, demand: ResourceDemand) -> None:
        if demand not in self._holding:
            return
        self._holding.discard(demand)
        for key, count in demand.needs.items():
            self._used[key] -= count

    def _check_scope(self, demand: ResourceDemand) -> None:
        """Refuse a resource that is global for one model and per device for another, as Triton does."""
        for other in self._demands:
            if other.model == demand.model:
                # Its earlier generation, which ends soon.
                continue
            for name, device in demand.needs:
                if any(key[0] == name and (key[1] is None) != (device is None) for key in other.needs):
                    raise BadModelConfig(
                        f"model '{demand.model}': instance_group.rate_limiter asks for resource '{name}'"
                        f"{_describe_device((name, device))}, and to model '{other.model}' it is "
                        f"{'one of each device' if device is None else 'global'}"
                    )

    def _configured_count(self, key: ResourceKey) -> int | None:
        name, device = key
        if device is None:
            # As in Triton: a global resource has no device, so a count that names a device applies to it too.
            return max((count for (other, _), count in self._configured.items() if other == name), default=None)
        for device_key in (device, None, 0 if device == CPU else None):
            # In Triton the CPU has the number 0.
            if (count := self._configured.get((name, device_key))) is not None:
                return count
        return None

    def _count(self, key: ResourceKey) -> int:
        configured = self._configured_count(key)
        if configured is not None:
            return configured
        return max((demand.needs.get(key, 0) for demand in self._demands), default=0)

    def _is_available(self, demand: ResourceDemand) -> bool:
        return all(self._used.get(key, 0) + count <= self._count(key) for key, count in demand.needs.items())


def _describe_device(key: ResourceKey) -> str:
    if key[1] is None:
        return " of all devices together"
    return " of the CPU" if key[1] == CPU else f" of device {key[1]}"
