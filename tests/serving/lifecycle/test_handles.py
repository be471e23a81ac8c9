"""A handle is found once for a request: one object for each generation, and never the way to one that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.core.version_lifecycle import VersionState
from edge_server.errors import Draining


def answered(house: Any, new_mailbox: Any, handle: Any, **more: Any) -> Any:
    mailbox = new_mailbox()
    handle.submit(house.request(3.0, **more), mailbox)
    return mailbox.final()


def test_requests_to_one_generation_get_one_handle(house: Any) -> None:
    first = house.load(house.spec())
    handle = house.service.find("m", None)
    assert house.service.find("m", None) is handle
    assert handle.spec is house.service.find("m", 1).spec is first.spec
    second = house.load(house.spec(), mark="b")
    assert house.service.find("m", None).spec is second.spec


def test_a_handle_that_is_older_than_a_reload_leads_to_the_successor(
    house: Any, new_mailbox: Any, eventually: Any
) -> None:
    first = house.load(house.spec())
    handle = house.service.find("m", None)
    successor = house.load(house.spec(), mark="b")
    eventually(lambda: first.state is VersionState.RETIRED)
    assert answered(house, new_mailbox, handle).error is None
    assert (first.statistics().success.count, successor.statistics().success.count) == (0, 1)


def test_a_handle_of_a_model_with_a_canary_takes_both_turns(house: Any, new_mailbox: Any) -> None:
    house.load(house.spec(parameters={"canary_share": "0.5"}), 1, 2)
    handle = house.service.find("m", None)
    assert sorted(answered(house, new_mailbox, handle).version for _ in range(8)) == [1] * 4 + [2] * 4


def test_a_handle_of_a_stopping_server_takes_nothing(house: Any, new_mailbox: Any) -> None:
    house.load(house.spec())
    handle, released = house.service.find("m", None), []
    house.service.stop_accepting()
    with pytest.raises(Draining, match="stopping"):
        answered(house, new_mailbox, handle, release=lambda: released.append(1))
    assert released == [1]
    with pytest.raises(Draining, match="stopping"):
        house.service.find("m", None)
