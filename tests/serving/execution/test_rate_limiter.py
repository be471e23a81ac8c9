"""Triton's rate limiter: the rule against a list that knows what must hold, and real threads that fight for turns."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_server.core.model_spec import DynamicBatching, InstanceGroup, InstanceKind, RateResource
from edge_server.errors import BadModelConfig, Cancelled, EdgeServerError
from edge_server.serving.execution.rate_limiter import CPU, RateLimiter, ResourceDemand, ResourceKey, needs_of

R = ("R", CPU)


def group(name: str, *resources: tuple[str, int], instances: int = 1, priority: int = 1) -> tuple[InstanceGroup, ...]:
    wanted = tuple(RateResource(key, count) for key, count in resources)
    return (InstanceGroup(name, InstanceKind.CPU, instances, resources=wanted, rate_priority=priority),)


# -- the rule ------------------------------------------------------------------------------------------------------


def in_use(limiter: RateLimiter) -> dict[ResourceKey, tuple[int, int]]:
    """Return, for each resource that instances ask for, the granted and the total count."""
    with limiter._lock:
        keys = {key for demand in limiter._demands for key in demand.needs}
        return {key: (limiter._used.get(key, 0), limiter._count(key)) for key in keys}


class LimiterMachine(RuleBasedStateMachine):
    """Demands that want to run, run, and stop wanting, in any order; a woken one asks again, as schedulers do."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = RateLimiter({("A", None): 4, ("B", None): 2})
        self.wanting: set[ResourceDemand] = set()
        self.running: set[ResourceDemand] = set()
        self.demands: list[ResourceDemand] = []

    @rule(a=st.integers(0, 4), b=st.integers(0, 2), c=st.integers(0, 3), priority=st.integers(1, 4))
    def register(self, a: int, b: int, c: int, priority: int) -> None:
        needs = {key: count for key, count in ((("A", CPU), a), (("B", CPU), b), (("C", CPU), c)) if count}
        if not needs or len(self.demands) > 8:
            return
        demand = ResourceDemand("m", needs, priority)
        demand.wake = lambda: self.ask(demand)
        self.limiter.register(demand)
        self.demands.append(demand)

    def ask(self, demand: ResourceDemand) -> None:
        if demand not in self.wanting:
            self.limiter.withdraw(demand)
        elif self.limiter.acquire(demand):
            self.wanting.discard(demand)
            self.running.add(demand)

    def idle(self) -> list[ResourceDemand]:
        return [item for item in self.demands if item not in self.wanting and item not in self.running]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        demand = data.draw(st.sampled_from(self.idle()))
        self.wanting.add(demand)
        self.ask(demand)
        self.limiter.wake_next()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), wants_more=st.booleans())
    def end(self, data: st.DataObject, wants_more: bool) -> None:
        demand = data.draw(st.sampled_from([item for item in self.demands if item in self.running]))
        self.running.discard(demand)
        self.limiter.release(demand)
        if wants_more:
            self.wanting.add(demand)
            self.ask(demand)
        self.limiter.wake_next()

    @precondition(lambda self: self.wanting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        demand = data.draw(st.sampled_from([item for item in self.demands if item in self.wanting]))
        self.wanting.discard(demand)
        self.limiter.withdraw(demand)
        self.limiter.wake_next()

    @precondition(lambda self: self.demands)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        demand = data.draw(st.sampled_from(self.demands))
        self.demands.remove(demand)
        self.wanting.discard(demand)
        self.running.discard(demand)
        self.limiter.unregister(demand)

    @invariant()
    def no_more_is_in_use_than_there_is(self) -> None:
        for key, (used, count) in in_use(self.limiter).items():
            assert used == sum(item.needs.get(key, 0) for item in self.running)
            # Without a configured count the most demanding one says how many there are, and it may have left.
            assert used <= count or key[0] == "C"

    @invariant()
    def nobody_waits_who_could_run(self) -> None:
        """Of those that want to run, the one whose turn it is lacks something that another holds."""
        if self.wanting:
            first = min(self.wanting, key=lambda item: (item.turn, item.order))
            used = in_use(self.limiter)
            assert any(used[key][0] + count > used[key][1] for key, count in first.needs.items())

    @invariant()
    def whoever_shares_nothing_with_the_others_runs(self) -> None:
        for demand in self.wanting:
            others = (self.wanting | self.running) - {demand}
            assert any(not demand.needs.keys().isdisjoint(other.needs) for other in others)


TestLimiter = LimiterMachine.TestCase


def runs_of(limiter: RateLimiter, demands: dict[str, ResourceDemand], count: int) -> Counter[str]:
    """Let all of them always want to run, one at a time, and return who ran how often."""
    running: list[str] = []

    def ask(name: str) -> None:
        if limiter.acquire(demands[name]):
            running.append(name)

    for name, demand in demands.items():
        demand.wake = lambda name=name: ask(name)  # type: ignore[misc]
        ask(name)
    seen: Counter[str] = Counter()
    for _ in range(count):
        name = running.pop(0)
        seen[name] += 1
        limiter.release(demands[name])
        ask(name)
        limiter.wake_next()
    return seen


def test_the_weights_give_the_shares() -> None:
    limiter = RateLimiter({("R", None): 1})
    demands = {name: ResourceDemand(name, {R: 1}, weight) for name, weight in (("one", 1), ("two", 2), ("four", 4))}
    for demand in demands.values():
        limiter.register(demand)
    seen = runs_of(limiter, demands, 700)
    assert abs(seen["one"] - 400) <= 2
    assert abs(seen["two"] - 200) <= 2
    assert abs(seen["four"] - 100) <= 2


def test_a_late_demand_does_not_catch_up_with_earlier_runs_of_others() -> None:
    limiter = RateLimiter({("R", None): 1})
    old, new = ResourceDemand("old", {R: 1}, 1), ResourceDemand("new", {R: 1}, 1)
    limiter.register(old)
    for _ in range(1000):
        assert limiter.acquire(old)
        limiter.release(old)
    limiter.register(new)
    seen = runs_of(limiter, {"old": old, "new": new}, 100)
    assert abs(seen["old"] - seen["new"]) <= 1


def test_a_large_demand_is_not_overtaken_by_small_ones() -> None:
    limiter = RateLimiter({("R", None): 4})
    big = ResourceDemand("big", {R: 4}, 1)
    small = [ResourceDemand(f"small{index}", {R: 1}, 1) for index in range(4)]
    for demand in (big, *small):
        limiter.register(demand)
    assert all(limiter.acquire(demand) for demand in small[:3])
    assert not limiter.acquire(big)
    assert not limiter.acquire(small[3]), "it would fit, but the big one came first"
    for demand in small[:3]:
        limiter.release(demand)
    assert not limiter.acquire(small[3])
    assert limiter.acquire(big)


def test_resources_of_each_device_are_counted_for_each() -> None:
    limiter = RateLimiter({("R", None): 1})
    demands = [ResourceDemand("m", needs_of((RateResource("R", 1),), device), 1) for device in (0, 1, None)]
    for demand in demands:
        limiter.register(demand)
    assert all(limiter.acquire(demand) for demand in demands)


def test_a_global_resource_is_one_for_all_devices() -> None:
    limiter = RateLimiter({("R", None): 1})
    demands = [ResourceDemand("m", needs_of((RateResource("R", 1, True),), device), 1) for device in (0, 1, None)]
    for demand in demands:
        limiter.register(demand)
    assert [limiter.acquire(demand) for demand in demands] == [True, False, False]


def test_a_count_for_one_device_goes_before_the_count_for_each() -> None:
    limiter = RateLimiter({("R", None): 1, ("R", 1): 2})
    with pytest.raises(BadModelConfig, match=r"model 'm': .* 2 of resource 'R' of device 0, .* grants 1"):
        limiter.register(ResourceDemand("m", {("R", 0): 2}, 1))
    limiter.register(ResourceDemand("m", {("R", 1): 2}, 1))


def test_a_resource_is_global_for_all_models_or_for_none() -> None:
    limiter = RateLimiter({})
    limiter.register(ResourceDemand("first", {("R", None): 1}, 1))
    with pytest.raises(BadModelConfig, match=r"model 'second'.*'R' of device 0, and to model 'first' it is global"):
        limiter.register(ResourceDemand("second", {("R", 0): 1}, 1))


def test_a_model_may_change_the_scope_of_its_resource_when_it_is_reloaded() -> None:
    limiter = RateLimiter({})
    limiter.register(ResourceDemand("m", {("R", None): 1}, 1))
    limiter.register(ResourceDemand("m", {("R", 0): 1}, 1))


def test_without_a_configured_count_there_is_what_the_most_demanding_one_needs() -> None:
    limiter = RateLimiter({})
    small = [ResourceDemand(f"s{index}", {R: 1}, 1) for index in range(3)]
    for demand in small:
        limiter.register(demand)
    granted = [limiter.acquire(demand) for demand in small]
    assert granted == [True, False, False]
    woken: list[str] = []
    small[1].wake = lambda: woken.append("s1") or limiter.acquire(small[1])  # type: ignore[func-returns-value]
    limiter.register(ResourceDemand("big", {R: 2}, 1))
    assert woken == ["s1"], "a count that grows lets those go on that it holds up"


def test_releasing_resources_that_are_not_held_changes_nothing() -> None:
    limiter = RateLimiter({("R", None): 1})
    demand = ResourceDemand("m", {R: 1}, 1)
    limiter.register(demand)
    limiter.release(demand)
    assert in_use(limiter) == {R: (0, 1)}


# -- models in a house ------------------------------------------------------------------------------------------------


class Watched:
    """Sessions that know how many of each model run at once."""

    def __init__(self, core: Any, seconds: float = 0.0) -> None:
        self._lock = threading.Lock()
        self.now: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.ran: list[str] = []
        self.costs: dict[str, int] = {}
        self.limit = 1
        self._seconds = seconds
        core.script.on_run = self.run

    def run(self, name: str, inputs: Any) -> Any:
        model = name.rpartition("_")[0]
        with self._lock:
            self.ran.append(model)
            self.now[model] += 1
            in_use = sum(self.costs.get(key, 1) * count for key, count in self.now.items())
            if in_use > self.limit:
                self.wrong.append(f"{in_use} of {self.limit}: {dict(self.now)}")
        if self._seconds:
            time.sleep(self._seconds)
        with self._lock:
            self.now[model] -= 1
        return {"OUT": np.array(inputs["IN"])}


def test_two_models_that_share_a_resource_never_run_at_once(new_core: Any) -> None:
    core = new_core(limiter=RateLimiter({("R", None): 1}))
    watched = Watched(core, 0.001)
    for name in ("a", "b"):
        core.load(core.spec(name, instance_groups=group(name, ("R", 1), instances=2)))
    mailboxes = [core.submit(number, model=name)[1] for number in range(30) for name in ("a", "b")]
    assert all(mailbox.final().error is None for mailbox in mailboxes)
    assert watched.wrong == []
    assert Counter(watched.ran) == {"a": 30, "b": 30}


def test_a_model_without_resources_is_not_held_up(new_core: Any) -> None:
    core = new_core(limiter=RateLimiter({("R", None): 1}))
    stop = core.block_runs("a")
    core.load(core.spec("a", instance_groups=group("a", ("R", 1))))
    core.load(core.spec("b"))
    _, first = core.submit(model="a")
    stop.wait_blocked()
    assert core.submit(model="b")[1].final().error is None
    stop.release()
    first.final()


def test_priorities_give_shares_to_models_that_are_always_asked(new_core: Any) -> None:
    core = new_core(limiter=RateLimiter({("R", None): 1}))
    watched = Watched(core, 0.0005)
    core.load(core.spec("a", instance_groups=group("a", ("R", 1), priority=1)))
    core.load(core.spec("b", instance_groups=group("b", ("R", 1), priority=3)))
    mailboxes = [core.submit(model=name)[1] for _ in range(120) for name in ("a", "b")]
    for mailbox in mailboxes:
        mailbox.final()
    # While both still wait: 90 of a's turns to 30 of b's.
    assert abs(Counter(watched.ran[:120])["a"] - 90) <= 4
    assert watched.wrong == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_gives_its_resources_back_also_when_it_fails(new_core: Any, fails: bool) -> None:
    limiter = RateLimiter({("R", None): 1})
    core = new_core(limiter=limiter)
    core.load(core.spec("a", instance_groups=group("a", ("R", 1))))
    if fails:
        core.script.on_run = lambda name, inputs: 1 / 0
    for _ in range(3):
        assert (core.submit(model="a")[1].final().error is not None) is fails
    core.service.close(1.0)
    assert in_use(limiter) == {}


def test_a_cancelled_waiter_lets_the_next_one_go(new_core: Any, new_blocker: Any) -> None:
    """`both` waits for R1, and so for R2 too, which `other` could have."""
    core = new_core(limiter=RateLimiter({("R1", None): 1, ("R2", None): 1}))
    stop = new_blocker()
    core.script.on_run = lambda name, inputs: (
        (name.startswith("holder") and stop.block()) or {"OUT": np.array(inputs["IN"])}
    )
    core.load(core.spec("holder", instance_groups=group("holder", ("R1", 1))))
    core.load(core.spec("both", instance_groups=group("both", ("R1", 1), ("R2", 1))))
    core.load(core.spec("other", instance_groups=group("other", ("R2", 1))))
    _, held = core.submit(model="holder")
    stop.wait_blocked()
    waiting, cancelled = core.submit(model="both")
    _, behind = core.submit(model="other")
    assert behind.responses == []
    waiting.cancel()
    assert isinstance(cancelled.final().error, Cancelled)
    assert behind.final().error is None, "nobody is before it any more"
    stop.release()
    held.final()


def test_an_expired_waiter_lets_the_next_one_go(new_core: Any, new_blocker: Any) -> None:
    core = new_core(limiter=RateLimiter({("R1", None): 1, ("R2", None): 1}))
    stop = new_blocker()
    core.script.on_run = lambda name, inputs: (
        (name.startswith("holder") and stop.block()) or {"OUT": np.array(inputs["IN"])}
    )
    core.load(core.spec("holder", instance_groups=group("holder", ("R1", 1))))
    core.load(core.spec("both", instance_groups=group("both", ("R1", 1), ("R2", 1))))
    core.load(core.spec("other", instance_groups=group("other", ("R2", 1))))
    _, held = core.submit(model="holder")
    stop.wait_blocked()
    _, late = core.submit(model="both", deadline_ns=time.monotonic_ns() + 20_000_000)
    _, behind = core.submit(model="other")
    assert late.final().error is not None
    assert behind.final().error is None
    stop.release()
    held.final()


def test_a_version_that_is_unloaded_while_it_waits_answers_first_and_leaves_nothing(
    new_core: Any, eventually: Any
) -> None:
    limiter = RateLimiter({("R", None): 1})
    core = new_core(limiter=limiter)
    stop = core.block_runs("a")
    for name in ("a", "b"):
        core.load(core.spec(name, instance_groups=group(name, ("R", 1))))
    _, held = core.submit(model="a")
    stop.wait_blocked()
    _, waiting = core.submit(model="b")
    core.service.unload_model("b")
    assert waiting.responses == []
    stop.release()
    assert held.final().error is None
    assert waiting.final().error is None
    assert eventually(lambda: not core.router.versions("b") or core.router.versions("b")[0].state == "RETIRED")
    assert core.submit(model="a")[1] is not None
    stop.release()


def test_what_hangs_does_not_keep_its_resources_from_others(new_core: Any) -> None:
    core = new_core(limiter=RateLimiter({("R", None): 1}), hang_timeout_s=0.2)
    stop = core.block_runs("a")
    for name in ("a", "b"):
        core.load(core.spec(name, instance_groups=group(name, ("R", 1))))
    _, hung = core.submit(model="a")
    stop.wait_blocked()
    _, waiting = core.submit(model="b")
    assert hung.final().error is not None
    assert waiting.final().error is None
    stop.release()


def test_a_model_that_needs_more_resources_than_exist_does_not_load_and_leaves_nothing_open(new_core: Any) -> None:
    limiter = RateLimiter({("R", None): 3})
    core = new_core(limiter=limiter)
    core.set_desired(core.spec("a", instance_groups=group("a", ("R", 4))))
    assert core.table.wait_settled(["a"], 20)
    assert "asks for 4 of resource 'R' of the CPU, and --rate-limit-resource grants 3" in core.router.failure("a")
    assert core.script.opened == []
    assert in_use(limiter) == {}


def test_waiting_for_resources_with_a_queue_delay_does_not_keep_the_timer_busy(new_core: Any) -> None:
    core = new_core(limiter=RateLimiter({("R", None): 1}))
    stop = core.block_runs("a")
    core.load(core.spec("a", instance_groups=group("a", ("R", 1))))
    batching = DynamicBatching((8,), max_queue_delay_us=1000)
    core.load(core.spec("b", instance_groups=group("b", ("R", 1)), dynamic_batching=batching))
    _, held = core.submit(model="a")
    stop.wait_blocked()
    calls = Counter[str]()
    plain = core.timer.call_at

    def count(when_ns: int, call: Any) -> Any:
        calls["set"] += 1
        return plain(when_ns, call)

    core.timer.call_at = count
    _, waiting = core.submit(model="b")
    # The delay is over once the timer has come to what was put behind it.
    passed = threading.Event()
    plain(time.monotonic_ns() + 30_000_000, passed.set)
    assert passed.wait(20)
    assert calls["set"] <= 2
    stop.release()
    held.final()
    assert waiting.final().error is None


def test_two_groups_of_one_model_each_run_their_own_batches(new_core: Any) -> None:
    """The instance freed last may be refused while another one of the same model is granted."""
    core = new_core(limiter=RateLimiter({("R", None): 1}))
    watched = Watched(core, 0.0002)
    watched.limit = 99
    groups = (*group("a", ("R", 1), instances=2), InstanceGroup("free", InstanceKind.CPU, 1))
    version = core.load(core.spec("a", instance_groups=groups))
    mailboxes = [core.submit(number, model="a")[1] for number in range(200)]
    assert [float(mailbox.final().outputs[0].array.flat[0]) for mailbox in mailboxes] == list(range(200))
    assert version.in_flight == 0


def test_a_storm_with_cancels_and_reloads_loses_no_request_and_oversteps_nothing(new_core: Any) -> None:
    limiter = RateLimiter({("R", None): 3})
    core = new_core(limiter=limiter)
    watched = Watched(core)
    watched.limit = 3
    watched.costs = {"a": 1, "b": 2, "c": 3, "d": 0}
    batching = DynamicBatching((8,), max_queue_delay_us=200)
    specs = {
        "a": core.spec("a", instance_groups=group("a", ("R", 1), instances=2)),
        "b": core.spec("b", instance_groups=group("b", ("R", 2), priority=2), dynamic_batching=batching),
        "c": core.spec("c", instance_groups=group("c", ("R", 3), priority=3)),
        "d": core.spec("d"),
    }
    for spec in specs.values():
        core.load(spec)
    start = threading.Barrier(5)
    problems: list[str] = []

    def ask(seed: int) -> None:
        luck = random.Random(seed)
        start.wait()
        waiting = []
        for _ in range(150):
            name = luck.choice("abcd")
            try:
                ticket, mailbox = core.submit(model=name, may_run=luck.random() < 0.3)
            except EdgeServerError as error:
                problems.append(f"{name}: {error}")
                continue
            waiting.append(mailbox)
            if luck.random() < 0.2:
                ticket.cancel()
        for mailbox in waiting:
            error = mailbox.final().error
            if error is not None and not isinstance(error, Cancelled):
                problems.append(str(error))

    def reload() -> None:
        start.wait()
        for number in range(12):
            name = "abc"[number % 3]
            core.set_desired(specs[name], mark=f"new{number}")
            core.table.wait_settled([name], 20)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)] + [threading.Thread(target=reload)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    assert problems == []
    assert watched.wrong == []
    assert core.service.close(20.0)
    assert in_use(limiter) == {}
