"""Which models must serve for the server to be ready."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import LoadError
from edge_server.service import Readiness


def fail(core: Any) -> None:
    def on_open(job: Any) -> None:
        raise LoadError("the file is damaged")

    core.script.on_open = on_open


@pytest.mark.parametrize("readiness", Readiness)
def test_no_server_is_ready_before_the_first_desired_state_is_reached(new_core: Any, readiness: Readiness) -> None:
    core = new_core(readiness=readiness, has_started=False)
    core.load(core.spec())
    assert not core.service.is_ready()
    core.service.started()
    assert core.service.is_ready()


@pytest.mark.parametrize("readiness", Readiness)
def test_what_failed_beside_a_version_that_serves_never_counts(new_core: Any, readiness: Readiness) -> None:
    core = new_core(readiness=readiness)
    core.load(core.spec(), 1)
    fail(core)
    core.set_desired(core.spec(), 2)
    assert core.table.wait_settled(["m"], 20)
    assert core.router.has_failures()
    assert core.service.is_ready()
    core.set_desired(core.spec(), 1, mark="new files")
    assert core.table.wait_settled(["m"], 20)
    assert core.service.is_ready()
    core.table.set_desired(DesiredModel("m", reason="config.pbtxt line 1: what is this?"))
    assert core.service.is_ready()


@pytest.mark.parametrize(
    ("readiness", "is_ready"), [(Readiness.STRICT, False), (Readiness.KEEPS_SERVING, True), (Readiness.ANY, True)]
)
def test_a_model_that_never_served_counts_where_readiness_is_strict(
    new_core: Any, new_blocker: Any, readiness: Readiness, is_ready: bool
) -> None:
    core, blocker = new_core(readiness=readiness), new_blocker()
    core.load(core.spec("good"))
    fail(core)
    core.set_desired(core.spec("bad"))
    assert core.table.wait_settled(["bad"], 20)
    assert core.service.is_ready() is is_ready
    # Nor does it count while its load is tried again.
    core.script.on_open = lambda job: blocker.block()
    core.set_desired(core.spec("bad"), mark="new files")
    blocker.wait_blocked()
    assert core.service.is_ready() is is_ready
    blocker.release()
    assert core.table.wait_settled(["bad"], 20)
    assert core.service.is_ready()
    core.table.set_desired(DesiredModel("duplicate", reason="two repositories hold it"))
    assert core.service.is_ready() is is_ready


@pytest.mark.parametrize(
    ("readiness", "is_ready"), [(Readiness.STRICT, False), (Readiness.KEEPS_SERVING, False), (Readiness.ANY, True)]
)
def test_a_model_that_served_and_does_not_any_more_counts_until_it_is_removed(
    new_core: Any, readiness: Readiness, is_ready: bool
) -> None:
    core = new_core(readiness=readiness)
    core.load(core.spec("good"))
    lost = core.load(core.spec("lost"))
    core.table.fail_hung(lost, "it hangs")
    assert core.service.is_ready() is is_ready
    core.table.set_desired(DesiredModel("lost"))
    assert core.service.is_ready()
    fail(core)
    core.set_desired(core.spec("lost"), mark="another model of that name")
    assert core.table.wait_settled(["lost"], 20)
    assert core.service.is_ready() is (readiness is not Readiness.STRICT)
