"""Computation of the desired state, the versions of each model that should serve: from scanned folders, version pins
and load calls."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.repository.disk.load_call_files import OverriddenModel, check_no_code, delete_abandoned
from edge_server.repository.disk.scan import ModelDirectory, Scanner, with_config
from edge_server.repository.resolve_version import ResolveOptions, resolve, resolve_as_scanned
from edge_server.repository.trust.verify_version import TrustPolicy
from edge_server.repository.version_pins import VersionPins


def desired_model(
    model: ModelDirectory, options: ResolveOptions, config_json: str | None = None, *, is_followed: bool = False
) -> DesiredModel:
    """Return the desired state of a model. `config_json` replaces the configuration on disk.

    `model.desired_versions` must already reflect `config_json` (see `with_config`). `is_followed`: a watcher finds
    later changes, so a load may only use the files of this scan.
    """
    resolve_version = resolve_as_scanned if is_followed else resolve
    suffix = (
        ""
        if config_json is None
        else "." + hashlib.blake2b(config_json.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )
    versions = {
        version: DesiredVersion(
            fingerprint=model.fingerprint_of(version) + suffix,
            resolve=partial(resolve_version, model, version, options, config_json),
        )
        for version in model.desired_versions
    }
    return DesiredModel(model.name, versions, model.problem, members=model.members, builds_engine=model.builds_engine)


class RepositorySource:
    """Makes the desired state from the results of a Scanner, and owns the files of load calls. Thread-safe.

    `scratch` is the folder for files of load calls; None: the system's. Of a model in `pins` only the pinned version is
    desired, regardless of its version policy.
    """

    def __init__(
        self, scanner: Scanner, options: ResolveOptions, scratch: Path | None = None, pins: VersionPins | None = None
    ) -> None:
        self.scanner = scanner
        self._options = options
        self._scratch = scratch
        self._pins = pins or VersionPins()
        self._lock = threading.Lock()
        self._written: dict[str, OverriddenModel] = {}
        self._watched_models: Mapping[str, ModelDirectory] | None = None
        self._last_desired: dict[str, tuple[ModelDirectory, ResolveOptions, DesiredModel]] = {}
        """Result of the last `desired_models_for`: the desired state of each model, and its inputs."""
        delete_abandoned(scratch)

    def use_trust(self, trust: TrustPolicy) -> None:
        """Check later loads by this policy. Loaded models continue to serve."""
        self._options = replace(self._options, trust=trust)

    def names(self) -> tuple[str, ...]:
        """Return the names of all models on disk, loaded or not. Unreadable repositories are skipped."""
        return self.scanner.names()

    def passed_over(self) -> dict[str, str]:
        """Return the files and folders of the repositories that cannot be a model: printable name -> reason."""
        return self.scanner.passed_over()

    def desired_models(self) -> tuple[dict[str, DesiredModel], tuple[str, ...]]:
        """Return the desired state of every model by name, and warnings about ignored entries. Raises ServingFault."""
        snapshot = self.scanner.scan()
        return {name: self._desired_model(model) for name, model in snapshot.models.items()}, snapshot.warnings

    def desired_models_for(self, models: Mapping[str, ModelDirectory]) -> dict[str, DesiredModel]:
        """Return the desired state for the complete models that a watcher found.

        Until the next call, all other methods use these models too: a load call during an upload must not load half a
        version. An unchanged model object gives the same result object, unless its pin changed.
        """
        self._watched_models = models
        options, before, now = self._options, self._last_desired, {}
        for name, model in models.items():
            known = before.get(name)
            is_same = known is not None and known[0] is model and known[1] is options
            if known is None or not is_same or known[2].pin != self._pins.get(name):
                known = model, options, self._desired_model(model)
            now[name] = known
        self._last_desired = now
        return {name: desired for name, (_, _, desired) in now.items()}

    def with_pins(self, desired: Mapping[str, DesiredModel]) -> dict[str, DesiredModel]:
        """Return the desired state of an earlier scan, updated to the current pins.

        Scans only the models whose pin has changed.
        """
        current: dict[str, DesiredModel] = {}
        for name, model_state in desired.items():
            model = None if model_state.pin == self._pins.get(name) else self._find(name)
            current[name] = model_state if model is None else self._desired_model(model)
        return current

    def desired_model(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool = True
    ) -> DesiredModel | None:
        """Return the desired state of one model with overrides; None if no repository has it.

        Files of an earlier load call for the model are deleted. The versions made from them must be loaded already, or
        be replaced by this result. Raises BadModelConfig, ServingFault, InvalidRequest for files without a
        configuration, and without `may_carry_code` Forbidden for overrides that contain code or name paths.
        """
        if files:
            return self._desired_model_of_files(name, config_json, files, may_carry_code=may_carry_code)
        model = self._find(name)
        if model is not None and config_json is not None:
            if not may_carry_code:
                check_no_code(model, config_json)
            model = with_config(model, config_json)
        if model is None:
            # Keep the files of the serving version: it may have to be loaded again from them.
            return None
        self._replace_written(name, None)
        return self._desired_model(model, config_json)

    def versions(self, name: str) -> tuple[int, ...]:
        """Return all versions of a model on disk in ascending order; empty if there is no such model."""
        model = self._find(name)
        return () if model is None else tuple(version.number for version in model.versions)

    @property
    def pins_are_durable(self) -> bool:
        """Whether a pin survives a restart."""
        return self._pins.is_durable

    def pins(self) -> dict[str, int]:
        """Return the pinned models, each with its version."""
        return self._pins.all()

    def pin(self, name: str, version: int) -> int | None:
        """Pin a model. Return the version it was pinned to before. Raises ServingFault if the pin cannot be stored."""
        return self._pins.put(name, version)

    def unpin(self, name: str) -> int | None:
        """Remove the pin of a model. Return the version it was pinned to, None if it was not."""
        return self._pins.put(name, None)

    def close(self) -> None:
        """Delete the files of all load calls."""
        with self._lock:
            written, self._written = list(self._written.values()), {}
        for model in written:
            model.close()

    def _find(self, name: str) -> ModelDirectory | None:
        return self.scanner.find(name) if self._watched_models is None else self._watched_models.get(name)

    def _desired_model_of_files(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool
    ) -> DesiredModel:
        if config_json is None:
            raise InvalidRequest(f"load of model '{name}': files need the parameter 'config' beside them")
        written = OverriddenModel(name, files, config_json, self._scratch)
        if not may_carry_code:
            try:
                check_no_code(written.model, config_json, files)
            except EdgeServerError:
                written.close()
                raise
        self._replace_written(name, written)
        return self._desired_model(written.model, config_json)

    def _desired_model(self, model: ModelDirectory, config_json: str | None = None) -> DesiredModel:
        pin = self._pins.get(model.name)
        pinned = model if pin is None else _pinned(model, pin)
        is_followed = self._watched_models is not None and model.path.parent in self.scanner.roots
        return replace(desired_model(pinned, self._options, config_json, is_followed=is_followed), pin=pin)

    def _replace_written(self, name: str, written: OverriddenModel | None) -> None:
        with self._lock:
            before = self._written.pop(name, None)
            if written is not None:
                self._written[name] = written
        if before is not None:
            before.close()


def _pinned(model: ModelDirectory, version: int) -> ModelDirectory:
    """Return the model with only this version desired. A problem of the whole model stays."""
    if model.problem and not model.is_policy_unmet:
        return model
    if any(found.number == version for found in model.versions):
        return replace(model, desired_versions=(version,), problem="", is_policy_unmet=False)
    return replace(
        model, desired_versions=(), problem=f"model '{model.name}' is pinned to version {version}, which is not there"
    )
