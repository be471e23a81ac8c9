"""Copies of remote repositories, against a real S3 server: complete or absent, resumed, and kept while it is away."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.config import RepositoryConfig
from edge_server.errors import ServingFault
from edge_server.plugins.remote import local_copy as cache_module
from edge_server.plugins.remote.address import parse_address
from edge_server.plugins.remote.local_copy import LocalCopy, LocalDiskFault, exchange
from edge_server.plugins.remote.object_store import ObjectStore, RemoteUnavailable
from edge_server.plugins.remote.repositories import RemoteRepositories
from edge_server.plugins.remote.sync import RemoteSync
from edge_server.repository.disk import free_space
from edge_server.repository.disk.scan import Scanner

pytestmark = pytest.mark.full

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "CHUNK_BYTES", 256 << 10)


@pytest.fixture
def mirror_of(tmp_path: Path) -> Iterator[Callable[..., RemoteSync]]:
    """Make a mirror of an address, on the same folder each time: as a restart would."""
    made: list[RemoteSync] = []

    def make(url: str) -> RemoteSync:
        for earlier in made:
            earlier.close()
        made.append(RemoteSync(ObjectStore(parse_address(url)), LocalCopy(tmp_path / "cache"), url, interval_s=0.05))
        return made[-1]

    yield make
    for mirror in made:
        mirror.close()


@pytest.fixture
def synced(bucket: Any, mirror_of: Callable[..., RemoteSync]) -> Callable[[], RemoteSync]:
    """Make a mirror of the bucket that has copied it."""

    def make() -> RemoteSync:
        mirror = mirror_of(bucket.url)
        assert mirror.sync()
        return mirror

    return make


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def fill(bucket: Any) -> dict[str, bytes]:
    files = {"m/config.pbtxt": b"name: 'm'", "m/1/model.onnx": os.urandom(100_000), "m/1/weights/w.bin": b"\x00" * 10}
    for path, content in files.items():
        bucket.put(path, content)
    return files


def test_the_copy_equals_the_bucket(bucket: Any, synced: Any) -> None:
    files = fill(bucket)
    bucket.put("m/2/empty.bin", b"")
    bucket.put("n/1/", b"")  # what consoles write for a folder: a version without files
    bucket.put("README.md", b"beside the models")
    mirror = synced()
    assert tree(mirror.root) == {**files, "m/2/empty.bin": b""}
    assert [version.number for version in Scanner([mirror.root]).scan().models["n"].versions] == [1]
    assert mirror.is_warm


def test_unchanged_files_are_not_downloaded_again(bucket: Any, mirror_of: Any, synced: Any) -> None:
    bucket.put("m/1/model.onnx", os.urandom(MIB))
    synced()
    before = bucket.relay.sent_bytes
    mirror = mirror_of(bucket.url)
    bucket.put("m/2/model.onnx", b"two")
    assert mirror.sync()
    assert bucket.relay.sent_bytes - before < 100_000
    assert tree(mirror.root)["m/2/model.onnx"] == b"two"


def test_only_changed_files_of_a_version_are_downloaded(bucket: Any, synced: Any) -> None:
    bucket.put("m/1/weights.bin", os.urandom(MIB))
    bucket.put("m/1/model.xml", b"old")
    mirror = synced()
    before = bucket.relay.sent_bytes
    bucket.put("m/1/model.xml", b"new")
    assert mirror.sync()
    assert bucket.relay.sent_bytes - before < 100_000
    assert tree(mirror.root)["m/1/model.xml"] == b"new"
    assert len(tree(mirror.root)["m/1/weights.bin"]) == MIB


def test_an_interrupted_download_is_resumed_and_published_when_complete(
    bucket: Any, mirror_of: Any, synced: Any
) -> None:
    content = os.urandom(3 * MIB)
    bucket.put("m/1/model.onnx", content)
    mirror = mirror_of(bucket.url)
    bucket.relay.cut_after = 2 * MIB
    with pytest.raises(RemoteUnavailable, match=r"model\.onnx"):
        mirror.sync()
    assert bucket.relay.cut_count > 0
    assert tree(mirror.root) == {}
    assert not mirror.is_warm
    # After a restart too: what came is on the disk.
    bucket.relay.cut_after, before = None, bucket.relay.sent_bytes
    mirror = synced()
    assert tree(mirror.root) == {"m/1/model.onnx": content}
    assert bucket.relay.sent_bytes - before < 2 * MIB


def test_a_file_replaced_during_its_download_is_never_published_mixed(bucket: Any, mirror_of: Any) -> None:
    bucket.put("m/1/model.onnx", b"a" * MIB)
    mirror = mirror_of(bucket.url)
    read = mirror._store.read

    def replace_then_read(file: Any, start: int, end: int) -> bytes:
        if start == 512 << 10:
            bucket.put("m/1/model.onnx", b"b" * MIB)
        return bytes(read(file, start, end))

    mirror._store.read = replace_then_read
    assert not mirror.sync()
    assert tree(mirror.root) == {}
    assert mirror.sync()
    assert tree(mirror.root) == {"m/1/model.onnx": b"b" * MIB}


def test_a_version_is_published_once_its_upload_has_ended(
    bucket: Any, mirror_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("m/1/model.xml", b"first half")
    mirror = mirror_of(bucket.url)
    monkeypatch.setattr(mirror._closing, "wait", lambda _: bucket.put("m/1/model.bin", b"second half"))
    assert not mirror.sync()
    assert tree(mirror.root) == {}
    monkeypatch.undo()


def test_files_deleted_from_the_bucket_are_deleted_from_the_copy(bucket: Any, synced: Any) -> None:
    fill(bucket)
    bucket.put("m/2/model.onnx", b"two")
    bucket.put("m/labels/a.txt", b"cat")
    bucket.put("n/1/model.onnx", b"n")
    mirror = synced()
    bucket.delete("m/1/model.onnx", "m/1/weights/w.bin", "m/config.pbtxt", "m/labels/a.txt", "n/1/model.onnx")
    assert mirror.sync()
    assert tree(mirror.root) == {"m/2/model.onnx": b"two"}
    assert sorted(path.name for path in mirror.root.rglob("*") if path.is_dir()) == ["2", "m"]


def test_nothing_is_deleted_if_a_download_failed(bucket: Any, synced: Any) -> None:
    bucket.put("m/1/model.onnx", b"one")
    mirror = synced()
    bucket.delete("m/1/model.onnx")
    bucket.put("m/2/model.onnx", os.urandom(2 * MIB))
    bucket.relay.cut_after = MIB
    with pytest.raises(RemoteUnavailable):
        mirror.sync()
    assert tree(mirror.root) == {"m/1/model.onnx": b"one"}
    bucket.relay.cut_after = None
    assert mirror.sync()
    assert list(tree(mirror.root)) == ["m/2/model.onnx"]


@pytest.mark.parametrize(
    "garble", [(b"<Contents>", b"<Contents "), (b"<Size>", b"<Syze>"), (b"</ListBucketResult>", b"</ListBucketResulX>")]
)
def test_a_corrupted_listing_changes_nothing(bucket: Any, synced: Any, garble: tuple[bytes, bytes]) -> None:
    files = fill(bucket)
    mirror = synced()
    bucket.put("m/2/model.onnx", b"two")
    bucket.relay.garble = garble
    with pytest.raises(RemoteUnavailable):
        mirror.sync()
    assert tree(mirror.root) == files
    bucket.relay.garble = None
    assert mirror.sync()
    assert tree(mirror.root) == {**files, "m/2/model.onnx": b"two"}


def test_a_damaged_copy_is_repaired(bucket: Any, synced: Any) -> None:
    files = fill(bucket)
    mirror = synced()
    (mirror.root / "m/1/model.onnx").write_bytes(b"bit rot")
    (mirror.root / "m/config.pbtxt").unlink()
    (mirror.root / "m/9").mkdir()
    (mirror.root / "m/9/planted.onnx").write_bytes(b"not from the bucket")
    mirror = synced()
    assert tree(mirror.root) == files


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"units": {"m": {"x": {}}}, "is_complete": true}'])
def test_a_damaged_record_only_repeats_the_download(bucket: Any, synced: Any, content: bytes) -> None:
    files = fill(bucket)
    mirror = synced()
    (mirror.root.parent / "state.json").write_bytes(content)
    mirror = synced()
    assert tree(mirror.root) == files


def test_unsafe_names_are_not_copied(bucket: Any, synced: Any, tmp_path: Path) -> None:
    files = fill(bucket)
    for name in ("m/../../escaped", "m//x", "m/1/a\\b", "m/3"):
        bucket.put(name, b"hostile")
    bucket.put("m/1/.hidden", b"ignored")
    mirror = synced()
    assert tree(mirror.root) == files
    assert not list(tmp_path.rglob("escaped"))


def test_a_full_disk_keeps_the_copy_and_deletes_the_partial_download(
    bucket: Any, synced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fill(bucket)
    mirror = synced()
    bucket.put("m/2/model.onnx", os.urandom(MIB))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda _: usage(1, 1, free_space.RESERVE_BYTES + 1000))
    with pytest.raises(LocalDiskFault, match="1048576 bytes"):
        mirror.sync()
    assert tree(mirror.root) == files
    assert not list((mirror.root.parent / "staging").glob("*.part"))
    monkeypatch.undo()


def test_a_disk_that_fills_up_while_writing_is_a_cache_fault(tmp_path: Path) -> None:
    """A limit on the file size replaces a full disk: the write fails in the middle with the system's error."""
    (tmp_path / "store/m/1").mkdir(parents=True)
    (tmp_path / "store/m/1/model.onnx").write_bytes(b"x" * (4 * MIB))
    code = f"""
        import resource
        from pathlib import Path
        from edge_server.plugins.remote.address import parse_address
        from edge_server.plugins.remote.local_copy import LocalCopy, LocalDiskFault
        from edge_server.plugins.remote.sync import RemoteSync
        from edge_server.plugins.remote.object_store import ObjectStore
        url = "file://{tmp_path}/store"
        mirror = RemoteSync(ObjectStore(parse_address(url)), LocalCopy(Path("{tmp_path}/cache")), url, 0.05)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            mirror.sync()
        except LocalDiskFault as error:
            print("refused", error)
        print(list(Path("{tmp_path}/cache/staging").iterdir()), list(mirror.root.iterdir()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "refused 'm/1/model.onnx' cannot be stored: File too large\n[] []" in done.stdout


def test_without_the_store_the_start_waits_for_the_timeout_only(bucket: Any, tmp_path: Path) -> None:
    bucket.relay.is_down = True
    config = RepositoryConfig(
        (bucket.url,), cache_dir=str(tmp_path / "cache"), control_mode="none", poll_s=0.05, first_sync_s=0.5
    )
    repositories = RemoteRepositories(config)
    with pytest.raises(ServingFault, match="could not be copied within"):
        repositories.before_first_scan()
    repositories.stop(0.0)
    for copy in repositories._copies.values():
        copy._thread.join(60)


def test_a_version_without_files_is_copied_from_a_share_and_a_share_that_is_gone_is_named(
    tmp_path: Path, mirror_of: Any
) -> None:
    (tmp_path / "share/empty/1").mkdir(parents=True)
    mirror = mirror_of(f"file://{tmp_path}/share")
    assert mirror.sync()
    assert (mirror.root / "empty/1").is_dir()
    (tmp_path / "share").rename(tmp_path / "away")
    with pytest.raises(RemoteUnavailable, match="does not exist"):
        mirror.sync()


@pytest.mark.parametrize("has_exchange", [True, False])
def test_two_folders_are_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_exchange: bool) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not has_exchange:
        monkeypatch.setattr(cache_module.ctypes, "CDLL", lambda *_, **__: object())
    exchange(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_exchanging_with_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError) as caught:
        exchange(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.ENOENT
