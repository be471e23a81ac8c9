"""A run that does not come back: its version is given up, everyone is answered, and the server says it is not ready."""

from __future__ import annotations

import sysconfig
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InstanceGroup, InstanceKind
from edge_server.errors import NotReady, SessionLost
from edge_server.serving.lifecycle.periodic_checks import HangWatchdog
from tests.kit.eventually import eventually


def test_a_run_that_hangs_fails_its_version_and_the_servers_readiness(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(hang_timeout_s=0.1), new_blocker()
    core.load(core.spec("other"))
    version = core.load(core.spec())
    core.service.started()
    assert core.service.is_ready()
    plain = core.script.on_run
    core.script.on_run = lambda name, inputs: blocker.block() or plain(name, inputs)
    mailboxes = [core.submit(1.0)[1] for _ in range(3)]
    errors = [mailbox.final().error for mailbox in mailboxes]
    assert all(isinstance(error, SessionLost) for error in errors)
    assert "instance m_0 of model 'm' version 1 hangs" in errors[0].message
    assert version.state.name == "FAILED"
    assert not core.service.is_ready()
    assert not core.service.is_model_ready("m", 1)
    assert core.service.is_model_ready("other", None)
    with pytest.raises(NotReady, match="hangs"):
        core.submit(1.0, version=1)
    (report,) = core.router.versions("m")
    assert (report.state, report.generation) == ("FAILED", 1)
    assert eventually(lambda: "model.hung" in [kind for kind, _ in core.events])
    assert len(core.script.opened) == 2, "it is not loaded again by itself"
    blocker.release(9)
    assert eventually(lambda: core.table._models["m"].loaded == [])
    core.script.on_run = plain
    core.load(core.spec(), mark="new files")
    assert core.service.is_ready()


def test_a_server_with_a_hung_run_still_ends(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(hang_timeout_s=0.05), new_blocker()
    core.load(core.spec())
    core.script.on_run = lambda name, inputs: blocker.block()
    assert isinstance(core.submit(1.0)[1].final().error, SessionLost)
    assert core.service.close(20.0), "no request is left to fail, and closing does not wait for the hung thread"
    blocker.release(9)


def test_slow_runs_one_after_the_other_are_no_hang(new_core: Any) -> None:
    core = new_core(hang_timeout_s=5.0)
    core.load(core.spec())
    for _ in range(20):
        assert core.submit(1.0)[1].final().error is None
    assert core.service.is_model_ready("m", None)


class Version:
    def __init__(self, **numbers: int) -> None:
        self.run_numbers = numbers


def test_only_the_same_run_seen_for_the_whole_time_is_a_hang() -> None:
    watch = HangWatchdog(1.0)
    version = Version(a=1, b=2)
    assert watch.find_hung([version], 0) == []
    assert watch.find_hung([version], 999_999_999) == []
    version.run_numbers = {"a": 3, "b": 2}
    assert watch.find_hung([version], 1_500_000_000) == []
    assert watch.find_hung([version], 2_499_999_999) == []
    assert watch.find_hung([version], 2_500_000_000) == [(version, "a")]
    version.run_numbers = {"a": 4, "b": 2}
    assert watch.find_hung([version], 9_000_000_000) == []


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="the allocator of this Python reuses no memory so soon"
)
def test_a_version_in_the_place_of_one_that_is_gone_is_not_taken_for_it() -> None:
    watch = HangWatchdog(1.0)
    first = Version(a=1)
    number = id(first)
    assert watch.find_hung([first], 0) == []
    del first
    others = []
    while id(other := Version(a=1)) != number and len(others) < 100_000:
        others.append(other)
    assert id(other) == number, "the memory of an object is given to the next of its size"
    assert watch.find_hung([other], 5_000_000_000) == []
    assert watch.find_hung([other], 6_000_000_000) == [(other, "a")]


def test_an_instance_that_hangs_beside_one_of_its_name_is_found(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(), new_blocker()
    groups = (InstanceGroup("g", InstanceKind.GPU, 1, (0, 0)),)
    version = core.load(core.spec(instance_groups=groups))
    core.script.on_run = lambda name, inputs: blocker.block() or {"OUT": np.array(inputs["IN"])}
    core.submit(1.0)
    blocker.wait_blocked()
    assert sum(number % 2 for number in version.run_numbers.values()) == 1
    core.submit(1.0)
    blocker.wait_blocked()
    assert sum(number % 2 for number in version.run_numbers.values()) == 2
    blocker.release(9)
