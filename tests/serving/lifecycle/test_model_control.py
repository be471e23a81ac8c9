"""Load and unload calls: the second of two conflicting ones gets an error, and scans do not revert them."""

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
    """A repository whose pins are kept in a dictionary; the core has the desired states of all versions."""

    pins_are_durable = False

    def __init__(self, core: Any) -> None:
        self.core = core
        self.pinned: dict[str, int] = {}

    def passed_over(self) -> dict[str, str]:
        return {}

    def names(self) -> list[str]:
        return list(self.core.desired)

    def desired_model(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool = True
    ) -> DesiredModel | None:
        wish = self.core.desired.get(name)
        return None if wish is None else self._with_pin(wish)

    def with_pins(self, desired: Mapping[str, DesiredModel]) -> Mapping[str, DesiredModel]:
        return {name: self._with_pin(wish) for name, wish in desired.items()}

    def versions(self, name: str) -> list[int]:
        return sorted(self.core.desired[name].versions) if name in self.core.desired else []

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


def make(core: Any, *, is_explicit: bool = True) -> ModelControl:
    versions = {number: core.desired_version(core.spec(), number) for number in (1, 2)}
    core.desired["m"] = DesiredModel("m", versions)
    return ModelControl(core.table, core.router, Shelf(core), EventBus(), is_explicit=is_explicit)


def ready(core: Any) -> list[int]:
    return [item.version for item in core.router.ready_versions("m")]


def test_while_an_order_is_carried_out_another_for_the_model_is_refused(core: Any, new_blocker: Any) -> None:
    control, blocker = make(core), new_blocker()
    core.script.on_open = lambda job: blocker.block()
    first = threading.Thread(target=control.load, args=("m",))
    first.start()
    blocker.wait_blocked()
    for order in (control.load, control.unload, control.rollback, control.unpin):
        with pytest.raises(ServingFault, match="a related model 'm' to a load/unload request is currently"):
            order("m")
    blocker.release(100)
    first.join()
    assert ready(core) == [2, 1]
    control.unload("m")
    assert ready(core) == []


def test_a_scan_that_began_before_a_pin_does_not_take_it_back(core: Any) -> None:
    control = make(core, is_explicit=False)
    found_before = dict(core.desired)
    control.set_desired_state(found_before)
    assert core.table.wait_settled(["m"], 60)
    report = control.rollback("m")
    assert (report.pin, report.before, report.serves) == (1, None, 1)
    control.set_desired_state(found_before)
    assert core.table.wait_settled(["m"], 60)
    assert ready(core) == [1]
    assert control.unpin("m").before == 1
    assert ready(core) == [2, 1]


def test_load_calls_need_explicit_mode_and_pins_an_existing_version(core: Any) -> None:
    control = make(core, is_explicit=False)
    for order in (control.load, control.unload):
        with pytest.raises(Refusal, match="explicit model load / unload is not allowed"):
            order("m")
    with pytest.raises(UnknownModel, match=r"no version 3 in the repository, there are \[1, 2\]"):
        control.rollback("m", 3)
    with pytest.raises(InvalidRequest, match="name the one to roll back to"):
        control.rollback("m")
    with pytest.raises(InvalidRequest, match="is not pinned"):
        control.unpin("m")


def test_the_pin_of_a_model_that_is_not_loaded_waits_for_its_load(core: Any) -> None:
    control = make(core)
    assert control.rollback("m", 1).serves is None
    assert ready(core) == []
    control.load("m")
    assert ready(core) == [1]


def test_a_rollback_that_a_shutdown_refuses_leaves_no_pin_for_the_next_start(core: Any) -> None:
    control = make(core, is_explicit=False)
    control.set_desired_state(dict(core.desired))
    assert core.table.wait_settled(["m"], 60)
    core.service.close(0.0)
    with pytest.raises(Draining, match="Server is stopping"):
        control.rollback("m", 1)
    assert control._source.pins() == {}
