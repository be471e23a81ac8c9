"""Model file formats of the installed backends: format and standard name of a file, and which backend and platform name
belong to it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

from edge_server.backends import ONNX_ORDER
from edge_server.own_plugins import ModelFormat, plugin_objects

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
