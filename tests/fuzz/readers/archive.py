"""Archives of `edge-server pull`. Only files and folders are written, only below the folder, and within its bounds."""

from __future__ import annotations

import io
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterable

from stubs import new_folder, result_of

from edge_server.plugins.remote.pull.archive import MAX_FILES, PullFailed, UnpackLimits, unpack

_ROOT = new_folder("archive")
_SUFFIXES = (".tar", ".tar.gz", ".zip")
_MAX_BYTES = 16 << 20


def _tar(mode: str, **files: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        info = tarfile.TarInfo("m/folder")
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    return stream.getvalue().rstrip(b"\0") + bytes(1024) if mode == "w" else stream.getvalue()


def seeds() -> Iterable[bytes]:
    files = {"m__config.pbtxt": b"backend: 'x'", "m__1__model.onnx": b"o" * 600}
    yield b"\0" + _tar("w", **files)
    yield b"\0" + _tar("w", **{"m__" + "n" * 120: b"x"})
    yield b"\1" + _tar("w:gz", **files)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as archive:
            archive.writestr("m/config.pbtxt", "backend")
            archive.writestr("m/1/", "")
            archive.writestr("m/1/model.onnx", b"o" * 300)
        yield b"\2" + stream.getvalue()


def check(data: bytes) -> None:
    suffix = _SUFFIXES[data[0] % len(_SUFFIXES)] if data else ".tar"
    archive, folder = _ROOT / "archive", _ROOT / "inside" / "folder"
    archive.write_bytes(data[1:])
    folder.mkdir(parents=True)
    try:
        result_of(lambda: unpack(archive, folder, suffix, UnpackLimits(_MAX_BYTES, folder)), PullFailed)
        assert sorted(path.name for path in _ROOT.iterdir()) == ["archive", "inside"]
        assert [path.name for path in (_ROOT / "inside").iterdir()] == ["folder"]
        total, paths = 0, list(folder.rglob("*"))
        for path in paths:
            status = path.lstat()
            assert stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode), f"{path} is no file"
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
        assert total <= _MAX_BYTES
        assert len(paths) <= MAX_FILES
    finally:
        shutil.rmtree(_ROOT / "inside")
