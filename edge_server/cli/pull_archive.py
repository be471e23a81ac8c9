"""Archives of `edge-server pull`: unpacked member by member, each checked as hostile."""

from __future__ import annotations

import errno
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from edge_server.errors import BadModelConfig, EdgeServerError
from edge_server.repository.file_fingerprint import MAX_FILES
from edge_server.repository.remote.local_copy import RESERVE_BYTES
from edge_server.repository.safe_paths import check_relative

ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
_MAX_TAR_HEADER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of tarfile and zipfile for a file that is no archive, is damaged, or has a compression unknown to Python.
TypeError: tarfile's for a file that ends within the header of gzip."""


class PullFailed(EdgeServerError):
    """The pull failed, and its download is of no further use."""


def check_space(folder: Path, size: int, what: str) -> None:
    """Raise PullFailed if `size` bytes do not fit on the disk of `folder`. `what` begins the message."""
    free = shutil.disk_usage(folder).free
    if size + RESERVE_BYTES > free:
        raise PullFailed(
            f"{what} does not fit on the disk: it needs {size} bytes and {RESERVE_BYTES} are kept free; {free} are "
            f"free in '{folder.parent}'"
        )


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


def unpack(archive: Path, folder: Path, suffix: str) -> None:
    """Write the archive's files below `folder`. `suffix` is one of ARCHIVES. Raises PullFailed and OSError."""
    try:
        _write_members(_zip_members(archive) if suffix == ".zip" else _tar_members(archive), folder)
    except (*_DAMAGED, OSError) as error:
        # zipfile seeks to the offsets in a damaged file without a check, which is EINVAL.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise PullFailed(f"the file is not a complete {suffix} archive: {error}") from None


def _write_members(members: Iterator[tuple[str, int, IO[bytes] | None]], folder: Path) -> None:
    for count, (name, size, content) in enumerate(members):
        what = f"the archive's '{name[:200]}'"
        if count >= MAX_FILES:
            raise PullFailed(f"the archive has too many files: expected at most {MAX_FILES}")
        try:
            path = folder / check_relative(name, what)
        except BadModelConfig as error:
            raise PullFailed(str(error)) from None
        try:
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            check_space(folder, size, what)
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("xb") as output:
                shutil.copyfileobj(content, output, _CHUNK_BYTES)
                output.flush()
                os.fsync(output.fileno())
        except (FileExistsError, NotADirectoryError):
            raise PullFailed(f"{what} is in it twice") from None


def _tar_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    """Yield name, size and content of each file; the content of a folder is None.

    Raises PullFailed, OSError and the errors in _DAMAGED.
    """
    # "r|": one pass without seeking; the list of members is not read ahead.
    with tarfile.open(archive, "r|*", tarinfo=_CheckedHeader) as tar:
        for member in tar:
            if not member.isreg() and not member.isdir():
                raise PullFailed(
                    f"the archive's '{member.name[:200]}' is a link or a device: expected files and folders"
                )
            if member.name not in (".", ""):
                yield member.name, member.size, tar.extractfile(member) if member.isreg() else None


def _zip_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    """As `_tar_members`."""
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
                raise PullFailed(
                    f"the archive's '{info.filename[:200]}' is a link, a device or encrypted: expected files"
                )
            yield info.filename, info.file_size, None if info.filename.endswith("/") else file.open(info)
