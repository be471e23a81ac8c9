"""Loads that take long, or hang: nothing ends them, and requests get the reason."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.errors import NotReady
from edge_server.serving.lifecycle import model_state, periodic_checks
from edge_server.serving.lifecycle.loader import LoadSlot
from edge_server.serving.timer import Alarm
from tests.kit.eventually import eventually


def test_the_log_and_the_index_tell_of_a_load_that_hangs_for_as_long_as_it_does(
    new_core: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(periodic_checks, "LONG_LOAD_S", 0.05)
    monkeypatch.setattr(model_state, "_REPORTED_AFTER_S", 0.0)
    core = new_core()
    blocker = core.block_loads()
    core.set_desired(core.spec())
    blocker.wait_blocked()

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    assert eventually(lambda: len(told()) >= 3)
    assert all(re.fullmatch(r"model 'm' version 1 is still loading after \d+ s", text) for text in told())
    entry = core.service.repository_index()[0]
    assert entry.state == "LOADING"
    reasons = [entry.reason, *(report.reason for report in core.router.versions("m"))]
    assert len(reasons) == 2
    assert all(re.fullmatch(r"loading for \d+ s", reason) for reason in reasons)
    assert not core.service.is_model_ready("m", None)
    assert not core.service.is_ready()
    with pytest.raises(NotReady, match=r"model 'm' version 1 is not at ready state: loading for \d+ s"):
        core.router.route("m", 1)

    blocker.release()
    assert core.table.wait_settled(["m"], 20)
    entry = core.service.repository_index()[0]
    assert (entry.state, entry.reason) == ("READY", "")
    count = len(told())
    # The timer is asked after it could have told again: an alarm that is due runs before one that is due later.
    passed: list[bool] = []
    core.timer.call_at(time.monotonic_ns() + 100_000_000, lambda: passed.append(True))
    assert eventually(lambda: passed)
    assert len(told()) == count


def test_a_recent_load_is_reported_without_a_reason(core: Any, caplog: Any) -> None:
    blocker = core.block_loads()
    core.set_desired(core.spec())
    blocker.wait_blocked()
    entry = core.service.repository_index()[0]
    assert (entry.state, entry.reason) == ("LOADING", "")
    assert not caplog.records
    blocker.release()
    assert core.table.wait_settled(["m"], 20)


def test_how_long_a_load_takes_is_counted_from_its_beginning(monkeypatch: Any) -> None:
    now_ns = 10**12
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    assert model_state._loading_reason(now_ns - 9_900_000_000) == ""
    assert model_state._loading_reason(now_ns - 75_000_000_000) == "loading for 75 s"


def test_a_late_alarm_does_not_release_the_slot_that_a_load_acquired_again() -> None:
    class Held:
        """A timer whose calls are made by the test."""

        def __init__(self) -> None:
            self.calls: list[Callable[[], None]] = []

        def call_at(self, when_ns: int, call: Callable[[], None]) -> Alarm:
            self.calls.append(call)
            return Alarm(when_ns, call)

    timer = Held()
    free = threading.Semaphore(1)
    slot = LoadSlot(free, timer, 60.0)  # type: ignore[arg-type]
    slot.acquire()
    with slot.release_while_waiting():
        pass
    timer.calls[0]()  # it had begun on the timer's thread before it was taken back
    assert not free.acquire(blocking=False), "one load goes on, and one more could begin"
    timer.calls[1]()
    assert free.acquire(blocking=False), "its time is over"
    slot.release()
    assert not free.acquire(blocking=False), "and it is released once"
