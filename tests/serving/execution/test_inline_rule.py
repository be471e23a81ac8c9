"""Inline execution: which requests run on the thread that brings them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edge_server.backends.base import SessionInfo
from edge_server.errors import Draining
from edge_server.service import READING_THREAD_HOLD_US
from edge_server.serving.execution.inline_rule import UNLIMITED_US, InlineRule, needed_hold_us
from tests.kit.eventually import eventually

COMPUTES = SessionInfo("scripted", "CPU", "f32", only_computes=True)
MAY_WAIT = SessionInfo("scripted", "CPU", "f32")
BOUND = SessionInfo("scripted", "CPU", "f32", keeps_thread=True, only_computes=True)
ANY_FINITE_US = 1e12
"""More than any run of a test takes, so that no test depends on the machine's speed."""


@pytest.mark.parametrize(
    ("info", "is_decoupled", "run_us", "hold_us", "is_inline"),
    [
        (COMPUTES, False, 20.0, 0.0, False),
        (COMPUTES, False, 0.0, 0.0, False),
        (COMPUTES, False, 20.0, 300.0, True),
        (COMPUTES, False, 300.0, 300.0, False),
        (COMPUTES, False, 20_000.0, 300.0, False),
        (COMPUTES, False, 20_000.0, math.inf, True),
        (COMPUTES, False, UNLIMITED_US, ANY_FINITE_US, False),
        (COMPUTES, False, UNLIMITED_US, math.inf, True),
        (COMPUTES, True, 20.0, 300.0, False),
        (COMPUTES, True, 20.0, math.inf, True),
        (MAY_WAIT, False, 20.0, 300.0, False),
        (MAY_WAIT, False, 20.0, ANY_FINITE_US, False),
        (MAY_WAIT, False, 20.0, math.inf, True),
        (BOUND, False, 20.0, 300.0, False),
        (BOUND, False, 20.0, math.inf, False),
        (BOUND, True, UNLIMITED_US, math.inf, False),
    ],
)
def test_the_rule(info: SessionInfo, is_decoupled: bool, run_us: float, hold_us: float, is_inline: bool) -> None:
    assert (hold_us > needed_hold_us(info, is_decoupled, run_us)) is is_inline


US = 1000
QUICK = (20 * US, 20 * US)
PREEMPTED = (5000 * US, 20 * US)
WAITS = (5000 * US, 30 * US)
COMPUTES_LONG = (5000 * US, 5000 * US)


@pytest.mark.parametrize(
    ("runs", "is_short"),
    [
        ([], False),
        ([QUICK], True),
        ([WAITS], False),
        ([COMPUTES_LONG], False),
        # Other threads took the processor, or the GIL, from half of the runs.
        ([QUICK, PREEMPTED] * 8, True),
        ([QUICK] * 8 + [PREEMPTED] * 4, True),
        ([QUICK] * 8 + [WAITS] * 8, False),
        # One run in ten that computes for long holds everybody behind it.
        (([QUICK] * 9 + [COMPUTES_LONG]) * 3, False),
        ([COMPUTES_LONG] * 8 + [QUICK] * 30, True),
        ([WAITS] * 20 + [QUICK] * 8, True),
    ],
)
def test_how_long_runs_take_is_learned(runs: list[tuple[int, int]], is_short: bool) -> None:
    rule = InlineRule(COMPUTES, is_decoupled=False)
    for wall_ns, processor_ns in runs:
        rule.note(wall_ns, processor_ns)
    assert (rule.needed_hold_us < READING_THREAD_HOLD_US) is is_short


def test_of_short_runs_few_are_measured_and_more_after_a_slow_one() -> None:
    rule = InlineRule(COMPUTES, is_decoupled=False)

    def measured(count: int, wall_ns: int = QUICK[0]) -> int:
        found = 0
        for _ in range(count):
            if rule.begin():
                found += 1
                rule.note(wall_ns, QUICK[1])
            else:
                rule.end(wall_ns, 0)
        return found

    assert measured(16) == 16
    assert QUICK[0] < rule.slow_ns < PREEMPTED[0]
    assert measured(160) == 10
    # Cold caches: slower than usual, and still short.
    assert measured(160, 4 * QUICK[0]) == 10
    while rule.begin():
        rule.note(*QUICK)
    rule.end(PREEMPTED[0], 0)
    assert measured(16) == 16
    for _ in range(20):
        rule.note(500 * US, 500 * US)
    assert measured(30, 500 * US) == 30


def test_many_threads_note_their_runs() -> None:
    rule = InlineRule(COMPUTES, is_decoupled=False)

    def note_runs(_: int) -> None:
        for _ in range(500):
            rule.note(*QUICK)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(note_runs, range(8)))
    assert rule.needed_hold_us == pytest.approx(20.0)


@pytest.mark.parametrize(("info", "depends"), [(COMPUTES, True), (MAY_WAIT, False), (BOUND, False)])
def test_runs_are_noted_only_where_it_depends_on_them(info: SessionInfo, depends: bool) -> None:
    assert InlineRule(info, is_decoupled=False).depends_on_runs is depends
    assert not InlineRule(info, is_decoupled=True).depends_on_runs


@pytest.fixture
def load(core: Any) -> Callable[..., Any]:
    """Load a model whose scripted sessions report the given SessionInfo."""

    def load_it(info: SessionInfo, **more: Any) -> Any:
        plain = core.script.open

        def open_session(job: Any) -> Any:
            session = plain(job)
            session.info = info
            return session

        core.script.open = open_session
        return core.load(core.spec(**more))

    return load_it


@pytest.fixture
def is_run_here(core: Any, new_mailbox: Any) -> Callable[[float], bool]:
    """Return whether a request runs on this thread, which may be held for the given time."""

    def is_run(hold_us: float) -> bool:
        mailbox = new_mailbox()
        core.service.submit(core.request(1.0), mailbox, hold_us=hold_us)
        assert mailbox.final().error is None
        # The instance is free again after the response: another request finds it busy before.
        assert eventually(lambda: core.router.in_flight() == 0)
        return core.script.ran[-1][1] is threading.current_thread()

    return is_run


def test_a_model_runs_on_a_reading_thread_once_it_was_seen_to_be_short(core: Any, load: Any, is_run_here: Any) -> None:
    load(COMPUTES)
    assert not is_run_here(ANY_FINITE_US)
    assert all(is_run_here(ANY_FINITE_US) for _ in range(30))
    assert not is_run_here(0.0)


def test_a_model_that_waits_is_not_run_on_a_reading_thread(core: Any, load: Any, is_run_here: Any) -> None:
    plain = core.script.on_run

    def run(name: str, inputs: Any) -> Any:
        time.sleep(3 * READING_THREAD_HOLD_US / 1e6)
        return plain(name, inputs)

    core.script.on_run = run
    load(COMPUTES)
    assert not any(is_run_here(READING_THREAD_HOLD_US) for _ in range(20))
    assert is_run_here(math.inf)


def test_what_may_wait_for_this_server_runs_only_where_a_thread_waits_anyway(
    core: Any, load: Any, is_run_here: Any
) -> None:
    load(MAY_WAIT)
    assert not any(is_run_here(ANY_FINITE_US) for _ in range(5))
    assert is_run_here(math.inf)


def test_what_keeps_its_thread_runs_on_no_other(core: Any, load: Any, is_run_here: Any) -> None:
    load(BOUND)
    assert not any(is_run_here(hold_us) for hold_us in (ANY_FINITE_US, math.inf) for _ in range(5))


def test_a_reload_learns_anew(core: Any, load: Any, is_run_here: Any) -> None:
    load(COMPUTES)
    is_run_here(ANY_FINITE_US)
    assert is_run_here(ANY_FINITE_US)
    core.load(core.spec(), mark="b")
    assert not is_run_here(ANY_FINITE_US)


@pytest.fixture
def running(core: Any, blocker: Any, new_mailbox: Any) -> Any:
    """A request that a caller's thread computes, blocked within the run; its responses, and the thread."""
    core.load(core.spec())
    released = threading.Event()
    request = core.request(7.0, release=released.set)
    mailbox = new_mailbox()
    caller = threading.Thread(target=core.service.submit, args=(request, mailbox), kwargs={"hold_us": math.inf})
    caller.start()
    blocker.wait_blocked()
    yield mailbox, caller, released
    blocker.release(10)
    caller.join(20)


def test_a_drain_waits_for_a_run_on_a_callers_thread(core: Any, blocker: Any, running: Any) -> None:
    mailbox, caller, released = running
    version = core.router.route("m", None)
    drained = threading.Event()
    assert version.in_flight == 1
    core.service.unload_model("m")
    version.when_drained(drained.set)
    assert not drained.wait(0.05)
    blocker.release()
    assert drained.wait(20)
    caller.join(20)
    assert mailbox.final().outputs[0].array.tolist() == [[7.0]]
    assert released.is_set()
    assert version.in_flight == 0


def test_a_run_that_outlasts_the_drain_is_answered_once_and_released_at_its_end(
    core: Any, blocker: Any, running: Any
) -> None:
    mailbox, caller, released = running
    version = core.router.route("m", None)
    assert version.abandon_running() == 1
    assert isinstance(mailbox.final().error, Draining)
    assert not released.is_set()
    assert version.in_flight == 1
    blocker.release()
    caller.join(20)
    assert len(mailbox.responses) == 1
    assert released.is_set()
    assert version.in_flight == 0


def test_a_ticket_is_cancelled_in_vain_once_its_caller_has_computed_it(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec())
    mailbox = new_mailbox()
    ticket = core.service.submit(core.request(2.0), mailbox, hold_us=math.inf)
    ticket.cancel()
    assert [response.error for response in mailbox.responses] == [None]
    assert core.router.route("m", None).in_flight == 0
