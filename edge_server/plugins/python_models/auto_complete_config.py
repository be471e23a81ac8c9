"""Completion of a Python model's configuration: calls the model's function `auto_complete_config`, with an object that
takes inputs, outputs and batch size."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from edge_server.backends.base import ModelFile
from edge_server.backends.isolation.child_process import ModelChildProcess, log_from_process
from edge_server.backends.runtime_errors import file_title
from edge_server.errors import LoadError
from edge_server.plugins.python_models.error_translation import (
    MODEL_EXCEPTIONS,
    error_line,
    log_failure,
    release_frames,
)
from edge_server.plugins.python_models.model_context import CallingModel, register_model
from edge_server.plugins.python_models.module_loader import ModelModules

log = logging.getLogger(__name__)

_UNSET: tuple[object, ...] = (None, "TYPE_INVALID", [], "")


class ModelConfig:
    """The configuration that `auto_complete_config` receives and completes.

    A value in both the configuration and the model must be the same; otherwise the methods raise ValueError.
    """

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch size. The configuration may have a smaller one already."""
        stated = self._config.get("max_batch_size", 0)
        if stated > max_batch_size:
            raise self._wrong(f"max_batch_size: the configuration states {stated}, the model at most {max_batch_size}")
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if self._config.get(other):
                raise self._wrong(f"the model sets dynamic_batching, the configuration states {other}")
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input: {"name", "data_type", "dims"} and optionally "optional"."""
        self._add("input", input, ("name", "data_type", "dims"), ("optional",))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: {"name", "data_type", "dims"}."""
        self._add("output", output, ("name", "data_type", "dims"), ())

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set {"decoupled": true or false}."""
        self._check_keys("model_transaction_policy", transaction_policy_dict, (), ("decoupled",))
        policy = self._config.setdefault("model_transaction_policy", {})
        given = transaction_policy_dict.get("decoupled", False)
        if policy.get("decoupled") and not given:
            raise self._wrong("the configuration states model_transaction_policy decoupled, the model not decoupled")
        policy["decoupled"] = given

    def _add(self, kind: str, given: Mapping[str, Any], needed: tuple[str, ...], allowed: tuple[str, ...]) -> None:
        self._check_keys(kind, given, needed, allowed)
        items = self._config.setdefault(kind, [])
        for item in items:
            if item.get("name") != given["name"]:
                continue
            for key in (*needed, *allowed):
                stated = item.get(key)
                if key in given and stated not in _UNSET and stated is not False and stated != given[key]:
                    raise self._wrong(
                        f"{kind} '{given['name']}' {key}: the configuration states {stated}, the model {given[key]}"
                    )
            item.update(given)
            return
        items.append(dict(given))

    def _check_keys(
        self, what: str, given: Mapping[str, Any], needed: tuple[str, ...], allowed: tuple[str, ...]
    ) -> None:
        name = f" '{given['name']}'" if "name" in given else ""
        missing = [key for key in needed if key not in given]
        unknown = [key for key in given if key not in (*needed, *allowed)]
        if missing or unknown:
            expected = ", ".join((*needed, *allowed))
            raise self._wrong(f"{what}{name}: expected the keys {expected}, given {', '.join(given) or 'none'}")

    def _wrong(self, text: str) -> ValueError:
        return ValueError(f"auto_complete_config of model '{self._config.get('name', '')}': {text}")


def auto_complete(file: ModelFile, config_json: str, *, is_alone: bool = False) -> str | None:
    """Run the model's `auto_complete_config` here. Return the completed configuration, None if the model has none.

    `is_alone`: this process runs no other model. The file is executed for this, then unloaded. Raises LoadError.
    """
    modules = ModelModules(file.path, file.model_dir, is_alone=is_alone)
    caller = CallingModel(file.model_dir.name, modules.package, None, folder=str(file.path.parent))
    register_model(caller)
    failed_step = "cannot be imported"
    try:
        module = modules.load()
        failed_step = "failed in auto_complete_config"
        complete = getattr(getattr(module, "TritonPythonModel", None), "auto_complete_config", None)
        if complete is None:
            return None
        completed = complete(ModelConfig(config_json))
        if not isinstance(completed, ModelConfig):
            raise LoadError(
                f"{file_title(file)}: auto_complete_config must return the configuration that it was given, "
                f"got {type(completed).__name__}"
            )
        return json.dumps(completed.as_dict())
    except MODEL_EXCEPTIONS as error:
        if isinstance(error, LoadError):
            raise
        log_failure(log, f"{file_title(file)} {failed_step}", error)
        problem = LoadError(f"{file_title(file)}: {error_line(error, file.model_dir)}")
        release_frames(error)
        raise problem from None
    finally:
        modules.unload()


def auto_complete_in_process(
    file: ModelFile, config_json: str, complete_alone: Callable[[ModelFile, str], str | None]
) -> str | None:
    """Run the model's `auto_complete_config` in a child process of its own, by `complete_alone`, a function of a
    module. Raises LoadError."""
    child = ModelChildProcess(file)
    try:
        child.send(("run", complete_alone, (file, config_json)))
        while True:
            message, _ = child.channel.receive()
            if message is None:
                continue
            kind, *rest = message
            if kind == "failed":
                raise rest[0]
            if kind == "returned":
                text: str | None = rest[0]
                return text
            if kind == "log":
                log_from_process(*rest)
    except (OSError, EOFError):
        raise LoadError(f"{file_title(file)}: its process {child.wait_for_exit()} in auto_complete_config") from None
    finally:
        child.channel.cut()
        child.wait_for_exit()
        child.close()
