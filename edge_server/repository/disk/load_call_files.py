"""Files that a client sends with a load call: writes them to a temporary model directory, and refuses code.

The process locks the folder while it runs, so that the folder of a killed server can be recognised and deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from edge_server.backends import data_backends, engine_backends
from edge_server.errors import BadModelConfig, Forbidden, ServingFault
from edge_server.repository.choice.backend_choice import candidates
from edge_server.repository.disk.safe_paths import check_relative
from edge_server.repository.disk.scan import ModelDirectory, Scanner, is_model_name, parse_version, with_config
from edge_server.repository.model_config.pbtxt import ConfigMessage, parse_json

MAX_FILES = 4096
_PREFIX = "edge_server-model-"


class OverriddenModel:
    """Temporary model directory, readable by this user only. The owner calls `close`."""

    def __init__(self, name: str, files: Mapping[str, bytes], config_json: str, folder: Path | None = None) -> None:
        """Write `files`, "1/model.onnx" -> content, below a new folder in `folder` (None: the system's temporary
        folder).

        Raises BadModelConfig for a bad configuration, and for a name or path that leaves the folder or lies outside a
        version directory. Raises ServingFault if the files cannot be written.
        """
        paths = _checked(name, files)
        self._root, self._lock = _new_folder(folder)
        try:
            self.model = self._write(name, paths, files, config_json)
        except BaseException:
            self.close()
            raise

    def _write(
        self, name: str, paths: Mapping[str, Path], files: Mapping[str, bytes], config_json: str
    ) -> ModelDirectory:
        path = self._root / name
        try:
            for key, relative in paths.items():
                target = path / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files[key])
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise BadModelConfig(f"model '{name}': files: one path is both a file and a folder") from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise BadModelConfig(f"model '{name}': files: a path is too long for the file system") from error
            raise ServingFault(f"model '{name}': its files cannot be written: {error.strerror}") from error
        found = Scanner([self._root]).find(name)
        if found is None:
            raise ServingFault(f"model '{name}': its files were removed while they were written")
        return with_config(found, config_json)

    def close(self) -> None:
        """Delete the files. Files that a runtime has open stay usable. May be called again."""
        shutil.rmtree(self._root, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def delete_abandoned(folder: Path | None = None) -> None:
    """Delete the folders of killed servers of this user in a folder (None: the system's temporary folder)."""
    with contextlib.suppress(OSError), os.scandir(folder or tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                _delete_if_abandoned(entry.path)


def _delete_if_abandoned(path: str) -> None:
    """Delete a folder of this user that no living process has locked."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except OSError:  # a living process has the lock
        return
    finally:
        os.close(lock)


def _new_folder(folder: Path | None) -> tuple[Path, int]:
    """Return a new folder and the open descriptor that holds its lock."""
    path = ""
    try:
        while True:
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=folder)
            lock = _lock(path)
            if lock is not None:
                return Path(path), lock
    except OSError as error:
        if path:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise ServingFault(f"no folder can be made for a model's files: {error.strerror}") from error


def _lock(path: str) -> int | None:
    """Lock a new folder. Return None if a starting server deleted it as abandoned."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.isdir(path):
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _checked(name: str, files: Mapping[str, bytes]) -> dict[str, Path]:
    """Return the checked path of each file, relative to the model directory."""
    if not is_model_name(name):
        raise BadModelConfig(f"model name: expected one that fits a URL and a directory, given {name[:80]!r}")
    if not 1 <= len(files) <= MAX_FILES:
        raise BadModelConfig(f"model '{name}': files: expected 1 to {MAX_FILES}, given {len(files)}")
    paths: dict[str, Path] = {}
    for key in files:
        relative = check_relative(key, f"model '{name}': files")
        if len(relative.parts) < 2 or parse_version(relative.parts[0]) is None:
            raise BadModelConfig(f"model '{name}': files: expected '<version>/<file>', given {key[:80]!r}")
        paths[key] = Path(relative)
    if len(set(paths.values())) != len(paths):
        raise BadModelConfig(f"model '{name}': files: expected each path once, given one in two spellings")
    return paths


_DATA_SUFFIXES = (
    ".onnx", ".data", ".onnx_data", ".xml", ".bin", ".tflite", ".gguf", ".json", ".ubj", ".txt", ".npy"
)  # fmt: skip
"""Files that hold no code: models of ONNX with their weights, OpenVINO, TensorFlow Lite, GGUF, XGBoost and LightGBM,
labels and samples. An allow list, because formats with code are many: a .pt2 holds pickles and Python expressions, a
TorchScript file and a SavedModel have operators that read and write files, an engine holds machine code."""

_NAMES_A_PATH = re.compile(
    r"(?:paths?|(?:^|[_.])(?:dir|directory|folder|files?|filename|librar(?:y|ies)|plugins?|extensions?))(?:$|[_.])",
    re.IGNORECASE,
)
"""Parameters that name a path, such as CACHE_DIR, CPU_EXTENSION_PATH, trt_extra_plugin_lib_paths,
session.optimized_model_filepath. Runtimes accept any of their own properties, so there is no complete list."""

_IS_A_PATH = re.compile(r"\s*(?:/|~|file:)|(?:^|.*[\\/])\.\.(?:$|[\\/])")


def check_no_code(model: ModelDirectory, config_json: str, files: Collection[str] = ()) -> None:
    """Raise Forbidden if an override may contain code: a file or backend that is not known to be data, or a path.

    `model` already contains the override; `files` are the names of the files given. Raises BadModelConfig.
    """
    config = parse_json(config_json, model.name)
    for name in files:
        if PurePosixPath(name).suffix.lower() not in _DATA_SUFFIXES:
            known = ", ".join(_DATA_SUFFIXES)
            raise _forbidden(model.name, f"the file '{name[:80]}', which may hold code (data ends in {known}),")
    for version in model.versions:
        try:
            found = candidates(config, model.name, model.path / str(version.number))
        except BadModelConfig:
            continue  # the load will fail with the reason
        for candidate in found:
            builds_engine = candidate.backend in engine_backends() and candidate.file_name.lower().endswith(".onnx")
            # An engine of cc_model_filenames is preferred to the ONNX file.
            is_data = candidate.backend in data_backends() or (builds_engine and not config.cc_model_filenames)
            if not is_data:
                raise _forbidden(
                    model.name, f"a configuration for the backend '{candidate.backend}', whose files may hold code,"
                )
    if config.model_operations.op_library_filename:
        raise _forbidden(model.name, "model_operations.op_library_filename, which names a library,")
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


def _forbidden(model: str, content: str) -> Forbidden:
    return Forbidden(
        f"load of model '{model}': {content} is accepted from this machine only, or with --allow-code-upload from any"
    )
