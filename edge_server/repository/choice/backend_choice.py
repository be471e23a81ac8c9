"""Choice of the backend and the file for a model version: from its configuration, else from the files in its folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

from edge_server.backends import ONNX_ORDER, backend_names, engine_backends
from edge_server.errors import BadModelConfig
from edge_server.repository.choice.model_formats import (
    _MAX_NAMES,
    _PICKLES,
    _SAVED_MODEL,
    OTHER_FILE_NAMES,
    _formats,
    _formats_by_suffix,
    advice_for_pickle,
    backend_of_platform,
    format_of,
)
from edge_server.repository.disk.safe_paths import check_relative
from edge_server.repository.model_config.pbtxt import ConfigMessage


class BackendCandidate(NamedTuple):
    """A runtime to try, and the model file it would open; "" for the backend's own default name."""

    backend: str
    file_name: str


def candidates(
    config: ConfigMessage, model: str, version_dir: Path, onnx_order: tuple[str, ...] = ONNX_ORDER
) -> tuple[BackendCandidate, ...]:
    """Return the runtimes to try for a model version, in order.

    The result has several entries for an ONNX or GGUF file without a stated backend, and for a model with an engine:
    `onnx_order` names the runtimes that serve it until the engine is built. The choice is made by `backend`, else
    `platform`, else the suffix of default_model_filename, else a well-known file in `version_dir`, else the suffix of
    the model's name ("x.<backend>"). Raises BadModelConfig if none of these is given.
    """
    file_name = config.default_model_filename
    if file_name:
        check_relative(file_name, f"model '{model}': default_model_filename")
    stated = _stated_backend(config, model)
    if config.platform == _SAVED_MODEL and not config.backend:
        return tuple(BackendCandidate(backend, file_name or "model.savedmodel") for backend in _saved_model_order())
    if stated in engine_backends():
        return _with_interim_runtimes(stated, file_name, version_dir, onnx_order)
    if stated:
        return (BackendCandidate(stated, file_name or _only_file_of(stated, version_dir)),)
    if file_name:
        found = format_of(file_name)
        backends = () if found is None or found.writer else found.backends
    else:
        file_name, backends = _well_known_file(version_dir)
    if backends == ONNX_ORDER:
        backends = onnx_order
    if backends:
        return tuple(BackendCandidate(backend, file_name) for backend in backends)
    suffix = model.rpartition(".")[2]
    if suffix != model and suffix in backend_names():
        return (BackendCandidate(suffix, file_name),)
    raise BadModelConfig(f"model '{model}': {_missing_file(version_dir)}, and the configuration names no backend")


class TimedChoice(NamedTuple):
    """Part of measured times in the choice of a runtime. `problem`: why they do not choose, "" if they do. `at_once`:
    how many sequences they are measured with, 0 for a model that continues none."""

    problem: str
    at_once: int


def timed_choice(file_name: str, version_dir: Path, config: ConfigMessage) -> TimedChoice:
    """Return whether times choose among the backends of a model file's format."""
    found = format_of(file_name)
    if found is None or not found.timing:
        return TimedChoice("", 0)
    module, _, function = found.timing.partition(":")
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    return TimedChoice(*getattr(importlib.import_module(module), function)(version_dir, parameters))


def _saved_model_order() -> tuple[str, ...]:
    """Return the runtimes to try if the configuration names the SavedModel platform and no backend."""
    return tuple(dict.fromkeys((backend_of_platform()[_SAVED_MODEL], *_formats()["model.savedmodel"].backends)))


def _with_interim_runtimes(
    stated: str, file_name: str, version_dir: Path, onnx_order: tuple[str, ...]
) -> tuple[BackendCandidate, ...]:
    """Return the engine runtime alone for a plan; for an ONNX file, add the runtimes that read ONNX directly."""
    engines = (item.file_name for item in _formats().values() if item.backends[0] in engine_backends())
    has_engine = any((version_dir / name).exists() for name in engines)
    if not file_name and not has_engine and (version_dir / "model.onnx").exists():
        file_name = "model.onnx"
    others = [name for name in onnx_order if name not in engine_backends()]
    if not file_name.lower().endswith(".onnx"):
        others = []
    return tuple(BackendCandidate(name, file_name) for name in (stated, *others))


def _stated_backend(config: ConfigMessage, model: str) -> str:
    platforms = backend_of_platform()
    of_platform = platforms.get(config.platform, "")
    if config.platform and not of_platform and not config.backend:
        known = ", ".join(platforms)
        raise BadModelConfig(f"model '{model}': platform: expected one of {known}, given '{config.platform}'")
    is_either = config.platform == _SAVED_MODEL and config.backend in _saved_model_order()
    if config.backend and of_platform and config.backend != of_platform and not is_either:
        raise BadModelConfig(
            f"model '{model}': platform '{config.platform}' belongs to backend '{of_platform}', "
            f"but backend is '{config.backend}'"
        )
    return str(config.backend or of_platform)


def _missing_file(version_dir: Path) -> str:
    """Return the advice for a version folder without a file of a known name, and the list of the files in it."""
    try:
        names = sorted(entry.name for entry in version_dir.iterdir() if not entry.name.startswith("."))
    except OSError:
        names = []
    # The likeliest model first.
    by_suffix = _formats_by_suffix()
    read = [suffix for suffix, item in by_suffix.items() if not item.writer]
    written = [suffix for suffix, item in by_suffix.items() if item.writer]
    for suffixes in (read, written, _PICKLES):
        name = next((name for name in names if Path(name).suffix.lower() in suffixes), "")
        if not name:
            continue
        holds = f"'{version_dir}' holds '{name}'"
        if advice := advice_for_pickle(name):
            return f"{advice}: {holds}"
        found = by_suffix[Path(name).suffix.lower()]
        condition = f" if {found.writer} wrote it" if found.writer else ""
        return f"call '{name}' '{found.file_name}'{condition}, or name it in default_model_filename: {holds}"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    holds = f"holds {', '.join(map(repr, names[:_MAX_NAMES]))}{more}" if names else "is empty"
    return f"copy the model's file into '{version_dir}' as model.onnx {OTHER_FILE_NAMES}: the folder {holds}"


def _well_known_file(version_dir: Path) -> tuple[str, tuple[str, ...]]:
    for item in _formats().values():
        if (version_dir / item.file_name).exists():
            return item.file_name, item.backends
    for item in _formats().values():
        found = [path.name for path in version_dir.glob(f"*{item.ending}")] if item.ending else []
        if len(found) == 1:
            return found[0], item.backends
    return "", ()


def _only_file_of(backend: str, version_dir: Path) -> str:
    """Return the one well-known file in the folder that a stated backend reads, or "" if there are none or several."""
    readable = [item.file_name for item in _formats().values() if backend in item.backends]
    present = [name for name in readable if (version_dir / name).exists()]
    return present[0] if len(present) == 1 else ""
