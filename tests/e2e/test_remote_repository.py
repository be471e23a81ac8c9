"""The installed server on a bucket: served, followed, resumed, and still served when the network is away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve

pytestmark = pytest.mark.full


@pytest.fixture
def serve_bucket(bucket: Any, tmp_path: Path) -> Callable[..., Any]:
    """`with serve_bucket(*flags) as server:`, each time with the same cache."""

    def start(*flags: str) -> Any:
        return serve(
            bucket.url, f"--repository-cache-dir={tmp_path / 'cache'}", "--repository-poll-secs=0.2", *flags,
            environment=bucket.environment,
        )  # fmt: skip

    return start


def answered_by(server: Any, name: str) -> str:
    status, answer = server.infer(name, identity_body())
    return answer["model_version"] if status == 200 else answer["error"]


def test_a_bucket_is_served_and_its_new_versions_need_no_restart(serve_bucket: Any, bucket: Any) -> None:
    bucket.put("echo/config.pbtxt", identity_config().encode())
    bucket.put("echo/1/note.txt", b"one")
    with serve_bucket("--model-control-mode=poll") as server:
        assert answered_by(server, "echo") == "1"
        bucket.put("echo/2/note.txt", b"two")
        assert eventually(lambda: answered_by(server, "echo") == "2"), server.log()
        bucket.put("late/config.pbtxt", identity_config().encode())
        bucket.put("late/1/note.txt", b"one")
        assert eventually(lambda: answered_by(server, "late") == "1"), server.log()
        bucket.delete("echo/2/note.txt")
        assert eventually(lambda: answered_by(server, "echo") == "1"), server.log()
        server.stop_cleanly()


def test_without_network_the_local_copy_is_served_even_after_a_restart(serve_bucket: Any, bucket: Any) -> None:
    bucket.put("echo/config.pbtxt", identity_config().encode())
    bucket.put("echo/1/note.txt", b"one")
    for mode in ("poll", "none"):
        bucket.relay.is_down = False
        with serve_bucket(f"--model-control-mode={mode}") as server:
            assert answered_by(server, "echo") == "1"
            bucket.relay.is_down = True
            bucket.relay.drop()
            assert answered_by(server, "echo") == "1"
        with serve_bucket(f"--model-control-mode={mode}") as server:
            assert answered_by(server, "echo") == "1"
            assert eventually(lambda server=server: "the local copy is served" in server.log())
            assert server.stop() == 0
