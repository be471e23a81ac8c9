"""Unpacking of downloaded archives: each member is checked, so that a hostile archive writes nothing outside its
folder."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from edge_server.errors import BadModelConfig, EdgeServerError
from edge_server.repository.disk.free_space import check_space
from edge_server.repository.disk.safe_paths import check_relative

ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
DEFAULT_MAX_BYTES = 4 << 30
"""Most bytes that the archives of a model unpack to, unless the user says otherwise."""
MAX_FILES = 10_000
"""Most files and folders of an archive."""

WHITEOUT = ".wh."
"""Begins the name of an empty file in an image's layer that removes the file NAME of the layers below."""
OPAQUE_WHITEOUT = ".wh..wh..opq"
"""Name of one that removes all of its folder (https://github.com/opencontainers/image-spec/blob/main/layer.md)."""

_MAX_DEPTH = 32
_MAX_TAR_HEADER_BYTES = 1 << 20
_MAX_ZIP_LIST_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20
_GZIP_MARK = b"\x1f\x8b"
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    EOFError,
    IndexError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    ValueError,
)
"""Errors of tarfile, gzip and zipfile for a file that is no archive, or is damaged."""


class PullFailed(EdgeServerError):
    """The pull failed, and its download is of no further use."""


class _CheckedHeader(tarfile.TarInfo):
    """Tar header that refuses large extra headers, because tarfile reads each of them into memory."""

    @classmethod
    def frombuf(cls, *arguments: Any, **named: Any) -> _CheckedHeader:
        header = super().frombuf(*arguments, **named)
        is_file = header.type in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE)
        if not is_file and header.size > _MAX_TAR_HEADER_BYTES:
            raise PullFailed(
                f"the archive has a header of {header.size} bytes: expected at most {_MAX_TAR_HEADER_BYTES}"
            )
        return header


class UnpackLimits:
    """Counter of what archives unpack to: at most `max_bytes`, nine tenths of what is free on the disk, and MAX_FILES,
    all together."""

    def __init__(self, max_bytes: int, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        self.max_bytes, limit = min(
            (max_bytes, f"--max-bytes={max_bytes}"),
            (free // 10 * 9, f"nine tenths of the {free} bytes that are free in '{folder.parent}'"),
        )
        self._too_large = f"the archive unpacks to more than {self.max_bytes} bytes: expected at most {limit}"
        self._bytes = self._files = 0

    def add_bytes(self, count: int, declared: int = 0) -> None:
        """Raise PullFailed if `count` bytes more, and the `declared` ones that follow, are too many."""
        self._bytes += count
        if self._bytes + declared > self.max_bytes:
            raise PullFailed(self._too_large)

    def add_files(self, count: int) -> None:
        """Raise PullFailed if `count` files and folders more are too many."""
        self._files += count
        if self._files > MAX_FILES:
            raise PullFailed(f"the archive has too many files: expected at most {MAX_FILES} files and folders")


def unpack(archive: Path, folder: Path, suffix: str, limits: UnpackLimits, below: str = "") -> None:
    """Write the archive's files below `folder`, without syncing them. `suffix` is one of ARCHIVES.

    With `below` only what a tar file has in the folder of this name is written, and that without the folder. Raises
    PullFailed and OSError.
    """
    try:
        if suffix == ".zip":
            with _ZipReader(io.FileIO(archive)) as zip_file:
                _write_members(_zip_members(zip_file), folder, limits)
        else:
            with archive.open("rb") as file, _decompressed(file) as stream:
                _write_members(_tar_members(_TarReader(stream), limits, below), folder, limits)
    except (*_DAMAGED, OSError) as error:
        # zipfile seeks to the offsets in a damaged file without a check, which is EINVAL.
        if isinstance(error, OSError) and error.errno != errno.EINVAL and not isinstance(error, gzip.BadGzipFile):
            raise
        raise PullFailed(f"the file is not a complete {suffix} archive: {error}") from None


def check_names(folder: Path, what: str) -> None:
    """Raise PullFailed for names in one folder that differ only in capitals: many file systems hold one of them.

    `what` is "archive" or "artifact".
    """
    seen: set[str] = set()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.casefold() in seen:
            raise PullFailed(
                f"the {what}'s '{name[:200]}' is in it twice: expected names that differ in more than capitals"
            )
        seen.add(name.casefold())


def _write_members(members: Iterator[tuple[str, int, IO[bytes] | None]], folder: Path, limits: UnpackLimits) -> None:
    folders = {folder}
    for name, size, content in members:
        what = f"the archive's '{name[:200]}'"
        try:
            relative = check_relative(name, what)
        except BadModelConfig as error:
            raise PullFailed(str(error)) from None
        if len(relative.parts) > _MAX_DEPTH:
            raise PullFailed(f"{what} lies in {len(relative.parts) - 1} folders: expected less than {_MAX_DEPTH}")
        path = folder / relative
        own_folders = path.parents if content is not None else (path, *path.parents)
        missing = list(itertools.takewhile(lambda parent: parent not in folders, own_folders))
        # A folder that is named again creates nothing, but an archive could name it without end.
        limits.add_files(len(missing) + (content is not None or not missing))
        # What the archive declares only ends the work early. What is written is counted below.
        check_space(folder, size, what)
        limits.add_bytes(0, declared=size)
        try:
            for parent in reversed(missing):
                parent.mkdir()
            folders.update(missing)
            if content is None:
                continue
            with content, path.open("xb") as output:
                while chunk := content.read(_CHUNK_BYTES):
                    limits.add_bytes(len(chunk))
                    output.write(chunk)
        except (FileExistsError, NotADirectoryError):
            raise PullFailed(f"{what} is in it twice") from None


def _decompressed(file: io.BufferedReader) -> io.BufferedIOBase:
    """Return the content of a tar file that may be compressed with gzip, whatever its name says."""
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP_MARK else file


class _TarReader(io.RawIOBase):
    """File object for tarfile. Refuses long headers, because tarfile collects those of one member in memory."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        super().__init__()
        self._stream = stream
        self._header_bytes: int | None = 0
        """Bytes read since the last content, None while content is read."""

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        if self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > 2 * _MAX_TAR_HEADER_BYTES:
                raise PullFailed(
                    f"the archive has a file with more than {2 * _MAX_TAR_HEADER_BYTES} bytes of headers before it"
                )
        return data

    def begin_content(self) -> None:
        self._header_bytes = None

    def begin_headers(self) -> None:
        self._header_bytes = 0


def _tar_members(reader: _TarReader, limits: UnpackLimits, below: str) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    """Yield name, size and content of each file; the content of a folder is None.

    With `below` only those of this folder. Raises PullFailed, OSError and the errors in _DAMAGED.
    """
    # "r|": one pass without seeking; the list of members is not read ahead.
    with tarfile.open(fileobj=reader, mode="r|", tarinfo=_CheckedHeader) as tar:
        for member in tar:
            name = member.name
            if below:
                parts = PurePosixPath(name).parts
                if parts in ((f"{WHITEOUT}{below}",), (OPAQUE_WHITEOUT,)):
                    parts = (below, OPAQUE_WHITEOUT)
                if parts[:1] != (below,):
                    _skip(tar, member, reader, limits)
                    continue
                name = "/".join(parts[1:])
            if not member.isreg() and not member.isdir():
                raise PullFailed(
                    f"the archive's '{member.name[:200]}' is a link or a device: expected files and folders"
                )
            if name not in (".", ""):
                reader.begin_content()
                yield name, member.size, tar.extractfile(member) if member.isreg() else None
                reader.begin_headers()


def _skip(tar: tarfile.TarFile, member: tarfile.TarInfo, reader: _TarReader, limits: UnpackLimits) -> None:
    """Read a member without writing it. It counts as if it were written, as it may cost as much time."""
    limits.add_bytes(tarfile.BLOCKSIZE, declared=member.size)
    reader.begin_content()
    if member.isreg() and (content := tar.extractfile(member)) is not None:
        while chunk := content.read(_CHUNK_BYTES):
            limits.add_bytes(len(chunk))
    reader.begin_headers()


class _ZipReader(io.BufferedReader):
    """File object for zipfile. Refuses a long list of files, which zipfile reads in one piece."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_ZIP_LIST_BYTES:
            raise PullFailed(f"the archive's list of files has {size} bytes: expected at most {_MAX_ZIP_LIST_BYTES}")
        return super().read(size)


def _zip_members(reader: _ZipReader) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    """As `_tar_members`."""
    with zipfile.ZipFile(reader) as file:
        for info in file.infolist():
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
                raise PullFailed(
                    f"the archive's '{info.filename[:200]}' is a link, a device or encrypted: expected files"
                )
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise PullFailed(
                    f"the archive's '{info.filename[:200]}' has compression {info.compress_type}: expected 0 (stored) "
                    "or 8 (deflated), which take little memory"
                )
            yield info.filename, info.file_size, None if info.filename.endswith("/") else file.open(info)
