"""Handles: one object for each generation, found once for a request, and never one to a closed generation."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.core.version_lifecycle import VersionState
from edge_server.errors import Draining
from tests.kit.eventually import eventually


def answered(core: Any, new_mailbox: Any, handle: Any, **more: Any) -> Any:
    mailbox = new_mailbox()
    handle.submit(core.request(3.0, **more), mailbox)
    return mailbox.final()


def test_requests_to_one_generation_get_one_handle(core: Any) -> None:
    first = core.load(core.spec())
    handle = core.service.find("m", None)
    assert core.service.find("m", None) is handle
    assert handle.spec is core.service.find("m", 1).spec is first.spec
    second = core.load(core.spec(), mark="b")
    assert core.service.find("m", None).spec is second.spec


def test_a_handle_that_is_older_than_a_reload_leads_to_the_successor(core: Any, new_mailbox: Any) -> None:
    first = core.load(core.spec())
    handle = core.service.find("m", None)
    successor = core.load(core.spec(), mark="b")
    assert eventually(lambda: first.state is VersionState.RETIRED)
    assert answered(core, new_mailbox, handle).error is None
    assert (first.statistics().success.count, successor.statistics().success.count) == (0, 1)


def test_a_handle_of_a_model_with_a_canary_takes_both_turns(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec(parameters={"canary_share": "0.5"}), 1, 2)
    handle = core.service.find("m", None)
    assert sorted(answered(core, new_mailbox, handle).version for _ in range(8)) == [1] * 4 + [2] * 4


def test_a_held_generation_takes_all_requests_of_its_handle_also_a_canary_and_one_that_was_retired(
    core: Any, new_mailbox: Any
) -> None:
    core.load(core.spec(parameters={"canary_share": "0.5"}), 1, 2)
    old, new = (core.router.route("m", version) for version in (1, 2))
    held = [core.service.hold("m") for _ in range(4)]
    versions = [{answered(core, new_mailbox, handle).version for _ in range(4)} for handle, _ in held]
    assert sorted(versions, key=min) == [{1}, {1}, {2}, {2}]
    core.load(core.spec(), 3, mark="b")
    assert eventually(lambda: old.state is new.state is VersionState.DRAINING)
    assert [{answered(core, new_mailbox, handle).version} for handle, _ in held] == versions
    for _, release in held:
        release()
        release()
    assert eventually(lambda: old.state is new.state is VersionState.RETIRED)
    assert answered(core, new_mailbox, held[0][0]).version == 3


def test_a_handle_of_a_stopping_server_takes_nothing(core: Any, new_mailbox: Any) -> None:
    core.load(core.spec())
    handle, released = core.service.find("m", None), []
    core.service.stop_accepting()
    with pytest.raises(Draining, match="stopping"):
        answered(core, new_mailbox, handle, release=lambda: released.append(1))
    assert released == [1]
    with pytest.raises(Draining, match="stopping"):
        core.service.find("m", None)
