"""Choice of the backend and the file for a model version: from its configuration, else from the files in its folder."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

from edge_server.backends import ONNX_ORDER, backend_names, engine_backends
from edge_server.errors import BadModelConfig
from edge_server.own_plugins import ModelFormat, plugin_objects
from edge_server.repository.disk.safe_paths import check_relative
from edge_server.repository.model_config.pbtxt import ConfigMessage

CORE_FORMATS = (
    ModelFormat("model.onnx", ONNX_ORDER, platform="onnxruntime_onnx", is_timed=True),
    ModelFormat("model.xml", ("openvino",)),
    ModelFormat("model.tflite", ("openvino",)),
    ModelFormat("model.savedmodel", ("openvino",), holds_code=True),
)
"""Formats of the core's backends."""

_SAVED_MODEL = "tensorflow_savedmodel"
CORE_PLATFORMS = {_SAVED_MODEL: "openvino"}
"""Platforms that are of no format here -> the core's backend for them, which a plugin's replaces."""

OTHER_FILE_NAMES = "(`edge-server check -v` lists the names of other formats)"
"""Part of the error for a version folder without a model's file."""

_PICKLES = (".pkl", ".pickle", ".joblib", ".sav")
_MAX_NAMES = 8
"""Maximum number of files that a message names."""


@functools.cache
def _formats() -> Mapping[str, ModelFormat]:
    """Return well-known file name -> format. The first name in a version folder decides."""
    declared = (*CORE_FORMATS, *(item for plugin in plugin_objects() for item in plugin.model_formats))
    found: dict[str, ModelFormat] = {}
    for item in sorted(declared, key=lambda item: -item.rank):
        known = found.get(item.file_name)
        found[item.file_name] = known._replace(backends=(*known.backends, *item.backends)) if known else item
    return found


@functools.cache
def _formats_by_suffix() -> Mapping[str, ModelFormat]:
    found: dict[str, ModelFormat] = {}
    for item in _formats().values():
        if not item.beside:
            for suffix in (Path(item.file_name).suffix, *item.other_suffixes):
                found.setdefault(suffix, item)
    return found


def format_of(file_name: str) -> ModelFormat | None:
    """Return the format of a model file by its suffix, None for an unknown one."""
    return _formats_by_suffix().get(Path(file_name).suffix.lower())


def model_file_names() -> tuple[str, ...]:
    """Return the well-known names."""
    return tuple(_formats())


def files_beside(file_name: str) -> tuple[str, ...]:
    """Return the well-known files that lie beside a model's file of this name and say which backend reads it."""
    return tuple(item.file_name for item in _formats().values() if item.beside == file_name)


@functools.cache
def backend_of_platform() -> Mapping[str, str]:
    """Return platform of Triton -> the backend that serves it."""
    of_formats = {item.platform: item.backends[0] for item in _formats().values() if item.platform}
    return (
        of_formats | CORE_PLATFORMS | {name: of for plugin in plugin_objects() for name, of in plugin.platforms.items()}
    )


def platform_of(backend: str) -> str:
    """Return the platform that a configuration for a backend gets, "" for none."""
    return next((item.platform for item in _formats().values() if item.platform and item.backends[0] == backend), "")


def standard_name(file_name: str) -> str:
    """Return the well-known name that a model file with the suffix of `file_name` has in a version folder, or ""."""
    found = format_of(file_name)
    return "" if found is None else found.file_name


def advice_for_pickle(file_name: str) -> str:
    """Return how to serve a file of Python objects, "" for a file with another suffix."""
    if Path(file_name).suffix.lower() not in _PICKLES:
        return ""
    return "convert a pickle to ONNX, of scikit-learn with the package skl2onnx, or load it in a model.py"


def describe_code(files: Iterable[PurePath]) -> str:
    """Return a sentence that says which of some files hold code, "" if none of them does."""
    code = {*_PICKLES, *(suffix for suffix, item in _formats_by_suffix().items() if item.holds_code)}
    found = sorted(str(file) for file in files if file.suffix.lower() in code or file.name == "saved_model.pb")
    if not found:
        return ""
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return (
        f"{', '.join(map(repr, found[:_MAX_NAMES]))}{more} may hold code, which runs with the rights of the server: "
        "serve it only if you trust its author"
    )


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
