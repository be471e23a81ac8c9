"""Control of models by clients' requests (load, unload, return to an earlier version), combined with the results of
repository scans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from edge_server.core.status_reports import PinReport
from edge_server.core.version_lifecycle import DesiredModel, VersionState
from edge_server.errors import Draining, EdgeServerError, InvalidRequest, LoadError, Refusal, ServingFault, UnknownModel
from edge_server.serving.lifecycle.model_table import ModelTable
from edge_server.serving.lifecycle.router import Router
from edge_server.telemetry.event_bus import MODEL_PINNED, MODEL_UNPINNED, EventBus


class ModelSource(Protocol):
    """Source of models for load and unload requests: the repository."""

    def names(self) -> Iterable[str]:
        """Return the names of all models on disk, loaded or not."""

    def passed_over(self) -> Mapping[str, str]:
        """Return the files and folders in the repositories that cannot be a model: printable name -> reason."""

    def desired_model(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool = True
    ) -> DesiredModel | None:
        """Return the desired state of a model with the overrides, or None if the repository does not have it."""

    def with_pins(self, desired: Mapping[str, DesiredModel]) -> Mapping[str, DesiredModel]:
        """Return an earlier desired state, updated to the current pins."""

    def versions(self, name: str) -> Sequence[int]:
        """Return all versions of a model on disk, ascending."""

    def pins(self) -> Mapping[str, int]:
        """Return the pinned models, each with its version."""

    def pin(self, name: str, version: int) -> int | None:
        """Pin a model to a version. Return the version it was pinned to before."""

    def unpin(self, name: str) -> int | None:
        """Remove the pin of a model. Return the version it was pinned to, if any."""

    @property
    def pins_are_durable(self) -> bool:
        """Whether a pin survives a restart."""


class ModelControl:
    """Thread-safe. Holds the desired models and the requests in progress, one per model.

    `is_explicit`: explicit mode, in which only named models are loaded. All methods *block*.
    """

    def __init__(
        self, table: ModelTable, router: Router, source: ModelSource, events: EventBus, *, is_explicit: bool
    ) -> None:
        self._table = table
        self._router = router
        self._source = source
        self._events = events
        self._is_explicit = is_explicit
        self._ordering = threading.Lock()
        self._ordered: set[str] = set()
        self._setting = threading.Lock()
        self._desired_names: set[str] = set()
        self._ordered_by_name: set[str] = set()

    def set_desired_state(self, desired: Mapping[str, DesiredModel]) -> None:
        """Set the whole desired state that a scan found, by model name. Models left out are unloaded."""
        with self._setting:
            # A pin that changed since the scan has precedence: a scan must not undo an operator's request. Nor may it
            # undo a load by name before the first scan, during which the front ends are open.
            ordered = set(self._desired_names) if self._is_explicit else set()
            self._table.set_desired_state(self._source.with_pins(desired).values(), ordered)
            self._desired_names = {*desired, *ordered}

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
        with self._exclusive(name):
            self._check_settled(name)
            desired = self._source.desired_model(name, config_json, files or {}, may_carry_code=may_carry_code)
            if desired is None:
                raise ServingFault(f"failed to load '{name}', failed to poll from model repository")
            with self._setting:
                self._desired_names.add(name)
                self._ordered_by_name.add(name)
            self._load_members(desired)
            reason = self._settle(desired)
        if reason:
            raise LoadError(f"load failed for model '{name}': {reason}")
        if not desired.versions:
            raise LoadError(f"load failed for model '{name}': at least one version must be available")

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop offering a model and drain it in the background. *Blocking* until the order is accepted.

        A model that is not loaded stays as it is. With `unload_dependents` the members of an ensemble are unloaded too,
        except those that were loaded by name or that another ensemble needs. Ensembles with the model as a member stop
        serving with it. Raises Refusal outside explicit mode, and ServingFault while another order for the model is
        carried out.
        """
        self._check_control()
        with self._exclusive(name):
            self._check_settled(name)
            members = self._router.members_of(name)
            self._desired_names.discard(name)
            self._ordered_by_name.discard(name)
            if self._router.is_known(name):
                self._settle(DesiredModel(name))
        if unload_dependents:
            for member in members:
                if member not in self._ordered_by_name and not self._table.is_member(member):
                    self.unload(member, unload_dependents=True)

    def rollback(self, name: str, version: int | None = None) -> PinReport:
        """Pin a model to `version`, or to the one before the version that serves now, and wait for it. *Blocking.*

        Until `unpin`, the version policy and newer versions are ignored. If the version does not load, the order is
        undone. In explicit mode the pin of a model that is not loaded waits for its next load. Raises UnknownModel (no
        such model or version), InvalidRequest (no earlier version), LoadError, ServingFault.
        """
        with self._exclusive(name):
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
                # The load was not waited for, for example because the server stops: the next start must not use this
                # pin.
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
        """Remove the pin, and wait until the version policy is applied. *Blocking.*

        Raises InvalidRequest when the model is not pinned, ServingFault.
        """
        with self._exclusive(name):
            if name not in self._source.pins():
                raise InvalidRequest(f"model '{name}' is not pinned to a version")
            before, problem = self._pin(name, None)
        self._events.publish(MODEL_UNPINNED, model=name, version=before)
        return PinReport(name, None, before, self._serving(name), self._source.pins_are_durable, problem)

    def _load_members(self, desired: DesiredModel) -> None:
        """Load the members of an ensemble that do not serve yet; members of members first."""
        for member in dict.fromkeys(name for name, _ in desired.members):
            is_fine = not self._router.is_known(member) or self._router.failure(member) is None
            if member in self._desired_names and is_fine:
                continue
            found = self._source.desired_model(member, None, {})
            if found is None or member == desired.name:
                continue
            self._desired_names.add(member)
            self._load_members(found)
            self._table.set_desired(found, retry=True)

    @contextlib.contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """Refuse other requests for the model during this one. They fail at once, as in Triton."""
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
        """Raise ServingFault during a load of the model by a scan, as at the start."""
        if not self._table.wait_settled([name], 0):
            raise _conflict(name)

    def _settle(self, desired: DesiredModel) -> str:
        """Set the desired state of one model and wait for it. Return why a version does not serve, "" if all do."""
        self._table.set_desired(desired, retry=True)
        return self._outcome(desired.name)

    def _outcome(self, name: str) -> str:
        if not self._table.wait_settled([name]):
            raise Draining(f"Server is stopping, model '{name}' can be neither loaded nor unloaded")
        return self._router.failure(name) or ""

    def _pin(self, name: str, version: int | None, *, retry: bool = True) -> tuple[int | None, str]:
        """Pin (None: unpin) and wait for the new desired state. Return the pin before, and the problem.

        Without `retry`, earlier failures stay.
        """
        with self._setting:
            before = self._put_pin(name, version)
            if self._is_explicit and name not in self._desired_names:
                return before, ""
            desired = self._source.desired_model(name, None, {})
            if desired is None:
                return before, f"model '{name}' is not in the repository any more;"
            self._table.set_desired(desired, retry=retry)
        return before, self._outcome(name)

    def _put_pin(self, name: str, version: int | None) -> int | None:
        return self._source.unpin(name) if version is None else self._source.pin(name, version)

    def _version_before(self, name: str, there: Iterable[int]) -> int:
        """Return the highest version below the one that serves now, without those whose load failed."""
        serves = self._serving(name)
        if serves is None:
            raise InvalidRequest(f"no version of model '{name}' serves now; name the one to roll back to")
        failed = {report.version for report in self._router.versions(name) if report.state == VersionState.FAILED.name}
        earlier = [version for version in there if version < serves and version not in failed]
        if not earlier:
            raise InvalidRequest(f"there is nothing to roll back to: no good version of model '{name}' below {serves}")
        return max(earlier)

    def _serving(self, name: str) -> int | None:
        """Return the highest version for requests without a version, also if it must be loaded first."""
        reports = self._router.versions(name)
        taking = [item.version for item in reports if item.state == VersionState.READY.name and item.share > 0]
        return max(taking or self._router.offered_versions(name), default=None)

    def _check_control(self) -> None:
        if not self._is_explicit:
            raise Refusal(
                "explicit model load / unload is not allowed if polling is enabled; to allow it, start the server with "
                "--model-control-mode=explicit",
                retry_after_s=None,
            )


def _conflict(name: str) -> ServingFault:
    return ServingFault(f"a related model '{name}' to a load/unload request is currently loading or unloading")
