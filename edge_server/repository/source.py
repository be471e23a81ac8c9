"""The repository as the serving core sees it: what should be served of each model, now, and with a load's overrides."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from edge_server.core.lifecycle import ModelWish, VersionWish
from edge_server.errors import InvalidRequest
from edge_server.repository.overrides import WrittenModel
from edge_server.repository.resolve import ResolveOptions, resolve
from edge_server.repository.scan import ModelOnDisk, Scanner, with_config


def model_wish(model: ModelOnDisk, options: ResolveOptions, config_json: str | None = None) -> ModelWish:
    """Return the wish for a model's wished versions; `config_json` stands in for the configuration on disk.

    `config_json` must have been taken into account in `model.wished` (`with_config`).
    """
    suffix = (
        ""
        if config_json is None
        else "." + hashlib.blake2b(config_json.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )
    versions = {
        version: VersionWish(
            fingerprint=model.fingerprint_of(version) + suffix,
            resolve=partial(resolve, model, version, options, config_json),
        )
        for version in model.wished
    }
    return ModelWish(model.name, versions, model.problem)


class RepositorySource:
    """Turns what a Scanner finds into wishes, and owns the files that load calls brought along.

    May be used from several threads. `scratch` is the folder for files of load calls; None: the system's.
    """

    def __init__(self, scanner: Scanner, options: ResolveOptions, scratch: Path | None = None) -> None:
        self._scanner = scanner
        self._options = options
        self._scratch = scratch
        self._lock = threading.Lock()
        self._written: dict[str, WrittenModel] = {}

    def names(self) -> tuple[str, ...]:
        """Return the models that are there, loaded or not. Raises ServingFault for an unreadable repository."""
        return self._scanner.names()

    def wishes(self) -> tuple[dict[str, ModelWish], tuple[str, ...]]:
        """Return the wish for every model, by name, and warnings about what was passed over. Raises ServingFault."""
        snapshot = self._scanner.scan()
        return {name: model_wish(model, self._options) for name, model in snapshot.models.items()}, snapshot.warnings

    def wish(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> ModelWish | None:
        """Return what should be served of one model, overrides in place; None when no repository holds it.

        Files given earlier for the model are deleted: what resolves from them must have been loaded, or replaced by
        the wish returned here. Raises BadModelConfig, ServingFault, and InvalidRequest for files without a
        configuration.
        """
        if files:
            return self._wish_for_files(name, config_json, files)
        model = self._scanner.find(name)
        if model is not None and config_json is not None:
            model = with_config(model, config_json)
        self._keep(name, None)
        return None if model is None else model_wish(model, self._options, config_json)

    def close(self) -> None:
        """Delete the files of all load calls."""
        with self._lock:
            written, self._written = list(self._written.values()), {}
        for model in written:
            model.close()

    def _wish_for_files(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> ModelWish:
        if config_json is None:
            raise InvalidRequest(f"load of model '{name}': files need the parameter 'config' beside them")
        written = WrittenModel(name, files, config_json, self._scratch)
        self._keep(name, written)
        return model_wish(written.model, self._options, config_json)

    def _keep(self, name: str, written: WrittenModel | None) -> None:
        with self._lock:
            before = self._written.pop(name, None)
            if written is not None:
                self._written[name] = written
        if before is not None:
            before.close()
