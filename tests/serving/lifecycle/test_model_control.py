"""Orders for models, given to a house of models: who comes second to one is told, and scans do not take orders back."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import Draining, InvalidRequest, Refusal, ServingFault, UnknownModel
from edge_server.serving.lifecycle.model_control import ModelControl
from edge_server.telemetry.event_bus import EventBus


class Shelf:
    """A repository whose pins are kept in a dictionary; the house has the wishes for all versions."""

    pins_are_durable = False

    def __init__(self, house: Any) -> None:
        self.house = house
        self.pinned: dict[str, int] = {}

    def passed_over(self) -> dict[str, str]:
        return {}

    def names(self) -> list[str]:
        return list(self.house.wishes)

    def desired_model(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool = True
    ) -> DesiredModel | None:
        wish = self.house.wishes.get(name)
        return None if wish is None else self._with_pin(wish)

    def with_pins(self, wishes: Mapping[str, DesiredModel]) -> Mapping[str, DesiredModel]:
        return {name: self._with_pin(wish) for name, wish in wishes.items()}

    def versions(self, name: str) -> list[int]:
        return sorted(self.house.wishes[name].versions) if name in self.house.wishes else []

    def pins(self) -> Mapping[str, int]:
        return dict(self.pinned)

    def pin(self, name: str, version: int) -> int | None:
        before, self.pinned[name] = self.pinned.get(name), version
        return before

    def unpin(self, name: str) -> int | None:
        return self.pinned.pop(name, None)

    def _with_pin(self, wish: DesiredModel) -> DesiredModel:
        pin = self.pinned.get(wish.name)
        return wish if pin is None else DesiredModel(wish.name, {pin: wish.versions[pin]})


def make(house: Any, *, is_explicit: bool = True) -> ModelControl:
    versions = {number: house.desired_version(house.spec(), number) for number in (1, 2)}
    house.wishes["m"] = DesiredModel("m", versions)
    return ModelControl(house.manager, Shelf(house), EventBus(), is_explicit=is_explicit)


def ready(house: Any) -> list[int]:
    return [item.version for item in house.manager.ready_versions("m")]


def test_while_an_order_is_carried_out_another_for_the_model_is_refused(house: Any, new_gate: Any) -> None:
    control, gate = make(house), new_gate()
    house.script.on_open = lambda job: gate.stop()
    first = threading.Thread(target=control.load, args=("m",))
    first.start()
    gate.wait_entered()
    for order in (control.load, control.unload, control.rollback, control.unpin):
        with pytest.raises(ServingFault, match="a related model 'm' to a load/unload request is currently"):
            order("m")
    gate.let_go(100)
    first.join()
    assert ready(house) == [2, 1]
    control.unload("m")
    assert ready(house) == []


def test_a_scan_that_began_before_a_pin_does_not_take_it_back(house: Any) -> None:
    control = make(house, is_explicit=False)
    found_before = dict(house.wishes)
    control.set_desired_state(found_before)
    assert house.manager.wait_settled(["m"], 60)
    report = control.rollback("m")
    assert (report.pin, report.before, report.serves) == (1, None, 1)
    control.set_desired_state(found_before)
    assert house.manager.wait_settled(["m"], 60)
    assert ready(house) == [1]
    assert control.unpin("m").before == 1
    assert ready(house) == [2, 1]


def test_orders_by_name_need_explicit_mode_and_pins_a_version_that_is_there(house: Any) -> None:
    control = make(house, is_explicit=False)
    for order in (control.load, control.unload):
        with pytest.raises(Refusal, match="explicit model load / unload is not allowed"):
            order("m")
    with pytest.raises(UnknownModel, match=r"no version 3 in the repository, there are \[1, 2\]"):
        control.rollback("m", 3)
    with pytest.raises(InvalidRequest, match="name the one to roll back to"):
        control.rollback("m")
    with pytest.raises(InvalidRequest, match="is not pinned"):
        control.unpin("m")


def test_the_pin_of_a_model_that_is_not_loaded_waits_for_its_load(house: Any) -> None:
    control = make(house)
    assert control.rollback("m", 1).serves is None
    assert ready(house) == []
    control.load("m")
    assert ready(house) == [1]


def test_a_rollback_that_a_shutdown_refuses_leaves_no_pin_for_the_next_start(house: Any) -> None:
    control = make(house, is_explicit=False)
    control.set_desired_state(dict(house.wishes))
    assert house.manager.wait_settled(["m"], 60)
    house.manager.close(0.0)
    with pytest.raises(Draining, match="Server is stopping"):
        control.rollback("m", 1)
    assert control._source.pins() == {}
