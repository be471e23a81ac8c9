"""Writer of checksums and signatures of a model: SHA256SUMS and SHA256SUMS.sig for its own files and for each
version."""

from __future__ import annotations

import os
from pathlib import Path

from edge_server.errors import InvalidRequest, ServingFault
from edge_server.repository.disk.replace_file import replace_file
from edge_server.repository.disk.scan import is_model_name, parse_version
from edge_server.repository.trust.checksum_file import (
    FILE_NAME,
    SIGNATURE_NAME,
    Manifest,
    digest_file,
    files_below,
    render,
    subject_of,
)
from edge_server.repository.trust.ed25519_keys import PrivateKey


def sign_model(folder: Path, key: PrivateKey | None) -> list[Path]:
    """List and, with a key, sign a model's directory and every version in it. Return the lists written, in order.

    Without a key, an earlier signature is removed, because it no longer fits. Raises InvalidRequest for a path that is
    not a model directory, LoadError for a file that cannot be read, ServingFault if the disk cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir() or not is_model_name(folder.name):
        raise InvalidRequest(f"'{folder}' is not the directory of a model")
    versions = {
        number: entry
        for entry in folder.iterdir()
        if entry.is_dir() and (number := parse_version(entry.name)) is not None
    }
    if not versions:
        raise InvalidRequest(f"'{folder}' has no version directories: a model's directory holds '1', '2' and so on")
    skip = frozenset(entry.name for entry in versions.values())
    # Versions first: a watching server loads the model when its own list is complete.
    written = [_write(path, folder.name, number, frozenset(), key) for number, path in sorted(versions.items())]
    return [*written, _write(folder, folder.name, None, skip, key)]


def _write(folder: Path, model: str, version: int | None, skip: frozenset[str], key: PrivateKey | None) -> Path:
    digests = {name: digest_file(folder / name)[0] for name in files_below(folder, skip=skip)}
    content = render(Manifest(digests, subject_of(model, version)))
    path = folder / FILE_NAME
    try:
        replace_file(path, content)
        if key is None:
            (folder / SIGNATURE_NAME).unlink(missing_ok=True)
        else:
            replace_file(folder / SIGNATURE_NAME, key.sign(content))
    except OSError as error:
        raise ServingFault(f"'{path}' cannot be written: {error.strerror}") from error
    return path
