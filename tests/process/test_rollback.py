"""Rollback to an earlier version of a model under load, in every control mode, and across restarts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.models import Repository, identity_body, identity_config
from tests.kit.server import serve_here

MODES: dict[str, dict[str, Any]] = {
    "none": {"model_control_mode": "none"},
    "poll": {"model_control_mode": "poll", "repository_poll_secs": 0.2},
    "explicit": {"model_control_mode": "explicit"},
}


def add_versions(repository: Any, *versions: int, name: str = "m") -> None:
    for version in versions:
        repository.add(name, identity_config(), version)


def serving(server: Any, name: str = "m") -> int | None:
    """Return the version that answers a request without one."""
    status, answer = server.infer(name, identity_body())
    return int(answer["model_version"]) if status == 200 else None


def rollback(server: Any, name: str = "m", **members: Any) -> tuple[int, Any]:
    return server.ask(f"/edge/v1/models/{name}/rollback", members)


def unpin(server: Any, name: str = "m") -> tuple[int, Any]:
    return server.ask(f"/edge/v1/models/{name}/unpin", {})


def reasons(server: Any, name: str = "m") -> dict[str, str]:
    _, index = server.ask("/v2/repository/index", {})
    return {item.get("version", ""): item.get("reason", "") for item in index if item["name"] == name}


def load(server: Any, name: str, **parameters: str) -> int:
    return int(server.ask(f"/v2/repository/models/{name}/load", {"parameters": parameters})[0])


def kinds(server: Any, name: str) -> list[str]:
    events = server.ask("/edge/v1/events?follow=false")[1]
    return [event["kind"] for event in events if event.get("model") == name]


@pytest.fixture(scope="module")
def explicit(module_repository: Any) -> Iterator[Any]:
    """One server for the tests of rollback requests. Each adds a model with its own name."""
    with serve_here(module_repository.path, **MODES["explicit"]) as server:
        yield server


@pytest.fixture(scope="module")
def polling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server that polls its folder. `models`: its folder."""
    models = Repository(tmp_path_factory.mktemp("polled"))
    add_versions(models, 1, 2, 5, name="m")
    with serve_here(models.path, **MODES["poll"]) as server:
        server.models = models
        yield server


@pytest.mark.parametrize("mode", MODES)
def test_the_previous_version_serves_until_the_pin_is_removed(
    mode: str, module_repository: Any, request: pytest.FixtureRequest
) -> None:
    with contextlib.ExitStack() as stack:
        if mode == "poll":
            server = request.getfixturevalue("polling")
        elif mode == "explicit":
            server = request.getfixturevalue("explicit")
            add_versions(module_repository, 1, 2, 5)
            assert load(server, "m") == 200
        else:
            repository = request.getfixturevalue("repository")
            add_versions(repository, 1, 2, 5)
            server = stack.enter_context(serve_here(repository.path, **MODES[mode]))
        assert serving(server) == 5
        status, report = rollback(server)
        assert (status, report) == (
            200,
            {"name": "m", "pin": 2, "before": None, "serves": 2, "survives_restart": False, "problem": ""},
        )
        assert serving(server) == 2
        assert reasons(server)["2"] == "pinned to version 2"
        versions = {item["version"]: item for item in server.ask("/edge/v1/versions?model=m")[1]["versions"]}
        assert [number for number, item in versions.items() if item["is_pinned"]] == [2]
        assert (versions[2]["state"], versions[2]["share"]) == ("READY", 1.0)
        assert versions[2]["served_count"] >= 1
        assert versions[1]["state"] == "NOT_LOADED"
        # From there the version before is 1, and below it there is none.
        assert rollback(server)[1]["serves"] == 1
        status, refused = rollback(server)
        assert status == 400
        assert "there is nothing to roll back to" in refused["error"]
        assert serving(server) == 1
        assert unpin(server)[1]["serves"] == 5
        assert serving(server) == 5
        assert reasons(server)["5"] == ""
        assert [kind for kind in kinds(server, "m") if "pin" in kind] == [
            "model.pinned",
            "model.pinned",
            "model.unpinned",
        ]
        assert server.get("/v2/health/ready")[0] == 200


def test_no_request_is_lost_while_versions_are_rolled_back_and_forth(explicit: Any, module_repository: Any) -> None:
    add_versions(module_repository, 1, 2, name="busy")
    assert load(explicit, "busy") == 200
    is_over = threading.Event()
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        while not is_over.is_set():
            answers.append(explicit.infer("busy", identity_body()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert rollback(explicit, "busy")[1]["serves"] == 1
            assert unpin(explicit, "busy")[1]["serves"] == 2
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert [answer for answer in answers if answer[0] != 200] == []
    assert {answer["model_version"] for _, answer in answers} == {"1", "2"}


def test_a_rollback_to_a_version_that_does_not_load_changes_nothing(explicit: Any, module_repository: Any) -> None:
    module_repository.add_sub("faulty", 'backend: "onnxruntime"', 3)
    (module_repository.add("faulty", version=2) / "2" / "model.onnx").write_bytes(b"damaged")
    module_repository.add_sub("faulty", 'backend: "onnxruntime"', 1)
    assert load(explicit, "faulty") == 200
    status, refused = rollback(explicit, "faulty")
    assert status == 400
    assert "was not rolled back to version 2" in refused["error"]
    assert "version 3 goes on serving" in refused["error"]
    assert explicit.ask("/v2/models/faulty")[1]["versions"] == ["3"]
    assert not any("pinned" in reason for reason in reasons(explicit, "faulty").values())
    # Version 2 is known not to be good now, so that the one before it is the version to go back to.
    assert rollback(explicit, "faulty")[1]["serves"] == 1
    assert unpin(explicit, "faulty")[1]["serves"] == 3


def test_impossible_rollbacks_report_the_reason(explicit: Any, module_repository: Any) -> None:
    add_versions(module_repository, 1, 2, name="calm")
    assert load(explicit, "calm") == 200
    for answer, code, words in (
        (rollback(explicit, "calm", version=9), 404, "no version 9 in the repository, there are [1, 2]"),
        (rollback(explicit, "nobody"), 404, "'nobody' has no version in the repository"),
        (rollback(explicit, "..%2Fcalm"), 404, "has no version in the repository"),
        (unpin(explicit, "calm"), 400, "'calm' is not pinned"),
        (unpin(explicit, "nobody"), 400, "'nobody' is not pinned"),
    ):
        assert answer[0] == code, answer
        assert words in answer[1]["error"]
    assert serving(explicit, "calm") == 2
