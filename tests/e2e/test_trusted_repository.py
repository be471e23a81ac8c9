"""The installed server with signed models only: valid, corrupt and unsigned updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve


@pytest.fixture
def sign(run_command: Callable[..., Any]) -> Callable[..., None]:
    def sign(*arguments: str | Path) -> None:
        done = run_command("sign", *map(str, arguments))
        assert done.returncode == 0, done.stderr

    return sign


def stage(repository: Any, tmp_path: Path, config: str, version: int) -> Path:
    """Write a version where the server does not look, together with the model's own files."""
    folder = tmp_path / f"staged-{version}" / "echo"
    (folder / str(version)).mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / str(version) / "weights.bin").write_bytes(b"weights of %d" % version)
    return folder


def deploy(repository: Any, staged: Path, version: int) -> None:
    """Put a version into the repository in one step."""
    (staged / str(version)).rename(repository.path / "echo" / str(version))


def answered_by(server: Any) -> str:
    status, answer = server.infer("echo", identity_body())
    return answer["model_version"] if status == 200 else answer["error"]


def reason(server: Any, version: int) -> str:
    index = server.ask("/v2/repository/index", {})[1]
    return next((item.get("reason", "") for item in index if item.get("version") == str(version)), "")


def test_only_models_signed_with_the_key_are_served(repository: Any, tmp_path: Path, sign: Any) -> None:
    sign("--new-key", tmp_path / "key")
    sign("--new-key", tmp_path / "stolen")
    first = stage(repository, tmp_path, identity_config(), 1)
    sign(first, "--key", tmp_path / "key")
    first.rename(repository.path / "echo")
    flags = [f"--signature-public-key={tmp_path / 'key.pub'}", "--repository-poll-secs=0.2"]
    with serve(repository.path, "--model-control-mode=poll", *flags) as server:
        assert answered_by(server) == "1"

        unsigned = stage(repository, tmp_path, identity_config(), 2)
        deploy(repository, unsigned, 2)
        assert eventually(lambda: "there is no SHA256SUMS" in reason(server, 2)), server.log()
        assert answered_by(server) == "1"

        stolen = stage(repository, tmp_path, identity_config(), 3)
        sign(stolen, "--key", tmp_path / "stolen")
        deploy(repository, stolen, 3)
        assert eventually(lambda: "not by the owner" in reason(server, 3)), server.log()
        assert answered_by(server) == "1"

        good = stage(repository, tmp_path, identity_config(), 4)
        sign(good, "--key", tmp_path / "key")
        deploy(repository, good, 4)
        assert eventually(lambda: answered_by(server) == "4"), server.log()
        assert "Traceback" not in server.log()
