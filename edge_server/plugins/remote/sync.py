"""Update of local copies from remote model repositories, one thread for each. `RemoteSync` is that of object stores."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_server.errors import ServingFault
from edge_server.plugins.remote.grouped_listing import FetchPlan, UnitKey, plan
from edge_server.plugins.remote.local_copy import LocalCopy, LocalDiskFault
from edge_server.plugins.remote.object_store import ObjectStore, RemoteFile, RemoteUnavailable

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""How long a listing must stay the same before it counts as complete."""

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_CLOSE_S = 3.0


class RepositorySync(ABC):
    """One remote repository and its copy. `start` starts a thread. All methods except `sync` are thread-safe."""

    def __init__(self, url: str, interval_s: float) -> None:
        self._url = url
        self._interval_s = interval_s
        self._settle_s = min(SETTLE_S, interval_s)
        self._is_unreachable = False
        self._warned: set[str] = set()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._tried_count = 0
        self._is_complete = False
        self._thread = threading.Thread(target=self._loop, name="edge-mirror", daemon=True)

    @property
    @abstractmethod
    def root(self) -> Path:
        """The copy: a model repository."""

    @property
    @abstractmethod
    def is_warm(self) -> bool:
        """Whether the copy was complete once, in this run or before."""

    @abstractmethod
    def sync(self) -> bool:
        """Update the copy once. Return False if the store changed during the update and must be read again soon.

        Raises ServingFault.
        """

    @abstractmethod
    def _release(self) -> None:
        """Let another process update the copy."""

    def start(self) -> None:
        self._thread.start()

    def wait_first(self, timeout_s: float, *, needs_success: bool) -> bool:
        """Wait until the copy was updated once. Unless `needs_success`, a failed attempt is enough.

        Returns whether the copy is complete, from this run or an earlier one. Also true after `close`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_complete or self._closing.is_set() or (self._tried_count > 0 and not needs_success),
                timeout_s,
            )
            return self._is_complete or self.is_warm or self._closing.is_set()

    def close(self) -> None:
        """Stop. A read that hangs in the network is not awaited; it ends with the process."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._release()

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._follow()
        finally:
            self._release()

    def _follow(self) -> None:
        failed_count = 0
        delay_s = 0.0
        while not self._closing.wait(delay_s):
            try:
                is_settled = self.sync()
            except ServingFault as error:
                if self._closing.is_set():
                    break
                failed_count += 1
                delay_s = min(
                    _FIRST_RETRY_S * 2.0 ** min(failed_count - 1, 10), max(_LONGEST_RETRY_S, self._interval_s)
                )
                # Logged once, until the store is back.
                level = logging.DEBUG if self._is_unreachable else logging.WARNING
                note = "the local copy is served; " if self.is_warm else ""
                log.log(level, "%s; %strying again in %g s", error.message, note, delay_s)
                self._is_unreachable = True
            except Exception:
                # An unforeseen error must not end the thread: the copy would no longer be updated.
                log.exception("model repository '%s' could not be synchronised", self._url)
                delay_s = _LONGEST_RETRY_S
            else:
                failed_count = 0
                delay_s = self._interval_s if is_settled else self._settle_s
                if self._is_unreachable:
                    log.info("model repository '%s' can be reached again", self._url)
                self._is_unreachable = False
            with self._changed:
                self._tried_count += 1
                self._changed.notify_all()

    def _set_complete(self, is_complete: bool) -> None:
        with self._changed:
            self._is_complete = self._is_complete or is_complete
            self._changed.notify_all()

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned and len(self._warned) < 1000:
            self._warned.add(sentence)
            log.warning("%s", sentence)


class RemoteSync(RepositorySync):
    """A repository in an object store."""

    def __init__(self, store: ObjectStore, cache: LocalCopy, url: str, interval_s: float) -> None:
        super().__init__(url, interval_s)
        self._store = store
        self._cache = cache

    @property
    def root(self) -> Path:
        return self._cache.models

    @property
    def is_warm(self) -> bool:
        return self._cache.is_warm

    def _release(self) -> None:
        self._cache.close()

    def sync(self) -> bool:
        """Update the copy once. Return False if the store changed during the update and must be listed again soon.

        Complete units are kept even if others failed. Raises RemoteUnavailable, LocalDiskFault.
        """
        if not self._cache.lock():
            self._warn_once(f"another process updates the copy of '{self._url}'")
            self._set_complete(self._cache.is_warm)
            return True
        first = self._list_store()
        if not first.units and not self._cache.is_empty():
            self._warn_once(f"model repository '{self._url}' is empty; the local copy is kept")
            self._set_complete(True)
            return True
        staged, failure = self._stage(first.units)
        is_settled = True
        surplus = self._cache.surplus(first.units)
        if staged or surplus:
            is_settled = self._apply(first, staged, [] if failure else surplus)
        if failure is not None:
            raise failure
        if is_settled:
            self._cache.clean(first.units)
            self._set_complete(True)
        return is_settled

    def _list_store(self) -> FetchPlan:
        found = plan(self._store.list())
        for warning in found.warnings:
            self._warn_once(f"model repository '{self._url}': {warning}")
        return found

    def _stage(
        self, units: Mapping[UnitKey, Mapping[str, RemoteFile]]
    ) -> tuple[list[UnitKey], RemoteUnavailable | LocalDiskFault | None]:
        """Download the changed units: the files of a model before its versions. Stop at the first failure."""
        staged: list[UnitKey] = []
        for key in sorted(units, key=lambda item: (item.model, item.version is not None, item.version or 0)):
            if self._cache.holds(key, units[key]):
                continue
            try:
                self._cache.stage(key, units[key], self._read)
            except (RemoteUnavailable, LocalDiskFault) as error:
                return staged, error
            staged.append(key)
        return staged, None

    def _read(self, file: RemoteFile, start: int, end: int) -> bytes:
        if self._closing.is_set():
            raise RemoteUnavailable(f"model repository '{self._url}': the server is stopping")
        return self._store.read(file, start, end)

    def _apply(self, first: FetchPlan, staged: Sequence[UnitKey], surplus: Sequence[UnitKey]) -> bool:
        """Install and delete the units that a second listing confirms. Return False if the two listings differ.

        An upload of several files may be in progress, or a file may have been replaced while it was read.
        """
        self._closing.wait(self._settle_s)
        second = self._list_store()
        for key in staged:
            if second.units.get(key) == first.units[key]:
                self._cache.install(key, first.units[key])
                log.info("model repository '%s': %s was copied", self._url, _unit_label(key))
        removed = [key for key in surplus if key not in second.units]
        if removed and second.units:
            self._cache.remove(removed, second.units)
            log.info("model repository '%s': %s was removed", self._url, ", ".join(map(_unit_label, removed)))
        return second.units == first.units


def _unit_label(key: UnitKey) -> str:
    return f"model '{key.model}'" + ("" if key.version is None else f" version {key.version}")
