"""Model control: load, unload, rollback and pin requests, combined with the results of repository scans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from edge_server.core.status_reports import PinReport
from edge_server.core.version_lifecycle import DesiredModel, VersionState
from edge_server.errors import Draining, EdgeServerError, InvalidRequest, LoadError, Refusal, ServingFault, UnknownModel
from edge_server.serving.lifecycle.manager import Manager
from edge_server.telemetry.event_bus import MODEL_PINNED, MODEL_UNPINNED, EventBus


class ModelSource(Protocol):
    """Where models come from: the repository, as the load and unload calls see it."""

    def names(self) -> Iterable[str]:
        """Return the models that are there, loaded or not."""

    def passed_over(self) -> Mapping[str, str]:
        """Return the files and folders in the repositories that cannot be a model: printable name -> reason."""

    def wish(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool = True
    ) -> DesiredModel | None:
        """Return the desired state of a model with the overrides, or None if the repository does not have it."""

    def with_pins(self, wishes: Mapping[str, DesiredModel]) -> Mapping[str, DesiredModel]:
        """Return earlier wishes as they would be with the pins that hold now."""

    def versions(self, name: str) -> Sequence[int]:
        """Return the versions of a model that are there, ascending, wished for or not."""

    def pins(self) -> Mapping[str, int]:
        """Return the pinned models, each with its version."""

    def pin(self, name: str, version: int) -> int | None:
        """Wish for that version of a model alone; return the one that it was pinned to before."""

    def unpin(self, name: str) -> int | None:
        """Let the version policy decide again; return the version it was pinned to, if it was."""

    @property
    def pins_are_durable(self) -> bool:
        """Whether a pin survives a restart."""


class ModelControl:
    """Thread-safe. Holds who ordered what: the models that are wished for, and the orders under way, one for a model.

    `is_explicit`: the server does what it is told, and loads nothing that nobody named. Every order is *blocking*.
    """

    def __init__(self, manager: Manager, source: ModelSource, events: EventBus, *, is_explicit: bool) -> None:
        self._manager = manager
        self._source = source
        self._events = events
        self._is_explicit = is_explicit
        self._ordering = threading.Lock()
        self._ordered: set[str] = set()
        self._wishing = threading.Lock()
        self._wished: set[str] = set()
        self._ordered_by_name: set[str] = set()

    def wish_for_all(self, wishes: Mapping[str, DesiredModel]) -> None:
        """Hand on what a scan found should be served, by model: the whole of it. Models left out are unloaded."""
        with self._wishing:
            # A pin that was put or lifted since the scan counts: the wish must not take an operator's order back. Nor
            # what was ordered by name before it: front ends are open while the first scan is made.
            ordered = set(self._wished) if self._is_explicit else set()
            self._manager.wish_for_all(self._source.with_pins(wishes).values(), ordered)
            self._wished = {*wishes, *ordered}

    def load(
        self,
        name: str,
        config_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        may_carry_code: bool = True,
    ) -> None:
        """Load or reload, and wait for it. *Blocking.*

        `config_json` overrides config.pbtxt; `files` maps "1/model.onnx" to contents that stand in for the disk's.
        Without `may_carry_code`, overrides that carry code, or name paths of this machine, raise Forbidden. Raises
        Refusal outside explicit mode, LoadError, ServingFault; also while another order for it is carried out.
        """
        self._check_control()
        with self._alone(name):
            self._check_settled(name)
            wish = self._source.wish(name, config_json, files or {}, may_carry_code=may_carry_code)
            if wish is None:
                raise ServingFault(f"failed to load '{name}', failed to poll from model repository")
            with self._wishing:
                self._wished.add(name)
                self._ordered_by_name.add(name)
            self._load_members(wish)
            reason = self._settle(wish)
        if reason:
            raise LoadError(f"load failed for model '{name}': {reason}")
        if not wish.versions:
            raise LoadError(f"load failed for model '{name}': at least one version must be available")

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop offering a model and drain it in the background. *Blocking* for the hand-over only.

        A model that is not loaded is left as it is. With `unload_dependents` the members of an ensemble go too, but for
        those that were ordered by name, or that another ensemble needs. Ensembles that the model is a member of stop
        serving with it. Raises Refusal outside explicit mode, and ServingFault while another order for it is carried
        out.
        """
        self._check_control()
        with self._alone(name):
            self._check_settled(name)
            members = self._manager.members_of(name)
            self._wished.discard(name)
            self._ordered_by_name.discard(name)
            if self._manager.is_known(name):
                self._settle(DesiredModel(name))
        if unload_dependents:
            for member in members:
                if member not in self._ordered_by_name and not self._manager.is_member(member):
                    self.unload(member, unload_dependents=True)

    def rollback(self, name: str, version: int | None = None) -> PinReport:
        """Pin a model to `version`, or to the one before that which serves now, and wait for it. *Blocking.*

        The version policy and newer versions count for nothing until `unpin`. When the version does not load, the
        order is taken back. In explicit mode the pin of a model that is not loaded waits for its next load. Raises
        UnknownModel (no such model, no such version), InvalidRequest (none before), LoadError, ServingFault.
        """
        with self._alone(name):
            there = self._source.versions(name)
            if not there:
                raise UnknownModel(f"model '{name}' has no version in the repository")
            if version is None:
                version = self._version_before(name, there)
            elif version not in there:
                raise UnknownModel(f"model '{name}' has no version {version} in the repository, there are {[*there]}")
            pinned = self._source.pins().get(name)
            try:
                before, problem = self._pin(name, version)
            except EdgeServerError:
                # Nobody waited for it to serve, as at a shutdown: the next start must not go by it.
                self._put_pin(name, pinned)
                raise
            serves = self._serving(name)
            if problem:
                self._pin(name, before, retry=False)
                tail = "nothing of it serves" if serves is None else f"version {serves} goes on serving"
                raise LoadError(f"model '{name}' was not rolled back to version {version}: {problem} {tail}")
        self._events.publish(MODEL_PINNED, model=name, version=version)
        return PinReport(name, version, before, serves, self._source.pins_are_durable)

    def unpin(self, name: str) -> PinReport:
        """Let the version policy decide again, and wait for what it wants. *Blocking.*

        Raises InvalidRequest when the model is not pinned, ServingFault.
        """
        with self._alone(name):
            if name not in self._source.pins():
                raise InvalidRequest(f"model '{name}' is not pinned to a version")
            before, problem = self._pin(name, None)
        self._events.publish(MODEL_UNPINNED, model=name, version=before)
        return PinReport(name, None, before, self._serving(name), self._source.pins_are_durable, problem)

    def _load_members(self, wish: DesiredModel) -> None:
        """Wish for what an ensemble is made of, members of members first, as far as it is not served already."""
        for member in dict.fromkeys(name for name, _ in wish.members):
            is_fine = not self._manager.is_known(member) or self._manager.failure(member) is None
            if member in self._wished and is_fine:
                continue
            found = self._source.wish(member, None, {})
            if found is None or member == wish.name:
                continue
            self._wished.add(member)
            self._load_members(found)
            self._manager.wish_for(found, retry=True)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Keep other orders for the model away, as Triton does: they fail at once instead of waiting their turn."""
        with self._ordering:
            if name in self._ordered:
                raise _conflict(name)
            self._ordered.add(name)
        try:
            yield
        finally:
            with self._ordering:
                self._ordered.discard(name)

    def _check_settled(self, name: str) -> None:
        """Raise ServingFault while a load of the model that no order waits for is under way, as at the start."""
        if not self._manager.wait_settled([name], 0):
            raise _conflict(name)

    def _settle(self, wish: DesiredModel) -> str:
        """State the wish for one model and wait for it. Return why not all of it is served, "" when it is."""
        self._manager.wish_for(wish, retry=True)
        return self._outcome(wish.name)

    def _outcome(self, name: str) -> str:
        if not self._manager.wait_settled([name]):
            raise Draining(f"Server is stopping, model '{name}' can be neither loaded nor unloaded")
        return self._manager.failure(name) or ""

    def _pin(self, name: str, version: int | None, *, retry: bool = True) -> tuple[int | None, str]:
        """Pin, with None unpin, and wait for the wish that follows. Return the pin before and what went wrong.

        Without `retry`, what is known about failed loads stays known.
        """
        with self._wishing:
            before = self._put_pin(name, version)
            if self._is_explicit and name not in self._wished:
                return before, ""
            wish = self._source.wish(name, None, {})
            if wish is None:
                return before, f"model '{name}' is not in the repository any more;"
            self._manager.wish_for(wish, retry=retry)
        return before, self._outcome(name)

    def _put_pin(self, name: str, version: int | None) -> int | None:
        return self._source.unpin(name) if version is None else self._source.pin(name, version)

    def _version_before(self, name: str, there: Iterable[int]) -> int:
        """Return the highest version below the one that serves now, those left out whose load failed."""
        serves = self._serving(name)
        if serves is None:
            raise InvalidRequest(f"no version of model '{name}' serves now; name the one to roll back to")
        failed = {report.version for report in self._manager.versions(name) if report.state == VersionState.FAILED.name}
        earlier = [version for version in there if version < serves and version not in failed]
        if not earlier:
            raise InvalidRequest(f"there is nothing to roll back to: no good version of model '{name}' below {serves}")
        return max(earlier)

    def _serving(self, name: str) -> int | None:
        """Return the highest version that takes requests which name none, if need be by being loaded for one."""
        reports = self._manager.versions(name)
        taking = [item.version for item in reports if item.state == VersionState.READY.name and item.share > 0]
        return max(taking or self._manager.offered_versions(name), default=None)

    def _check_control(self) -> None:
        if not self._is_explicit:
            raise Refusal("explicit model load / unload is not allowed if polling is enabled", retry_after_s=None)


def _conflict(name: str) -> ServingFault:
    return ServingFault(f"a related model '{name}' to a load/unload request is currently loading or unloading")
