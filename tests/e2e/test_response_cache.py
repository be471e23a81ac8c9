"""A response cache of two servers in Redis, which dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.models import add_sub_body
from tests.kit.server import serve

CACHED = 'backend: "onnxruntime"\nresponse_cache { enable: true }'


def answered(server: Any) -> bool:
    """Return whether the model gives the sum."""
    status, answer = server.infer("add_sub", add_sub_body(3.0))
    return (status, answer["outputs"][0]["data"]) == (200, [4.0] * 16)


def test_two_servers_share_redis_and_serve_without_it(repository: Any, redis_server: Any, tmp_path: Path) -> None:
    repository.add_sub("add_sub", CACHED)
    # Patient: a busy machine is not a slow Redis.
    times = "connect_timeout=5000,socket_timeout=5000,wait_timeout=5000"
    flags = [f"--cache-config=redis,host=127.0.0.1,port={redis_server.port}", f"--cache-config=redis,{times}"]
    with serve(repository.path, *flags) as one, serve(repository.path, *flags) as two:
        assert answered(one)
        assert eventually(lambda: redis_server.client().dbsize() == 1)
        assert answered(two)
        found = two.statistics("add_sub")
        assert (found["inference_stats"]["cache_hit"]["count"], found["execution_count"]) == (1, 0)
        redis_server.kill()
        assert all(answered(two) for _ in range(10))
        assert two.statistics("add_sub")["execution_count"] == 10
        assert two.log().count("requests are computed") == 1
        assert [one.stop(), two.stop()] == [0, 0]


@pytest.mark.full
def test_the_redis_password_is_never_shown(repository: Any) -> None:
    repository.add_sub("add_sub", CACHED)
    environment = {"TRITONCACHE_REDIS_PASSWORD": "open-sesame"}
    flags = ["--cache-config=redis,host=127.0.0.1,port=1", "--log-verbose=1"]
    with serve(repository.path, *flags, environment=environment) as server:
        assert answered(server)
        assert "requests are computed" in server.log()
        assert "open-sesame" not in server.log()
