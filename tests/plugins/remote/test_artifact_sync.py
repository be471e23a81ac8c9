"""Copy of a model in an OCI registry, from one in this process: it follows the tag, and is kept while that is away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.remote.artifact_sync import ArtifactSync
from edge_server.plugins.remote.object_store import RemoteUnavailable
from edge_server.plugins.remote.pull.model_installation import locked
from tests.plugins.remote.pull.registry import Registry, digest_of


@pytest.fixture
def copy(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ArtifactSync]:
    """A function that makes the copy of a tag, on the same folder each time: as a restart would."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return lambda: ArtifactSync(f"oci://http://{registry.host}/team/m:stable", tmp_path / "cache", interval_s=1.0)


def push(registry: Registry, content: bytes) -> str:
    return registry.push("stable", registry.add_file("m.onnx", content))


def test_an_unchanged_tag_is_asked_for_its_digest_only(registry: Registry, copy: Callable[[], ArtifactSync]) -> None:
    push(registry, b"first")
    copy().sync()
    sync = copy()
    registry.requests.clear()
    for _ in range(2):
        sync.sync()
    assert [(method, path) for method, path, _ in registry.requests] == [("HEAD", "/v2/team/m/manifests/stable")] * 2


def test_the_copy_stays_while_the_registry_is_wrong(registry: Registry, copy: Callable[[], ArtifactSync]) -> None:
    push(registry, b"first")
    sync = copy()
    sync.sync()
    file = sync.root / "m/1/model.onnx"
    push(registry, b"second")
    registry.blobs[digest_of(b"second")] = b"forged"
    with pytest.raises(RemoteUnavailable, match="has another SHA-256"):
        sync.sync()
    # It may be large: not again, until the tag moves.
    registry.requests.clear()
    with pytest.raises(RemoteUnavailable, match="has another SHA-256"):
        sync.sync()
    assert [method for method, _, _ in registry.requests] == ["HEAD"]
    assert (file.read_bytes(), sync.is_warm) == (b"first", True)
    push(registry, b"third")
    sync.sync()
    assert file.read_bytes() == b"third"


def test_a_broken_pull_is_tried_again(registry: Registry, copy: Callable[[], ArtifactSync]) -> None:
    push(registry, bytes(100_000))
    sync = copy()
    registry.cut_after = 60_000
    with pytest.raises(RemoteUnavailable, match="after 60000 of 100000 bytes"):
        sync.sync()
    sync.sync()
    assert (sync.root / "m/1/model.onnx").read_bytes() == bytes(100_000)


def test_another_process_that_updates_the_copy_is_left_alone(
    registry: Registry, copy: Callable[[], ArtifactSync], caplog: pytest.LogCaptureFixture
) -> None:
    push(registry, b"first")
    sync, other = copy(), copy()
    with locked(sync.root):
        assert sync.sync()
    assert "another process updates the copy" in caplog.text
    assert not sync.is_warm
    other.sync()
    registry.requests.clear()
    sync.sync()
    assert sync.is_warm
    assert [method for method, _, _ in registry.requests] == ["HEAD"]


@pytest.mark.parametrize("url", ["oci://m", "oci://me:secret@host.example/m", "oci://host.example/m@sha256:1"])
def test_a_wrong_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="expected oci://HOST"):
        ArtifactSync(url, tmp_path, interval_s=1.0)
