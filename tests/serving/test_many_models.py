"""A thousand models: what one of them costs must not grow with the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from edge_server.core.lifecycle import ModelWish

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


def wishes_of(house: Any, count: int) -> dict[str, ModelWish]:
    specs = [house.spec(f"m{number}") for number in range(count)]
    return {spec.name: ModelWish(spec.name, {1: house.version_wish(spec)}) for spec in specs}


def calls_of_a_reload(house: Any, count: int) -> int:
    """Load so many models, and return what the order to reload one of them costs the thread that gives it."""
    wishes = wishes_of(house, count)
    house.manager.wish_for_all(wishes.values())
    assert house.manager.wait_settled(timeout_s=PATIENCE_S)
    changed = {**wishes, "m3": ModelWish("m3", {1: house.version_wish(house.spec("m3"), mark="b")})}
    calls = calls_made_by(lambda: house.manager.wish_for_all(changed.values()))
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
        house.manager.wish_for_all(wishes.values())
        assert house.manager.wait_settled(timeout_s=PATIENCE_S)
        del wishes["m3"]
        return calls_made_by(lambda: house.manager.wish_for_all(wishes.values()))

    few, many = calls_of_a_removal(10), calls_of_a_removal(110)
    assert (many - few) / 100 < 10, (few, many)
