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

PATIENCE_S = 20.0


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


def wishes_of(house: Any, count: int) -> dict[str, DesiredModel]:
    specs = [house.spec(f"m{number}") for number in range(count)]
    return {spec.name: DesiredModel(spec.name, {1: house.desired_version(spec)}) for spec in specs}


def calls_of_a_reload(house: Any, count: int) -> int:
    """Load so many models, and return what the order to reload one of them costs the thread that gives it."""
    wishes = wishes_of(house, count)
    house.manager.set_desired_state(wishes.values())
    assert house.manager.wait_settled(timeout_s=PATIENCE_S)
    changed = {**wishes, "m3": DesiredModel("m3", {1: house.desired_version(house.spec("m3"), mark="b")})}
    calls = calls_made_by(lambda: house.manager.set_desired_state(changed.values()))
    assert house.manager.wait_settled(["m3"], PATIENCE_S)
    return calls


def test_the_order_to_reload_one_model_asks_next_to_nothing_of_the_others(new_house: Callable[..., Any]) -> None:
    few, many = calls_of_a_reload(new_house(), 10), calls_of_a_reload(new_house(), 110)
    # 3 for each further model when this was written; 224 before there was an index of ensembles.
    assert (many - few) / 100 < 10, (few, many)


def test_the_end_of_a_model_asks_next_to_nothing_of_the_others(new_house: Callable[..., Any]) -> None:
    def calls_of_a_removal(count: int) -> int:
        house = new_house()
        wishes = wishes_of(house, count)
        house.manager.set_desired_state(wishes.values())
        assert house.manager.wait_settled(timeout_s=PATIENCE_S)
        del wishes["m3"]
        return calls_made_by(lambda: house.manager.set_desired_state(wishes.values()))

    few, many = calls_of_a_removal(10), calls_of_a_removal(110)
    assert (many - few) / 100 < 10, (few, many)


def threads_named(start: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(start)]


def test_loads_that_wait_for_their_turn_have_no_threads(house: Any, new_gate: Any) -> None:
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    house.manager.set_desired_state(wishes_of(house, 30).values())
    gate.wait_entered()
    gate.wait_entered()
    assert len(threads_named("edge-load")) <= 3, "two load, and one waits for the next turn"
    gate.let_go(30)
    assert house.manager.wait_settled(timeout_s=PATIENCE_S)
    assert len(house.script.opened) == 30


def test_models_that_drain_have_no_threads(house: Any, gate: Any, eventually: Any) -> None:
    wishes = wishes_of(house, 20)
    house.manager.set_desired_state(wishes.values())
    assert house.manager.wait_settled(timeout_s=PATIENCE_S)
    answers = [house.submit(model=name)[1] for name in wishes]
    for _ in wishes:
        gate.wait_entered()
    house.manager.set_desired_state([])
    assert all(version.state is VersionState.DRAINING for version in house.manager.loaded_versions())
    eventually(lambda: not threads_named("edge-drain"))
    assert len(house.manager.loaded_versions()) == 20
    told = [kind for kind, _ in house.events].count(MODEL_DRAINING)
    assert told == 20, "though none is drained yet"
    gate.let_go(20)
    for answer in answers:
        assert answer.final().error is None
    eventually(lambda: not house.manager.loaded_versions())
    assert len(house.script.closed) == 20


@pytest.mark.soak
def test_a_thousand_built_in_models_are_loaded_asked_and_removed_with_64_threads(house: Any, new_mailbox: Any) -> None:
    specs = [house.spec(f"m{number}", backend="identity") for number in range(1000)]
    wishes = [DesiredModel(spec.name, {1: house.desired_version(spec)}) for spec in specs]
    # Runtimes that other tests loaded into this process may keep threads of their own: they are not counted.
    before = len(os.listdir("/proc/self/task"))
    most, is_over = [0], threading.Event()

    def count_threads() -> None:
        while not is_over.wait(0.005):
            most[0] = max(most[0], len(os.listdir("/proc/self/task")) - before)

    counter = threading.Thread(target=count_threads)
    counter.start()
    try:
        house.manager.set_desired_state(wishes)
        assert house.manager.wait_settled(timeout_s=300)
        mailboxes = []
        for spec in specs * 3:
            # None waits for the one before: all are in flight at the same time.
            mailboxes.append(new_mailbox())
            house.service.submit(house.request(1.0, model=spec.name), mailboxes[-1])
        assert all(mailbox.final().error is None for mailbox in mailboxes)
        house.manager.set_desired_state([])
        with house.manager.table._changed:
            assert house.manager.table._changed.wait_for(lambda: not house.manager.table._unfinished, 300)
        assert house.manager.loaded_versions() == []
    finally:
        is_over.set()
        counter.join()
    # Two more threads are there in a process of its own: the main thread, and one of numpy's.
    assert most[0] <= 62
