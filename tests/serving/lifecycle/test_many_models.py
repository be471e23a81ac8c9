"""A thousand models: what one of them costs must not grow with the others."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel, VersionState
from edge_server.telemetry.event_bus import MODEL_DRAINING
from tests.kit.eventually import eventually

TIMEOUT_S = 60.0


def calls_made_by(work: Callable[[], object]) -> int:
    """Return how many functions a call has called on this thread: a measure of work that no other load moves."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def wishes_of(core: Any, count: int) -> dict[str, DesiredModel]:
    specs = [core.spec(f"m{number}") for number in range(count)]
    return {spec.name: DesiredModel(spec.name, {1: core.desired_version(spec)}) for spec in specs}


def calls_of_a_reload(core: Any, count: int) -> int:
    """Load so many models, and return what the order to reload one of them costs the thread that gives it."""
    desired = wishes_of(core, count)
    core.table.set_desired_state(desired.values())
    assert core.table.wait_settled(timeout_s=TIMEOUT_S)
    changed = {**desired, "m3": DesiredModel("m3", {1: core.desired_version(core.spec("m3"), mark="b")})}
    calls = calls_made_by(lambda: core.table.set_desired_state(changed.values()))
    assert core.table.wait_settled(["m3"], TIMEOUT_S)
    return calls


def test_reloading_one_model_costs_the_others_almost_nothing(new_core: Callable[..., Any]) -> None:
    few, many = calls_of_a_reload(new_core(), 10), calls_of_a_reload(new_core(), 110)
    # 3 for each further model when this was written; 224 before there was an index of ensembles.
    assert (many - few) / 100 < 10, (few, many)


def test_the_end_of_a_model_asks_next_to_nothing_of_the_others(new_core: Callable[..., Any]) -> None:
    def calls_of_a_removal(count: int) -> int:
        core = new_core()
        desired = wishes_of(core, count)
        core.table.set_desired_state(desired.values())
        assert core.table.wait_settled(timeout_s=TIMEOUT_S)
        del desired["m3"]
        return calls_made_by(lambda: core.table.set_desired_state(desired.values()))

    few, many = calls_of_a_removal(10), calls_of_a_removal(110)
    assert (many - few) / 100 < 10, (few, many)


def threads_named(start: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(start)]


def test_loads_that_wait_for_their_turn_have_no_threads(core: Any) -> None:
    blocker = core.block_loads()
    core.table.set_desired_state(wishes_of(core, 30).values())
    blocker.wait_blocked()
    blocker.wait_blocked()
    assert len(threads_named("edge-load")) <= 3, "two load, and one waits for the next turn"
    blocker.release(30)
    assert core.table.wait_settled(timeout_s=TIMEOUT_S)
    assert len(core.script.opened) == 30


def test_models_that_drain_have_no_threads(core: Any, blocker: Any) -> None:
    desired = wishes_of(core, 20)
    core.table.set_desired_state(desired.values())
    assert core.table.wait_settled(timeout_s=TIMEOUT_S)
    answers = [core.submit(model=name)[1] for name in desired]
    for _ in desired:
        blocker.wait_blocked()
    core.table.set_desired_state([])
    assert all(version.state is VersionState.DRAINING for version in core.table.loaded_versions())
    assert eventually(lambda: not threads_named("edge-drain"))
    assert len(core.table.loaded_versions()) == 20
    told = [kind for kind, _ in core.events].count(MODEL_DRAINING)
    assert told == 20, "though none is drained yet"
    blocker.release(20)
    for answer in answers:
        assert answer.final().error is None
    assert eventually(lambda: not core.table.loaded_versions())
    assert len(core.script.closed) == 20


@pytest.mark.soak
def test_a_thousand_built_in_models_are_loaded_asked_and_removed_with_64_threads(core: Any, new_mailbox: Any) -> None:
    specs = [core.spec(f"m{number}", backend="identity") for number in range(1000)]
    desired = [DesiredModel(spec.name, {1: core.desired_version(spec)}) for spec in specs]
    # Runtimes that other tests loaded into this process may keep threads of their own: they are not counted.
    before = len(os.listdir("/proc/self/task"))
    most, is_over = [0], threading.Event()

    def count_threads() -> None:
        while not is_over.wait(0.005):
            most[0] = max(most[0], len(os.listdir("/proc/self/task")) - before)

    counter = threading.Thread(target=count_threads)
    counter.start()
    try:
        core.table.set_desired_state(desired)
        assert core.table.wait_settled(timeout_s=300)
        mailboxes = []
        for spec in specs * 3:
            # None waits for the one before: all are in flight at the same time.
            mailboxes.append(new_mailbox())
            core.service.submit(core.request(1.0, model=spec.name), mailboxes[-1])
        assert all(mailbox.final().error is None for mailbox in mailboxes)
        core.table.set_desired_state([])
        with core.table._changed:
            assert core.table._changed.wait_for(lambda: not core.table._unfinished, 300)
        assert core.table.loaded_versions() == []
    finally:
        is_over.set()
        counter.join()
    # Two more threads are there in a process of its own: the main thread, and one of numpy's.
    assert most[0] <= 62
