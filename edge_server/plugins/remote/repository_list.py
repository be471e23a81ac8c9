"""List of the repositories of a server: local folders, and local copies of remote repositories.

The code that copies is imported only if there is a remote address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.errors import ServingFault
from edge_server.plugins.remote.address import is_remote

if TYPE_CHECKING:
    from edge_server.plugins.remote.sync import RemoteSync

log = logging.getLogger(__name__)


class RepositoryList:
    """The repositories of a server: local folders, and copies of remote ones below `cache_dir`.

    `roots` are the folders to scan, in the order given. `follows`: stores are listed repeatedly.
    """

    def __init__(self, paths: Sequence[str], cache_dir: str, interval_s: float, *, follows: bool) -> None:
        """Raises InvalidRequest for a bad address, ServingFault for a missing library or an unwritable disk."""
        self._follows = follows
        self._mirrors: dict[str, RemoteSync] = {}
        self.roots: list[Path] = []
        for path in paths:
            if not is_remote(path):
                self.roots.append(Path(path))
                continue
            if path not in self._mirrors:
                self._mirrors[path] = _mirror(path, Path(cache_dir), interval_s)
            self.roots.append(self._mirrors[path].root)

    def start(self, timeout_s: float, *, is_polled: bool) -> None:
        """Start copying, and wait until the first scan can start: at most `timeout_s` for all repositories.

        Without an earlier copy, wait for a complete one. With an earlier copy, do not wait if the server follows
        changes (`is_polled`); else wait for one attempt. Raises ServingFault if a missing copy will not come later.
        """
        for mirror in self._mirrors.values():
            mirror.start()
        deadline = time.monotonic() + timeout_s
        for url, mirror in self._mirrors.items():
            if mirror.is_warm and is_polled:
                continue
            is_copied = mirror.wait_first(max(deadline - time.monotonic(), 0.0), needs_success=not mirror.is_warm)
            if is_copied:
                continue
            problem = f"model repository '{url}' could not be copied within {timeout_s:g} s"
            if not self._follows:
                raise ServingFault(problem)
            log.error("%s; its models are served as soon as it is copied", problem)
        if not self._follows:
            self.close()

    def close(self) -> None:
        """Stop copying. The copies stay."""
        for mirror in self._mirrors.values():
            mirror.close()


def _mirror(url: str, cache_dir: Path, interval_s: float) -> RemoteSync:
    from edge_server.plugins.remote.address import parse_address
    from edge_server.plugins.remote.local_copy import LocalCopy
    from edge_server.plugins.remote.object_store import ObjectStore
    from edge_server.plugins.remote.sync import RemoteSync

    address = parse_address(url)
    return RemoteSync(ObjectStore(address), LocalCopy(cache_dir / address.folder_name), url, interval_s)
