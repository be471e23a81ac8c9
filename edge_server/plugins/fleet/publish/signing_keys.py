"""Private keys of a publisher: files of a folder, and keys in hardware or a cloud, which securesystemslib signs with.

DIR/NAME.pem    a private key, PKCS#8 without a password
DIR/keys.toml   NAME = "URI": a key that is elsewhere, with a scheme of securesystemslib's SIGNER_FOR_URI_SCHEME
DIR/NAME.pub    the public key of such a one, as PEM (SubjectPublicKeyInfo): its owner exports it once
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_server.config.toml_file import parse_toml
from edge_server.errors import InvalidRequest, ServingFault, install_hint

try:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    from securesystemslib.signer import CryptoSigner, Key, Signer, SSlibKey
except ImportError as error:
    raise ServingFault(f"{error}: {install_hint('fleet')}") from None

URIS_NAME = "keys.toml"
NAME_FIELD = "x-edge-server-name"
"""Field of a public key in metadata: the key's name here, for messages."""

_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,49}")


def is_key_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def fingerprint(key: Key) -> str:
    """Return the fingerprint of a public key, for people. Its id in metadata is a text that the author chose."""
    content = json.dumps([key.keytype, key.scheme, key.keyval], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def name_of(key: Key) -> str:
    """Return the name and the fingerprint of a public key, for messages."""
    return f"'{key.unrecognized_fields.get(NAME_FIELD, '?')}' ({fingerprint(key)})"


class SigningKeys:
    """Keys of the folder `folder`, which may lack some: not every machine has every key."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidRequest for a keys.toml that cannot be read."""
        self.folder = folder
        self._secrets: dict[str, str] = {}
        self._made: list[Path] = []
        path = folder / URIS_NAME
        try:
            self._uris: dict[str, Any] = parse_toml(path.read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            self._uris = {}
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"'{path}' cannot be read: {error}") from None
        for name, uri in self._uris.items():
            if _NAME.fullmatch(name) is None or not isinstance(uri, str) or ":" not in uri:
                raise InvalidRequest(f"'{path}': expected NAME = \"SCHEME:...\", given {name[:80]} = {repr(uri)[:80]}")

    def make(self, names: Sequence[str]) -> dict[str, Key]:
        """Return public keys: of those that are elsewhere, and of new files NAME.pem for the others.

        Raises InvalidRequest if such a file exists, ServingFault if it cannot be written.
        """
        found = {name: self.public_key(name) for name in names if name in self._uris}
        for name in names:
            if name in found:
                continue
            path = self._path(name)
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                self._made.append(path)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(CryptoSigner.generate_ed25519().private_bytes)
                    os.fsync(file.fileno())
            except FileExistsError:
                self.delete_made()
                raise InvalidRequest(f"'{path}' exists, but the repository does not: give other folders") from None
            except OSError as error:
                raise ServingFault(f"'{path}' cannot be written: {error.strerror}") from None
            found[name] = self.public_key(name)
        return found

    def replace(self, name: str, old: Key) -> Key:
        """Return the public key of the key that takes the place of `old` under its name.

        It is what NAME.pub or NAME.pem holds if that is another one; else NAME.pem is made anew, and the old file
        becomes NAME-FINGERPRINT.pem. Raises InvalidRequest if somebody else has to make the new key, and as `make`.
        """
        path = self._path(name)
        if path.exists() or self._is_elsewhere(name):
            new = self.public_key(name)
            if new.keyid != old.keyid:
                return new
            if self._is_elsewhere(name):
                raise InvalidRequest(
                    f"'{self._path(name, 'pub')}' is still the old key: put the new one there, and its URI into "
                    f"{URIS_NAME} if it has a line there; root also needs the old one, under another name"
                )
            path.rename(self.folder / f"{name}-{fingerprint(old)}.pem")
        return self.make([name])[name]

    def delete_made(self) -> None:
        """Delete the files of `make`, whose keys nothing names yet."""
        for path in self._made:
            path.unlink(missing_ok=True)

    def public_key(self, name: str) -> Key:
        """Return the public key of NAME.pem, or the key NAME.pub. Raises InvalidRequest."""
        path = self._path(name, "pub" if self._is_elsewhere(name) else "pem")
        try:
            if path.suffix == ".pub":
                key = SSlibKey.from_crypto(load_pem_public_key(path.read_bytes()))
            else:
                key = CryptoSigner(load_pem_private_key(path.read_bytes(), None)).public_key
        except FileNotFoundError:
            expected = f"the public key of the line '{name}' of {URIS_NAME}" if name in self._uris else "a private key"
            other = "" if name in self._uris else f", or a public one as '{name}.pub'"
            raise InvalidRequest(f"'{path}' does not exist; expected {expected} there, as PEM{other}") from None
        except (OSError, ValueError, TypeError) as error:
            raise InvalidRequest(f"'{path}' is no key that can be used: {error}") from None
        key.unrecognized_fields[NAME_FIELD] = name
        return key

    def sign(self, metadata: Any, keys: Mapping[str, Key], key_ids: Iterable[str]) -> dict[str, str]:
        """Add the signatures of those of the keys that are here. Return, for each other, its name -> why.

        `metadata`: tuf's Metadata; `keys`: id -> public key.
        """
        names = sorted({*self._uris, *(path.stem for path in self.folder.glob("*.pem"))})
        here = {self.public_key(name).keyid: name for name in names}
        missing = {}
        for key_id in key_ids:
            if key_id not in here:
                missing[name_of(keys[key_id])] = f"it is not in '{self.folder}'"
                continue
            try:
                metadata.sign(self._signer(here[key_id], keys[key_id]), append=True)
            except Exception as error:  # noqa: BLE001 - each kind of key has errors of its own
                # tuf names only itself; the cause is what the key said.
                cause = error.__cause__ or error
                missing[name_of(keys[key_id])] = f"it cannot sign: {str(cause) or type(cause).__name__}"
        return missing

    def _is_elsewhere(self, name: str) -> bool:
        return name in self._uris or (not self._path(name).exists() and self._path(name, "pub").exists())

    def _path(self, name: str, suffix: str = "pem") -> Path:
        return self.folder / f"{name}.{suffix}"

    def _signer(self, name: str, key: Key) -> Signer:
        if name not in self._uris:
            private_key = load_pem_private_key(self._path(name).read_bytes(), None)
            return CryptoSigner(private_key)

        def secret(kind: str) -> str:
            if name not in self._secrets:
                prompt = f"{kind} of the key '{name}': "
                is_terminal = sys.stdin.isatty()
                self._secrets[name] = getpass.getpass(prompt) if is_terminal else sys.stdin.readline().rstrip("\n")
            return self._secrets[name]

        return Signer.from_priv_key_uri(self._uris[name], key, secret)
