"""Models that fail and models that come and go: readiness and banner of the installed server."""

from __future__ import annotations

import shutil
from typing import Any

from tests.kit.eventually import eventually
from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve

BROKEN = 'backend: "no_such_runtime"\nmax_batch_size: 0'


def test_a_broken_model_is_listed_with_its_reason_and_makes_the_server_unready_unless_told_otherwise(
    repository: Any,
) -> None:
    repository.add("good", identity_config())
    repository.add("bad", BROKEN)
    with serve(repository.path, "--model-control-mode=none") as server:
        entry = server.index()["bad"]
        assert entry["state"] == "UNAVAILABLE"
        assert "no_such_runtime" in entry["reason"]
        assert server.get("/v2/health/live")[0] == 200
        assert server.get("/v2/health/ready")[0] == 400
        assert server.infer("good", identity_body())[0] == 200
        assert server.stop() == 0
        assert "/v2/health/ready answers 400" in server.output()
    with serve(repository.path, "--strict-readiness=false") as server:
        assert server.get("/v2/health/ready")[0] == 200
        assert server.stop() == 0
        assert "/v2/health/ready" not in server.output()


def test_poll_mode_follows_the_folders_and_is_ready_without_a_broken_model(repository: Any, tmp_path: Any) -> None:
    repository.add("first", identity_config())
    repository.add("bad", BROKEN)
    other = type(repository)(tmp_path / "other")
    other.add("there", identity_config())
    flags = (f"--model-repository={other.path}", "--model-control-mode=poll", "--repository-poll-secs=0.1")
    with serve(repository.path, *flags) as server:
        states = {name: item["state"] for name, item in server.index().items()}
        assert states == {"first": "READY", "there": "READY", "bad": "UNAVAILABLE"}
        assert server.get("/v2/health/ready")[0] == 200
        assert server.infer("first", identity_body())[0] == 200
        repository.add("second", identity_config())
        assert eventually(lambda: server.infer("second", identity_body())[0] == 200)
        shutil.rmtree(repository.path / "first")
        assert eventually(lambda: server.infer("first", identity_body())[0] == 404)
        assert server.ask("/v2/repository/models/second/load", {})[0] == 503
        assert server.stop() == 0
        assert "/v2/health/ready" not in server.output()
