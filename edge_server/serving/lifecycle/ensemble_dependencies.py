"""Order of loads and unloads with ensembles: member models are loaded before an ensemble and unloaded after it.

Guarded by the table's lock. Does not affect models outside of ensembles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from edge_server.core.ensemble_graph import find_cycle
from edge_server.core.version_lifecycle import DesiredModel, Member, VersionState
from edge_server.errors import BadModelConfig
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.serving.lifecycle.model_state import ModelState
from edge_server.serving.lifecycle.version_routes import ready_versions

_NONE = "-"
"""Fingerprint of a member that does not serve."""

_SEPARATOR = "|"

_IN_USE = (VersionState.READY, VersionState.DRAINING, VersionState.CLOSING)


class EnsembleDependencies:
    """Members and users of ensembles, computed from the states of all models."""

    def __init__(self, models: Mapping[str, ModelState]) -> None:
        self._models = models
        self._ensembles_of: dict[str, set[str]] = {}
        """Member -> every ensemble that ever had it as a member, so that a query need not visit all models."""

    def add_members(self, ensemble: str, members: Iterable[Member]) -> None:
        """Store the members of an ensemble. Called for each desired state and for each opened version."""
        for member, _ in members:
            self._ensembles_of.setdefault(member, set()).add(ensemble)

    def with_member_fingerprints(self, stated: DesiredModel) -> DesiredModel:
        """Return the desired state with fingerprints that also change with the members of an ensemble and with
        renewals."""
        model = self._models.get(stated.name)
        if model is not None and model.renewals:
            # The marks are added to fingerprints that have not changed since.
            marked = {
                number: replace(desired, fingerprint=f"{fingerprint}+{mark}")
                for number, (fingerprint, mark) in model.renewals.items()
                if (desired := stated.versions.get(number)) is not None and desired.fingerprint == fingerprint
            }
            stated = replace(stated, versions={**stated.versions, **marked})
        if not stated.members:
            return stated
        members = "\n".join(
            self._member_fingerprint(*member) or _NONE + self._failure(member[0]) for member in stated.members
        )
        suffix = _SEPARATOR + hashlib.blake2b(members.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        versions = {
            number: replace(desired, fingerprint=desired.fingerprint + suffix)
            for number, desired in stated.versions.items()
        }
        return replace(stated, versions=versions)

    def ensembles_with_member(self, name: str) -> list[ModelState]:
        """Return the desired ensembles that have the model as a member."""
        return [model for model in self._ensembles(name) if any(member == name for member, _ in model.stated.members)]

    def find_loading_member(self, model: ModelState, seen: set[str] | None = None) -> str:
        """Return the member that is still loading, for which the load of an ensemble must wait; "" if there is none.
        `seen`: models that were visited before."""
        seen = {model.name} if seen is None else seen
        for name, number in model.stated.members:
            member = self._models.get(name)
            if member is None or name in seen or self._member_fingerprint(name, number):
                continue
            seen.add(name)
            if member.loading is not None or self.find_loading_member(member, seen):
                return name
        return ""

    def ensembles_using(self, model: ModelState, version: ServedVersion) -> list[tuple[ModelState, ServedVersion]]:
        """Return the loaded ensembles that need this version for a step."""
        left = {*ready_versions(model.loaded, version), *model.on_demand()}
        found = []
        for other in self._ensembles(model.name):
            for item in other.loaded:
                if item.state in _IN_USE and any(
                    name == model.name and not (left if number is None else number in left)
                    for name, number in steps_of(item)
                ):
                    found.append((other, item))
        return found

    def is_used(self, version: ServedVersion) -> bool:
        """Return whether a loaded ensemble has the model as a member."""
        return any(
            name == version.name
            for model in self._ensembles(version.name)
            for item in model.loaded
            if item.state in _IN_USE
            for name, _ in steps_of(item)
        )

    def check_cycle(self, name: str) -> None:
        """Raise BadModelConfig for an ensemble that is a member of itself, over other ensembles or at once."""
        cycle = find_cycle(
            name, {model.name: [member for member, _ in model.stated.members] for model in self._models.values()}
        )
        if cycle:
            names = " -> ".join(f"'{item}'" for item in cycle)
            raise BadModelConfig(f"ensemble '{name}': expected models that do not lead back to it, given {names}")

    def member_problem(self, name: str, version: int | None) -> str:
        """Return why a model cannot be a member now, "" if it can."""
        model = self._models.get(name)
        if model is None or not (model.desired.versions or model.desired.reason):
            return f"model '{name}' is not loaded"
        if self._member_fingerprint(name, version):
            return ""
        which = f"model '{name}'" if version is None else f"model '{name}' version {version}"
        rows = model.index_rows()
        number = version if version is not None else max(rows, default=0)
        state, reason = rows.get(number, ("", model.desired.reason))
        failure = model.failed().get(number)
        if failure is not None:
            # A version that is being unloaded has no reason of its own.
            reason = failure.cause.message
        return f"{which} does not serve: {reason or state or 'there is no such version'}"

    def _ensembles(self, member: str) -> list[ModelState]:
        """Return the models that are, or were, ensembles with this member, by name."""
        return [self._models[name] for name in sorted(self._ensembles_of.get(member, ())) if name in self._models]

    def _failure(self, name: str) -> str:
        """Return why a model failed to load, for the reason of its ensembles."""
        model = self._models.get(name)
        return "" if model is None else "; ".join(item.cause.message for item in model.failed().values())

    def _member_fingerprint(self, name: str, version: int | None) -> str:
        """Return the fingerprint of the version that answers for a member, "" if there is none."""
        model = self._models.get(name)
        if model is None or not (model.desired.versions or model.desired.reason):
            return ""
        found = {number: evicted.fingerprint for number, evicted in model.on_demand().items()}
        found |= {number: item.fingerprint for number, item in ready_versions(model.loaded, None).items()}
        if version is None:
            return found[max(found)] if found else ""
        is_going = bool(model.desired.versions) and version not in model.desired.versions
        return "" if is_going else found.get(version, "")


def own_fingerprint(fingerprint: str) -> str:
    """Return the part of a fingerprint that does not depend on members."""
    return fingerprint.partition(_SEPARATOR)[0]


def steps_of(version: ServedVersion) -> Collection[Member]:
    """Return the member models and versions of an ensemble; empty for any other model."""
    ensemble = version.spec.ensemble
    return () if ensemble is None else [(step.model, step.version) for step in ensemble.steps]
