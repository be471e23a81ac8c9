"""The timer: calls come in order of their time, a faulty one harms no other, and it can be stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from edge_server.serving.timer import Timer


@pytest.fixture
def timer() -> Iterator[Timer]:
    made = Timer()
    yield made
    made.close()


def test_calls_come_in_order_of_their_time(timer: Timer) -> None:
    order: list[str] = []
    all_are_set, done = threading.Event(), threading.Event()
    timer.call_at(0, lambda: all_are_set.wait(20))
    timer.call_at(30, done.set)
    timer.call_at(20, lambda: order.append("b"))
    timer.call_at(10, lambda: order.append("a"))
    timer.call_at(0, lambda: order.append("overdue"))
    all_are_set.set()
    assert done.wait(20)
    assert order == ["overdue", "a", "b"]


def test_a_call_never_comes_before_its_time(timer: Timer) -> None:
    done = threading.Event()
    came: list[int] = []
    when = time.monotonic_ns() + 20_000_000
    timer.call_at(when, lambda: (came.append(time.monotonic_ns()), done.set()))
    assert done.wait(20)
    assert came[0] >= when


def test_a_cancelled_call_does_not_come(timer: Timer) -> None:
    came: list[str] = []
    done = threading.Event()
    now = time.monotonic_ns()
    timer.call_at(now + 5_000_000, lambda: came.append("cancelled")).cancel()
    timer.call_at(now + 10_000_000, done.set)
    assert done.wait(20)
    assert came == []


def test_a_call_that_raises_is_logged_and_the_next_still_comes(timer: Timer, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    timer.call_at(0, lambda: [][0])
    timer.call_at(1, done.set)
    assert done.wait(20)
    assert "a timed call failed" in caplog.text


@pytest.mark.parametrize("when_ns", [2**62, 2**63, 2**70, 2**200])
def test_a_time_beyond_all_clocks_keeps_the_timer_alive(timer: Timer, when_ns: int) -> None:
    timer.call_at(when_ns, lambda: None)
    done = threading.Event()
    timer.call_at(0, done.set)
    assert done.wait(20)
    again = threading.Event()
    timer.call_at(time.monotonic_ns() + 5_000_000, again.set)
    assert again.wait(20)


def test_a_call_may_arrange_another(timer: Timer) -> None:
    done = threading.Event()
    timer.call_at(0, lambda: timer.call_at(0, done.set))
    assert done.wait(20)


def test_closing_ends_the_thread_though_calls_are_to_come() -> None:
    timer = Timer()
    timer.call_at(time.monotonic_ns() + 10**15, lambda: None)
    timer.close()
    assert not timer._thread.is_alive()


def test_calls_that_were_taken_back_do_not_pile_up_until_their_time(timer: Timer) -> None:
    """A client's deadline may be years away, and each request that waits may bring one."""
    far_ns = time.monotonic_ns() + 10**18
    kept = [timer.call_at(far_ns - number, lambda: None) for number in range(10)]
    for number in range(10_000):
        timer.call_at(far_ns + number, lambda: None).cancel()
    assert len(timer._heap) < 1_000
    done = threading.Event()
    timer.call_at(0, done.set)
    assert done.wait(60)
    assert {id(alarm) for alarm in kept} <= {id(entry[2]) for entry in timer._heap}
