"""What each copy of a remote repository promises, of files, S3 and an OCI registry: it follows, stays, and is whole."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from edge_server.plugins.remote import sync as sync_module
from edge_server.plugins.remote.address import parse_address
from edge_server.plugins.remote.artifact_sync import ArtifactSync
from edge_server.plugins.remote.local_copy import LocalCopy
from edge_server.plugins.remote.object_store import ObjectStore, RemoteUnavailable
from edge_server.plugins.remote.sync import RemoteSync, RepositorySync
from tests.kit.eventually import eventually
from tests.plugins.remote.pull.registry import run_registry


class Remote(NamedTuple):
    """A remote repository with one model `m`. `put` replaces its file. `empty` takes the model away."""

    open: Callable[[], RepositorySync]
    put: Callable[[bytes], object]
    lose: Callable[[], object]
    find: Callable[[], object]
    empty: Callable[[], object]


# Those of an object store need fsspec, an extra.
@pytest.fixture(
    params=[pytest.param("file", marks=pytest.mark.full), "oci", pytest.param("s3", marks=pytest.mark.full)]
)
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setattr(sync_module, "_FIRST_RETRY_S", 0.02)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    cache, opened = tmp_path / "cache", list[RepositorySync]()

    def opener(make: Callable[[], RepositorySync]) -> Callable[[], RepositorySync]:
        return lambda: opened.append(make()) or opened[-1]

    def mirror(url: str) -> Callable[[], RepositorySync]:
        return opener(lambda: RemoteSync(ObjectStore(parse_address(url)), LocalCopy(cache), url, interval_s=0.05))

    if request.param == "file":
        share, away = tmp_path / "share", tmp_path / "away"
        (share / "m/1").mkdir(parents=True)
        yield Remote(
            mirror(f"file://{share}"), (share / "m/1/model.onnx").write_bytes, lambda: share.rename(away),
            lambda: away.rename(share), lambda: shutil.rmtree(share / "m"),
        )  # fmt: skip
    elif request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        yield Remote(
            mirror(bucket.url), lambda content: bucket.put("m/1/model.onnx", content),
            lambda: setattr(bucket.relay, "is_down", True), lambda: setattr(bucket.relay, "is_down", False),
            lambda: bucket.delete("m/1/model.onnx"),
        )  # fmt: skip
    else:
        with run_registry() as registry:
            url = f"oci://http://{registry.host}/team/m:stable"
            yield Remote(
                opener(lambda: ArtifactSync(url, cache, interval_s=0.05)),
                lambda content: registry.push("stable", registry.add_file("m.onnx", content)),
                lambda: setattr(registry, "challenge", "Basic"), lambda: setattr(registry, "challenge", ""),
                registry.manifests.clear,
            )  # fmt: skip
    for one in opened:
        one.close()
    assert [thread.name for thread in threading.enumerate() if thread.name == "edge-mirror"] == []


def model_of(copy: RepositorySync) -> bytes | None:
    path = copy.root / "m/1/model.onnx"
    return path.read_bytes() if path.exists() else None


def sync_until(copy: RepositorySync, expected: bytes) -> None:
    """A store that changed a moment ago is read again."""
    assert eventually(lambda: copy.sync() and model_of(copy) == expected)


def test_the_copy_follows_the_store_and_a_restart_goes_on_with_it(remote: Remote) -> None:
    remote.put(b"first")
    copy = remote.open()
    assert (copy.is_warm, model_of(copy)) == (False, None)
    sync_until(copy, b"first")
    remote.put(b"second, longer")
    sync_until(copy, b"second, longer")
    assert copy.is_warm
    copy.close()
    again = remote.open()
    assert (again.is_warm, model_of(again)) == (True, b"second, longer")
    remote.put(b"third")
    sync_until(again, b"third")


def test_the_copy_stays_while_the_store_is_away_or_empty(remote: Remote) -> None:
    remote.put(b"first")
    copy = remote.open()
    sync_until(copy, b"first")
    remote.lose()
    with pytest.raises(RemoteUnavailable):
        copy.sync()
    assert (copy.is_warm, model_of(copy)) == (True, b"first")
    remote.find()
    remote.empty()
    for _ in range(3):
        try:
            copy.sync()
        except RemoteUnavailable:
            continue
    assert (copy.is_warm, model_of(copy)) == (True, b"first")


def test_a_store_that_is_away_at_the_start_is_asked_until_it_is_back(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.put(b"first")
    remote.lose()
    copy = remote.open()
    copy.start()
    assert not copy.wait_first(30, needs_success=False)
    assert not copy.wait_first(0.1, needs_success=True)
    remote.find()
    assert copy.wait_first(60, needs_success=True)
    assert model_of(copy) == b"first"
    assert len([record for record in caplog.records if "trying again in" in record.message]) == 1
    remote.put(b"second, longer")
    assert eventually(lambda: model_of(copy) == b"second, longer")


def test_one_process_at_a_time_writes_a_copy_and_the_next_goes_on_with_it(remote: Remote) -> None:
    remote.put(b"first")
    first, second, third = remote.open(), remote.open(), remote.open()
    sync_until(first, b"first")
    assert second.sync()
    remote.put(b"second, longer")
    other = threading.Thread(target=second.sync)
    other.start()
    first.sync()
    other.join()
    assert model_of(first) in (b"first", b"second, longer")
    first.close()
    sync_until(second, b"second, longer")
    second.close()
    written = (second.root / "m/1/model.onnx").stat().st_ctime_ns
    assert third.sync()
    assert (third.is_warm, (third.root / "m/1/model.onnx").stat().st_ctime_ns) == (True, written)
