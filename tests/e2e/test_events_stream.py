"""The stream of events of a running server, and metrics and index that agree with it."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc

from tests.kit.model_folder import parameters
from tests.kit.models import identity_config
from tests.kit.server import serve

SLOW = parameters(stub_open_delay_ms="700")
STUB = """
backend: "stub"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_INT32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [-1] }
"""


class Stream:
    """Follows the events on a thread."""

    def __init__(self, server: Any) -> None:
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._connection = http.client.HTTPConnection(server.http, timeout=60)
        self._connection.request("GET", "/edge/v1/events")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self._answer:
            if line.startswith(b"data: "):
                self.events.put(json.loads(line[6:]))

    def until(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the events up to the first of that kind with these fields."""
        seen = []
        while True:
            seen.append(self.events.get(timeout=30))
            if seen[-1]["kind"] == kind and fields.items() <= seen[-1].items():
                return seen

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._connection.close()


@pytest.fixture
def explicit(repository: Any) -> Iterator[Any]:
    repository.add("one", identity_config())
    (repository.add("broken", 'backend: "onnxruntime"') / "1" / "model.onnx").write_bytes(b"not a model")
    with serve(repository.path, "--model-control-mode=explicit", "--load-model=one") as server:
        yield server


@pytest.fixture(scope="module")
def shared(module_repository: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server for the tests that do not end it, with models for each of them."""
    repository, other = module_repository, type(module_repository)(tmp_path_factory.mktemp("other"))
    for name in ("slow", "slow_again"):
        repository.add(name, STUB + SLOW)
    (repository.add("broken", 'backend: "onnxruntime"') / "1" / "model.onnx").write_bytes(b"not a model")
    for name in ("never", "serving", "gone", "twice"):
        repository.add(name, identity_config())
    other.add("twice", identity_config())
    repository.add("unreadable", "this is no configuration")
    (repository.path / "empty").mkdir()
    for version in (1, 2):
        repository.add("pinned", identity_config(), version)
    flags = (f"--model-repository={other.path}", "--model-control-mode=explicit", "--load-model=serving")
    with serve(repository.path, *flags) as server:
        yield server
        server.stop_cleanly()


def order(server: Any, name: str, what: str) -> tuple[int, Any]:
    return server.ask(f"/v2/repository/models/{name}/{what}", {})


def steps(events: list[dict[str, Any]], model: str) -> list[str]:
    return [event["kind"].removeprefix("model.") for event in events if event.get("model") == model]


def test_loads_failures_reloads_and_drains_are_published_as_they_happen(explicit: Any, repository: Any) -> None:
    stream = Stream(explicit)
    assert steps(stream.until("server.ready"), "one") == ["loading", "ready"]
    assert order(explicit, "broken", "load")[0] == 400
    failed = stream.until("model.failed", model="broken")
    assert steps(failed, "broken") == ["loading", "failed"]
    assert failed[-1]["reason"]
    config = repository.path / "one" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 4"))
    assert order(explicit, "one", "load")[0] == 200
    reload = stream.until("model.unloaded", model="one")
    assert steps(reload, "one") == ["loading", "ready", "draining", "unloaded"]
    assert order(explicit, "one", "unload")[0] == 200
    last = stream.until("model.unloaded", model="one")
    assert steps(last, "one") == ["draining", "unloaded"]
    _, remembered = explicit.ask("/edge/v1/events?follow=false")
    assert [event["number"] for event in remembered] == list(range(1, last[-1]["number"] + 1))
    assert explicit.stop() == 0
    stream.join()


def test_the_index_is_correct_during_a_slow_load_over_http_and_grpc(shared: Any) -> None:
    request = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}]}
    with tritonclient.grpc.InferenceServerClient(shared.grpc) as client:

        def over_http() -> str:
            _, entries = shared.ask("/v2/repository/index", {})
            return next(entry.get("state", "") for entry in entries if entry["name"] == "slow")

        def over_grpc() -> str:
            return next(entry.state for entry in client.get_model_repository_index().models if entry.name == "slow")

        assert (over_http(), over_grpc()) == ("", "")
        done: list[tuple[int, Any]] = []
        loading = threading.Thread(target=lambda: done.append(order(shared, "slow", "load")))
        loading.start()
        seen: list[str] = []
        while not done:
            # Each state is between two looks of the other protocol: a step back would be a contradiction.
            seen += [over_http(), over_grpc()]
            is_ready = client.is_model_ready("slow")
            status = shared.infer("slow", request)[0]
            if seen[-1] == "READY":
                assert (is_ready, status) == (True, 200)
            elif is_ready or status == 200:
                assert over_http() == over_grpc() == "READY"
        loading.join()
        assert done[0][0] == 200
        assert over_http() == over_grpc() == "READY"
    ranks = ["", "LOADING", "READY"]
    order_seen = [ranks.index(state) for state in seen]
    assert order_seen == sorted(order_seen)
    assert "LOADING" in seen
