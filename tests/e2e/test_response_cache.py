"""A response cache of two servers in Redis, which dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.server import serve

CACHED = 'backend: "onnxruntime"\nresponse_cache { enable: true }'


def inputs(module: Any, value: float, names: tuple[str, str] = ("INPUT0", "INPUT1")) -> list[Any]:
    made = []
    for name, array in zip(names, (np.full((1, 16), value, np.float32), np.ones((1, 16), np.float32)), strict=True):
        made.append(infer_input(module, name, array))
    return made


def counts(server: Any, model: str) -> dict[str, int]:
    client = httpclient.InferenceServerClient(server.http)
    (found,) = client.get_inference_statistics(model)["model_stats"]
    client.close()
    parts = found["inference_stats"]
    return {name: parts[name]["count"] for name in parts} | {"executions": found["execution_count"]}


def test_two_servers_share_redis_and_serve_without_it(repository: Any, redis_server: Any, tmp_path: Path) -> None:
    repository.add_sub("add_sub", CACHED)
    # Patient: a busy machine is not a slow Redis.
    times = "connect_timeout=5000,socket_timeout=5000,wait_timeout=5000"
    flags = [f"--cache-config=redis,host=127.0.0.1,port={redis_server.port}", f"--cache-config=redis,{times}"]
    with serve(repository.path, *flags) as one, serve(repository.path, *flags) as two:
        first, second = (httpclient.InferenceServerClient(server.http) for server in (one, two))
        assert (first.infer("add_sub", inputs(httpclient, 3.0)).as_numpy("OUTPUT0") == 4).all()
        assert eventually(lambda: redis_server.client().dbsize() == 1)
        assert (second.infer("add_sub", inputs(httpclient, 3.0)).as_numpy("OUTPUT0") == 4).all()
        found = counts(two, "add_sub")
        assert (found["cache_hit"], found["executions"]) == (1, 0)
        redis_server.kill()
        for _ in range(10):
            assert (second.infer("add_sub", inputs(httpclient, 3.0)).as_numpy("OUTPUT0") == 4).all()
        assert counts(two, "add_sub")["executions"] == 10
        assert two.log().count("requests are computed") == 1
        first.close()
        second.close()
        assert [one.stop(), two.stop()] == [0, 0]


@pytest.mark.full
def test_the_redis_password_is_never_shown(repository: Any) -> None:
    repository.add_sub("add_sub", CACHED)
    environment = {"TRITONCACHE_REDIS_PASSWORD": "open-sesame"}
    flags = ["--cache-config=redis,host=127.0.0.1,port=1", "--log-verbose=1"]
    with serve(repository.path, *flags, environment=environment) as server:
        client = httpclient.InferenceServerClient(server.http)
        assert (client.infer("add_sub", inputs(httpclient, 3.0)).as_numpy("OUTPUT0") == 4).all()
        client.close()
        assert "requests are computed" in server.log()
        assert "open-sesame" not in server.log()
