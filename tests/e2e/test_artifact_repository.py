"""The installed server on a model in an OCI registry."""

from __future__ import annotations

from pathlib import Path

from tests.kit.eventually import eventually
from tests.kit.server import serve
from tests.plugins.remote.pull.registry import Registry, run_registry

CONFIG = (
    b'backend: "identity" input { name: "I" data_type: TYPE_FP32 dims: [1] } '
    b'output { name: "O" data_type: TYPE_FP32 dims: [1] }'
)


def push(registry: Registry, version: int) -> None:
    weights = registry.add_file(f"{version}/weights", b"w")
    registry.push("stable", registry.add_file("config.pbtxt", CONFIG), weights)


def test_a_server_follows_a_tag_without_a_restart(tmp_path: Path) -> None:
    with run_registry() as registry:
        push(registry, 1)
        with serve(
            f"oci://http://{registry.host}/team/echo:stable", f"--repository-cache-dir={tmp_path / 'cache'}",
            "--model-control-mode=poll", "--repository-poll-secs=0.2",
        ) as server:  # fmt: skip

            def answer() -> str:
                tensor = {"name": "I", "datatype": "FP32", "shape": [1], "data": [1.0]}
                status, body = server.infer("echo", {"inputs": [tensor]})
                return str(body["model_version"]) if status == 200 else f"{status} {body}"

            assert answer() == "1"
            push(registry, 2)
            assert eventually(lambda: answer() == "2"), server.log()
            server.stop_cleanly()
