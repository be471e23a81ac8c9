"""Going back to an earlier version of a model while it is used, in every control mode, and over restarts."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODES = {
    "none": ("--model-control-mode=none",),
    "poll": ("--model-control-mode=poll", "--repository-poll-secs=0.2"),
    "explicit": ("--model-control-mode=explicit", "--load-model=m"),
}


def add_versions(repository: Any, identity: Callable[..., str], *versions: int) -> None:
    for version in versions:
        repository.add("m", identity(), version)


def body(rows: int = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [rows, 1], "data": [7] * rows}]}


def serving(server: Any) -> int | None:
    """Return the version that answers a request without one."""
    status, answer = server.infer("m", body())
    return int(answer["model_version"]) if status == 200 else None


def rollback(server: Any, name: str = "m", **members: Any) -> tuple[int, Any]:
    return server.ask(f"/edge/v1/models/{name}/rollback", members)


def unpin(server: Any, name: str = "m") -> tuple[int, Any]:
    return server.ask(f"/edge/v1/models/{name}/unpin", {})


def reasons(server: Any) -> dict[str, str]:
    _, index = server.ask("/v2/repository/index", {})
    return {item.get("version", ""): item.get("reason", "") for item in index if item["name"] == "m"}


def kinds(server: Any) -> list[str]:
    return [event["kind"] for event in server.ask("/edge/v1/events?follow=false")[1]]


@pytest.mark.parametrize("mode", MODES)
def test_the_version_before_serves_until_the_pin_is_lifted(
    mode: str, serve: Any, repository: Any, identity: Callable[..., str]
) -> None:
    add_versions(repository, identity, 1, 2, 5)
    with serve(repository.path, *MODES[mode]) as server:
        assert serving(server) == 5
        status, report = rollback(server)
        assert (status, report) == (
            200,
            {"name": "m", "pin": 2, "before": None, "serves": 2, "survives_restart": False, "problem": ""},
        )
        assert serving(server) == 2
        assert reasons(server)["2"] == "pinned to version 2"
        versions = {item["version"]: item for item in server.ask("/edge/v1/versions")[1]["versions"]}
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
        assert [kind for kind in kinds(server) if "pin" in kind] == ["model.pinned", "model.pinned", "model.unpinned"]
        assert server.get("/v2/health/ready")[0] == 200
        assert server.stop() == 0


def test_no_request_is_lost_while_versions_are_rolled_back_and_forth(
    serve: Any, repository: Any, identity: Callable[..., str]
) -> None:
    add_versions(repository, identity, 1, 2)
    with serve(repository.path, *MODES["none"]) as server:
        is_over = threading.Event()
        answers: list[tuple[int, Any]] = []

        def ask() -> None:
            while not is_over.is_set():
                answers.append(server.infer("m", body()))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert rollback(server)[1]["serves"] == 1
                assert unpin(server)[1]["serves"] == 2
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert [answer for answer in answers if answer[0] != 200] == []
    assert {answer["model_version"] for _, answer in answers} == {"1", "2"}


def test_a_newer_version_waits_while_the_model_is_pinned(
    serve: Any, repository: Any, identity: Callable[..., str], eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    add_versions(repository, identity, 1, 2)
    with serve(repository.path, *MODES["poll"]) as server:
        assert rollback(server)[0] == 200
        add_versions(repository, identity, 3)
        # A model that came later and serves shows that the scan has been through.
        repository.add("later", identity())
        assert eventually(lambda: server.infer("later", body())[0] == 200)
        assert serving(server) == 1
        assert "3" not in reasons(server)
        assert unpin(server)[1]["serves"] == 3
        repository.add("latest", identity())
        assert eventually(lambda: server.infer("latest", body())[0] == 200)
        assert serving(server) == 3


def test_a_pin_survives_a_restart_with_a_state_directory(
    serve: Any, repository: Any, identity: Callable[..., str], tmp_path: Path
) -> None:
    add_versions(repository, identity, 1, 2)
    state = tmp_path / "deep" / "state"
    for _ in range(2):
        with serve(repository.path, f"--state-dir={state}") as server:
            if serving(server) == 2:
                assert rollback(server)[1]["survives_restart"] is True
            assert serving(server) == 1
    assert json.loads((state / "pins.json").read_text()) == {"pins": {"m": 1}}
    with serve(repository.path) as server:
        assert serving(server) == 2


def test_a_pin_outlives_a_kill_of_the_process(
    serve: Any, repository: Any, identity: Callable[..., str], tmp_path: Path
) -> None:
    add_versions(repository, identity, 1, 2)
    with serve(repository.path, f"--state-dir={tmp_path / 'state'}") as server:
        assert rollback(server)[0] == 200
        server.process.kill()
        server.process.wait()
    with serve(repository.path, f"--state-dir={tmp_path / 'state'}") as server:
        assert serving(server) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pins": {"m": "1"}}', '{"pins": {"../m": 1}}', "\xff" * 50])
def test_a_damaged_file_of_pins_is_told_and_does_not_keep_the_server_from_serving(
    text: str, serve: Any, repository: Any, identity: Callable[..., str], tmp_path: Path
) -> None:
    add_versions(repository, identity, 1, 2)
    (tmp_path / "pins.json").write_text(text, encoding="latin-1")
    with serve(repository.path, f"--state-dir={tmp_path}") as server:
        assert serving(server) == 2
        assert "pins.json' cannot be read" in server.log()
        assert "Traceback" not in server.log()
        assert rollback(server)[0] == 200
    assert json.loads((tmp_path / "pins.json").read_text()) == {"pins": {"m": 1}}


def test_a_version_that_does_not_load_leaves_everything_as_it_was(
    serve: Any, repository: Any, identity: Callable[..., str]
) -> None:
    repository.add_sub("m", 'backend: "onnxruntime"', 3)
    (repository.add("m", version=2) / "2" / "model.onnx").write_bytes(b"damaged")
    repository.add_sub("m", 'backend: "onnxruntime"', 1)
    with serve(repository.path, *MODES["none"]) as server:
        status, refused = rollback(server)
        assert status == 400
        assert "was not rolled back to version 2" in refused["error"]
        assert "version 3 goes on serving" in refused["error"]
        assert server.ask("/v2/models/m")[1]["versions"] == ["3"]
        assert not any("pinned" in reason for reason in reasons(server).values())
        # Version 2 is known not to be good now, so that the one before it is the version to go back to.
        assert rollback(server)[1]["serves"] == 1
        assert unpin(server)[1]["serves"] == 3


def test_orders_that_cannot_be_carried_out_say_why(serve: Any, repository: Any, identity: Callable[..., str]) -> None:
    add_versions(repository, identity, 1, 2)
    with serve(repository.path, *MODES["none"]) as server:
        for answer, code, words in (
            (rollback(server, version=9), 404, "no version 9 in the repository, there are [1, 2]"),
            (rollback(server, "nobody"), 404, "'nobody' has no version in the repository"),
            (rollback(server, "..%2Fm"), 404, "has no version in the repository"),
            (unpin(server), 400, "'m' is not pinned"),
            (unpin(server, "nobody"), 400, "'nobody' is not pinned"),
        ):
            assert answer[0] == code, answer
            assert words in answer[1]["error"]
        assert serving(server) == 2


def test_the_pin_of_a_model_that_is_not_loaded_waits_for_its_load(
    serve: Any, repository: Any, identity: Callable[..., str]
) -> None:
    add_versions(repository, identity, 1, 2)
    with serve(repository.path, "--model-control-mode=explicit") as server:
        status, refused = rollback(server)
        assert status == 400
        assert "no version of model 'm' serves now" in refused["error"]
        assert rollback(server, version=1)[1]["serves"] is None
        assert reasons(server) == {"": "pinned to version 1"}
        assert server.ask("/v2/repository/models/m/load", {})[0] == 200
        assert serving(server) == 1
        # A load call is no way around an operator's order.
        config = json.dumps({**json.loads(server.get("/v2/models/m/config")[1]), "version_policy": {"all": {}}})
        assert server.ask("/v2/repository/models/m/load", {"parameters": {"config": config}})[0] == 200
        assert serving(server) == 1
        assert server.ask("/v2/models/m")[1]["versions"] == ["1"]


def test_a_version_policy_whose_versions_are_gone_does_not_matter_to_a_pin(
    serve: Any, repository: Any, identity: Callable[..., str], tmp_path: Path
) -> None:
    repository.add("m", identity(more="version_policy { specific { versions: 7 } }"), 2)
    (tmp_path / "pins.json").write_text('{"pins": {"m": 2}}')
    with serve(repository.path, f"--state-dir={tmp_path}") as server:
        assert serving(server) == 2


def test_orders_from_other_machines_need_a_key(serve: Any, repository: Any, identity: Callable[..., str]) -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but the loopback")
    add_versions(repository, identity, 1, 2)
    with serve(repository.path, "--http-address=0.0.0.0") as server:
        port = server.http.rpartition(":")[2]
        server.http = f"{address}:{port}"
        status, refused = rollback(server)
        assert status == 403
        assert "--http-restricted-api=model-repository" in refused["error"]
        assert serving(server) == 2
    guard = "--http-restricted-api=model-repository:x-key=s3cret"
    with serve(repository.path, "--http-address=0.0.0.0", guard) as server:
        server.http = f"{address}:{server.http.rpartition(':')[2]}"
        assert rollback(server)[0] == 403
        assert server.request("POST", "/edge/v1/models/m/rollback", b"", {"x-key": "s3cret"})[0] == 200
        assert serving(server) == 1


def own_address() -> str | None:
    """Return an address of this machine that is not the loopback's; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address
