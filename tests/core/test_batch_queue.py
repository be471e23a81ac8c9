"""Dynamic batching rule as tables of cases with a manual clock. Times are microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from edge_server.core.batch_queue import BatchQueue, QueueEntry
from edge_server.core.model_spec import DynamicBatching, QueuePolicy, TimeoutAction
from edge_server.errors import QueueFull

NO_LIMITS = QueuePolicy()
REJECT, DELAY = TimeoutAction.REJECT, TimeoutAction.DELAY


def queue_of(
    *,
    preferred: Sequence[int] = (8,),
    delay: int = 0,
    policy: QueuePolicy = NO_LIMITS,
    policies: Mapping[int, QueuePolicy] | None = None,
    levels: int = 0,
    default_level: int = 0,
    max_rows: int = 8,
) -> BatchQueue[str]:
    batching = DynamicBatching(
        tuple(preferred),
        max_queue_delay_us=delay,
        priority_levels=levels,
        default_priority_level=default_level,
        default_queue_policy=policy,
        queue_policies=policies or {},
    )
    return BatchQueue(max_rows, batching, "m")


def put(
    queue: BatchQueue[str],
    name: str,
    rows: int = 1,
    *,
    at: int = 0,
    key: object = None,
    priority: int = 0,
    limit: int = 0,
) -> QueueEntry[str]:
    entry: QueueEntry[str] = QueueEntry(rows, key, at * 1000, priority, limit)
    queue.offer(entry, name)
    return entry


def take(queue: BatchQueue[str], at: int = 0) -> str:
    return "".join(queue.take(at * 1000))


def drain(queue: BatchQueue[str], at: int = 0) -> list[str]:
    batches = []
    while batch := take(queue, at):
        batches.append(batch)
    return batches


# Offered: name, rows, key. All at time 0; `at` is when the instance asks.
RULE = [
    ("nothing waits, nothing runs", {}, [], 0, []),
    ("without delay all pending go at once", {}, [("a", 1, 0), ("b", 2, 0)], 0, ["ab"]),
    ("a batch never exceeds the maximum", {}, [("a", 5, 0), ("b", 4, 0), ("c", 4, 0)], 0, ["a", "bc"]),
    ("a full batch goes without waiting", {"delay": 100}, [("a", 5, 0), ("b", 3, 0)], 0, ["ab"]),
    ("the next that does not fit sends what is pending", {"delay": 100}, [("a", 5, 0), ("b", 4, 0)], 0, ["a"]),
    ("different shapes are never mixed", {}, [("a", 1, 0), ("b", 1, 1), ("c", 1, 0)], 0, ["a", "b", "c"]),
    ("a different shape ends the wait", {"delay": 100}, [("a", 1, 0), ("b", 1, 1)], 0, ["a"]),
    ("a delay waits for more", {"delay": 100}, [("a", 1, 0), ("b", 1, 0)], 99, []),
    ("and ends when the oldest has waited that long", {"delay": 100}, [("a", 1, 0), ("b", 1, 0)], 100, ["ab"]),
    ("a preferred size goes at once", {"delay": 100, "preferred": (2, 4)}, [("a", 1, 0), ("b", 1, 0)], 0, ["ab"]),
    (
        "the largest preferred size that can be met is taken",
        {"delay": 100, "preferred": (2, 4)}, [(name, 1, 0) for name in "abcde"], 0, ["abcd"],
    ),
    (
        "without delay the rest follows a preferred size",
        {"preferred": (4,)}, [(name, 1, 0) for name in "abcdef"], 0, ["abcd", "ef"],
    ),
    (
        "once the delay is over preferred sizes do not matter",
        {"delay": 100, "preferred": (4,)}, [(name, 1, 0) for name in "abcdef"], 100, ["abcdef"],
    ),
    (
        "more than the largest preferred size goes though it is none",
        {"delay": 100, "preferred": (4,)}, [("a", 3, 0), ("b", 3, 0)], 0, ["ab"],
    ),
    (
        "less than the largest preferred size waits",
        {"delay": 100, "preferred": (4,)}, [("a", 1, 0), ("b", 2, 0)], 0, [],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "settings", "offered", "at", "batches"), RULE, ids=[case[0] for case in RULE])
def test_the_rule(
    sentence: str, settings: dict[str, object], offered: list[tuple[str, int, int]], at: int, batches: list[str]
) -> None:
    queue = queue_of(**settings)  # type: ignore[arg-type]
    for name, rows, key in offered:
        put(queue, name, rows, key=key)
    assert drain(queue, at) == batches


def test_without_dynamic_batching_each_is_a_batch_of_its_own_in_order_of_arrival() -> None:
    queue: BatchQueue[str] = BatchQueue(8, None, "m")
    for name in "abc":
        put(queue, name, priority=9, limit=5)
    assert drain(queue, at=10_000) == ["a", "b", "c"]
    assert queue.next_wakeup_ns() is None


PRIORITIES = [
    ("level 1 goes first", [("a", 2), ("b", 1)], "ba"),
    ("0 means the default level", [("a", 0), ("b", 1), ("c", 3), ("d", 2)], "badc"),
    ("above the range means the default level", [("a", 99), ("b", 1), ("c", 3)], "bac"),
    ("within a level the first is served first", [("a", 1), ("b", 1), ("c", 1)], "abc"),
]


@pytest.mark.parametrize(("sentence", "offered", "order"), PRIORITIES, ids=[case[0] for case in PRIORITIES])
def test_priorities(sentence: str, offered: list[tuple[str, int]], order: str) -> None:
    queue = queue_of(levels=3, default_level=2)
    for name, priority in offered:
        put(queue, name, priority=priority)
    assert take(queue) == order


def test_an_older_request_of_a_lower_level_ends_the_wait_of_a_higher_one() -> None:
    queue = queue_of(levels=2, default_level=2, delay=100)
    put(queue, "low", at=0, priority=2)
    put(queue, "high", at=90, priority=1)
    assert take(queue, at=99) == ""
    assert queue.next_wakeup_ns() == 100_000
    assert take(queue, at=100) == "highlow"


def test_each_level_has_a_limit_of_its_own_and_the_one_too_many_is_not_queued() -> None:
    queue = queue_of(
        levels=2, default_level=2, policy=QueuePolicy(max_queue_size=1), policies={1: QueuePolicy(max_queue_size=2)}
    )
    put(queue, "a", priority=1)
    put(queue, "b", priority=1)
    put(queue, "c", priority=2)
    for priority in (1, 2, 0):
        with pytest.raises(QueueFull, match=r"Exceeds maximum queue size.*'m'"):
            put(queue, "x", priority=priority)
    assert queue.size == 3
    assert take(queue) == "abc"
    put(queue, "d", priority=2)
    assert take(queue) == "d"


def test_requests_that_are_late_count_as_waiting() -> None:
    queue = queue_of(policy=QueuePolicy(DELAY, default_timeout_us=10, max_queue_size=1))
    put(queue, "a")
    assert queue.expire(10_000) == []
    with pytest.raises(QueueFull):
        put(queue, "b", at=10)


# default time-out, override allowed, as asked -> when the time is over (None: never)
LIMITS = [
    (0, False, 0, None), (0, False, 50, None), (0, True, 50, 50), (0, True, 0, None),
    (100, False, 50, 100), (100, True, 50, 50), (100, True, 500, 100), (100, True, 0, 100), (100, True, 2**80, 100),
]  # fmt: skip


@pytest.mark.parametrize(("default", "is_allowed", "asked", "over"), LIMITS)
def test_a_time_limit_is_the_policys_unless_the_request_may_shorten_it(
    default: int, is_allowed: bool, asked: int, over: int | None
) -> None:
    queue = queue_of(policy=QueuePolicy(REJECT, default, is_allowed), delay=10**9)
    put(queue, "a", at=7, limit=asked)
    assert queue.next_deadline_ns() == (None if over is None else (7 + over) * 1000)
    if over is not None:
        assert queue.expire((7 + over) * 1000 - 1) == []
        assert queue.expire((7 + over) * 1000) == ["a"]
        assert queue.size == 0


def test_a_late_request_is_served_after_all_others_of_its_level_but_before_lower_levels() -> None:
    queue = queue_of(
        levels=2, default_level=2, policies={1: QueuePolicy(DELAY, default_timeout_us=10, allow_timeout_override=True)}
    )
    put(queue, "low", priority=2)
    put(queue, "late", priority=1)
    put(queue, "later", at=1, priority=1)
    put(queue, "fresh", at=50, priority=1)
    assert queue.expire(20_000) == []
    assert take(queue, at=20) == "freshlatelaterlow"


def test_the_order_of_expiry_is_the_order_of_deadlines() -> None:
    queue = queue_of(policy=QueuePolicy(REJECT, 0, True), delay=10**9)
    put(queue, "a", limit=30)
    put(queue, "b", limit=10)
    put(queue, "c", limit=20)
    assert queue.next_deadline_ns() == 10_000
    assert queue.expire(25_000) == ["b", "c"]
    assert queue.next_deadline_ns() == 30_000


def test_dropped_entries_are_neither_run_nor_expired_nor_counted() -> None:
    queue = queue_of(policy=QueuePolicy(REJECT, 10, max_queue_size=2), delay=100)
    first, second = put(queue, "a"), put(queue, "b")
    assert queue.drop(first)
    assert not queue.drop(first)
    put(queue, "c")
    assert queue.expire(5_000) == []
    assert take(queue, at=5) == ""
    assert queue.drop(second)
    assert queue.expire(10_000) == ["c"]
    assert queue.size == 0
    assert queue.next_deadline_ns() is None


def test_a_taken_entry_cannot_be_dropped() -> None:
    queue = queue_of()
    entry = put(queue, "a")
    assert take(queue) == "a"
    assert not queue.drop(entry)


def test_the_next_wakeup_is_the_end_of_the_delay_or_the_nearest_deadline() -> None:
    queue = queue_of(delay=100, policy=QueuePolicy(REJECT, 0, True))
    put(queue, "a", at=0)
    put(queue, "b", at=10)
    assert take(queue, at=10) == ""
    assert queue.next_wakeup_ns() == 100_000
    put(queue, "c", at=20, limit=30)
    assert take(queue, at=20) == ""
    assert queue.next_wakeup_ns() == 50_000
    assert queue.expire(50_000) == ["c"]
    assert take(queue, at=50) == ""
    assert queue.next_wakeup_ns() == 100_000
    assert take(queue, at=100) == "ab"
    assert queue.next_wakeup_ns() is None


def test_clear_returns_everything_in_the_order_in_which_it_would_have_run() -> None:
    queue = queue_of(levels=2, default_level=2, policy=QueuePolicy(REJECT, 10))
    put(queue, "a", priority=2)
    put(queue, "b", priority=1)
    assert queue.clear() == ["b", "a"]
    assert queue.size == 0
    assert queue.next_deadline_ns() is None


def test_what_left_before_its_time_does_not_pile_up_behind_a_long_deadline() -> None:
    queue = queue_of(policy=QueuePolicy(REJECT, 0, True), delay=10**9)
    put(queue, "patient", limit=10)
    for _ in range(5000):
        queue.drop(put(queue, "impatient", limit=10**6))
    assert len(queue._deadlines) < 200
    assert queue.clear() == ["patient"]
