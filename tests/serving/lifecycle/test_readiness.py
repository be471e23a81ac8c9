"""Which models must serve for the server to be ready."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import LoadError
from edge_server.service import Readiness


def fail(house: Any) -> None:
    def on_open(job: Any) -> None:
        raise LoadError("the file is damaged")

    house.script.on_open = on_open


@pytest.mark.parametrize("readiness", Readiness)
def test_no_server_is_ready_before_the_first_desired_state_was_worked_off(new_house: Any, readiness: Readiness) -> None:
    house = new_house(readiness=readiness, has_started=False)
    house.load(house.spec())
    assert not house.service.is_ready()
    house.service.started()
    assert house.service.is_ready()


@pytest.mark.parametrize("readiness", Readiness)
def test_what_failed_beside_a_version_that_serves_never_counts(new_house: Any, readiness: Readiness) -> None:
    house = new_house(readiness=readiness)
    house.load(house.spec(), 1)
    fail(house)
    house.set_desired(house.spec(), 2)
    assert house.manager.wait_settled(["m"], 20)
    assert house.manager.has_failures()
    assert house.service.is_ready()
    house.set_desired(house.spec(), 1, mark="new files")
    assert house.manager.wait_settled(["m"], 20)
    assert house.service.is_ready()
    house.manager.set_desired(DesiredModel("m", reason="config.pbtxt line 1: what is this?"))
    assert house.service.is_ready()


@pytest.mark.parametrize(
    ("readiness", "is_ready"), [(Readiness.STRICT, False), (Readiness.KEEPS_SERVING, True), (Readiness.ANY, True)]
)
def test_a_model_that_never_served_counts_where_readiness_is_strict(
    new_house: Any, new_gate: Any, readiness: Readiness, is_ready: bool
) -> None:
    house, gate = new_house(readiness=readiness), new_gate()
    house.load(house.spec("good"))
    fail(house)
    house.set_desired(house.spec("bad"))
    assert house.manager.wait_settled(["bad"], 20)
    assert house.service.is_ready() is is_ready
    # Nor does it count while its load is tried again.
    house.script.on_open = lambda job: gate.stop()
    house.set_desired(house.spec("bad"), mark="new files")
    gate.wait_entered()
    assert house.service.is_ready() is is_ready
    gate.let_go()
    assert house.manager.wait_settled(["bad"], 20)
    assert house.service.is_ready()
    house.manager.set_desired(DesiredModel("duplicate", reason="two repositories hold it"))
    assert house.service.is_ready() is is_ready


@pytest.mark.parametrize(
    ("readiness", "is_ready"), [(Readiness.STRICT, False), (Readiness.KEEPS_SERVING, False), (Readiness.ANY, True)]
)
def test_a_model_that_served_and_does_not_any_more_counts_until_it_is_removed(
    new_house: Any, eventually: Any, readiness: Readiness, is_ready: bool
) -> None:
    house = new_house(readiness=readiness)
    house.load(house.spec("good"))
    lost = house.load(house.spec("lost"))
    house.manager.table.fail_hung(lost, "it hangs")
    assert house.service.is_ready() is is_ready
    house.manager.set_desired(DesiredModel("lost"))
    assert house.service.is_ready()
    fail(house)
    house.set_desired(house.spec("lost"), mark="another model of that name")
    assert house.manager.wait_settled(["lost"], 20)
    assert house.service.is_ready() is (readiness is not Readiness.STRICT)
