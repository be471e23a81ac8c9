"""Check of a version's files against their checksums and signature before it is opened, and again for later changes."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from edge_server.errors import ChangedWhileLoading, Untrusted
from edge_server.file_stamp import FileStamp, file_stamp
from edge_server.record import record
from edge_server.repository.disk.scan import ModelDirectory, parse_version
from edge_server.repository.trust.checksum_file import (
    FILE_NAME,
    MAX_MANIFEST_BYTES,
    SIGNATURE_NAME,
    digest_file,
    files_below,
    parse,
    read_small,
    subject_of,
)
from edge_server.repository.trust.ed25519_keys import PublicKey, read_public_key

_MAX_SIGNATURE_BYTES = 1024


class TrustPolicy(NamedTuple):
    """Rules for checksums and signatures. A `public_key` implies `requires_checksums`."""

    requires_checksums: bool = False
    public_key: PublicKey | None = None

    @property
    def is_strict(self) -> bool:
        return self.requires_checksums or self.public_key is not None


def trust_policy(requires_checksums: bool, public_key_path: str) -> TrustPolicy:
    """Return the policy for these settings; "" means no key. Raises ServingFault for an invalid key."""
    key = read_public_key(Path(public_key_path)) if public_key_path else None
    return TrustPolicy(requires_checksums, key)


@record(frozen=True, slots=True)
class Verified:
    """The verified files, each with its stamp from before it was read."""

    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)

    def confirm(self) -> None:
        """Raise ChangedWhileLoading if a file changed after it was verified."""
        for path, stamp in self.stamps.items():
            try:
                now = file_stamp(path.stat())
            except OSError as error:
                raise ChangedWhileLoading(f"'{path}' changed while it was loaded: {error.strerror}") from error
            if now != stamp:
                raise ChangedWhileLoading(f"'{path}' changed while it was loaded")


def verify(model: ModelDirectory, version: int, policy: TrustPolicy, *, is_config_given: bool = False) -> Verified:
    """Verify the files of a version: its directory, and the model's files outside the versions.

    `is_config_given`: the configuration comes from a load call and is not signed. Reads every listed file once.
    Raises Untrusted with the first error.
    """
    if is_config_given and policy.public_key is not None:
        raise Untrusted(f"model '{model.name}': a configuration given with a load call is not signed")
    stamps: dict[Path, FileStamp] = {}
    for found in (_SignedFolder(model, None, policy), _SignedFolder(model, version, policy)):
        found.verify(version, stamps)
    return Verified(stamps)


class _SignedFolder:
    """A directory with its own SHA256SUMS: a version's directory, or the model's for the files outside the versions."""

    def __init__(self, model: ModelDirectory, version: int | None, policy: TrustPolicy) -> None:
        self._folder = model.path if version is None else model.path / str(version)
        self._subject = subject_of(model.name, version)
        self._prefix = f"model '{model.name}'" if version is None else f"model '{model.name}' version {version}"
        self._is_model = version is None
        self._policy = policy

    def verify(self, version: int, stamps: dict[Path, FileStamp]) -> None:
        """Check the files of the directory that `version` uses, and add the stamps of the files read."""
        public_key = self._policy.public_key
        content = read_small(self._folder / FILE_NAME, MAX_MANIFEST_BYTES)
        present = self._files() if self._policy.is_strict else []
        if content is None:
            # A signed model always has its own list, even an empty one, so that its configuration cannot be removed.
            has_own_files = bool(present) or not self._is_model
            if public_key is not None or (self._policy.requires_checksums and has_own_files):
                why = "--signature-public-key" if public_key is not None else "--require-checksums"
                raise Untrusted(f"{self._prefix}: there is no {FILE_NAME} in '{self._folder}', and {why} is set")
            return
        if public_key is not None:
            prefix = f"{self._prefix}: {SIGNATURE_NAME}"
            signature = read_small(self._folder / SIGNATURE_NAME, _MAX_SIGNATURE_BYTES)
            if signature is None:
                raise Untrusted(f"{prefix}: there is none in '{self._folder}', and --signature-public-key is set")
            public_key.verify(content, signature, prefix)
        manifest = parse(content, f"{self._prefix}: {FILE_NAME}")
        if manifest.subject != self._subject and (manifest.subject or public_key is not None):
            given = f"'{manifest.subject}'" if manifest.subject else "none"
            raise Untrusted(
                f"{self._prefix}: {FILE_NAME} has another subject: expected '{self._subject}', given {given}"
            )
        listed = {name: digest for name, digest in manifest.digests.items() if self._concerns(name, version)}
        unlisted = [name for name in present if name not in listed]
        if unlisted:
            names = ", ".join(map(repr, unlisted[:5])) + (", ..." if len(unlisted) > 5 else "")
            raise Untrusted(f"{self._prefix}: {FILE_NAME} does not list {names}")
        for name, digest in listed.items():
            self._check_file(name, digest, stamps)

    def _files(self) -> list[str]:
        skip = frozenset[str]()
        if self._is_model:
            skip = frozenset(
                entry.name
                for entry in self._folder.iterdir()
                if parse_version(entry.name) is not None and entry.is_dir()
            )
        return files_below(self._folder, skip=skip)

    def _concerns(self, name: str, version: int) -> bool:
        """Return whether an entry belongs to this load. A model's list may also name the files of other versions."""
        first, slash, _ = name.partition("/")
        of_version = parse_version(first) if self._is_model and slash else None
        return of_version is None or of_version == version

    def _check_file(self, name: str, digest: bytes, stamps: dict[Path, FileStamp]) -> None:
        path = self._folder / name
        if not path.exists():
            raise Untrusted(f"{self._prefix}: {FILE_NAME} lists {name!r}, which is not there")
        given, stamp = digest_file(path)
        if not hmac.compare_digest(given, digest):
            raise Untrusted(
                f"{self._prefix}: {name!r} is not the file that {FILE_NAME} lists: "
                f"expected {digest.hex()[:16]}..., given {given.hex()[:16]}..."
            )
        stamps[path] = stamp
