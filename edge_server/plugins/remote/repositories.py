"""The plugin `remote` in a running server: makes a local copy of each remote repository, and keeps it up to date."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from edge_server.config import RepositoryConfig
from edge_server.errors import ServingFault
from edge_server.plugin import RunningPlugin
from edge_server.plugins.remote.address import is_remote, parse_address
from edge_server.plugins.remote.local_copy import LocalCopy
from edge_server.plugins.remote.object_store import ObjectStore
from edge_server.plugins.remote.sync import RemoteSync, RepositorySync

log = logging.getLogger(__name__)


class RemoteRepositories(RunningPlugin):
    """Copies of remote repositories below the cache folder, updated repeatedly except in control mode none."""

    def __init__(self, config: RepositoryConfig) -> None:
        """Raises InvalidRequest for a bad address, ServingFault for a missing library or an unwritable disk."""
        self._config = config
        self._follows = config.control_mode != "none"
        self._copies: dict[str, RepositorySync] = {}
        for url in dict.fromkeys(filter(is_remote, config.paths)):
            address = parse_address(url)
            folder = Path(config.cache_dir) / address.folder_name
            if address.protocol == "oci":
                # Imported here, because it imports the command `pull`'s parts.
                from edge_server.plugins.remote.artifact_sync import ArtifactSync

                self._copies[url] = ArtifactSync(url, folder, config.poll_s)
            else:
                self._copies[url] = RemoteSync(ObjectStore(address), LocalCopy(folder), url, config.poll_s)
        self.local_folders = {url: copy.root for url, copy in self._copies.items()}

    def before_first_scan(self) -> None:
        """Start copying, and wait until the first scan can start: at most `first_sync_s` for all repositories.

        Without an earlier copy, wait for a complete one. With an earlier copy, do not wait in control mode poll; else
        wait for one attempt. Raises ServingFault if a missing copy will not come later.
        """
        for copy in self._copies.values():
            copy.start()
        timeout_s = self._config.first_sync_s
        deadline = time.monotonic() + timeout_s
        for url, copy in self._copies.items():
            if copy.is_warm and self._config.control_mode == "poll":
                continue
            is_copied = copy.wait_first(max(deadline - time.monotonic(), 0.0), needs_success=not copy.is_warm)
            if is_copied:
                continue
            problem = f"model repository '{url}' could not be copied within {timeout_s:g} s"
            if not self._follows:
                raise ServingFault(problem)
            log.error("%s; its models are served as soon as it is copied", problem)
        if not self._follows:
            self.stop(0.0)

    def stop(self, timeout_s: float) -> None:
        """Stop copying. The copies stay."""
        for copy in self._copies.values():
            copy.close()
