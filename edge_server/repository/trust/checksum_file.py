"""Reader and writer of SHA256SUMS files (the format of sha256sum(1)), and of Triton's checksum repository agent.

A comment line, which `sha256sum --check` ignores, names the model of the list, so that a signed list of one model
cannot be used for another: `# edge-server model=NAME version=N`, without the version for a model's excluded files.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path, PurePosixPath

from edge_server.errors import ChangedWhileLoading, StorageFault, Untrusted
from edge_server.file_stamp import FileStamp, file_stamp
from edge_server.record import record
from edge_server.repository.disk.file_fingerprint import MAX_FILES, is_ignored

FILE_NAME = "SHA256SUMS"
SIGNATURE_NAME = "SHA256SUMS.sig"
MAX_MANIFEST_BYTES = 16 << 20

_CHUNK_BYTES = 1 << 20
_SUBJECT = "# edge-server "
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_TAGGED = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})", re.DOTALL)
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@record(frozen=True, slots=True)
class Manifest:
    """Content of a SHA256SUMS: relative path -> SHA-256 digest. `subject` names its model and version, "" if absent."""

    digests: Mapping[str, bytes] = field(default_factory=dict)
    subject: str = ""


def subject_of(model: str, version: int | None) -> str:
    """Return the subject of a list; `version` None: the model's files outside its versions."""
    return f"model={model}" if version is None else f"model={model} version={version}"


def parse(content: bytes, prefix: str) -> Manifest:
    """Read a SHA256SUMS. `prefix` begins the sentences of errors.

    Raises Untrusted for a line that is neither an entry nor a comment, a file listed twice, and a path that is
    absolute or leads upwards.
    """
    digests: dict[str, bytes] = {}
    subject = ""
    for number, line in enumerate(os.fsdecode(content).split("\n"), 1):
        text = line.removesuffix("\r")
        if text.startswith(_SUBJECT):
            subject = text.removeprefix(_SUBJECT).strip()
        if not text or text.startswith("#"):
            continue
        entry = _entry(text)
        if entry is None:
            raise Untrusted(f"{prefix}: line {number}: expected a checksum and a file name, given {text[:80]!r}")
        name, digest = entry
        if name in digests:
            raise Untrusted(f"{prefix}: line {number}: {name!r} is listed twice")
        digests[name] = digest
    return Manifest(digests, subject)


def _entry(line: str) -> tuple[str, bytes] | None:
    """Return the relative path and the digest of a line, or None if it has neither of the two forms."""
    found = _LINE.fullmatch(line)
    if found:
        escape, digest, name = found.groups()
    else:
        found = _TAGGED.fullmatch(line)
        if not found:
            return None
        escape, name, digest = found.groups()
    if escape:
        name = re.sub(r"\\[\\nr]", lambda match: _ESCAPES[match[0]], name)
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        return None
    return path.as_posix(), bytes.fromhex(digest)


def render(manifest: Manifest) -> bytes:
    """Return the file that `parse` and `sha256sum --check` read."""
    lines = [_SUBJECT + manifest.subject] if manifest.subject else []
    for name, digest in sorted(manifest.digests.items()):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{chr(92) if escaped != name else ''}{digest.hex()}  {escaped}")
    return b"".join(os.fsencode(line) + b"\n" for line in lines)


def files_below(folder: Path, *, skip: frozenset[str] = frozenset()) -> list[str]:
    """Return the relative paths of all files below a folder, links followed, in order, without its SHA256SUMS.

    `skip` names entries of the folder that are left out. Raises StorageFault if it cannot be read.
    """
    excluded = {FILE_NAME, SIGNATURE_NAME}
    try:
        found = [name for name in _walk(folder, "", frozenset()) if name.partition("/")[0] not in skip]
    except OSError as error:
        raise StorageFault(f"'{error.filename or folder}' cannot be read: {error.strerror or error}") from error
    return sorted(name for name in found if name not in excluded)


def _walk(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    found = folder.stat()
    identity = (found.st_dev, found.st_ino)
    if identity in above:
        return
    with os.scandir(folder) as entries:
        children = [entry for entry in entries if not is_ignored(entry.name)]
    if len(children) > MAX_FILES:
        raise OSError(0, f"more than {MAX_FILES} files", str(folder))
    for child in children:
        if child.is_dir():
            yield from _walk(Path(child.path), f"{prefix}{child.name}/", above | {identity})
        else:
            yield prefix + child.name


def read_small(path: Path, limit: int) -> bytes | None:
    """Return a file's content, or None if there is no file.

    Raises Untrusted if it is larger than `limit` bytes or not a regular file, and StorageFault.
    """
    try:
        with open(_open_regular(path), "rb") as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFault(f"'{path}' cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise Untrusted(f"'{path}' is larger than {limit} bytes")
    return content


def digest_file(path: Path, algorithm: str = "sha256") -> tuple[bytes, FileStamp]:
    """Return the digest of a file, read once in chunks, and its stamp from before the reading.

    Raises StorageFault if it cannot be read, Untrusted if it is not a regular file, and ChangedWhileLoading.
    """
    # FIPS builds of OpenSSL allow MD5 only with this flag. Only the author of a configuration chooses MD5.
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with open(_open_regular(path), "rb", buffering=0) as file:
            before = file_stamp(os.fstat(file.fileno()))
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            after = file_stamp(os.fstat(file.fileno()))
    except OSError as error:
        raise StorageFault(f"'{path}' cannot be read: {error.strerror or error}") from error
    if after != before:
        raise ChangedWhileLoading(f"'{path}' changed while it was read")
    return digest.digest(), before


def _open_regular(path: Path) -> int:
    """Open a regular file for reading. Raises Untrusted for a pipe or device, which could block for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Untrusted(f"'{path}' is not a regular file")
    return descriptor
