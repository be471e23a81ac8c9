"""The repository as the serving core sees it: what should be served of each model, now, and with a load's overrides."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.repository.overrides import OverriddenModel, check_no_code, delete_abandoned
from edge_server.repository.resolve import ResolveOptions, resolve, resolve_as_seen
from edge_server.repository.scan import ModelDirectory, Scanner, with_config
from edge_server.repository.trust.verify import TrustPolicy
from edge_server.repository.version_pins import VersionPins


def model_wish(
    model: ModelDirectory, options: ResolveOptions, config_json: str | None = None, *, is_followed: bool = False
) -> DesiredModel:
    """Return the wish for a model's wished versions; `config_json` stands in for the configuration on disk.

    `config_json` must have been taken into account in `model.desired_versions` (`with_config`). `is_followed`: files
    that change are found, and wished for anew, so those of this wish need no other files to be loaded in their place.
    """
    read = resolve_as_seen if is_followed else resolve
    suffix = (
        ""
        if config_json is None
        else "." + hashlib.blake2b(config_json.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )
    versions = {
        version: DesiredVersion(
            fingerprint=model.fingerprint_of(version) + suffix,
            resolve=partial(read, model, version, options, config_json),
        )
        for version in model.desired_versions
    }
    return DesiredModel(model.name, versions, model.problem, members=model.members)


class RepositorySource:
    """Turns what a Scanner finds into wishes, and owns the files that load calls brought along.

    May be used from several threads. `scratch` is the folder for files of load calls; None: the system's. A model in
    `pins` is wished for in that version alone, whatever its version policy says.
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
        self._counting: Mapping[str, ModelDirectory] | None = None
        self._wishes: dict[str, tuple[ModelDirectory, ResolveOptions, DesiredModel]] = {}
        """Of `wishes_for`: the wish for each model, and what it was made from."""
        delete_abandoned(scratch)

    def use_trust(self, trust: TrustPolicy) -> None:
        """Have what is loaded from now on checked by this policy; what serves goes on serving."""
        self._options = replace(self._options, trust=trust)

    def names(self) -> tuple[str, ...]:
        """Return the models that are there, loaded or not; none of a repository that cannot be read now."""
        return self.scanner.names()

    def passed_over(self) -> dict[str, str]:
        """Return the files and folders in the repositories that cannot be a model: printable name -> reason."""
        return self.scanner.passed_over()

    def wishes(self) -> tuple[dict[str, DesiredModel], tuple[str, ...]]:
        """Return the wish for every model, by name, and warnings about what was passed over. Raises ServingFault."""
        snapshot = self.scanner.scan()
        return {name: self._wish_for_model(model) for name, model in snapshot.models.items()}, snapshot.warnings

    def wishes_for(self, models: Mapping[str, ModelDirectory]) -> dict[str, DesiredModel]:
        """Return the wish for the models that count: what of the disk has come to rest, as whoever follows it sees it.

        From then on every other wish is for these models too, until the next call: an order given while somebody
        copies a version must not load half of it. For a model that is the same object as in the last call the wish is,
        too, unless its pin changed.
        """
        self._counting = models
        options, before, now = self._options, self._wishes, {}
        for name, model in models.items():
            known = before.get(name)
            is_same = known is not None and known[0] is model and known[1] is options
            if known is None or not is_same or known[2].pin != self._pins.get(name):
                known = model, options, self._wish_for_model(model)
            now[name] = known
        self._wishes = now
        return {name: wish for name, (_, _, wish) in now.items()}

    def with_pins(self, wishes: Mapping[str, DesiredModel]) -> dict[str, DesiredModel]:
        """Return wishes of an earlier scan as they would be with the pins that hold now.

        Looks again at those models alone whose pin has changed since.
        """
        current: dict[str, DesiredModel] = {}
        for name, wish in wishes.items():
            model = None if wish.pin == self._pins.get(name) else self._find(name)
            current[name] = wish if model is None else self._wish_for_model(model)
        return current

    def wish(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool = True
    ) -> DesiredModel | None:
        """Return what should be served of one model, overrides in place; None when no repository holds it.

        Files given earlier for the model are deleted: what resolves from them must have been loaded, or replaced by
        the wish returned here. Raises BadModelConfig, ServingFault, InvalidRequest for files without a configuration,
        and without `may_carry_code` Forbidden for overrides that carry code or name paths.
        """
        if files:
            return self._wish_for_files(name, config_json, files, may_carry_code=may_carry_code)
        model = self._find(name)
        if model is not None and config_json is not None:
            if not may_carry_code:
                check_no_code(model, config_json)
            model = with_config(model, config_json)
        if model is None:
            # Nothing takes the place of what serves: it may have to be loaded again, from its files.
            return None
        self._keep(name, None)
        return self._wish_for_model(model, config_json)

    def versions(self, name: str) -> tuple[int, ...]:
        """Return the versions of a model that are there, ascending, wished for or not; none when it is not there."""
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
        """Pin a model; return the version that it was pinned to before. Raises ServingFault: it cannot be kept."""
        return self._pins.put(name, version)

    def unpin(self, name: str) -> int | None:
        """Let the version policy decide again; return the version it was pinned to, None when it was not pinned."""
        return self._pins.put(name, None)

    def close(self) -> None:
        """Delete the files of all load calls."""
        with self._lock:
            written, self._written = list(self._written.values()), {}
        for model in written:
            model.close()

    def _find(self, name: str) -> ModelDirectory | None:
        return self.scanner.find(name) if self._counting is None else self._counting.get(name)

    def _wish_for_files(
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
        self._keep(name, written)
        return self._wish_for_model(written.model, config_json)

    def _wish_for_model(self, model: ModelDirectory, config_json: str | None = None) -> DesiredModel:
        pin = self._pins.get(model.name)
        wished = model if pin is None else _pinned(model, pin)
        is_followed = self._counting is not None and model.path.parent in self.scanner.roots
        return replace(model_wish(wished, self._options, config_json, is_followed=is_followed), pin=pin)

    def _keep(self, name: str, written: OverriddenModel | None) -> None:
        with self._lock:
            before = self._written.pop(name, None)
            if written is not None:
                self._written[name] = written
        if before is not None:
            before.close()


def _pinned(model: ModelDirectory, version: int) -> ModelDirectory:
    """Return the model with that version alone wished for. What is wrong with all of the model stays wrong."""
    if model.problem and not model.is_policy_unmet:
        return model
    if any(found.number == version for found in model.versions):
        return replace(model, desired_versions=(version,), problem="", is_policy_unmet=False)
    return replace(
        model, desired_versions=(), problem=f"model '{model.name}' is pinned to version {version}, which is not there"
    )
