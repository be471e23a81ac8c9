"""Update of the local copy of a model in an OCI registry: when its tag stands for another digest, the model is pulled
and replaced as by `edge-server pull --replace`.

models/     the repository that is served, of one model
digest      SHA-256 of what models/ holds
"""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path

from edge_server.default_tls import make_default_tls_context
from edge_server.errors import InvalidRequest
from edge_server.plugins.remote.local_copy import LocalDiskFault
from edge_server.plugins.remote.object_store import RemoteUnavailable
from edge_server.plugins.remote.pull import oci_model
from edge_server.plugins.remote.pull.archive import DEFAULT_MAX_BYTES, PullFailed
from edge_server.plugins.remote.pull.model_installation import check_name, install, locked
from edge_server.plugins.remote.pull.oci_registry import OciRegistry, parse_reference
from edge_server.plugins.remote.pull.resumable_download import Interrupted
from edge_server.plugins.remote.sync import RepositorySync
from edge_server.repository.disk.free_space import DiskFull
from edge_server.repository.disk.replace_file import replace_file

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_REFUSED_S = 3600.0
"""How long an artifact that was refused is not pulled again: it may be large, and the next pull would end the same."""


class ArtifactSync(RepositorySync):
    """A model in an OCI registry."""

    def __init__(self, url: str, folder: Path, interval_s: float) -> None:
        """Raises InvalidRequest for a wrong address, LocalDiskFault for a folder that cannot be made or read."""
        super().__init__(url, interval_s)
        self._reference = parse_reference(url)
        self._name = self._reference.repository.rpartition("/")[2]
        check_name(self._name)
        tls = make_default_tls_context() if self._reference.site.startswith("https:") else None
        self._registry = OciRegistry(self._reference, {}, tls, _TIMEOUT_S, is_command=False)
        self._root = folder / "models"
        self._digest_path = folder / "digest"
        self._refused = ("", 0.0, "")
        """Digest of the last artifact that was refused, when, and why."""
        try:
            for path in (folder, self._root):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._digest = self._read_digest()
        except OSError as error:
            raise LocalDiskFault(f"the cache '{folder}' cannot be used: {error}") from error

    def _read_digest(self) -> str:
        return self._digest_path.read_text("ascii", "replace") if self._digest_path.exists() else ""

    @property
    def root(self) -> Path:
        return self._root

    @property
    def is_warm(self) -> bool:
        return bool(self._digest) and (self._root / self._name).exists()

    def _release(self) -> None:
        """The lock is held during an update only."""

    def sync(self) -> bool:
        """Update the copy once, and return True. Raises RemoteUnavailable, LocalDiskFault."""
        try:
            wanted = self._reference.sha256 or self._registry.read_digest()
            if wanted != self._digest or not self.is_warm:
                self._pull(wanted)
        except (PullFailed, DiskFull) as error:
            raise RemoteUnavailable(f"model repository '{self._url}': {error}") from None
        except OSError as error:
            raise LocalDiskFault(f"'{self._digest_path}' cannot be written: {error.strerror}") from None
        self._set_complete(self.is_warm)
        return True

    def _pull(self, wanted: str) -> None:
        digest, refused_s, reason = self._refused
        if digest == wanted and time.monotonic() < refused_s + _REFUSED_S:
            raise Interrupted(reason)
        try:
            with locked(self._root):
                # Another process may have updated it.
                self._digest = self._read_digest()
                if wanted == self._digest and self.is_warm:
                    return
                manifest = self._registry.read_manifest()
                if manifest.sha256 == self._digest and self.is_warm:
                    return  # The registry states other digests than it has.
                fill = functools.partial(oci_model.fill, self._registry, self._reference, manifest, DEFAULT_MAX_BYTES)
                install(self._root, self._name, self._url, fill, replaces=True)
                replace_file(self._digest_path, manifest.sha256.encode())
                self._digest = manifest.sha256
        except InvalidRequest:
            self._warn_once(f"another process updates the copy of '{self._url}'")
        except Interrupted:
            raise
        except (PullFailed, DiskFull) as error:
            self._refused = (wanted, time.monotonic(), str(error))
            raise
        else:
            log.info("model repository '%s': model '%s' was copied, sha256:%s", self._url, self._name, manifest.sha256)
