"""Ed25519 keys: creates and reads key files, signs, and verifies signatures. The only file that uses `cryptography`."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from edge_server.errors import ServingFault, Untrusted, install_hint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_BYTES = 64
_KEY_BYTES = 32


class PublicKey:
    """Public key that verifies signatures. Made by `read_public_key`."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    def verify(self, content: bytes, signature: bytes, prefix: str) -> None:
        """Raise Untrusted unless `signature` (64 bytes, or base64 of them) over `content` is by this key's owner."""
        from cryptography.exceptions import InvalidSignature

        raw = signature if len(signature) == SIGNATURE_BYTES else _from_base64(signature, SIGNATURE_BYTES)
        if raw is None:
            given = f"{len(signature)} bytes"
            raise Untrusted(f"{prefix}: expected a signature of {SIGNATURE_BYTES} bytes or base64 of it, given {given}")
        try:
            self._key.verify(raw, content)
        except InvalidSignature:
            raise Untrusted(f"{prefix}: the signature is not by the owner of the configured key") from None


class PrivateKey:
    """Private key that signs. Made by `read_private_key`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    def sign(self, content: bytes) -> bytes:
        return self._key.sign(content)


def read_public_key(path: Path) -> PublicKey:
    """Read a public key: PEM, or the 32 bytes as they are or in base64. Raises ServingFault with the reason."""
    library = _library()
    content = _read(path, "public")
    raw = content if len(content) == _KEY_BYTES else _from_base64(content, _KEY_BYTES)
    try:
        if raw is not None:
            return PublicKey(library.ed25519.Ed25519PublicKey.from_public_bytes(raw))
        key = library.serialization.load_pem_public_key(content)
    except (ValueError, library.UnsupportedAlgorithm):
        key = None
    if not isinstance(key, library.ed25519.Ed25519PublicKey):
        raise ServingFault(f"'{path}' is not an Ed25519 public key: expected PEM, 32 bytes, or base64 of them")
    return PublicKey(key)


def read_private_key(path: Path, password: bytes | None = None) -> PrivateKey:
    """Read a private key in PEM (PKCS #8).

    Raises ServingFault, and PasswordRequired if the key is encrypted and no password is given.
    """
    library = _library()
    content = _read(path, "private")
    try:
        key = library.serialization.load_pem_private_key(content, password)
    except TypeError as error:
        raise PasswordRequired(f"'{path}' is encrypted") from error
    except (ValueError, library.UnsupportedAlgorithm):
        key = None
    if not isinstance(key, library.ed25519.Ed25519PrivateKey):
        wrong = ", or the password is wrong" if password is not None else ""
        raise ServingFault(f"'{path}' is not an Ed25519 private key in PEM{wrong}")
    return PrivateKey(key)


class PasswordRequired(ServingFault):
    """The private key is encrypted."""


def new_key(path: Path) -> Path:
    """Create a key pair: the private key at `path`, readable by its owner only, the public key beside it as `.pub`.

    Return the path of the public key. Never overwrites a file. Raises ServingFault.
    """
    library = _library()
    serialization = library.serialization
    key = library.ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    public_path = path.with_name(path.name + ".pub")
    made: list[Path] = []
    for target, content, mode in ((path, private, 0o600), (public_path, public, 0o644)):
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            made.append(target)
            with open(descriptor, "wb") as file:
                file.write(content)
        except OSError as error:
            # A partial key pair would block the next try.
            for written in made:
                written.unlink(missing_ok=True)
            raise ServingFault(f"'{target}' cannot be written: {error.strerror}") from error
    return public_path


def _read(path: Path, kind: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ServingFault(f"the {kind} key '{path}' cannot be read: {error.strerror}") from error


def _from_base64(content: bytes, size: int) -> bytes | None:
    """Return the decoded base64 text if it has `size` bytes, else None."""
    try:
        raw = base64.b64decode(b"".join(content.split()), validate=True)
    except binascii.Error:
        return None
    return raw if len(raw) == size else None


def _library() -> Any:
    """Return the used names of `cryptography`. Raises ServingFault with the pip command if it is not installed."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ServingFault(
            f"signatures need the library 'cryptography' ({error}); {install_hint('signatures')}"
        ) from error

    return SimpleNamespace(ed25519=ed25519, serialization=serialization, UnsupportedAlgorithm=UnsupportedAlgorithm)
