"""`edge-server pull` against real HTTP and HTTPS servers: what it installs, resumes and refuses."""

from __future__ import annotations

import errno
import functools
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.remote.pull.archive import MAX_FILES, PullFailed, UnpackLimits, unpack
from tests.kit import site as kit_site
from tests.kit.site import Handler
from tests.plugins.remote.pull.archives import CONFIG, MODEL, Edge, tar


@dataclass
class Site:
    """Files of a web server, and how it behaves. `requests` are path, Range and Authorization of each request."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    has_ranges: bool = True
    cut_after: int | None = None
    """Close the connection after so many bytes of a body."""
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def add(self, name: str, content: bytes) -> tuple[str, str]:
        """Return the arguments of `pull` for a new file."""
        self.files[f"/{name}"] = content
        return f"{self.url}/{name}", f"--sha256={hashlib.sha256(content).hexdigest()}"


@contextmanager
def run_site(tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    site = Site()

    class Answers(Handler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            site.requests.append((self.path, asked, self.headers.get("Authorization")))
            if self.path in site.redirects:
                self.answer(status=302, Location=site.redirects[self.path])
                return
            if self.path not in site.files:
                self.send_error(404)
                return
            content = site.files[self.path]
            etag = f'"{hashlib.sha256(content).hexdigest()[:8]}"'
            start = 0
            if site.has_ranges and asked and self.headers.get("If-Range") == etag:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("ETag", etag)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : None if site.cut_after is None else start + site.cut_after])

    with kit_site.Site(Answers, tls) as server:
        site.url = server.url
        yield site


@pytest.fixture
def site() -> Iterator[Site]:
    with run_site() as made:
        yield made


@pytest.fixture
def secure_site(tls: ssl.SSLContext) -> Iterator[Site]:
    with run_site(tls) as made:
        yield made


def special(**fields: Any) -> bytes:
    """Return a tar with one member that is not a plain file, or has not the size in its header."""
    made = io.BytesIO()
    info = tarfile.TarInfo(fields.pop("name", "1/thing"))
    for key, value in fields.items():
        setattr(info, key, value)
    made.write(info.tobuf(tarfile.GNU_FORMAT))
    made.write(bytes(1024))
    return made.getvalue()


def sparse(map_bytes: int) -> bytes:
    """Return a compressed tar with a file of GNU's old sparse format, whose map of holes is that long."""
    info = tarfile.TarInfo("1/weights")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1  # the map continues in the next block
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    block = (b"00000000001\0" * 42 + b"\1").ljust(512, b"\0")
    return gzip.compress(bytes(header) + block * (map_bytes // 512), mtime=0)


# A file of one block, and behind it the long map.
AFTER_A_FILE = tar({"1/first": b"x"}, "w")[:1024] + gzip.decompress(sparse(3_000_000))


def sparse_by_extended_header(map_bytes: int) -> bytes:
    """Return the same in the format of pax 1.0."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("1/weights")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1"}
        content = b"1000000000\n0" + b"\n0" * (map_bytes // 2)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def zipped_with_wrong_offset() -> bytes:
    content = bytearray(zipped({"1/model.onnx": b"content"}))
    end = content.rindex(b"PK\5\6")
    content[end + 16 : end + 20] = (1 << 30).to_bytes(4, "little")
    return bytes(content)


def zipped_link() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        info = zipfile.ZipInfo("1/model.onnx")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return made.getvalue()


def in_folder(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {f"{name}/{path}": content for path, content in files.items()}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("echo.tar.gz", tar(MODEL, "w:gz")),
        ("echo.tgz", tar(in_folder(MODEL, "echo-release-3"), "w:gz")),
        ("echo.tar", tar(in_folder(MODEL, "download"), "w")),
        ("echo.zip", zipped(MODEL)),
        ("echo.zip", zipped(in_folder(MODEL, "echo"))),
    ],
)
def test_an_archive_of_a_model_or_its_folder_is_installed(
    file: str, content: bytes, site: Site, pull: Edge, models: Path
) -> None:
    done = pull(*site.add(file, content))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{models / 'echo'}: version 1\n"
    assert os.listdir(models) == ["echo"]
    assert (models / "echo/config.pbtxt").read_bytes() == CONFIG
    assert (models / "echo/1/weights").read_bytes() == MODEL["1/weights"]


def test_one_model_file_becomes_version_1(site: Site, pull: Edge, models: Path) -> None:
    assert pull(*site.add("a/Detector%20v3.onnx", b"onnx"), "--name=detector").returncode == 0
    assert (models / "detector/1/model.onnx").read_bytes() == b"onnx"
    assert pull(*site.add("small.gguf?download=true", b"gguf")).returncode == 0
    assert (models / "small/1/model.gguf").read_bytes() == b"gguf"
    assert sorted(os.listdir(models)) == ["detector", "small"]


def test_files_that_may_hold_code_are_named(site: Site, pull: Edge) -> None:
    files = {"1/model.pt2": b"x", "1/model.savedmodel/saved_model.pb": b"x", "1/labels.txt": b"x"}
    done = pull(*site.add("echo.tar", tar(files, "w")))
    assert done.returncode == 0
    assert "'1/model.pt2', '1/model.savedmodel/saved_model.pb' may hold code" in done.stderr


def test_an_interrupted_download_is_resumed(site: Site, pull: Edge, models: Path) -> None:
    content = os.urandom(300_000)
    arguments = site.add("m.onnx", content)
    site.cut_after = 100_000
    done = pull(*arguments)
    assert done.returncode == 1
    assert "after 100000 of 300000 bytes; run the same command again to resume" in done.stderr
    assert os.listdir(models) == [".pull-m"]
    assert pull(*arguments).returncode == 1
    site.cut_after = None
    assert pull(*arguments).returncode == 0
    assert [asked for _, asked, _ in site.requests] == [None, "bytes=100000-", "bytes=200000-"]
    assert (models / "m/1/model.onnx").read_bytes() == content
    assert os.listdir(models) == ["m"]


def test_a_server_without_ranges_sends_the_whole_file_again(site: Site, pull: Edge, models: Path) -> None:
    content = os.urandom(300_000)
    arguments = site.add("m.onnx", content)
    site.has_ranges, site.cut_after = False, 100_000
    assert pull(*arguments).returncode == 1
    site.cut_after = None
    assert pull(*arguments).returncode == 0
    assert site.requests[-1][1] == "bytes=100000-"
    assert (models / "m/1/model.onnx").read_bytes() == content


def test_a_file_changed_between_attempts_is_downloaded_from_the_start(site: Site, pull: Edge, models: Path) -> None:
    old, new = os.urandom(300_000), os.urandom(300_000)
    site.add("m.onnx", old)
    url, sha256 = f"{site.url}/m.onnx", f"--sha256={hashlib.sha256(new).hexdigest()}"
    site.cut_after = 100_000
    assert pull(url, sha256).returncode == 1
    site.add("m.onnx", new)
    site.cut_after = None
    assert pull(url, sha256).returncode == 0
    assert (models / "m/1/model.onnx").read_bytes() == new


def test_a_partial_download_of_another_file_is_not_used(site: Site, pull: Edge, models: Path) -> None:
    site.cut_after = 1000
    assert pull(*site.add("m.onnx", os.urandom(2000))).returncode == 1
    site.cut_after = None
    assert pull(*site.add("m.onnx", b"other")).returncode == 0
    assert site.requests[-1][1] is None
    assert (models / "m/1/model.onnx").read_bytes() == b"other"


def huge_header() -> bytes:
    return special(type=tarfile.XHDTYPE, size=1 << 40)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("m.tar.gz", b"<html>sign in first</html>", "is not a complete .tar.gz archive"),
        ("m.tar.gz", b"\x1f\x8b\x08\x04" + bytes(7), "is not a complete .tar.gz archive"),
        ("m.zip", b"<html>sign in first</html>", "is not a complete .zip archive"),
        ("m.tar.gz", tar({**MODEL, "1/weights": os.urandom(5000)}, "w:gz")[:3000], "is not a complete .tar.gz archive"),
        ("m.tar", tar({"../m/config.pbtxt": b""}, "w"), "expected a relative path"),
        ("m.tar", tar({"/tmp/outside": b""}, "w"), "expected a relative path"),
        ("m.zip", zipped({"../outside": b""}), "expected a relative path"),
        ("m.tar", special(type=tarfile.SYMTYPE, linkname="/etc"), "is a link or a device"),
        ("m.tar", special(type=tarfile.LNKTYPE, linkname="x"), "is a link or a device"),
        ("m.tar", special(type=tarfile.CHRTYPE), "is a link or a device"),
        ("m.tar", special(type=tarfile.FIFOTYPE), "is a link or a device"),
        ("m.zip", zipped_with_wrong_offset(), "is not a complete .zip archive"),
        ("m.zip", zipped({"x": b""}).replace(b"x", b"\0"), "expected a relative path"),
        ("m.zip", zipped_link(), "is a link, a device or encrypted"),
        ("m.tar", special(size=1 << 60), "does not fit on the disk"),
        ("m.tar", special(type=tarfile.XHDTYPE)[:512] * 3000, "is not a complete .tar archive"),
        ("m.tar", special(size=-(1 << 30)), "is not a complete .tar archive"),
        ("m.tar", huge_header(), "has a header of 1099511627776 bytes"),
        ("m.tar", tar({"1": b"", "1/model.onnx": b""}, "w"), "is in it twice"),
        ("m.zip", zipped({"1/a": b"", "1//a": b""}), "is in it twice"),
        ("m.tar", tar({**MODEL, "1/weights": b"", "1/Weights": b""}, "w"), "'1/weights' is in it twice: expected"),
        ("m.zip", zipped({"Model/1/model.onnx": b"", "model/1/a": b""}), "' is in it twice: expected names"),
        ("m.tar", tar({"n" * 256: b""}, "w"), "expected names of at most 255 bytes"),
        ("m.zip", zipped({"1/" + "\u00e9" * 128: b""}), "expected names of at most 255 bytes"),
        ("m.tar", tar({"readme.txt": b"", "config.pbtxt": CONFIG}, "w"), "has no version directories"),
        ("m.tar", tar({**MODEL, "config.pbtxt": b"bakend: 'x'"}, "w"), "bakend"),
        ("m.tar", tar({}, "w"), "holds no model that can be served"),
        ("m.tar.gz", sparse(3_000_000), "more than 2097152 bytes of headers before it"),
        ("m.tar", AFTER_A_FILE, "more than 2097152 bytes of headers before it"),
        ("m.tar", gzip.decompress(sparse(512))[:1024], "is not a complete .tar archive"),
        ("m.tar.gz", sparse_by_extended_header(3_000_000), "more than 2097152 bytes of headers before it"),
        ("m.tar.gz", lzma.compress(tar(MODEL, "w")), "is not a complete .tar.gz archive"),
        ("m.tar.gz", b"\x1f\x8b\x07" + bytes(100), "is not a complete .tar.gz archive"),
        ("m.tar", tar({"/".join("d" * 33): b""}, "w"), "lies in 32 folders: expected less than 32"),
        ("m.zip", zipped(MODEL, zipfile.ZIP_LZMA), "has compression 14: expected 0 (stored) or 8 (deflated)"),
        ("m.zip", zipped({"n" * 1000 + f"/{number}": b"" for number in range(4200)}), "list of files has"),
    ],
)
def test_an_unsafe_or_unreadable_model_is_refused_and_leaves_nothing(
    file: str, content: bytes, message: str, site: Site, pull: Edge, models: Path
) -> None:
    done = pull(*site.add(file, content))
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(models) == []
    assert os.listdir(models.parent) == ["models"]


def test_headers_behind_a_file_that_is_skipped_are_limited_too(tmp_path: Path) -> None:
    (tmp_path / "layer.tar").write_bytes(AFTER_A_FILE)
    with pytest.raises(PullFailed, match="more than 2097152 bytes of headers before it"):
        unpack(tmp_path / "layer.tar", tmp_path, ".tar", UnpackLimits(1 << 30, tmp_path), below="models")


def test_an_archive_with_too_many_files_is_refused(
    site: Site, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_server.plugins.remote.pull.archive.MAX_FILES", 2)
    for files in ({"1/a": b"", "1/b": b"", "1/c": b""}, {"1/a/b": b""}):
        done = pull(*site.add("m.tar", tar(files, "w")))
        assert (done.returncode, os.listdir(models)) == (1, [])
        assert "too many files: expected at most 2" in done.stderr


def test_an_archive_has_at_most_10000_entries_including_repeated_ones(
    site: Site, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_FILES == 10_000
    # So many take seconds.
    monkeypatch.setattr("edge_server.plugins.remote.pull.archive.MAX_FILES", 100)
    folder = special(name="1", type=tarfile.DIRTYPE)[:512]
    assert pull(*site.add("m.tar", folder * 100 + bytes(1024))).returncode == 0
    done = pull(*site.add("n.tar", folder * 101 + bytes(1024)))
    assert (done.returncode, os.listdir(models)) == (1, ["m"])
    assert "too many files: expected at most 100 files and folders" in done.stderr


ZEROS = bytes(40_000)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("m.tar.gz", tar({"1/weights": bytes(100_001)}, "w:gz")),
        ("m.tar.gz", tar({"1/a": ZEROS, "1/b": ZEROS, "1/c": ZEROS}, "w:gz")),
        ("m.zip", zipped({"1/a": ZEROS, "1/b": ZEROS, "1/c": ZEROS})),
        ("m.tar", special(size=100_001)),
    ],
)
def test_an_archive_that_unpacks_above_max_bytes_is_refused_and_leaves_no_file(
    file: str, content: bytes, site: Site, pull: Edge, models: Path
) -> None:
    done = pull(*site.add(file, content), "--max-bytes=100000")
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "the archive unpacks to more than 100000 bytes: expected at most --max-bytes=100000" in done.stderr


def test_max_bytes_limits_unpacked_archives_and_not_single_model_files(site: Site, pull: Edge, models: Path) -> None:
    assert pull(*site.add("m.tar.gz", tar(MODEL, "w:gz")), f"--max-bytes={5000 + len(CONFIG)}").returncode == 0
    assert pull(*site.add("n.onnx", bytes(5000)), "--max-bytes=1000").returncode == 0
    assert sorted(os.listdir(models)) == ["m", "n"]
    done = pull(*site.add("o.tar", tar(MODEL, "w:gz")), "--max-bytes=0")
    assert done.returncode == 2
    assert "expected a whole number from 1" in done.stderr


def test_an_archive_takes_at_most_nine_tenths_of_the_free_space(
    site: Site, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(models)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=40_000_000))
    files = {f"1/{number}": bytes(6_000_000) for number in range(7)}
    done = pull(*site.add("m.tar.gz", tar(files, "w:gz")))
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "more than 36000000 bytes: expected at most nine tenths of the 40000000 bytes that are free" in done.stderr


def test_one_sync_writes_all_files_before_the_model_is_renamed_into_place(
    site: Site, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("sync", "fsync", "fdatasync", "rename"):

        def record(real: Callable[..., None], *arguments: Any) -> None:
            real(*arguments)
            calls.append("in place" if arguments[1:] == (models / "m",) else real.__name__)

        monkeypatch.setattr(f"os.{name}", functools.partial(record, getattr(os, name)))
    assert pull(*site.add("m.tar.gz", tar({f"1/{number}": b"x" for number in range(300)}, "w:gz"))).returncode == 0
    # The last one makes the rename itself survive.
    assert calls == ["rename", "sync", "in place", "fsync"]


def test_content_with_another_hash_is_deleted(site: Site, pull: Edge, models: Path) -> None:
    url, _ = site.add("m.onnx", b"forged")
    done = pull(url, f"--sha256={'0' * 64}")
    assert done.returncode == 1
    assert f"expected {'0' * 64}, given {hashlib.sha256(b'forged').hexdigest()}" in done.stderr
    assert os.listdir(models) == []


def test_a_full_disk_is_reported_and_no_file_is_left(
    site: Site, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = site.add("m.onnx", b"content")
    usage = shutil.disk_usage(models)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
        done = pull(*arguments)
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "it needs 7 bytes and 33554432 are kept free; 1000 are free" in done.stderr

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "weights")

    monkeypatch.setattr("os.sync", full)
    done = pull(*site.add("m.tar", tar(MODEL, "w")))
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "'weights' cannot be written: No space left on device" in done.stderr


def test_a_model_that_exists_is_replaced_only_on_request(site: Site, pull: Edge, models: Path) -> None:
    assert pull(*site.add("m.onnx", b"first")).returncode == 0
    second = site.add("m.onnx", b"second")
    done = pull(*second)
    assert done.returncode == 2
    assert "exists: use --replace to replace it, or --name" in done.stderr
    assert (models / "m/1/model.onnx").read_bytes() == b"first"
    assert pull(*second, "--replace").returncode == 0
    assert (models / "m/1/model.onnx").read_bytes() == b"second"
    assert os.listdir(models) == ["m"]


def test_a_refused_replacement_does_not_change_the_model(site: Site, pull: Edge, models: Path) -> None:
    assert pull(*site.add("m.onnx", b"first")).returncode == 0
    assert pull(*site.add("m.tar", b"no tar"), "--replace").returncode == 1
    assert (models / "m/1/model.onnx").read_bytes() == b"first"
    assert os.listdir(models) == ["m"]


def test_a_model_is_restored_if_its_replacement_was_killed(site: Site, pull: Edge, models: Path) -> None:
    (models / ".pull-m/replaced/1").mkdir(parents=True)
    (models / ".pull-m/replaced/1/model.onnx").write_bytes(b"first")
    done = pull(*site.add("m.onnx", b"second"))
    assert done.returncode == 2
    assert "exists: use --replace" in done.stderr
    assert (models / "m/1/model.onnx").read_bytes() == b"first"


KILLED_PULLS = """
import contextlib, io, json, os, shutil, signal, sys
from pathlib import Path
from edge_server.plugins.remote.pull.command import run

CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
folder, first, after, old = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]


# Not the subject, and slow where other programs write.
os.sync = os.fsync = lambda *_: None


def pull(repository, arguments, changes=None):
    # In a process of its own, which kills itself instead of its next change of the disk after so many.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    done = 0

    def count(event, given):
        nonlocal done
        if event in CHANGES and (event != "open" or str(given[0]).startswith(str(repository))):
            if done == changes:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.addaudithook(count)
    os._exit(run([f"--model-repository={repository}", *arguments]))


# Here the first pull imports what it needs, and not in each process anew.
(folder / "imported").mkdir()
with contextlib.redirect_stdout(io.StringIO()):
    assert run([f"--model-repository={folder / 'imported'}", *first]) == 0
shutil.rmtree(folder / "imported")
status, changes = signal.SIGKILL, 0
while status == signal.SIGKILL:
    repository = folder / str(changes)
    (repository / "m/1").mkdir(parents=True) if old else repository.mkdir()
    if old:
        (repository / "m/1/model.onnx").write_text(old)
    status = pull(repository, first, changes)
    assert status in (0, signal.SIGKILL), status
    assert pull(repository, after) == 0
    changes += 1
print(changes)
"""


@pytest.mark.parametrize(
    ("is_same", "old"),
    [
        (False, "old"),
        pytest.param(False, "", marks=pytest.mark.full),
        pytest.param(True, "old", marks=pytest.mark.full),
        pytest.param(True, "", marks=pytest.mark.full),
    ],
)
def test_files_of_a_killed_pull_are_removed_by_the_next(is_same: bool, old: str, site: Site, tmp_path: Path) -> None:
    new = {"config.pbtxt": CONFIG, "1/a": b"a" * 5000, "1/b": b"b"}
    killed = [*site.add("m.tar.gz", tar(new, "w:gz")), *["--replace"] * bool(old)]
    after = [killed[0], killed[1], "--replace"] if is_same else site.add("other.onnx", b"other")
    folder = tmp_path / "repositories"
    folder.mkdir()
    script = [sys.executable, "-c", KILLED_PULLS, str(folder), json.dumps(killed), json.dumps(after), old]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    count = int(done.stdout)
    assert count > 20
    seen = set()
    for repository in (folder / str(number) for number in range(count)):
        found = {
            str(path.relative_to(repository)): path.read_bytes() for path in repository.rglob("*") if path.is_file()
        }
        if not is_same:
            assert found.pop("other/1/model.onnx") == b"other"
        assert {*os.listdir(repository)} <= {"m", "other"}
        known = {"new": in_folder(new, "m"), "old": {"m/1/model.onnx": b"old"}, "nothing": {}}
        seen.add(next((name for name, files in known.items() if files == found), str(sorted(found))))
    assert seen == ({"new"} if is_same else {"new", "old" if old else "nothing"})


def test_a_pull_leaves_alone_the_download_that_another_resumes(site: Site, pull: Edge, models: Path) -> None:
    interrupted = site.add("m.onnx", os.urandom(300_000))
    site.cut_after = 100_000
    assert pull(*interrupted).returncode == 1
    site.cut_after = None
    assert pull(*site.add("other.onnx", b"other")).returncode == 0
    assert pull(*interrupted).returncode == 0
    assert site.requests[-1][1] == "bytes=100000-"
    assert sorted(os.listdir(models)) == ["m", "other"]


def test_a_replaced_model_that_cannot_be_restored_is_kept(
    site: Site, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pull(*site.add("m.onnx", b"first")).returncode == 0
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if target == models / "m":
            raise OSError(errno.EIO, "Input/output error", str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", refuse)
        assert pull(*site.add("m.onnx", b"second"), "--replace").returncode == 1
        done = pull(*site.add("other.onnx", b"other"))
        assert done.returncode == 1
        assert f"'{models}/.pull-m/replaced' cannot be put back: Input/output error" in done.stderr
    assert pull(*site.add("other.onnx", b"other")).returncode == 0
    assert sorted(os.listdir(models)) == ["m", "other"]
    assert (models / "m/1/model.onnx").read_bytes() == b"first"


def test_a_model_is_restored_if_its_replacement_cannot_be_moved(
    site: Site, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pull(*site.add("m.onnx", b"first")).returncode == 0
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source == models / ".pull-m/model/m":
            raise OSError(errno.EIO, "Input/output error", str(target))
        rename(source, target)

    monkeypatch.setattr("os.rename", refuse)
    done = pull(*site.add("m.onnx", b"second"), "--replace")
    assert (done.returncode, os.listdir(models)) == (1, ["m"])
    assert "Input/output error" in done.stderr
    assert (models / "m/1/model.onnx").read_bytes() == b"first"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("https://host/m.onnx",), "--sha256 is missing"),
        (("smollm2:135m",), "given 'smollm2:135m': there is no library of models to pull by name"),
        ((), "given ''"),
        (("https://host/m.onnx", "--sha256=12"), "expected 64 hexadecimal digits"),
        (("https://host/m.exe", f"--sha256={'0' * 64}"), "expected a file that ends in one of .tar.gz"),
        (("ftp://host/m.onnx", f"--sha256={'0' * 64}"), "expected https://HOST/PATH"),
        (("file:///etc/m.onnx", f"--sha256={'0' * 64}"), "expected https://HOST/PATH"),
        (("https://me:secret@host/m.onnx", f"--sha256={'0' * 64}"), "'https://host': expected an address without user"),
        (("https://host/m.onnx", f"--sha256={'0' * 64}", "--name=a/b"), "name 'a/b' cannot be used"),
        (("https://host/m.onnx", f"--sha256={'0' * 64}", "--name=.m"), "name '.m' cannot be used"),
        (("https://host/m.onnx", f"--sha256={'0' * 64}", "--name=m.tmp"), "name 'm.tmp' cannot be used"),
        (("https://host/..%2Fm.onnx%20.onnx", f"--sha256={'0' * 64}"), "name 'm.onnx ' cannot be used"),
        (("https://host/m.onnx", f"--sha256={'0' * 64}", "--model-repository=/absent"), "expected an existing folder"),
        (("--list",), "--list needs --index"),
        (("--list", "--index=http://host/index.json"), "can be changed on its way"),
        (("m", "--index=http://host/index.json"), "can be changed on its way"),
    ],
)
def test_invalid_arguments_are_refused_before_a_request_is_sent(
    arguments: tuple[str, ...], message: str, pull: Edge
) -> None:
    done = pull(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_missing_file_and_an_unreachable_host_are_reported(site: Site, pull: Edge, models: Path) -> None:
    done = pull(f"{site.url}/absent.onnx", f"--sha256={'0' * 64}")
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "the server answers 404 Not Found" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/m.onnx"
        done = pull(url, f"--sha256={'0' * 64}", "--timeout=0.2")
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "timed out" in done.stderr


def test_a_second_pull_into_the_same_repository_is_refused_and_changes_nothing(
    site: Site, pull: Edge, models: Path
) -> None:
    from edge_server.plugins.remote.pull.model_installation import locked

    staging = models / ".pull-other" / "unpacked"
    staging.mkdir(parents=True)
    with locked(models):
        done = pull(*site.add("m.onnx", b"content"))
    assert done.returncode == 2
    assert "another pull into" in done.stderr
    assert staging.exists()


def test_a_certificate_that_is_not_trusted_is_refused(secure_site: Site, pull: Edge, models: Path) -> None:
    done = pull(*secure_site.add("m.onnx", b"content"))
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
    assert "--tls-root=FILE" in done.stderr
    assert secure_site.requests == []


def test_a_file_of_certificate_authorities_makes_a_site_known(
    secure_site: Site, certificate: Path, pull: Edge, models: Path
) -> None:
    url, sha256 = secure_site.add("m.onnx", b"content")
    done = pull(url.replace("127.0.0.1", "localhost"), sha256, f"--tls-root={certificate}")
    assert (done.returncode, os.listdir(models)) == (1, [])
    assert "use a name or IP address of the certificate as the address" in done.stderr
    done = pull(url, sha256, f"--tls-root={certificate}")
    assert (done.returncode, os.listdir(models)) == (0, ["m"]), done.stderr


def test_a_redirect_from_https_to_http_is_refused(
    site: Site, secure_site: Site, certificate: Path, pull: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    target, sha256 = site.add("m.onnx", b"content")
    secure_site.redirects["/m.onnx"] = target
    done = pull(f"{secure_site.url}/m.onnx", sha256)
    assert (done.returncode, os.listdir(models), site.requests) == (1, [], [])
    assert "redirects to" in done.stderr


def test_headers_are_sent_only_to_the_named_host(site: Site, pull: Edge) -> None:
    with run_site() as other:
        target, sha256 = other.add("m.onnx", b"content")
        site.redirects = {"/m.onnx?signature=secret": f"{site.url}/again.onnx", "/again.onnx": target}
        done = pull(f"{site.url}/m.onnx?signature=secret", sha256, "--header=Authorization=Bearer x")
    assert done.returncode == 0
    assert [key for _, _, key in site.requests] == ["Bearer x", "Bearer x"]
    assert [key for _, _, key in other.requests] == [None]
    assert done.stderr.splitlines() == [
        f"edge-server pull: {site.url} redirects to {site.url}",
        f"edge-server pull: {site.url} redirects to {other.url}",
    ]


@pytest.fixture
def index(secure_site: Site, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an index with one model beside it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    content = tar(MODEL, "w:gz")
    secure_site.add("models/files/echo-3.tar.gz", content)
    entry = {
        "name": "echo",
        "url": "files/echo-3.tar.gz",
        "sha256": hashlib.sha256(content).hexdigest().upper(),
        "size_bytes": 3_400_000,
        "description": "repeats its\x1b[31m input",
        "licence": "Apache-2.0",
    }
    url, _ = secure_site.add("models/index.json", json.dumps({"models": [entry]}).encode())
    return url


def test_the_index_is_listed_without_control_characters(index: str, pull: Edge, models: Path) -> None:
    done = pull("--list", f"--index={index}")
    assert (done.returncode, done.stderr, os.listdir(models)) == (0, "", [])
    assert re.search(r"echo +3\.4 +Apache-2\.0 +repeats its", done.stdout)
    assert "\x1b" not in done.stdout


def test_a_model_of_the_index_is_pulled_from_its_relative_url(
    index: str, secure_site: Site, pull: Edge, models: Path
) -> None:
    done = pull("echo", f"--index={index}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (models / "echo/config.pbtxt").read_bytes() == CONFIG
    done = pull("ecko", f"--index={index}")
    assert done.returncode == 2
    assert "has no model 'ecko'; it has echo" in done.stderr
    done = pull("echo", f"--index={index}", f"--sha256={'0' * 64}", "--name=other")
    assert done.returncode == 2
    assert "differs from that of 'echo' in the index" in done.stderr


GOOD = {"name": "m", "url": "m.onnx", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", 'expected {"models": [...]}'),
        (" " * (1 << 20) + "{}", "is too large: expected at most 1048576 bytes"),
        ({"models": [3]}, "models[0]: expected an object"),
        ({"models": [GOOD, {"name": "m", "url": "m.onnx"}]}, "models[1]: sha256: expected 64 hexadecimal digits"),
        ({"models": [{**GOOD, "url": 3}]}, "models[0]: url: expected a URL, given 3"),
        ({"models": [{**GOOD, "size_bytes": "3"}]}, "models[0]: size_bytes: expected a whole number"),
        ({"models": [{**GOOD, "url": "http://[::m.onnx"}]}, "models[0]: url"),
        ({"models": [GOOD, GOOD]}, "models[1]: there is a second model 'm'"),
    ],
)
def test_an_invalid_index_is_refused_with_the_location(
    text: object, message: str, index: str, secure_site: Site, pull: Edge
) -> None:
    secure_site.add("models/index.json", (text if isinstance(text, str) else json.dumps(text)).encode())
    done = pull("--list", f"--index={index}")
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_http_url_in_the_index_needs_the_hash_on_the_command_line(
    index: str, secure_site: Site, site: Site, pull: Edge, models: Path
) -> None:
    url, sha256 = site.add("m.onnx", b"content")
    entry = {"name": "m", "url": url, "sha256": sha256.partition("=")[2]}
    secure_site.add("models/index.json", json.dumps({"models": [entry]}).encode())
    done = pull("m", f"--index={index}")
    assert done.returncode == 2
    assert "can be changed on its way" in done.stderr
    assert pull("m", f"--index={index}", sha256).returncode == 0
    assert os.listdir(models) == ["m"]
