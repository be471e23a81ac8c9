"""The stream of events of a running server: loads, failures, reloads and its end, as they happen."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

from tests.kit.models import identity_config
from tests.kit.server import serve


def test_loads_failures_reloads_and_drains_are_published_as_they_happen(repository: Any) -> None:
    repository.add("one", identity_config())
    repository.add("broken", 'backend: "onnxruntime"', files={"1/model.onnx": b"not a model"})
    with (
        serve(repository.path, "--model-control-mode=explicit", "--load-model=one") as server,
        contextlib.closing(http.client.HTTPConnection(server.http, timeout=60)) as connection,
    ):
        connection.request("GET", "/edge/v1/events")
        answer = connection.getresponse()
        assert answer.status == 200
        events = (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))
        seen: list[dict[str, Any]] = []

        def steps_until(kind: str, model: str | None = None) -> list[str]:
            """Read up to the first event of that kind; return the steps of the model, or of "one", until then."""
            steps = []
            for event in events:
                seen.append(event)
                if event.get("model") == (model or "one"):
                    steps.append(event["kind"].removeprefix("model."))
                if event["kind"] == kind and event.get("model") == model:
                    return steps
            raise AssertionError(f"no {kind} among {seen}")

        def order(name: str, what: str) -> int:
            return int(server.ask(f"/v2/repository/models/{name}/{what}", {})[0])

        assert steps_until("server.ready") == ["loading", "ready"]
        assert order("broken", "load") == 400
        assert steps_until("model.failed", "broken") == ["loading", "failed"]
        assert seen[-1]["reason"]
        repository.add("one", identity_config(batch=4))
        assert order("one", "load") == 200
        assert steps_until("model.unloaded", "one") == ["loading", "ready", "draining", "unloaded"]
        assert order("one", "unload") == 200
        assert steps_until("model.unloaded", "one") == ["draining", "unloaded"]
        assert [event["number"] for event in seen] == list(range(1, seen[-1]["number"] + 1))
        assert server.ask("/edge/v1/events?follow=false")[1] == seen
        assert server.stop() == 0
        assert not any(event.get("model") == "one" for event in events), "the stream ends with the server"
