"""Which overrides of a load request run code of the sender, or make the server open paths that the sender names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from edge_server.errors import BadModelConfig, Forbidden
from edge_server.repository.backend_choice import candidates
from edge_server.repository.pbtxt import ConfigMessage, parse_json
from edge_server.repository.scan import ModelDirectory

_CODE_BACKENDS = ("python", "c_abi")
_CODE_SUFFIXES = (".py", ".so")

_NAMES_A_PATH = re.compile(
    r"(?:^|[_.])(?:\w*paths?|dir|directory|folder|files?|filename|librar(?:y|ies)|plugins?|extensions?)(?:$|[_.])",
    re.IGNORECASE,
)
"""Keys as CACHE_DIR, CPU_EXTENSION_PATH, trt_extra_plugin_lib_paths, session.optimized_model_filepath. Runtimes take
any property of theirs, so there is no list of all."""

_IS_A_PATH = re.compile(r"\s*(?:/|~|file:)|(?:^|.*[\\/])\.\.(?:$|[\\/])")


def check_no_code(model: ModelDirectory, config_json: str, files: Collection[str] = ()) -> None:
    """Raise Forbidden when an override carries code: files or a configuration of a Python or C model, or a path.

    `model` is what the override is for, `files` written. `files` are the names of those given. Raises BadModelConfig.
    """
    config = parse_json(config_json, model.name)
    for name in files:
        if PurePosixPath(name).suffix.lower() in _CODE_SUFFIXES:
            raise _forbidden(model.name, f"the file '{name[:80]}'")
    for version in model.versions:
        try:
            found = candidates(config, model.name, model.path / str(version.number))
        except BadModelConfig:
            continue  # the load will fail, and say why
        for candidate in found:
            if candidate.backend in _CODE_BACKENDS:
                raise _forbidden(model.name, f"a configuration for the backend '{candidate.backend}'")
    for key, value in _parameters(config):
        if _NAMES_A_PATH.search(key) or _IS_A_PATH.match(value):
            raise _forbidden(model.name, f"the parameter '{key[:80]}', which names a path")


def _parameters(config: ConfigMessage) -> Iterator[tuple[str, str]]:
    for key, value in config.parameters.items():
        yield key, value.string_value
    accelerators = config.optimization.execution_accelerators
    for accelerator in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        given: Mapping[str, str] = accelerator.parameters
        yield from given.items()


def _forbidden(model: str, what: str) -> Forbidden:
    return Forbidden(
        f"load of model '{model}': {what} is taken from this machine only; --allow-code-upload takes it from others too"
    )
